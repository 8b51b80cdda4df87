"""Summaries of full blocks, by which blocks are ranked without looking at their keys (Quest, arXiv 2406.10774).

    digests[places[i], h, 0] = min over the 16 tokens t of kv[pages[i], h, 0, t]        (by coordinate)
    digests[places[i], h, 1] = max over the same

The keys are those after RoPE, as they stand in pages. Neither can be undone for one token: a block is summarized when
it is full and all of its tokens are accepted.
"""

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where


def build_digests(kv: torch.Tensor, digests: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
    """Writes the digests of some pages to their places.

    kv: [pages, kv_heads, 2 (K, V), 16, head_dim], one layer's
    digests: [places, kv_heads, 2 (min, max), head_dim], one layer's, kv's dtype
    pages, places: [n] int64, no place twice; place -1: nothing is read or written. All contiguous.
    """
    _, kv_heads, sides, _, head_dim = kv.shape
    assert sides == 2, kv.shape
    assert digests.shape[1:] == (kv_heads, 2, head_dim), (digests.shape, kv.shape)
    assert digests.dtype == kv.dtype, (digests.dtype, kv.dtype)
    assert pages.shape == places.shape == (len(pages),), (pages.shape, places.shape)
    assert pages.dtype == places.dtype == torch.int64, (pages.dtype, places.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, digests, pages, places))
    run = build_digests_triton if kv.is_cuda else build_digests_reference
    run(kv, digests, pages, places)


def build_digests_reference(kv: torch.Tensor, digests: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
    valid = places >= 0
    keys = kv[torch.where(valid, pages, 0), :, 0]
    write_where(digests, places, torch.stack(torch.aminmax(keys, dim=2), dim=2), valid)


@triton.jit
def _build_digests_kernel(
    kv,
    digests,
    pages,
    places,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
):
    """One program for one KV head of one page; width: head_dim, rounded up to a power of two."""
    number = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    place = tl.load(places + number)
    if place >= 0:
        page = tl.load(pages + number)
        token = tl.arange(0, block_size)
        column = tl.arange(0, width)
        in_head = column < head_dim
        source = kv + (page * kv_heads + head) * (2 * block_size * head_dim)
        keys = tl.load(source + token[:, None] * head_dim + column[None, :], mask=in_head[None, :], other=0.0)
        target = digests + (place * kv_heads + head) * (2 * head_dim) + column
        tl.store(target, tl.min(keys, 0).to(digests.dtype.element_ty), mask=in_head)
        tl.store(target + head_dim, tl.max(keys, 0).to(digests.dtype.element_ty), mask=in_head)


def build_digests_triton(kv: torch.Tensor, digests: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> None:
    _, kv_heads, _, block_size, head_dim = kv.shape
    width = triton.next_power_of_2(head_dim)
    _build_digests_kernel[(len(pages) * kv_heads,)](
        kv, digests, pages, places, kv_heads, block_size, head_dim, width, num_warps=1
    )
