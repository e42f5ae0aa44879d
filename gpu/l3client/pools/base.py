"""What every KV pool offers to the code that moves its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor


class KVPool:
    """Per-layer KV tensors of one worker, read as bytes; it owns no memory and copies none.

    Page ``p`` is the slots ``[p * page_size, (p + 1) * page_size)`` of every layer and component.

    page_size   tokens, and slots, in a page
    num_layers  layers the pool holds
    num_pages   pages the pool holds
    heads       KV heads on this worker (1 for MLA)
    row_bytes   bytes of one head's row of one slot, for each component: (K, V), or (latent,)
    dtypes      of the tensors, for each component
    device      where every tensor lies
    """

    def __init__(self, components: Mapping[str, Sequence[Tensor]], *, page_size: int) -> None:
        """Take, for each named component, one contiguous ``[slots, heads, dim]`` tensor a layer.

        Raises ValueError that names the tensor, what is wrong with it and what to do.
        """
        _check(components, page_size)
        first = next(iter(components.values()))[0]
        self.page_size = page_size
        self.num_layers = len(next(iter(components.values())))
        self.num_pages = first.shape[0] // page_size
        self.heads = first.shape[1]
        self.row_bytes = tuple(layers[0].shape[2] * layers[0].element_size() for layers in components.values())
        self.dtypes = tuple(layers[0].dtype for layers in components.values())
        self.device = first.device
        self._layers = tuple(
            tuple(tensor.view(torch.uint8) for tensor in layer) for layer in zip(*components.values(), strict=True)
        )

    @property
    def components(self) -> int:
        """Tensors of a layer: 2 for MHA (K and V), 1 for MLA."""
        return len(self.row_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, components and local heads."""
        return self.num_layers * self.page_size * self.heads * sum(self.row_bytes)

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """The components of one layer as uint8 ``[slots, heads, row_bytes]`` views of the pool's own memory."""
        return self._layers[layer]

    @cached_property
    def pointers(self) -> Tensor:
        """Addresses of the tensors: int64 ``[layers, components]`` on the pool's device, made once."""
        return torch.tensor(self._addresses, dtype=torch.int64, device=self.device)

    @cached_property
    def alignment(self) -> int:
        """The widest power of two, 16 at most, that divides every tensor's address and storage offset."""
        offsets = (tensor.storage_offset() for layer in self._layers for tensor in layer)
        return math.gcd(16, *offsets, *(address for layer in self._addresses for address in layer))

    @property
    def _addresses(self) -> list[list[int]]:
        return [[tensor.data_ptr() for tensor in layer] for layer in self._layers]


def _check(components: Mapping[str, Sequence[Tensor]], page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}: it needs to be at least 1 token")
    counts = {name: len(layers) for name, layers in components.items()}
    if 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(
            f"layers of each component: {counts}; pass one tensor a layer, the same number for each, not 0"
        )
    reference = next(iter(components))
    expected = components[reference][0]
    for name, layers in components.items():
        for layer, tensor in enumerate(layers):
            where = f"{name}[{layer}]"
            _check_tensor(where, tensor)
            for what, got, want, of in (
                ("slots and heads", tuple(tensor.shape[:2]), tuple(expected.shape[:2]), f"{reference}[0]"),
                ("device", tensor.device, expected.device, f"{reference}[0]"),
                ("row width", tensor.shape[2], layers[0].shape[2], f"{name}[0]"),
                ("dtype", tensor.dtype, layers[0].dtype, f"{name}[0]"),
            ):
                if got != want:
                    raise ValueError(
                        f"{where} has {what} {got} and {of} has {want}: one pool holds layers that are alike; "
                        "give layers that differ a pool of their own"
                    )
    if expected.shape[0] % page_size:
        raise ValueError(
            f"{reference}[0] has {expected.shape[0]} slots, not a multiple of page_size {page_size}: "
            f"pass the first {expected.shape[0] // page_size * page_size} slots, or the engine's own page size"
        )


def _check_tensor(where: str, tensor: Tensor) -> None:
    if tensor.ndim != 3 or 0 in tensor.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}: it needs [slots, heads, dim], none of them 0")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{where} has strides {tensor.stride()}, so its slots are not one run of bytes: "
            "pass the tensor that the engine allocated, not a slice or a transpose of it"
        )
