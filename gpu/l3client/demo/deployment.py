"""One deployment of the demo's model: TP ranks and pipeline stages in one process, with paged KV pools.

Every rank has its own pool and its shard of the weights. What ranks exchange is what they would exchange between
devices: partial outputs are summed over the TP ranks of a stage, hidden states are handed from stage to stage.
Attention takes its keys and values from the pool's slots and from nowhere else, so pages that were restored into the
pool are what it computes with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from l3client.demo.decoder import Layer, Rotation, Weights, cut_for, rms_norm
from l3store.layout.shape import Range


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rank:
    """One worker: its place, its shard of the weights, and its pool.

    stage, tp_rank   the place in the deployment
    layers           the layers it holds, absolute in the model
    heads            the KV heads it holds, absolute in the model; None for MLA, whose rows all TP ranks hold alike
    shards           its part of each of its layers
    pool             for each component, (K, V) or (latent,), one tensor per layer: [slots, heads, dim] or [slots, dim]
    """

    stage: int
    tp_rank: int
    layers: Range
    heads: Range | None
    shards: tuple[Layer, ...]
    pool: tuple[tuple[Tensor, ...], ...]

    @property
    def k(self) -> tuple[Tensor, ...]:
        """Keys by layer, each [slots, heads, dim]; empty for MLA."""
        return () if self.heads is None else self.pool[0]

    @property
    def v(self) -> tuple[Tensor, ...]:
        """Values by layer, each [slots, heads, dim]; empty for MLA."""
        return () if self.heads is None else self.pool[1]

    @property
    def latent(self) -> tuple[Tensor, ...]:
        """Latent rows by layer, each [slots, dim]; empty for grouped-query attention."""
        return self.pool[0] if self.heads is None else ()

    def attend(self, layer: int, x: Tensor, step: _Step) -> Tensor:
        """Write the KV of the normed ``x`` [T, M] to the pool, then attend to the pool: a partial output, [T, M].

        ``layer`` counts from this rank's first.
        """
        attention = self.shards[layer].attention
        stores = [component[layer] for component in self.pool]
        for store, rows in zip(stores, attention.rows(x, step.rotation), strict=True):
            store[step.slots] = rows.to(store.dtype)
        return attention.partial(x, step.rotation, [step.gather(store) for store in stores])


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Greedily chosen ``tokens``, and the ``logits`` [tokens, vocab] that each was chosen from."""

    tokens: tuple[int, ...]
    logits: Tensor

    @property
    def margin(self) -> float:
        """The least lead of a chosen token over the second best: logits off by less than half of it choose the same."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One forward step's place in the pools: where its KV goes, and where all KV up to its last token lies."""

    rotation: Rotation
    slots: Tensor
    pages: Tensor
    page_size: int
    seen: int

    def gather(self, store: Tensor) -> Tensor:
        """The rows of all tokens seen, in their order and in float32: [seen, ...] from [slots, ...]."""
        paged = store.view(-1, self.page_size, *store.shape[1:])
        return paged.index_select(0, self.pages).flatten(0, 1)[: self.seen].float()


class Deployment:
    """A model cut over ``tp`` ranks by pipeline ``stages``, each rank with a pool of ``num_pages`` pages.

    ``stages`` are the layers of each stage, in order, and cover the model without a gap; they may be uneven. The ranks'
    shards are views of ``weights``: any number of deployments share one copy. ``chunk`` is the most tokens computed at
    once, which bounds the memory of a long prefill. ``ranks`` are ordered by stage, then by TP rank. ValueError if the
    cut does not fit the model.
    """

    def __init__(
        self, weights: Weights, *, tp: int, stages: Sequence[Range], num_pages: int, page_size: int, chunk: int = 512
    ) -> None:
        if min(tp, num_pages, page_size, chunk) < 1:
            raise ValueError("tp, num_pages, page_size and chunk are positive")
        bounds = [0, *(stage.end for stage in stages)]
        starts = [stage.start for stage in stages]
        if starts != bounds[:-1] or bounds[-1] != weights.config.layers:
            raise ValueError(f"stages {[*map(str, stages)]} do not cover {weights.config.layers} layers in order")
        self.weights = weights
        self.config = weights.config
        self.tp = tp
        self.stages = tuple(stages)
        self.num_pages = num_pages
        self.page_size = page_size
        self.chunk = chunk
        self._by_stage = tuple(
            tuple(self._rank(index, stage, tp_rank) for tp_rank in range(tp)) for index, stage in enumerate(self.stages)
        )
        self.ranks = tuple(rank for stage in self._by_stage for rank in stage)

    def forward(
        self, tokens: Sequence[int], *, start: int, page_ids: Sequence[int], every_position: bool = False
    ) -> Tensor:
        """The logits of ``tokens`` at positions ``start`` on: [1, vocab] of the last, or [tokens, vocab] of every one.

        ``page_ids`` are the pages of the sequence in order, from position 0: page i holds positions i * page_size on.
        All earlier positions must be in the pool already; the KV of ``tokens`` is written into it. ValueError if a
        token or page does not exist, a page comes twice, or the pages do not reach the last token. RuntimeError if the
        logits are not finite: a slot was read that nothing wrote (pools start as NaN), or it holds damaged bytes.
        """
        end = self._check(tokens, start, page_ids)
        pages = torch.tensor(page_ids, dtype=torch.int64)
        found = []
        with torch.no_grad():
            for first in range(start, end, self.chunk):
                part = Range(first, min(first + self.chunk, end))
                hidden = self._hidden(tokens[part.start - start : part.end - start], part, pages)
                if every_position or part.end == end:
                    found.append(self.weights.logits(hidden if every_position else hidden[-1:]))
        logits = torch.cat(found)
        if not bool(logits.isfinite().all()):
            raise RuntimeError(f"positions [{start}, {end}) read KV that was never written, or that is damaged")
        return logits

    def greedy(self, prompt: Sequence[int], count: int, *, page_ids: Sequence[int], cached: int = 0) -> Generation:
        """The ``count`` most likely next tokens after ``prompt``, whose first ``cached`` tokens are in the pool.

        At least one token of the prompt must be computed, for its logits. Errors are those of ``forward``.
        """
        if not 0 <= cached < len(prompt):
            raise ValueError(f"{cached} cached tokens leave nothing to compute of a prompt of {len(prompt)}")
        if count < 1:
            raise ValueError(f"{count} is not a number of tokens to generate")
        logits = [self.forward(prompt[cached:], start=cached, page_ids=page_ids)]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < count:
            logits.append(self.forward(tokens[-1:], start=len(prompt) + len(tokens) - 1, page_ids=page_ids))
            tokens.append(int(logits[-1].argmax()))
        return Generation(tuple(tokens), torch.cat(logits))

    def _rank(self, stage: int, layers: Range, tp_rank: int) -> Rank:
        config = self.config
        cut = cut_for(config, tp=self.tp, rank=tp_rank)
        heads = () if cut.kv_heads is None else (len(cut.kv_heads),)
        slots = self.num_pages * self.page_size
        # NaN, not zero: a page that was not restored shows in the logits instead of passing for a quiet one.
        pool = tuple(
            tuple(torch.full((slots, *heads, dim), math.nan, dtype=config.kv_dtype) for _ in layers)
            for dim in config.row_dims
        )
        shards = tuple(self.weights.layers[layer].shard(cut) for layer in layers)
        return Rank(stage=stage, tp_rank=tp_rank, layers=layers, heads=cut.kv_heads, shards=shards, pool=pool)

    def _check(self, tokens: Sequence[int], start: int, page_ids: Sequence[int]) -> int:
        """The position after the last token. ValueError as ``forward`` says."""
        if not tokens or start < 0:
            raise ValueError(f"{len(tokens)} tokens at position {start} are nothing to compute")
        if not all(0 <= token < self.config.vocab for token in tokens):
            raise ValueError(f"a token is not in the vocabulary of {self.config.vocab}")
        if len(set(page_ids)) != len(page_ids) or not all(0 <= page < self.num_pages for page in page_ids):
            raise ValueError(f"page ids are distinct and below {self.num_pages}")
        end = start + len(tokens)
        if end > len(page_ids) * self.page_size:
            raise ValueError(f"{len(page_ids)} pages of {self.page_size} tokens do not reach position {end - 1}")
        return end

    def _hidden(self, tokens: Sequence[int], positions: Range, pages: Tensor) -> Tensor:
        """Hidden states [T, M] of ``tokens`` at ``positions`` after the last stage."""
        at = torch.arange(positions.start, positions.end)
        step = _Step(
            Rotation.at(positions, dim=self.config.rope_dim, theta=self.config.rope_theta),
            pages[at // self.page_size] * self.page_size + at % self.page_size,
            pages[: -(-positions.end // self.page_size)],
            self.page_size,
            positions.end,
        )
        hidden = self.weights.embedding[torch.tensor(tokens, dtype=torch.int64)]
        for ranks in self._by_stage:
            hidden = self._stage(ranks, hidden, step)
        return hidden

    def _stage(self, ranks: Sequence[Rank], hidden: Tensor, step: _Step) -> Tensor:
        """``hidden`` [T, M] through the layers of one stage; each sum over its ranks stands for an all-reduce."""
        eps = self.config.norm_eps
        for layer, shard in enumerate(ranks[0].shards):
            x = rms_norm(hidden, shard.attention_norm, eps)
            hidden = hidden + _all_reduce([rank.attend(layer, x, step) for rank in ranks])
            x = rms_norm(hidden, shard.mlp_norm, eps)
            hidden = hidden + _all_reduce([rank.shards[layer].mlp.partial(x) for rank in ranks])
        return hidden


def _all_reduce(partials: Sequence[Tensor]) -> Tensor:
    """The sum over ranks, in rank order: the order is part of the result in floating point."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total
