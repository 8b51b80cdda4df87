"""The queries of a layer by which blocks are ranked: the lookahead row's of each lane, and the normal row's.

kept[lanes[e]] = q[e, ahead[e]], q[e, 0]
"""

import torch

from minserve.kernels.lang import tl, triton


def keep_queries(q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, kept: torch.Tensor) -> None:
    """q: [entries * rows, heads, head_dim], an entry's rows one after the other; ahead: [entries] int64, below rows;
    lanes: [entries] int64, no lane twice, -1: padding, of which nothing is kept;
    kept: [num_lanes, 2, heads, head_dim], of q's dtype, written.
    """
    (entries,) = lanes.shape
    _, heads, head_dim = q.shape
    assert len(q) % entries == 0, (q.shape, lanes.shape)
    assert (kept.shape[1:], kept.dtype) == ((2, heads, head_dim), q.dtype), (kept.shape, kept.dtype, q.shape, q.dtype)
    assert ahead.shape == (entries,), (ahead.shape, lanes.shape)
    assert ahead.dtype == lanes.dtype == torch.int64, (ahead.dtype, lanes.dtype)
    assert all(tensor.is_contiguous() for tensor in (q, ahead, lanes, kept))
    run = keep_queries_triton if q.is_cuda else keep_queries_reference
    run(q, ahead, lanes, kept)


def keep_queries_reference(q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, kept: torch.Tensor) -> None:
    rows = q.view(len(lanes), -1, *q.shape[1:])
    both = torch.stack((rows[torch.arange(len(rows), device=q.device), ahead], rows[:, 0]), dim=1)
    real = lanes >= 0
    kept[lanes[real]] = both[real]


@triton.jit(do_not_specialize=["rows"])
def _keep_queries_kernel(q, ahead, lanes, kept, rows, size: tl.constexpr, width: tl.constexpr):
    """One program for one of the two rows of an entry. size: numbers of a row; width: rounded up to a power of two."""
    entry = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    lane = tl.load(lanes + entry)
    if lane >= 0:
        row = tl.where(side == 0, tl.load(ahead + entry), 0)
        number = tl.arange(0, width)
        inside = number < size
        found = tl.load(q + (entry * rows + row) * size + number, mask=inside)
        tl.store(kept + (lane * 2 + side) * size + number, found, mask=inside)


def keep_queries_triton(q: torch.Tensor, ahead: torch.Tensor, lanes: torch.Tensor, kept: torch.Tensor) -> None:
    (entries,), size = lanes.shape, q[0].numel()
    rows = len(q) // max(entries, 1)
    _keep_queries_kernel[(entries, 2)](q, ahead, lanes, kept, rows, size, triton.next_power_of_2(size), num_warps=4)
