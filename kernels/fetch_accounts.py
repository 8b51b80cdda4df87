"""What lanes may fetch in a step, and what came of it: a kernel before a step's fetches are planned, and one behind.

    allowance = min(allowance + more, most), in each layer, of who takes part; a step that runs again adds nothing, as a
                lane has what it has for a token. Later less what is fetched, which is misses - cut
    again     = the mean of lacking over layers and KV heads > retry_above, unless the lane is running again
                already; in a lane's first step, and for UNSETTLED_STEPS behind one that ran again,
                > SOONER * retry_above is enough
    totals    = the counters, summed over layers and heads; misses with what the lane's last step fetched late, which is
                known when its own result is on its way

After a turn of the text much is lacking in one step, and then for some steps not much more than elsewhere: what came
before them tells these from the others (tools/NOTES.md, "What the ranking misses").

Counters are those of `FetchPlan`: hits, misses, cut, surprises, asked.
"""

from typing import NamedTuple

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where

COUNTERS = 5

UNSETTLED_STEPS, SOONER = 4, 0.22
"""Needles are found by it that one threshold loses, at the same share of steps on own text (tools/NOTES.md)."""

JUST_SPARSE = UNSETTLED_STEPS
"""Steps since it ran again, of a lane that has just become sparse: so its first step is unsettled, as it asks for what
nobody knew of when its slots were filled."""

SETTLED = 2**30
"""The same of a lane that never ran again, or not for long: no more are counted."""


class Accounts(NamedTuple):
    """Of lanes. refills: [2 (more, most), num_lanes] int64; cap: [num_lanes] int64; allowance: [layers, num_lanes]
    int32; retry_above: [num_lanes] float32; since_retry: [num_lanes] int32, steps since the lane had to run again, 0 in
    the one that does; late: [num_lanes + 1] int64, the last is nobody's."""

    refills: torch.Tensor
    cap: torch.Tensor
    allowance: torch.Tensor
    retry_above: torch.Tensor
    since_retry: torch.Tensor
    late: torch.Tensor

    def check(self) -> None:
        layers, num_lanes = self.allowance.shape
        shapes = ((2, num_lanes), (num_lanes,), (layers, num_lanes), (num_lanes,), (num_lanes,), (num_lanes + 1,))
        dtypes = (torch.int64, torch.int64, torch.int32, torch.float32, torch.int32, torch.int64)
        assert tuple(table.shape for table in self) == shapes, [table.shape for table in self]
        assert tuple(table.dtype for table in self) == dtypes, [table.dtype for table in self]
        assert all(table.is_contiguous() for table in self)


class Outcome(NamedTuple):
    """Of entries, written. again: [entries] bool, who has to run again; totals: [entries, 5] int64."""

    again: torch.Tensor
    totals: torch.Tensor


def take_given(given: torch.Tensor, accounts: Accounts, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies what the step is given, and adds to the allowances of its lanes.

    given: [4, entries] int64, the first are lanes, no lane twice, -1: padding; step: [1] int32.
    Returns ([7, entries] int64, a copy of step): given; lanes with 0 in place of -1, and with num_lanes; caps.
    """
    assert (len(given), given.dtype, given.stride(1)) == (4, torch.int64, 1), (given.shape, given.dtype)
    assert (step.shape, step.dtype) == ((1,), torch.int32), (step.shape, step.dtype)
    accounts.check()
    # Of even width, so that every row begins at 16 bytes: kernels are compiled for that.
    taken, clock = given.new_empty(7, given.shape[1] + given.shape[1] % 2)[:, : given.shape[1]], torch.empty_like(step)
    run = take_given_triton if given.is_cuda else take_given_reference
    run(given, accounts, step, taken, clock)
    return taken, clock


def take_given_reference(
    given: torch.Tensor, accounts: Accounts, step: torch.Tensor, taken: torch.Tensor, clock: torch.Tensor
) -> None:
    lanes, allowance, since_retry = given[0], accounts.allowance, accounts.since_retry
    own, at = lanes.clamp_min(0), torch.where(lanes < 0, allowance.shape[1], lanes)
    taken[:4], taken[4], taken[5], taken[6] = given, own, at, accounts.cap[own]
    takes_part = torch.zeros_like(accounts.late, dtype=torch.bool).index_fill_(0, at, True)[:-1]
    more, most = accounts.refills
    refilled = torch.minimum(allowance + torch.where(since_retry == 0, 0, more), most)
    allowance.copy_(torch.where(takes_part, refilled, allowance))
    clock.copy_(step)


@triton.jit(do_not_specialize=["given_stride", "taken_stride", "layers"])
def _take_given_kernel(
    given, refills, cap, allowance, since_retry, step, taken, clock, given_stride, taken_stride, layers, num_lanes,
    width: tl.constexpr,
):  # fmt: skip
    """One program for an entry. width: the number of layers, rounded up to a power of two."""
    entry = tl.program_id(0).to(tl.int64)
    row, layer = tl.arange(0, 4), tl.arange(0, width)
    lane = tl.load(given + entry)
    found = tl.load(given + row * given_stride + entry)
    # All loads come before all stores, none of which the compiler would move: what takes time is to wait for memory.
    now = tl.load(step)
    own = tl.maximum(lane, 0)
    own_cap = tl.load(cap + own)
    more = tl.where(tl.load(since_retry + own) == 0, 0, tl.load(refills + own))
    most = tl.load(refills + num_lanes + own)
    inside = layer < tl.where(lane < 0, 0, layers)
    at = allowance + layer.to(tl.int64) * num_lanes + own
    refilled = tl.minimum(tl.load(at, mask=inside, other=0) + more, most)

    taken += entry
    tl.store(taken + row * taken_stride, found)
    tl.store(taken + 4 * taken_stride, own)
    tl.store(taken + 5 * taken_stride, tl.where(lane < 0, num_lanes, lane))
    tl.store(taken + 6 * taken_stride, own_cap)
    tl.store(at, refilled.to(tl.int32), mask=inside)
    tl.store(clock, now)  # by all of them


def take_given_triton(
    given: torch.Tensor, accounts: Accounts, step: torch.Tensor, taken: torch.Tensor, clock: torch.Tensor
) -> None:
    refills, cap, allowance, _, since_retry, _ = accounts
    layers, num_lanes = allowance.shape
    _take_given_kernel[(given.shape[1],)](
        given, refills, cap, allowance, since_retry, step, taken, clock, given.stride(0), taken.stride(0), layers,
        num_lanes, triton.next_power_of_2(layers), num_warps=1,
    )  # fmt: skip


def count_fetches(
    counters: torch.Tensor, lacking: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, outcome: Outcome
) -> None:
    """When all of a step's fetches are planned.

    counters: [layers, entries, kv_heads, 5] int32, zero for who takes no part; lacking: [layers, entries, kv_heads]
    float32; lanes: [entries] int64, no lane twice, -1: padding.
    """
    layers, entries, _, size = counters.shape
    assert (len(accounts.allowance), lanes.shape, size) == (layers, (entries,), COUNTERS), (counters.shape, lanes.shape)
    assert lacking.shape == counters.shape[:3], (lacking.shape, counters.shape)
    assert (outcome.again.shape, outcome.totals.shape) == ((entries,), (entries, COUNTERS)), outcome
    tensors = (counters, lacking, lanes, *outcome)
    dtypes = [tensor.dtype for tensor in tensors]
    assert dtypes == [torch.int32, torch.float32, torch.int64, torch.bool, torch.int64], dtypes
    assert all(tensor.is_contiguous() for tensor in tensors)
    accounts.check()
    run = count_fetches_triton if lanes.is_cuda else count_fetches_reference
    run(counters, lacking, lanes, accounts, outcome)


def count_fetches_reference(
    counters: torch.Tensor, lacking: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, outcome: Outcome
) -> None:
    own, real = lanes.clamp_min(0), lanes >= 0
    since = accounts.since_retry[own]
    above = accounts.retry_above[own] * torch.where(since <= UNSETTLED_STEPS, SOONER, 1.0)
    outcome.again.copy_((lacking.mean(dim=(0, 2)) > above) & (since > 0) & real)
    later = torch.where(outcome.again, 0, (since + 1).clamp_max(SETTLED))
    write_where(accounts.since_retry, lanes, later, real)
    by_layer = counters.sum(dim=2)
    fetched = (by_layer[..., 1] - by_layer[..., 2]).to(torch.int32)
    accounts.allowance.index_add_(1, own, fetched, alpha=-1)
    outcome.totals.copy_(by_layer.sum(dim=0))
    outcome.totals[:, 1] += torch.where(real, accounts.late[own], 0)


@triton.jit(do_not_specialize=["entries", "layers"])
def _count_fetches_kernel(
    counters, lacking, lanes, allowance, retry_above, since_retry, late, again, totals, entries, layers, num_lanes,
    unsettled: tl.constexpr, sooner: tl.constexpr, settled: tl.constexpr, heads: tl.constexpr, width: tl.constexpr,
    head_width: tl.constexpr,
):  # fmt: skip
    """One program for an entry. Widths: the numbers of layers and heads, rounded up to powers of two."""
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + entry)
    own = tl.maximum(lane, 0)
    layer, head, counter = tl.arange(0, width), tl.arange(0, head_width)[None, :], tl.arange(0, 8)
    at = (layer[:, None].to(tl.int64) * entries + entry) * heads + head
    inside = (layer < layers)[:, None] & (head < heads)
    lacks = tl.load(lacking + at, mask=inside, other=0.0)
    source = counters + at[:, :, None] * 5 + counter[None, None, :]
    by_layer = tl.sum(tl.load(source, mask=inside[:, :, None] & (counter < 5)[None, None, :], other=0), 1)
    own_allowance = allowance + layer.to(tl.int64) * num_lanes + own
    of_lane = layer < tl.where(lane < 0, 0, layers)
    remaining = tl.load(own_allowance, mask=of_lane, other=0)
    fetched_late = tl.where(lane < 0, 0, tl.load(late + own))
    since = tl.load(since_retry + own)
    above = tl.load(retry_above + own) * tl.where(since <= unsettled, sooner, 1.0)

    share = tl.sum(tl.sum(lacks, 1), 0) / (layers * heads)
    runs_again = (lane >= 0) & (since > 0) & (share > above)
    tl.store(again + entry, runs_again.to(tl.uint8))
    tl.store(since_retry + own, tl.where(runs_again, 0, tl.minimum(since + 1, settled)), mask=lane >= 0)
    total = tl.sum(by_layer, 0).to(tl.int64) + tl.where(counter == 1, fetched_late, 0)
    tl.store(totals + entry * 5 + counter, total, mask=counter < 5)
    fetched = tl.sum(by_layer * tl.where(counter == 1, 1, tl.where(counter == 2, -1, 0))[None, :], 1)
    tl.store(own_allowance, remaining - fetched, mask=of_lane)


def count_fetches_triton(
    counters: torch.Tensor, lacking: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, outcome: Outcome
) -> None:
    _, _, allowance, retry_above, since_retry, late = accounts
    layers, entries, heads, _ = counters.shape
    _count_fetches_kernel[(entries,)](
        counters, lacking, lanes, allowance, retry_above, since_retry, late, outcome.again.view(torch.uint8),
        outcome.totals, entries, layers, allowance.shape[1], UNSETTLED_STEPS, SOONER, SETTLED, heads,
        triton.next_power_of_2(layers), triton.next_power_of_2(heads), num_warps=8,
    )  # fmt: skip
