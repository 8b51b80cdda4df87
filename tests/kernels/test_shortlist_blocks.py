"""Shortlists against loops over lists."""

import math

import pytest
import torch

from minserve.kernels.shortlist_blocks import (
    shortlist_blocks,
    shortlist_blocks_reference,
    shortlist_blocks_triton,
    shortlist_length,
)

from .working_sets import by_block

INF = float("inf")
BOTH = pytest.mark.parametrize("shorten", [shortlist_blocks_reference, shortlist_blocks_triton])


def worths(logits):
    """[blocks], of one KV head's [2][group][blocks] logits."""
    worth = [-INF] * len(logits[0][0])
    for own in (own for row in logits for own in row):
        norm = math.log(sum(math.exp(logit) for logit in own)) if max(own) > -INF else 0.0
        worth = [max(best, logit - norm / 2) for best, logit in zip(worth, own)]
    return worth


def random_logits(entries, kv_heads, group, num_blocks, ends):
    """[entries, 2, kv_heads * group, blocks], -inf for block 0 and from each entry's end on."""
    logits = torch.randn(entries, 2, kv_heads * group, num_blocks) * 3
    for entry, end in enumerate(ends):
        logits[entry, ..., max(end, 0) :] = -INF
    logits[..., 0] = -INF
    return logits


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 4), (1, 8)])
@pytest.mark.parametrize(("num_blocks", "count"), [(1, 1), (9, 4), (33, 8), (100, 64), (70, 70)])
def test_a_list_has_the_blocks_that_are_worth_most(shorten, dtype, kv_heads, group, num_blocks, count, device):
    torch.manual_seed(num_blocks)
    ends = (num_blocks, num_blocks // 2, 0)
    given = random_logits(3, kv_heads, group, num_blocks, ends).to(dtype)
    logits = by_block(given.to(device), kv_heads)
    found = shorten(logits, count)
    assert (found.shape, found.dtype) == ((3, kv_heads, count), torch.int32)
    grouped, left = given.float().unflatten(2, (kv_heads, group)), logits.float().cpu().transpose(3, 4)
    for entry, end in enumerate(ends):
        for head, listed in enumerate(found[entry].tolist()):
            own = grouped[entry, :, head]
            worth, num_listed = worths(own.tolist()), min(count, max(end - 1, 0))
            blocks = listed[:num_listed]
            assert listed[num_listed:] == [-1] * (count - num_listed)
            assert blocks == sorted(set(blocks))
            others = [worth[block] for block in range(num_blocks) if block not in blocks]
            assert all(worth[block] > -INF for block in blocks)
            assert not blocks or min(worth[block] for block in blocks) >= max(others) - 1e-4
            is_listed = torch.zeros(num_blocks, dtype=torch.bool).index_fill_(0, torch.tensor(blocks).long(), True)
            assert torch.equal(left[entry, :, head], own.masked_fill(~is_listed, -INF))


@BOTH
def test_of_blocks_that_are_worth_the_same_the_first_are_listed(shorten, device):
    logits = torch.full((1, 2, 2, 50), -INF)
    logits[..., 1:] = 0.5
    logits[:, 1, :, [7, 40]] = 2.0
    assert shorten(by_block(logits.to(device), 1), 6).tolist() == [[[1, 2, 3, 4, 7, 40]]]


@BOTH
@pytest.mark.parametrize("row", [0, 1])
def test_a_block_that_one_head_of_one_row_needs_is_listed(shorten, row, device):
    logits = torch.zeros(1, 2, 4, 50)
    logits[..., 0], logits[..., 4:9], logits[:, row, 2, 33] = -INF, 1.0, 6.0
    assert shorten(by_block(logits.to(device), 1), 3).tolist() == [[[4, 5, 33]]]


@BOTH
def test_heads_are_half_normalised(shorten, device):
    """One expects 30 everywhere, which says nothing of blocks; another only 4, but of one block."""
    logits = torch.zeros(1, 2, 2, 40)
    logits[:, :, 0], logits[:, :, 1, 9] = 30.0, 4.0
    logits[:, :, 0] -= torch.arange(40) * 0.01
    logits[..., 0] = -INF
    # 30 less half of 30 + log 39 is above what the other head has, in which 4 less half of 4.5 are.
    assert shorten(by_block(logits.to(device), 1), 2).tolist() == [[[1, 2]]]
    logits[:, :, 0] -= 28.0
    assert shorten(by_block(logits.to(device), 1), 2).tolist() == [[[1, 9]]]


@BOTH
def test_numbers_as_large_as_logits_can_be_are_listed(shorten, device):
    logits = torch.full((1, 2, 2, 20), -1e4)
    logits[..., 5], logits[..., 7] = 1e4, 80.0
    assert shorten(by_block(logits.to(device), 1), 3).tolist() == [[[0, 5, 7]]]


def test_a_list_is_twice_as_long_as_there_are_slots_and_no_shorter_than_4k_tokens():
    assert [shortlist_length(slots) for slots in (4, 128, 129, 500)] == [256, 256, 258, 1000]


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    logits = torch.zeros(2, 2, 1, 8, 4, device=device)
    for wrong in ((torch.cat((logits, logits), dim=1), 4), (logits, 9), (logits, 0), (logits.double(), 4)):
        with pytest.raises(AssertionError):
            shortlist_blocks(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_past_two_billion_elements_are_shortened(device):
    entries, heads, num_blocks = 2**31 // (2 * 8 * 8192) + 1, 8, 8192
    logits = torch.zeros(entries, 2, 1, num_blocks, heads, device=device)
    logits[-1, :, :, -1] = 20.0
    assert shortlist_blocks(logits, 2)[-1].tolist() == [[0, num_blocks - 1]]
    assert logits[-1, :, 0, 1:-1].eq(-INF).all()
