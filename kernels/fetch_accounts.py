"""What lanes may fetch in a step, and what came of it: one kernel before a step's fetches, one behind, one at its end.

    allowance  = min(allowance + more, most), of each layer, for who takes part; a step that runs again adds nothing, as
                 a lane has what it has for a token. Later less what is fetched = misses - cut
    again      = the mean of lacking over layers and KV heads > retry_above, and the lane's step did not run again yet
    counters   = the sums over layers and heads, and as misses also what was fetched late, for a step that ran again

Counters are those of `FetchPlan`: hits, misses, cut, surprises, asked.
"""

from typing import Any, NamedTuple

import torch

from minserve.kernels.lang import tl, triton

COUNTERS = 5


class Accounts(NamedTuple):
    """refills: [2 (more, most), num_lanes] int64; cap: [num_lanes] int64; allowance: [layers, num_lanes] int32;
    retry_above: [num_lanes] float32; retried: [num_lanes + 1] bool, whether the lane's last step runs again; late:
    [num_lanes + 1] int64, fetched for that; their last rows are nobody's; by_layer: [layers, 4] int64, the first
    counters so far."""

    refills: torch.Tensor
    cap: torch.Tensor
    allowance: torch.Tensor
    retry_above: torch.Tensor
    retried: torch.Tensor
    late: torch.Tensor
    by_layer: torch.Tensor


def take_given(given: torch.Tensor, accounts: Accounts, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies what a step is given, adds to the allowances of its lanes.

    given: [4, entries] int64, lanes first, no lane twice, -1: padding; step: [1] int32.
    Returns ([6, entries] int64, given, then lanes with 0 in place of -1, and the caps of these; a copy of step).
    """
    assert (len(given), given.dtype, given.stride(1)) == (4, torch.int64, 1), (given.shape, given.dtype)
    assert all(tensor.is_contiguous() for tensor in accounts)
    # Of even width, so that every row begins at 16 bytes: kernels are compiled for that.
    taken, clock = given.new_empty(6, given.shape[1] + given.shape[1] % 2)[:, : given.shape[1]], torch.empty_like(step)
    run = take_given_triton if given.is_cuda else take_given_reference
    run(given, accounts, step, taken, clock)
    return taken, clock


def take_given_reference(
    given: torch.Tensor, accounts: Accounts, step: torch.Tensor, taken: torch.Tensor, clock: torch.Tensor
) -> None:
    lanes, allowance = given[0], accounts.allowance
    own = lanes.clamp_min(0)
    taken[:4], taken[4], taken[5] = given, own, accounts.cap[own]
    takes_part = torch.zeros_like(accounts.retried)
    takes_part.index_fill_(0, torch.where(lanes < 0, len(takes_part) - 1, lanes), True)
    more, most = accounts.refills
    refilled = torch.minimum(allowance + torch.where(accounts.retried[:-1], 0, more), most).to(allowance.dtype)
    allowance.copy_(torch.where(takes_part[:-1], refilled, allowance))
    clock.copy_(step)


@triton.jit(do_not_specialize=["given_stride", "taken_stride", "layers"])
def _take_given_kernel(
    given, refills, cap, allowance, retried, step, taken, clock, given_stride, taken_stride, layers, num_lanes,
    width: tl.constexpr,
):  # fmt: skip
    """One program for an entry; width: the number of layers, rounded up to a power of two."""
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.load(given + entry)
    for row in tl.static_range(4):
        tl.store(taken + row * taken_stride + entry, tl.load(given + row * given_stride + entry))
    tl.store(taken + 4 * taken_stride + entry, tl.maximum(lane, 0))
    tl.store(taken + 5 * taken_stride + entry, tl.load(cap + tl.maximum(lane, 0)))
    if lane >= 0:
        more = tl.where(tl.load(retried + lane) != 0, 0, tl.load(refills + lane))
        most = tl.load(refills + num_lanes + lane)
        layer = tl.arange(0, width)
        at = allowance + layer.to(tl.int64) * num_lanes + lane
        refilled = tl.minimum(tl.load(at, mask=layer < layers, other=0) + more, most)
        tl.store(at, refilled.to(tl.int32), mask=layer < layers)
    if entry == 0:
        tl.store(clock, tl.load(step))


def take_given_triton(
    given: torch.Tensor, accounts: Accounts, step: torch.Tensor, taken: torch.Tensor, clock: torch.Tensor
) -> None:
    (layers, num_lanes), retried = accounts.allowance.shape, accounts.retried.view(torch.uint8)
    _take_given_kernel[(given.shape[1],)](
        given, accounts.refills, accounts.cap, accounts.allowance, retried, step, taken, clock, given.stride(0),
        taken.stride(0), layers, num_lanes, triton.next_power_of_2(layers), num_warps=1,
    )  # fmt: skip


def count_fetches(
    counters: torch.Tensor,
    lacking: torch.Tensor,
    lanes: torch.Tensor,
    accounts: Accounts,
    again: torch.Tensor,
    totals: torch.Tensor,
    recalled: torch.Tensor | None = None,
) -> None:
    """What a step's plans come to, when all are made.

    counters: [layers * entries, kv_heads, 5] int32, zero for who takes no part; lacking: [layers * entries, kv_heads]
    float32; lanes: [entries] int64, no lane twice, -1: padding; again: [entries] bool and totals: [entries, 5] int64,
    both written. recalled: [entries, 3] int64, in place of the first totals, which then are in by_layer already.
    """
    _check(counters, lanes, accounts, again)
    assert (lacking.shape, lacking.dtype) == (counters.shape[:2], torch.float32), (lacking.shape, counters.shape)
    assert (totals.shape, totals.dtype) == ((len(lanes), COUNTERS), torch.int64), (totals.shape, totals.dtype)
    assert all(each is None or each.is_contiguous() for each in (lacking, totals, recalled))
    run = count_fetches_triton if lanes.is_cuda else count_fetches_reference
    run(counters, lacking, lanes, accounts, again, totals, recalled)


def _check(counters: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, again: torch.Tensor) -> None:
    num_rows = len(accounts.by_layer) * len(lanes)
    assert (len(counters), counters.shape[2], counters.dtype) == (num_rows, COUNTERS, torch.int32), counters.shape
    assert (again.shape, again.dtype, lanes.dtype) == (lanes.shape, torch.bool, torch.int64), (again, lanes)
    assert all(tensor.is_contiguous() for tensor in (counters, lanes, again, *accounts))


def count_fetches_reference(
    counters: torch.Tensor,
    lacking: torch.Tensor,
    lanes: torch.Tensor,
    accounts: Accounts,
    again: torch.Tensor,
    totals: torch.Tensor,
    recalled: torch.Tensor | None,
) -> None:
    own, real, layers = lanes.clamp_min(0), lanes >= 0, len(accounts.by_layer)
    lacks = lacking.view(layers, len(lanes), -1).mean(dim=(0, 2)) > accounts.retry_above[own]
    again.copy_(lacks & ~accounts.retried[own] & real)
    by_layer = counters.view(layers, len(lanes), -1, COUNTERS).sum(dim=2)
    accounts.allowance.index_add_(1, own, (by_layer[..., 1] - by_layer[..., 2]).to(torch.int32), alpha=-1)
    totals.copy_(by_layer.sum(dim=0))
    if recalled is None:
        accounts.by_layer.add_(by_layer[..., :4].sum(dim=1))
    else:
        totals[:, :3] = recalled
    totals[:, 1] += torch.where(real, accounts.late[own], 0)


@triton.jit
def _of_layers(x, entry, entries, layers, heads: tl.constexpr, size: tl.constexpr, shape) -> Any:
    """What an entry has in each layer, summed over the heads. x: [layers, entries, heads, size], one of the last."""
    layer, head = tl.arange(0, shape[0])[:, None], tl.arange(0, shape[1])[None, :]
    at = x + ((layer.to(tl.int64) * entries + entry) * heads + head) * size
    return tl.sum(tl.load(at, mask=(layer < layers) & (head < heads), other=0), 1)


@triton.jit(do_not_specialize=["entries", "layers"])
def _count_fetches_kernel(
    counters, lacking, lanes, allowance, retry_above, retried, late, by_layer, again, totals, recalled, entries, layers,
    num_lanes, recalls: tl.constexpr, heads: tl.constexpr, width: tl.constexpr, head_width: tl.constexpr,
):  # fmt: skip
    """One program for an entry; widths: the numbers of layers and heads, rounded up to powers of two."""
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + entry)
    real = lane >= 0
    layer = tl.arange(0, width)
    share = tl.sum(_of_layers(lacking, entry, entries, layers, heads, 1, (width, head_width)), 0) / (layers * heads)
    lacks = share > tl.load(retry_above + lane, mask=real, other=float("inf"))
    lacks = lacks & (tl.load(retried + lane, mask=real, other=1) == 0)
    tl.store(again + entry, lacks.to(tl.uint8))
    fetched = tl.zeros([width], tl.int32)
    for counter in tl.static_range(5):
        own = _of_layers(counters + counter, entry, entries, layers, heads, 5, (width, head_width))
        total = tl.sum(own, 0).to(tl.int64)
        if counter < 3 and recalls:
            total = tl.load(recalled + entry * 3 + counter)
        elif counter < 4 and not recalls:
            to = by_layer + layer * 4 + counter
            tl.atomic_add(to, own.to(tl.int64), mask=(layer < layers) & (own != 0), sem="relaxed")
        if counter == 1:
            total += tl.load(late + lane, mask=real, other=0)
            fetched = own
        if counter == 2:
            fetched -= own
        tl.store(totals + entry * 5 + counter, total)
    at = allowance + layer.to(tl.int64) * num_lanes + lane
    of_lane = layer < tl.where(real, layers, 0)
    tl.store(at, tl.load(at, mask=of_lane, other=0) - fetched, mask=of_lane)


def count_fetches_triton(
    counters: torch.Tensor,
    lacking: torch.Tensor,
    lanes: torch.Tensor,
    accounts: Accounts,
    again: torch.Tensor,
    totals: torch.Tensor,
    recalled: torch.Tensor | None,
) -> None:
    _, _, allowance, retry_above, retried, late, by_layer = accounts
    (entries,), (layers, num_lanes), heads = lanes.shape, allowance.shape, counters.shape[1]
    _count_fetches_kernel[(entries,)](
        counters, lacking, lanes, allowance, retry_above, retried.view(torch.uint8), late, by_layer,
        again.view(torch.uint8), totals, totals if recalled is None else recalled, entries, layers, num_lanes,
        recalled is not None, heads, triton.next_power_of_2(layers), triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip


def count_repeats(
    counters: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, again: torch.Tensor, *, counts: bool
) -> None:
    """What was fetched for steps that run again. counters, lanes, again: as above; counts: in by_layer too."""
    _check(counters, lanes, accounts, again)
    run = count_repeats_triton if lanes.is_cuda else count_repeats_reference
    run(counters, lanes, accounts, again, counts=counts)


def count_repeats_reference(
    counters: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, again: torch.Tensor, *, counts: bool
) -> None:
    fetched = counters.view(len(accounts.by_layer), len(lanes), -1, COUNTERS).sum(dim=2)
    fetched = fetched[..., 1] - fetched[..., 2]
    at = torch.where(lanes < 0, len(accounts.late) - 1, lanes)
    accounts.late[at], accounts.retried[at] = fetched.sum(dim=0), again
    if counts:
        accounts.by_layer[:, 1].add_(fetched.sum(dim=1))


@triton.jit(do_not_specialize=["entries", "layers"])
def _count_repeats_kernel(
    counters, lanes, retried, late, by_layer, again, entries, layers,
    counts: tl.constexpr, heads: tl.constexpr, width: tl.constexpr, head_width: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + entry)
    if lane >= 0:
        shape: tl.constexpr = (width, head_width)
        fetched = _of_layers(counters + 1, entry, entries, layers, heads, 5, shape)
        fetched -= _of_layers(counters + 2, entry, entries, layers, heads, 5, shape)
        tl.store(late + lane, tl.sum(fetched, 0).to(tl.int64))
        tl.store(retried + lane, tl.load(again + entry))
        if counts:
            to = by_layer + tl.arange(0, width) * 4 + 1
            tl.atomic_add(to, fetched.to(tl.int64), mask=fetched != 0, sem="relaxed")


def count_repeats_triton(
    counters: torch.Tensor, lanes: torch.Tensor, accounts: Accounts, again: torch.Tensor, *, counts: bool
) -> None:
    (entries,), layers, heads = lanes.shape, len(accounts.by_layer), counters.shape[1]
    _count_repeats_kernel[(entries,)](
        counters, lanes, accounts.retried.view(torch.uint8), accounts.late, accounts.by_layer, again.view(torch.uint8),
        entries, layers, counts, heads, triton.next_power_of_2(layers), triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
