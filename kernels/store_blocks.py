"""Pages into host memory, whole blocks of all layers and KV heads: what is written through when a block is full.

    host[hosts[i], layer, h] = kv[layer, pages[i], h]        for all layers and KV heads h

On a GPU the host blocks lie in pinned memory, which the kernel writes by its address (unified virtual addressing). A
few programs fill the link: they are not in anybody's way, and there is one launch whatever the number of blocks. A host
block may be read when what was launched here has ended, which is for the caller to know.

The torch reference writes host blocks that lie on the device of the pages.
"""

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where

PROGRAMS, NUM_WARPS = 32, 4
"""Enough to fill the link (52 GB/s of 55 on an H200)."""


def store_blocks(kv: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, hosts: torch.Tensor) -> None:
    """Writes some pages to their host blocks.

    kv: [layers, pages, kv_heads, 2 (K, V), 16, head_dim], the whole cache
    host: [host_blocks, layers, kv_heads, 2, 16, head_dim], of the same dtype, in pinned memory or on the same device
    pages, hosts: [n] int64, no host block twice; -1 in either: nothing is read or written. All contiguous.
    """
    layers, _, *rest = kv.shape
    assert host.shape[1:] == (layers, *rest), (host.shape, kv.shape)
    assert (host.dtype, len(rest)) == (kv.dtype, 4), (host.dtype, kv.dtype, kv.shape)
    assert pages.shape == hosts.shape == (len(pages),), (pages.shape, hosts.shape)
    assert pages.dtype == hosts.dtype == torch.int64, (pages.dtype, hosts.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, host, pages, hosts))
    run = store_blocks_triton if kv.is_cuda else store_blocks_reference
    run(kv, host, pages, hosts)


def store_blocks_reference(kv: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, hosts: torch.Tensor) -> None:
    valid = (pages >= 0) & (hosts >= 0)
    write_where(host, hosts, kv[:, pages.clamp_min(0)].transpose(0, 1), valid)


@triton.jit(do_not_specialize=["num_stores"])
def _store_blocks_kernel(
    kv,
    host,
    pages,
    hosts,
    num_stores,
    num_layers,
    num_pages,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
):
    """A program takes every so-many-th layer of a block. size: of one head's K and V of it; width: a power of two, no
    less than size."""
    offset = tl.arange(0, width)
    for number in range(tl.program_id(0), num_stores * num_layers, tl.num_programs(0)):
        layer = (number % num_layers).to(tl.int64)
        page = tl.load(pages + number // num_layers)
        block = tl.load(hosts + number // num_layers)
        if (page >= 0) & (block >= 0):
            source = kv + (layer * num_pages + page) * (kv_heads * size)
            target = host + (block * num_layers + layer) * (kv_heads * size)
            for head in range(kv_heads):
                content = tl.load(source + head * size + offset, mask=offset < size)
                tl.store(target + head * size + offset, content, mask=offset < size)


def store_blocks_triton(kv: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, hosts: torch.Tensor) -> None:
    (num_layers, num_pages, kv_heads), size = kv.shape[:3], kv[0, 0, 0].numel()
    _store_blocks_kernel[(PROGRAMS,)](
        kv,
        host,
        pages,
        hosts,
        len(pages),
        num_layers,
        num_pages,
        kv_heads,
        size,
        triton.next_power_of_2(size),
        num_warps=NUM_WARPS,
    )
