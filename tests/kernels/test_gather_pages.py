"""A sequence's keys and values out of its pages: the reference and the kernel against plain indexing."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.gather_pages import gather_keys, gather_keys_reference, gather_keys_triton

RUNS = pytest.mark.parametrize("run", [gather_keys_reference, gather_keys_triton])
NO_PAGE = 2**31 - 1
"""Stands in a page table where the sequence has no block. Who looks it up reads far outside of the pages."""


def pages_and_row(device, dtype, blocks, kv_heads=2, head_dim=16):
    """Random pages, and a table's row with `blocks` of them."""
    kv = torch.randn(blocks + 3, kv_heads, 2, BLOCK_SIZE, head_dim, device=device).to(dtype)
    page_row = torch.full((blocks + 5,), NO_PAGE, device=device, dtype=torch.int32)
    page_row[:blocks] = torch.randperm(blocks + 3, device=device)[:blocks]
    return kv, page_row


def poisoned(kv, num_keys):
    shape = kv.shape[1], num_keys, kv.shape[4]
    return tuple(torch.full(shape, torch.nan, device=kv.device, dtype=kv.dtype) for _ in range(2))


def expected(kv, page_row, first, valid, num_keys):
    """K and V: [2, kv_heads, num_keys, head_dim]."""
    position = torch.arange(valid, device=kv.device) + first * BLOCK_SIZE
    found = kv[page_row[position // BLOCK_SIZE].long(), :, :, position % BLOCK_SIZE]
    both = kv.new_zeros(2, kv.shape[1], num_keys, kv.shape[4])
    both[:, :, :valid] = found.permute(2, 1, 0, 3)
    return both


def check(run, kv, page_row, first, valid, num_keys):
    k, v = poisoned(kv, num_keys)
    run(kv, page_row, first, k, v, valid)
    assert torch.equal(torch.stack((k, v)), expected(kv, page_row, first, valid, num_keys))


@RUNS
@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("first", [0, 2])
def test_consecutive_blocks_are_copied_and_the_last_is_cut(run, first, num_keys, device, dtype):
    kv, page_row = pages_and_row(device, dtype, blocks=5)
    check(run, kv, page_row, first, num_keys, num_keys)


@RUNS
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 64), (4, 128), (2, 48)])
def test_every_head_has_its_own_keys(run, kv_heads, head_dim, device, dtype):
    kv, page_row = pages_and_row(device, dtype, 2, kv_heads, head_dim)
    check(run, kv, page_row, 0, 20, 20)


@RUNS
@pytest.mark.parametrize("valid", [0, 1, 16, 17, 31, 32])
def test_what_the_sequence_does_not_have_is_zero_and_no_page_of_it_is_read(run, valid, device, dtype):
    kv, page_row = pages_and_row(device, dtype, blocks=2)
    check(run, kv, page_row, 0, valid, 75)


def test_wrong_shapes_and_counts_are_our_mistake(device):
    kv, page_row = pages_and_row(device, torch.float32, blocks=2)
    k, v = poisoned(kv, 32)
    for wrong in (
        (kv, page_row, 0, k, v[:, :16], 16),
        (kv, page_row, 0, k.half(), v.half(), 32),
        (kv, page_row.long(), 0, k, v, 32),
        (kv, page_row, 0, k, v, 33),
        (kv, page_row, -1, k, v, 32),
        (kv, page_row, 6, k, v, 32),
        (kv, page_row, 0, k[:, ::2], v[:, ::2], 16),
    ):
        with pytest.raises(AssertionError):
            gather_keys(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_page_past_two_billion_elements_is_found(device):
    kv_heads, head_dim = 8, 128
    pages = 2**31 // (kv_heads * 2 * BLOCK_SIZE * head_dim) + 2
    kv = torch.empty(pages, kv_heads, 2, BLOCK_SIZE, head_dim, device=device, dtype=torch.bfloat16)
    kv[-1] = torch.randn(kv[-1].shape, device=device)
    check(gather_keys, kv, torch.tensor([pages - 1], device=device, dtype=torch.int32), 0, 16, 20)
