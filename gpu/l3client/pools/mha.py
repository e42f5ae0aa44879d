"""The pool of a model with K and V heads: MHA, GQA and MQA."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from l3client.pools.base import KVPool


class MHAPool(KVPool):
    """K and V, one contiguous ``[slots, heads, dim]`` tensor a layer each; their ``dim`` and dtype may differ."""

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor], *, page_size: int) -> None:
        """Raises ValueError that names the tensor, what is wrong with it and what to do."""
        super().__init__({"k": k, "v": v}, page_size=page_size)
