"""Decode attention over pages, in Triton and in torch, against its formula over a dense copy in float64.

Whatever no row may see is NaN in these tests: tails of pages, pages of nobody, memory that a kernel has not written.
"""

import math
from contextlib import contextmanager

import pytest
import torch

from minserve.kernels.decode_attention import (
    MAX_SPLITS,
    DecodeBatch,
    choose_splits,
    decode_attention,
    decode_attention_reference,
    decode_attention_triton,
    decode_batch,
)

BLOCK = 16
PADDING = None
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def poisoned_memory():
    """torch.empty gives tensors full of NaN."""
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def close(out, expected):
    tolerance = 1e-5 if out.dtype == torch.float32 else 1.5e-2
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)


class Case:
    """Entries over shuffled pages. entries: for each the lengths of its rows, or PADDING."""

    def __init__(self, entries, device, dtype=torch.float32, *, heads=2, kv_heads=1, head_dim=64, stale=torch.nan):
        rows_per_entry = max(len(entry) for entry in entries if entry)
        blocks = [-(-max(entry) // BLOCK) if entry else 0 for entry in entries]
        num_pages = sum(blocks) + 3
        pages = torch.randperm(num_pages)
        max_blocks = max(blocks) + 2
        # Lanes in an order of their own; what is not an entry's names a page of nobody.
        lanes = torch.randperm(len(entries) + 2)[: len(entries)]
        table = pages[-1].repeat(len(entries) + 2, max_blocks)
        kv = torch.full((num_pages, kv_heads, 2, BLOCK, head_dim), stale)
        used = 0
        for lane, entry, count in zip(lanes, entries, blocks, strict=True):
            own = pages[used : used + count]
            used += count
            table[lane, :count] = own
            if entry:
                tokens = torch.full((count * BLOCK, kv_heads, 2, head_dim), stale)
                tokens[: max(entry)] = torch.randn(max(entry), kv_heads, 2, head_dim)
                kv[own] = tokens.view(count, BLOCK, kv_heads, 2, head_dim).permute(0, 2, 3, 1, 4)
        lengths = [length for entry in entries for length in entry or [7] * rows_per_entry]
        self.is_row = torch.tensor([entry is not PADDING for entry in entries for _ in range(rows_per_entry)])
        self.lanes = torch.where(torch.tensor([entry is PADDING for entry in entries]), -1, lanes).to(device)
        self.table = table.to(device, torch.int32)
        self.lengths = torch.tensor(lengths, device=device)
        self.q = torch.randn(len(lengths), heads, head_dim).to(device, dtype)
        self.kv = kv.to(device, dtype)

    def triton(self, **options):
        """Rows that are not padding. Splits as short as they can be, unless options say otherwise."""
        ended = torch.zeros(len(self.lanes) * self.kv.shape[1], dtype=torch.int32, device=self.q.device)
        batch = DecodeBatch(self.table, self.lanes, self.lengths, None, ended)
        options = {"min_keys": 32, "tile": 32} | options
        with poisoned_memory():
            out = decode_attention_triton(self.q, self.kv, batch, **options)
        assert not ended.any(), "the next layer counts from zero"
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        return out.cpu()[self.is_row]

    def expected(self):
        """The formula, row by row, of rows that are not padding."""
        q, kv = self.q.double().cpu(), self.kv.double().cpu()
        table, lanes, lengths = self.table.cpu(), self.lanes.tolist(), self.lengths.tolist()
        group, rows_per_entry = q.shape[1] // kv.shape[1], len(lengths) // len(lanes)
        out = []
        for row in self.is_row.nonzero()[:, 0].tolist():
            tokens = kv[table[lanes[row // rows_per_entry]].long()].permute(2, 1, 0, 3, 4).flatten(2, 3)
            k, v = tokens[:, :, : lengths[row]].repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,htd->ht", q[row], k / math.sqrt(q.shape[2])).softmax(-1)
            out.append(torch.einsum("ht,htd->hd", weights, v))
        return torch.stack(out)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 300])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_attends_all_of_its_keys_and_no_other(device, dtype, length, splits):
    case = Case([[length]], device, dtype)
    close(case.triton(splits=splits), case.expected())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_query_heads_share_their_kv_head(device, dtype, group, head_dim):
    case = Case([[50]], device, dtype, heads=2 * group, kv_heads=2, head_dim=head_dim)
    close(case.triton(splits=1), case.expected())


@pytest.mark.parametrize("splits", [1, 2, 7, 20])
def test_the_number_of_splits_changes_nothing(device, dtype, splits):
    """Entries of one batch use one, some and all of them."""
    case = Case([[31], [64], [300], [225]], device, dtype, heads=1)
    close(case.triton(splits=splits), case.expected())


@pytest.mark.parametrize("min_keys", [32, 64, 512])
def test_fewer_keys_than_are_worth_a_split_are_not_split(device, dtype, min_keys):
    case = Case([[63], [64], [65], [200]], device, dtype)
    close(case.triton(splits=4, min_keys=min_keys), case.expected())


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "entries",
    [
        [PADDING, [40], [3]],
        [[40], PADDING, PADDING, [120]],
        [[1], [129], PADDING],
        [PADDING, [33, 34], PADDING, [5, 6], PADDING],
    ],
)
def test_padding_is_passed_over(device, dtype, entries, splits):
    case = Case(entries, device, dtype)
    close(case.triton(splits=splits), case.expected())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "entries",
    [
        [[16, 17], [70, 71]],
        [[32, 33], [64, 65], [96, 97]],
        [[1, 2, 3, 4], [63, 64, 65, 66]],
        [[66, 65, 64, 63]],
    ],
)
def test_rows_of_one_entry_each_see_their_own_length(device, dtype, entries, splits):
    """Also where a row ends before a split that others of its entry still have keys in."""
    case = Case(entries, device, dtype)
    close(case.triton(splits=splits), case.expected())


def test_more_queries_than_one_instruction_takes(device, dtype):
    case = Case([[29, 30, 31, 32]], device, dtype, heads=8, head_dim=128)
    close(case.triton(splits=1), case.expected())


def test_entries_may_share_pages(device, dtype):
    case = Case([[40], [33]], device, dtype)
    case.table[case.lanes[1], :2] = case.table[case.lanes[0], :2]
    close(case.triton(splits=2), case.expected())


@pytest.mark.parametrize("length", [1, 17, 40])
def test_stale_memory_has_no_influence_on_a_single_bit(device, dtype, length):
    outs = []
    for stale in (0.0, 1e4, math.inf, math.nan):
        torch.manual_seed(length)
        outs.append(Case([[length]], device, dtype, stale=stale).triton(splits=2))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_large_scores_do_not_overflow(device, dtype):
    case = Case([[70]], device, dtype)
    case.q *= 300
    out = case.triton(splits=2)
    assert out.isfinite().all()
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), case.expected(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("entries", [[[21]], [[16], [99], [5]], [[16, 17], [63, 64]], [[46, 47, 48, 49]]])
def test_the_reference_gives_the_same(device, dtype, entries):
    case = Case(entries, device, dtype, heads=4, kv_heads=2, stale=0.0)
    batch = decode_batch(case.table, case.lanes, case.lengths, case.kv)
    close(decode_attention(case.q, case.kv, batch), case.expected())
    close(decode_attention_reference(case.q, case.kv, batch), case.expected())
    close(case.triton(splits=2), case.expected())


def test_head_dims_that_no_kernel_was_made_for_are_refused(device):
    with pytest.raises(AssertionError, match="96"):
        Case([[5]], device, head_dim=96).triton()


@pytest.mark.parametrize("num_pairs", [1, 8, 64, 176, 2048, 100_000])
def test_splits_fill_the_device_and_stay_in_bounds(num_pairs):
    splits = choose_splits(num_pairs, max_keys=32768, min_keys=128, num_sms=132)
    assert 1 <= splits <= MAX_SPLITS
    assert num_pairs * splits >= min(4 * 132, num_pairs * MAX_SPLITS)
    assert choose_splits(num_pairs, max_keys=200, min_keys=128, num_sms=132) <= 2


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_follows_lengths_and_lanes(device):
    case = Case([[300], [40], [170]], device, torch.bfloat16, heads=32, kv_heads=8, head_dim=128)
    batch = decode_batch(case.table, case.lanes, case.lengths, case.kv)
    decode_attention(case.q, case.kv, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(case.q, case.kv, batch)
    lanes = case.lanes.clone()
    for lengths, order in (([300, 40, 170], [0, 1, 2]), ([1, 299, 16], [2, 0, 1])):
        case.lengths.copy_(torch.tensor(lengths))
        case.lanes.copy_(lanes[order])
        graph.replay()
        close(out, case.expected())


@pytest.mark.gpu
@needs_gpu
def test_pages_past_2_31_elements(device):
    """A pool of 70,000 pages of 8 KV heads has 2.3e9 elements, 4.6 GB; the pages read are its last."""
    case = Case([[200], [33]], device, torch.bfloat16, heads=32, kv_heads=8, head_dim=128)
    num_pages, moved = 70_000, case.kv.shape[0]
    expected = case.expected()
    kv = torch.empty(num_pages, *case.kv.shape[1:], dtype=case.kv.dtype, device=device)
    kv[num_pages - moved :] = case.kv
    kv[:moved] = torch.nan
    case.table += num_pages - moved
    case.kv = kv
    close(case.triton(tile=64, min_keys=64), expected)
