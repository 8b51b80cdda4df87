"""The queries of a layer by which blocks are ranked: of each entry the lookahead row's and the normal row's.

    by_entry[e] = q[e, ahead[e]], q[e, 0]            by_lane[lanes[e]] = the same

By entry they are ranked in the step's background; by lane they are kept for who is made sparse later.
"""

import torch

from minserve.kernels.lang import tl, triton


def keep_queries(
    q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, by_entry: torch.Tensor, by_lane: torch.Tensor
) -> None:
    """q: [entries * rows, heads, head_dim], an entry's rows one after the other; ahead: [entries] int64, below rows;
    lanes: [entries] int64, no lane twice, -1: padding, of which nothing is kept;
    by_entry: [at least entries, 2, heads, head_dim]; by_lane: [num_lanes, 2, heads, head_dim], of q's dtype, written.
    """
    (entries,) = lanes.shape
    _, heads, head_dim = q.shape
    assert len(q) % entries == 0, (q.shape, lanes.shape)
    assert by_entry.shape[1:] == by_lane.shape[1:] == (2, heads, head_dim), (by_entry.shape, by_lane.shape, q.shape)
    assert q.dtype == by_entry.dtype == by_lane.dtype, (q.dtype, by_entry.dtype, by_lane.dtype)
    assert (len(by_entry) >= entries, ahead.shape) == (True, (entries,)), (by_entry.shape, ahead.shape, entries)
    assert ahead.dtype == lanes.dtype == torch.int64, (ahead.dtype, lanes.dtype)
    assert all(tensor.is_contiguous() for tensor in (q, ahead, lanes, by_entry, by_lane))
    run = keep_queries_triton if q.is_cuda else keep_queries_reference
    run(q, ahead, lanes, by_entry, by_lane)


def keep_queries_reference(
    q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, by_entry: torch.Tensor, by_lane: torch.Tensor
) -> None:
    entries = torch.arange(len(lanes), device=q.device)
    rows = q.view(len(lanes), -1, *q.shape[1:])
    kept = torch.stack((rows[entries, ahead], rows[:, 0]), dim=1)
    real = lanes >= 0
    by_entry[: len(lanes)][real] = kept[real]
    by_lane[lanes[real]] = kept[real]


@triton.jit(do_not_specialize=["rows"])
def _keep_queries_kernel(q, ahead, lanes, by_entry, by_lane, rows, size: tl.constexpr, width: tl.constexpr):
    """One program for one of the two rows of an entry. size: numbers of a row; width: rounded up to a power of two."""
    entry = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    lane = tl.load(lanes + entry)
    if lane < 0:
        return
    row = tl.where(side == 0, tl.load(ahead + entry), 0)
    number = tl.arange(0, width)
    inside = number < size
    kept = tl.load(q + (entry * rows + row) * size + number, mask=inside)
    tl.store(by_entry + (entry * 2 + side) * size + number, kept, mask=inside)
    tl.store(by_lane + (lane * 2 + side) * size + number, kept, mask=inside)


def keep_queries_triton(
    q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, by_entry: torch.Tensor, by_lane: torch.Tensor
) -> None:
    size = q.shape[1] * q.shape[2]
    _keep_queries_kernel[(len(lanes), 2)](
        q, ahead, lanes, by_entry, by_lane, len(q) // len(lanes), size, triton.next_power_of_2(size), num_warps=4
    )
