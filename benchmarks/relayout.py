"""How fast bytes move between page order and pool order, next to a plain copy of as many.

Run it with the repository and its ``gpu`` folder on the path: ``python benchmarks/relayout.py [--device cuda]``.
A GPU is measured twice: staged on the device, and in pinned host memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from l3client.pools import KVPool, MHAPool, MLAPool
from l3client.relayout import Placement, pages_to_pool, pool_to_pages
from l3store.layout.shape import PageShape


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The best of ``repeats`` runs, after one that does not count."""
    best = float("inf")
    for turn in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def measure(name: str, pool: KVPool, shape: PageShape, pages: Tensor, *, first_head: int, repeats: int) -> None:
    """Print GB/s of the bytes that the pool takes or gives, in both directions where it fills the page."""
    ids = torch.randperm(pool.num_pages)[: len(pages)].to(pool.device)
    placement = Placement(shape=shape, first_head=first_head)
    size = len(pages) * pool.page_bytes
    source = torch.ones(size, dtype=torch.uint8).to(pages.device)
    target = torch.zeros(size, dtype=torch.uint8, device=pool.device)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "pages_to_pool": lambda: pages_to_pool(pages, pool, ids, placement),
    }
    if pool.heads == placement.heads:
        works["pool_to_pages"] = lambda: pool_to_pages(pool, ids, pages, placement)
    rates = {key: size / seconds(work, pool.device, repeats) / 1e9 for key, work in works.items()}
    sys.stdout.write(
        f"{name:42}{size / 2**20:8.0f} MiB" + "".join(f"  {k} {v:7.1f} GB/s" for k, v in rates.items()) + "\n"
    )


def main() -> None:
    """Measure whole groups, a cut inside a group, and MLA."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    slots = 2 * args.pages * 64

    def tensors(*shape: int) -> list[Tensor]:
        return [torch.ones(slots, *shape, dtype=torch.bfloat16, device=args.device) for _ in range(args.layers)]

    mha = PageShape(groups=4, layers=args.layers, page_size=64, group_heads=2, row_bytes=(256, 256))
    mla = PageShape(groups=1, layers=args.layers, page_size=64, group_heads=1, row_bytes=(1152,))
    cases = (
        ("mha, 8 heads in groups of 2", MHAPool(tensors(8, 128), tensors(8, 128), page_size=64), mha, 0),
        ("mha, head 3 of 8, inside a group", MHAPool(tensors(1, 128), tensors(1, 128), page_size=64), mha, 3),
        ("mla, rows of 1152 bytes", MLAPool(tensors(576), page_size=64), mla, 0),
    )
    for name, pool, shape, first_head in cases:
        pages = torch.zeros(args.pages, shape.page_bytes, dtype=torch.uint8)
        if args.device.type == "cuda":
            measure(name, pool, shape, pages.to(args.device), first_head=first_head, repeats=args.repeats)
            pages = pages.pin_memory()
        measure(
            f"{name}, {'pinned' if pages.is_pinned() else 'host'}",
            pool,
            shape,
            pages,
            first_head=first_head,
            repeats=args.repeats,
        )


if __name__ == "__main__":
    main()
