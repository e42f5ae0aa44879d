"""A small decoder-only transformer: sizes, seeded weights, their tensor-parallel shards, and the math of one layer.

Two kinds of attention, told apart by ``ModelConfig.latent``: grouped-query attention, which caches K and V of every KV
head, and multi-head latent attention, which caches one latent row per token. A shard is of the same class as the whole,
over views of the same memory: each of its outputs is a partial sum, and the sum over all TP ranks is the layer's.

All math is float32. Shapes: T new tokens, S tokens seen so far (the new ones included), H query heads and G KV heads of
the shard, D head dimension, M model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from l3store.layout.shape import Range

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Scores of random queries and keys have a standard deviation of 1, and softmax over thousands of them is nearly flat:
# attention would return the same mean for every prompt. At 2.5 a few keys of thousands carry most of the weight.
_QUERY_GAIN = 2.5
_LOGIT_GAIN = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention, in values: the cached row is ``kv_lora_rank + rope_dim`` wide.

    Source: DeepSeek-V2 (2024), section 2.1. Queries are not compressed, as in DeepSeek-V2-Lite.
    """

    kv_lora_rank: int = 128
    rope_dim: int = 32

    def __post_init__(self) -> None:
        if self.kv_lora_rank < 1 or self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"kv_lora_rank must be positive and rope_dim even and positive: {self}")

    @property
    def row_dim(self) -> int:
        """Values in one token's latent row of one layer."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a model, the dtype of its KV and the seed of its weights. Two equal ones are the same model.

    With ``latent``, attention is MLA: ``head_dim`` is then the width of a head's value and of the part of its key that
    has no position, and ``kv_heads`` has no meaning. ValueError if the sizes do not fit together.
    """

    layers: int = 10
    d_model: int = 256
    q_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 32
    d_ff: int = 512
    vocab: int = 1000
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    kv_dtype: torch.dtype = torch.float32
    latent: LatentConfig | None = None
    seed: int = 20240607

    def __post_init__(self) -> None:
        sizes = (self.layers, self.d_model, self.q_heads, self.kv_heads, self.head_dim, self.d_ff, self.vocab)
        if min(sizes) < 1:
            raise ValueError(f"every size of a model is positive: {self}")
        if self.latent is None and self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads do not share {self.kv_heads} KV heads evenly")
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"RoPE rotates pairs: head_dim {self.head_dim} is odd")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"KV is one of {', '.join(map(str, KV_DTYPES))}, not {self.kv_dtype}")

    @property
    def rope_dim(self) -> int:
        """Values of a head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Values of one head's row of one token, for each cached component: (K, V), or (latent,)."""
        return (self.head_dim, self.head_dim) if self.latent is None else (self.latent.row_dim,)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank of ``tp`` computes and holds: its query heads, KV heads (None for MLA) and MLP columns."""

    q_heads: Range
    kv_heads: Range | None
    columns: Range


def cut_for(config: ModelConfig, *, tp: int, rank: int) -> Cut:
    """The part of ``rank`` among ``tp`` ranks. With more ranks than KV heads, rank r holds head r * kv_heads // tp.

    MLA's latent row belongs to all heads, so every rank holds it whole. ValueError if the sizes do not divide.
    """
    if not 0 <= rank < tp:
        raise ValueError(f"there is no rank {rank} among {tp}")
    if config.q_heads % tp or config.d_ff % tp:
        raise ValueError(f"tp {tp} does not divide {config.q_heads} query heads and {config.d_ff} MLP columns")
    q_heads = _slice_of(config.q_heads, tp, rank)
    columns = _slice_of(config.d_ff, tp, rank)
    if config.latent is not None:
        return Cut(q_heads, None, columns)
    if tp > config.kv_heads:
        if tp % config.kv_heads:
            raise ValueError(f"tp {tp} cannot replicate {config.kv_heads} KV heads evenly")
        head = rank * config.kv_heads // tp
        return Cut(q_heads, Range(head, head + 1), columns)
    if config.kv_heads % tp:
        raise ValueError(f"tp {tp} does not divide {config.kv_heads} KV heads")
    return Cut(q_heads, _slice_of(config.kv_heads, tp, rank), columns)


def _slice_of(total: int, parts: int, part: int) -> Range:
    size = total // parts
    return Range(part * size, (part + 1) * size)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """RoPE's rotation of T positions: ``cos`` and ``sin`` are [T, 1, dim / 2].

    Source: RoFormer (Su et al., 2021), in the half-split pairing of GPT-NeoX: value i turns with value i + dim / 2.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Range, *, dim: int, theta: float) -> Rotation:
        """The rotation of the tokens at ``positions`` for rows of ``dim`` values."""
        # In float64: a float32 angle of some thousand radians is off by 1e-4.
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(positions.start, positions.end, dtype=torch.float64)[:, None, None] * frequencies
        return cls(angles.cos().float(), angles.sin().float())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [T, heads, dim]."""
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis by its root mean square. Source: RMSNorm (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last T of S tokens to all tokens up to themselves, with KV heads shared by query heads.

    ``q`` [T, H, D], ``k`` [S, G, D] and ``v`` [S, G, E], H a multiple of G; the result is [T, H, E]. Query heads of one
    KV head are adjacent. Source: grouped-query attention (Ainslie et al., 2023).
    """
    tokens, heads, dim = q.shape
    seen, groups, _ = k.shape
    # One batch entry per KV head and one row per (query head, token): K and V are used as they are, never repeated.
    rows = q.view(tokens, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    scores = torch.matmul(rows / math.sqrt(dim), k.permute(1, 2, 0)).view(groups, -1, tokens, seen)
    if tokens > 1:
        # Added to the new tokens' square only: all earlier tokens are visible to all new ones.
        scores[..., seen - tokens :] += torch.full((tokens, tokens), -math.inf).triu_(1)
    weights = scores.softmax(dim=-1).view(groups, -1, seen)
    mixed = torch.matmul(weights, v.permute(1, 0, 2)).view(groups, heads // groups, tokens, v.shape[-1])
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads, v.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class GroupedAttention:
    """Grouped-query attention: ``q`` [H, D, M], ``k`` and ``v`` [G, D, M], ``o`` [M, H, D].

    Cached are K, already rotated to its position, and V. Source: grouped-query attention (Ainslie et al., 2023).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    def shard(self, cut: Cut) -> GroupedAttention:
        """The same for the heads of ``cut``, as views."""
        assert cut.kv_heads is not None
        return GroupedAttention(
            _take(self.q, 0, cut.q_heads),
            _take(self.k, 0, cut.kv_heads),
            _take(self.v, 0, cut.kv_heads),
            _take(self.o, 1, cut.q_heads),
        )

    def rows(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """What the cache must hold of the normed ``x`` [T, M]: K and V, each [T, G, D]."""
        return rotation(_project(x, self.k)), _project(x, self.v)

    def partial(self, x: Tensor, rotation: Rotation, cached: Sequence[Tensor]) -> Tensor:
        """This shard's share of the output, [T, M]; ``cached`` is K and V of all S tokens, each [S, G, D]."""
        k, v = cached
        q = rotation(_project(x, self.q))
        return causal_attention(q, k, v).flatten(1) @ self.o.flatten(1).T


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Multi-head latent attention, R = ``kv_lora_rank``, P = ``rope_dim``. Source: DeepSeek-V2 (2024), section 2.1.

    ``q`` [H, D + P, M]; ``down`` [R + P, M] and ``norm`` [R] make the cached row, which all ranks hold alike;
    ``up_k`` and ``up_v`` [H, D, R] make a head's key and value of it; ``o`` [M, H, D]. Keys and values are expanded,
    not absorbed into the queries: for a prefill that is the fewer operations.
    """

    q: Tensor
    down: Tensor
    norm: Tensor
    norm_eps: float
    up_k: Tensor
    up_v: Tensor
    o: Tensor

    def shard(self, cut: Cut) -> LatentAttention:
        """The same for the heads of ``cut``, as views."""
        return LatentAttention(
            _take(self.q, 0, cut.q_heads),
            self.down,
            self.norm,
            self.norm_eps,
            _take(self.up_k, 0, cut.q_heads),
            _take(self.up_v, 0, cut.q_heads),
            _take(self.o, 1, cut.q_heads),
        )

    def rows(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """What the cache must hold of the normed ``x`` [T, M]: the latent row, [T, R + P], its key part rotated."""
        latent, key = self._parts(x @ self.down.T)
        latent = rms_norm(latent, self.norm, self.norm_eps)
        return (torch.cat((latent, rotation(key[:, None])[:, 0]), dim=-1),)

    def partial(self, x: Tensor, rotation: Rotation, cached: Sequence[Tensor]) -> Tensor:
        """This shard's share of the output, [T, M]; ``cached`` is the latent rows of all S tokens, [S, R + P]."""
        latent, key = self._parts(cached[0])
        heads, dim, _ = self.up_k.shape
        q = _project(x, self.q)
        q = torch.cat((q[..., :dim], rotation(q[..., dim:])), dim=-1)
        k = torch.cat((_project(latent, self.up_k), key[:, None].expand(-1, heads, -1)), dim=-1)
        return causal_attention(q, k, _project(latent, self.up_v)).flatten(1) @ self.o.flatten(1).T

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The latent [..., R] and the key [..., P] of a row."""
        rank = self.norm.shape[0]
        return row[..., :rank], row[..., rank:]


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    """SwiGLU: ``gate`` and ``up`` [F, M], ``down`` [M, F]. Source: GLU Variants Improve Transformer (Shazeer, 2020)."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def shard(self, cut: Cut) -> MLP:
        """The same for the columns of ``cut``, as views."""
        return MLP(_take(self.gate, 0, cut.columns), _take(self.up, 0, cut.columns), _take(self.down, 1, cut.columns))

    def partial(self, x: Tensor) -> Tensor:
        """This shard's share of the output for the normed ``x``, both [T, M]."""
        return (functional.silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One pre-norm layer, whole or a shard: the norms [M] are the same on every rank."""

    attention_norm: Tensor
    attention: GroupedAttention | LatentAttention
    mlp_norm: Tensor
    mlp: MLP

    def shard(self, cut: Cut) -> Layer:
        """The part of ``cut``, as views."""
        return Layer(self.attention_norm, self.attention.shard(cut), self.mlp_norm, self.mlp.shard(cut))


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model: ``embedding`` and ``head`` [vocab, M], separate; ``norm`` [M]; all float32."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def generate(cls, config: ModelConfig) -> Weights:
        """The weights of ``config``: the same bits for the same config on one build of torch."""
        draw = _Draw(config.seed)
        embedding = draw.normal(config.vocab, config.d_model)
        layers = tuple(_layer(config, draw) for _ in range(config.layers))
        head = draw.linear((config.vocab, config.d_model), fan_in=config.d_model, gain=_LOGIT_GAIN)
        return cls(config, embedding, layers, draw.norm(config.d_model), head)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, M] after the last layer to [T, vocab]."""
        return rms_norm(hidden, self.norm, self.config.norm_eps) @ self.head.T


def random_tokens(config: ModelConfig, count: int, *, seed: int) -> list[int]:
    """``count`` token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(config.vocab, (count,), generator=generator)]


class _Draw:
    """Random weights, in the order asked for, scaled so that unit inputs give outputs of deviation ``gain``."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def linear(self, shape: tuple[int, ...], *, fan_in: int, gain: float = 1.0) -> Tensor:
        return self.normal(*shape) * (gain / math.sqrt(fan_in))

    def norm(self, dim: int) -> Tensor:
        return 1.0 + 0.1 * self.normal(dim)


def _layer(config: ModelConfig, draw: _Draw) -> Layer:
    width, ff = config.d_model, config.d_ff
    attention = _grouped(config, draw) if config.latent is None else _latent(config, config.latent, draw)
    mlp = MLP(
        draw.linear((ff, width), fan_in=width),
        draw.linear((ff, width), fan_in=width),
        draw.linear((width, ff), fan_in=ff),
    )
    return Layer(draw.norm(width), attention, draw.norm(width), mlp)


def _grouped(config: ModelConfig, draw: _Draw) -> GroupedAttention:
    heads, groups, dim, width = config.q_heads, config.kv_heads, config.head_dim, config.d_model
    return GroupedAttention(
        draw.linear((heads, dim, width), fan_in=width, gain=_QUERY_GAIN),
        draw.linear((groups, dim, width), fan_in=width),
        draw.linear((groups, dim, width), fan_in=width),
        draw.linear((width, heads, dim), fan_in=heads * dim),
    )


def _latent(config: ModelConfig, latent: LatentConfig, draw: _Draw) -> LatentAttention:
    heads, dim, width, rank = config.q_heads, config.head_dim, config.d_model, latent.kv_lora_rank
    return LatentAttention(
        draw.linear((heads, dim + latent.rope_dim, width), fan_in=width, gain=_QUERY_GAIN),
        draw.linear((latent.row_dim, width), fan_in=width),
        draw.norm(rank),
        config.norm_eps,
        draw.linear((heads, dim, rank), fan_in=rank),
        draw.linear((heads, dim, rank), fan_in=rank),
        draw.linear((width, heads, dim), fan_in=heads * dim),
    )


def _take(tensor: Tensor, axis: int, part: Range) -> Tensor:
    return tensor.narrow(axis, part.start, len(part))


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """[T, M] by [heads, dim, M] to [T, heads, dim]."""
    heads, dim, _ = weight.shape
    return torch.matmul(x, weight.flatten(0, 1).T).view(-1, heads, dim)
