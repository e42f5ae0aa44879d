"""The proof: one deployment writes the KV of a prompt, differently cut ones restore it and go on as if they had not.

Logits alone would not show pages in the wrong order (attention sums over rows, and keys are already rotated), so what
was restored is also compared with what was written, byte for byte, at its place.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from l3client.connector import Connector, StagingOptions
from l3client.demo.decoder import ModelConfig, Weights, random_tokens
from l3client.demo.deployment import Deployment, Generation, Rank
from l3client.pools import KVPool, MHAPool, MLAPool
from l3client.transport import L3Client
from l3store.layout import Fields, Geometry, Namespace, Range, SplitGroupError, Topology, hash_pages

PAGE_SIZE = 64
TOLERANCE = 1e-3
"""Of logits with a standard deviation of 3. Cuts that sum in another order differ by 1e-5, one wrong page by 0.1."""

_STAGING = StagingOptions(buffer_bytes=8 << 20, buffers=3)
"""Of each rank; there are many in one process here, and making what an engine wants takes longer than the proof."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    objects       written, or read as grid objects
    hit_tokens    that the deployment did not have to compute
    kv_equal      restored bytes equal the written ones; None for the writer
    difference    largest |logit - logit computed afresh|
    tokens_equal  the tokens produced are those of the deployment that computed everything
    """

    model: str
    role: str
    topology: str
    objects: int
    bytes: int
    hit_tokens: int
    seconds: float
    kv_equal: bool | None
    difference: float
    tokens_equal: bool

    @property
    def passed(self) -> bool:
        return self.kv_equal is not False and self.difference <= TOLERANCE and self.tokens_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is proven of one model: who writes, who reads, and how long a prompt."""

    name: str
    config: ModelConfig
    writer: Topology
    readers: Sequence[Topology]
    tokens: int
    generate: int

    @property
    def pages(self) -> int:
        """Full pages of the prompt; the last token is always computed, for its logits."""
        return (self.tokens - 1) // PAGE_SIZE

    @property
    def steps(self) -> int:
        """How often `prove` reports progress."""
        return 2 + len(self.readers)


def plan_for(name: str, config: ModelConfig, *, tokens: int, generate: int) -> Plan:
    """A TP4/PP2 writer; readers at TP2, at TP8 (inside a head group) and in three uneven stages (off the grid)."""
    third = config.layers // 3
    uneven = (Range(0, third), Range(third, 2 * third + 1), Range(2 * third + 1, config.layers))
    return Plan(
        name=name,
        config=config,
        writer=Topology.even(tp=4, pp=2, num_layers=config.layers),
        readers=(
            Topology.even(tp=2, pp=1, num_layers=config.layers),
            Topology.even(tp=8, pp=1, num_layers=config.layers),
            Topology(1, uneven),
        ),
        tokens=tokens,
        generate=generate,
    )


def namespace_for(name: str, config: ModelConfig, writer: Topology) -> Namespace:
    """The namespace of a demo model, on the grid that its writer fills."""
    mla = config.latent is not None
    fields = Fields(
        model_id=f"l3store/demo-{name}",
        dtype=_DTYPES[config.kv_dtype],
        page_size=PAGE_SIZE,
        rank_replicated=mla,
        total_kv_heads=0 if mla else config.kv_heads,
        layer_partition=len(writer.stages[0]),
        head_group=0 if mla else config.kv_heads // writer.tp,
    )
    geometry = Geometry(num_layers=config.layers, head_dim=config.row_dims[0], itemsize=config.kv_dtype.itemsize)
    return Namespace(fields=fields, geometry=geometry)


def prove(plan: Plan, client: L3Client, progress: Callable[[str], None]) -> list[Row]:
    """Run the proof for one model against a service; a row for the writer and for each reader."""
    weights = Weights.generate(plan.config)
    prompt = random_tokens(plan.config, plan.tokens, seed=1)
    namespace = namespace_for(plan.name, plan.config, plan.writer)
    # A service that is used twice must not have this prompt already: the proof is of what is written now.
    tenant = f"demo-{secrets.token_hex(8)}"
    namespace = dataclasses.replace(namespace, extension=dataclasses.replace(namespace.extension, tenant=tenant))
    worlds = _Worlds(plan, weights, namespace, prompt, client)

    progress(f"{plan.name}: computing everything afresh, TP1/PP1")
    afresh = worlds.deployment(Topology.even(tp=1, pp=1, num_layers=plan.config.layers))
    expected = afresh.greedy(prompt, plan.generate, page_ids=worlds.page_ids)
    progress(f"{plan.name}: {plan.writer} prefills and backs up")
    written, row = worlds.write(expected)
    rows = [row]
    for reader in plan.readers:
        progress(f"{plan.name}: {reader} restores and goes on")
        rows.append(worlds.read(reader, written, expected))
    return rows


class _Worlds:
    """Deployments of one model around one service."""

    def __init__(
        self, plan: Plan, weights: Weights, namespace: Namespace, prompt: Sequence[int], client: L3Client
    ) -> None:
        self._plan = plan
        self._weights = weights
        self._namespace = namespace
        self._prompt = prompt
        self._client = client
        self._hashes = hash_pages(prompt, PAGE_SIZE)[: plan.pages]
        self._num_pages = -(-(plan.tokens + plan.generate) // PAGE_SIZE)
        self.page_ids = list(range(self._num_pages))

    def deployment(self, topology: Topology) -> Deployment:
        return Deployment(
            self._weights, tp=topology.tp, stages=topology.stages, num_pages=self._num_pages, page_size=PAGE_SIZE
        )

    def write(self, expected: Generation) -> tuple[Deployment, Row]:
        """Prefill, back up, go on."""
        topology = self._plan.writer
        deployment = self.deployment(topology)
        generation = deployment.greedy(self._prompt, self._plan.generate, page_ids=self.page_ids)
        with ExitStack() as stack:
            connectors = [self._connect(stack, topology, rank) for rank in deployment.ranks]
            began = time.monotonic()
            transfers = [c.backup(self._hashes, self.page_ids[: self._plan.pages]) for c in connectors]
            stored = min(transfer.wait() for transfer in transfers)
            seconds = time.monotonic() - began
        if stored < self._plan.pages:
            raise RuntimeError(
                f"{topology} stored {stored} of {self._plan.pages} pages: {[t.error for t in transfers]}"
            )
        usage = next(n for n in self._client.control.namespaces() if n["digest"] == self._namespace.digest)
        row = self._row(
            "wrote", topology, objects=usage["objects"], moved=usage["bytes"], hit=0, seconds=seconds, kv_equal=None,
            generation=generation, expected=expected,
        )  # fmt: skip
        return deployment, row

    def read(self, topology: Topology, written: Deployment, expected: Generation) -> Row:
        """Restore into an empty deployment, at other page ids than the writer had, and go on."""
        deployment = self.deployment(topology)
        ids = torch.randperm(self._num_pages, generator=torch.Generator().manual_seed(topology.tp)).tolist()
        with ExitStack() as stack:
            connectors = [self._connect(stack, topology, rank) for rank in deployment.ranks]
            began = time.monotonic()
            hit = min(connector.match(self._hashes) for connector in connectors)
            transfers = [c.restore(self._hashes[:hit], ids[:hit]) for c in connectors]
            hit = min(transfer.wait() for transfer in transfers)
            seconds = time.monotonic() - began
            objects = hit * sum(len(connector.plan.objects) for connector in connectors)
        equal = all(
            torch.equal(_kv(deployment, layer, ids[:hit]), _kv(written, layer, self.page_ids[:hit]))
            for layer in range(self._plan.config.layers)
        )
        generation = deployment.greedy(self._prompt, self._plan.generate, page_ids=ids, cached=hit * PAGE_SIZE)
        return self._row(
            "read", topology, objects=objects, moved=sum(t.bytes for t in transfers), hit=hit, seconds=seconds,
            kv_equal=equal and hit == self._plan.pages, generation=generation, expected=expected,
        )  # fmt: skip

    def _connect(self, stack: ExitStack, topology: Topology, rank: Rank) -> Connector:
        shard = topology.shard(self._namespace, stage=rank.stage, tp_rank=rank.tp_rank)
        pool = _pool(rank)
        try:
            connector = Connector(self._client, self._namespace, shard, pool, staging=_STAGING)
        except SplitGroupError:
            connector = Connector(self._client, self._namespace, shard, pool, staging=_STAGING, read_only=True)
        stack.enter_context(connector)
        connector.attach({"engine": "l3store demo", "tp": topology.tp, "pp": len(topology.stages), "hash": "plain"})
        return connector

    def _row(
        self, role: str, topology: Topology, *, objects: int, moved: int, hit: int, seconds: float,
        kv_equal: bool | None, generation: Generation, expected: Generation,
    ) -> Row:  # fmt: skip
        return Row(
            model=self._plan.name,
            role=role,
            topology=str(topology),
            objects=objects,
            bytes=moved,
            hit_tokens=hit * PAGE_SIZE,
            seconds=seconds,
            kv_equal=kv_equal,
            difference=float((generation.logits - expected.logits).abs().max()),
            tokens_equal=generation.tokens == expected.tokens,
        )


def _pool(rank: Rank) -> KVPool:
    if rank.heads is None:
        return MLAPool(rank.latent, page_size=PAGE_SIZE)
    return MHAPool(rank.k, rank.v, page_size=PAGE_SIZE)


def _kv(deployment: Deployment, layer: int, page_ids: Sequence[int]) -> Tensor:
    """All bytes of one layer of some pages, whoever holds them: [components, tokens, heads x bytes]."""
    slots = (torch.tensor(page_ids, dtype=torch.int64)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    parts: dict[int, Tensor] = {}
    for rank in deployment.ranks:
        if layer in rank.layers:
            rows = [component[layer - rank.layers.start][slots] for component in rank.pool]
            head = 0 if rank.heads is None else rank.heads.start
            held = torch.stack([r.flatten(1).view(torch.uint8) for r in rows])
            # Ranks that hold the same rows must hold the same bytes.
            if head in parts and not torch.equal(parts[head], held):
                return torch.empty(0)
            parts[head] = held
    return torch.cat([parts[head] for head in sorted(parts)], dim=-1)
