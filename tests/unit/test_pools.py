"""Pools: the views they give of an engine's tensors, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from l3client.pools import KVPool, MHAPool, MLAPool


def tensors(layers: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(layers)]


def test_an_mha_pool_says_what_it_holds() -> None:
    pool = MHAPool(tensors(3, 32, 4, 128), tensors(3, 32, 4, 64), page_size=8)
    assert (pool.page_size, pool.num_layers, pool.num_pages, pool.heads) == (8, 3, 4, 4)
    assert pool.row_bytes == (256, 128)
    assert pool.dtypes == (torch.bfloat16, torch.bfloat16)
    assert pool.components == 2
    assert pool.page_bytes == 3 * 8 * 4 * (256 + 128)
    assert pool.device == torch.device("cpu")


def test_an_mla_pool_is_one_component_of_one_head() -> None:
    pool = MLAPool(tensors(2, 16, 576), page_size=16)
    assert (pool.num_layers, pool.num_pages, pool.heads, pool.components) == (2, 1, 1, 1)
    assert pool.row_bytes == (1152,)
    assert [tuple(t.shape) for t in pool.layer(1)] == [(16, 1, 1152)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_layers_are_the_tensors_own_bytes(dtype: torch.dtype) -> None:
    k, v = tensors(2, 8, 2, 6, dtype=dtype), tensors(2, 8, 2, 4, dtype=dtype)
    pool = MHAPool(k, v, page_size=4)
    for layer in range(2):
        for view, tensor in zip(pool.layer(layer), (k[layer], v[layer]), strict=True):
            assert view.dtype == torch.uint8
            assert view.shape == (8, 2, tensor.shape[2] * tensor.element_size())
            assert view.data_ptr() == tensor.data_ptr()
    pool.layer(1)[0].fill_(0x3C)
    assert bool((k[1].view(torch.uint8) == 0x3C).all())
    assert not bool(k[0].view(torch.uint8).any())


def test_pointers_are_the_tensors_addresses_and_made_once() -> None:
    k, v = tensors(3, 8, 2, 8), tensors(3, 8, 2, 8)
    pool = MHAPool(k, v, page_size=4)
    assert pool.pointers.dtype == torch.int64
    assert pool.pointers.tolist() == [[a.data_ptr(), b.data_ptr()] for a, b in zip(k, v, strict=True)]
    assert pool.pointers is pool.pointers


def test_alignment_is_that_of_the_worst_tensor() -> None:
    whole = torch.zeros(64 + 4, dtype=torch.uint8)
    assert MLAPool([whole[:64].view(16, 4)], page_size=4).alignment == 16
    assert MLAPool([whole[:64].view(16, 4), whole[4:].view(16, 4)], page_size=4).alignment == 4


def test_alignment_counts_the_offset_in_the_storage_too() -> None:
    # Torch views bytes as wider words by the offset, whatever the address.
    memory = bytearray(128)
    shift = (8 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=shift)[8:72].view(16, 4)
    assert tensor.data_ptr() % 16 == 0
    assert MLAPool([tensor], page_size=4).alignment == 8


def test_a_pool_takes_parameters_that_want_gradients() -> None:
    tensor = torch.zeros(8, 4, requires_grad=True)
    view = MLAPool([tensor], page_size=4).layer(0)[0]
    view.fill_(1)
    assert not view.requires_grad


def mha(k: list[Tensor], v: list[Tensor], page_size: int = 4) -> KVPool:
    return MHAPool(k, v, page_size=page_size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mha(tensors(2, 8, 2, 4), tensors(1, 8, 2, 4)), r"layers of each component: \{'k': 2, 'v': 1\}"),
        (lambda: mha([], []), "not 0"),
        (lambda: mha(tensors(1, 8, 2, 4), tensors(1, 8, 2, 4), 0), "page_size is 0"),
        (
            lambda: mha(tensors(1, 10, 2, 4), tensors(1, 10, 2, 4)),
            "10 slots, not a multiple of page_size 4: .* first 8",
        ),
        (lambda: mha(tensors(1, 8, 2, 4), tensors(1, 8, 3, 4)), r"v\[0\] has slots and heads \(8, 3\) and k\[0\]"),
        (lambda: mha(tensors(1, 8, 2, 4), tensors(1, 12, 2, 4)), r"v\[0\] has slots and heads \(12, 2\)"),
        (lambda: mha([*tensors(1, 8, 2, 4), *tensors(1, 8, 2, 6)], tensors(2, 8, 2, 4)), r"k\[1\] has row width 6"),
        (
            lambda: mha(tensors(2, 8, 2, 4), [*tensors(1, 8, 2, 4), *tensors(1, 8, 2, 4, dtype=torch.float32)]),
            r"v\[1\] has dtype torch.float32 and v\[0\]",
        ),
        (lambda: mha(tensors(1, 8, 2, 4), [torch.zeros(8, 2, 4, device="meta")]), r"v\[0\] has device meta"),
        (
            lambda: mha(tensors(1, 8, 2, 4), [torch.zeros(8, 4, 2).transpose(1, 2)]),
            r"v\[0\] has strides .* not a slice",
        ),
        (lambda: mha(tensors(1, 8, 8), tensors(1, 8, 8)), r"k\[0\] has shape \(8, 8\): it needs \[slots, heads, dim\]"),
        (lambda: mha(tensors(1, 8, 2, 0), tensors(1, 8, 2, 4)), "none of them 0"),
        (lambda: MLAPool(tensors(1, 8, 1, 4), page_size=4), r"latent\[0\] .* squeeze the head axis"),
    ],
)
def test_what_cannot_be_a_pool_is_refused_with_its_name(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
