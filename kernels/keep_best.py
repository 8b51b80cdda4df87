"""The best of a row, exactly and without a sort, for kernels that hold the row in registers.

    kept(i) = ranked[i], and fewer than `count` of the ranked ones j come before i:
              order[j] > order[i], or order[j] == order[i] and j < i

A threshold says it all: what is above it is kept, and of what is level with it the first few. The threshold is found by
halving the interval of integers from the least to the greatest, which counts the row once for each half: 32 times at
most, and mostly about 12, because the search ends as soon as exactly `count` are above. So the result depends on the
row alone and not on the order in which anything runs.
"""

from typing import Any

import torch

from minserve.kernels.lang import tl, triton


def row_shape(length: int, numbers_per_warp: int) -> dict[str, int]:
    """The block that holds a row, and the warps for it, as arguments of a launch. A count within a warp is one
    instruction behind the comparisons; among warps it is a barrier and more, each time."""
    width = triton.next_power_of_2(max(length, 1))
    return {"width": width, "num_warps": min(max(width // numbers_per_warp, 1), 16)}


def keep_best_reference(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The same of rows of scores, -inf where not ranked: [..., length] bool. scores: [..., length] float32."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    best = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False).values
    threshold = best.amin(dim=-1, keepdim=True)
    above, level = scores > threshold, (scores == threshold) & (scores > -torch.inf)
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


@triton.jit
def order_of_floats(x) -> Any:
    """An int32 for each float32, no NaN, ordered as they are; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # which makes one of both zeros
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keep_best(order, ranked, count) -> Any:
    """A mask of the `count` best, or of all that are ranked if they are fewer.

    order: [width] int32, above -2^31 and below 2^31 - 1; ranked: [width] bool; count: a scalar, 0 or more.
    """
    best = ranked
    if tl.sum(ranked.to(tl.int32), 0) > count:
        low = tl.min(tl.where(ranked, order, 0x7FFFFFFF), 0)
        order = tl.where(ranked, order, -0x80000000)  # and so below all that is compared with it
        # num_high of the ranked are at least `high`, and these are count at most; more than count are at least `low`.
        high, num_high = tl.max(order, 0) + 1, 0
        middle = (low & high) + ((low ^ high) >> 1)  # half of the sum, rounded down, which 32 bits need not hold
        while (middle > low) & (num_high < count):
            num = tl.sum((order >= middle).to(tl.int32), 0)
            fits = num <= count
            high = tl.where(fits, middle, high)
            num_high = tl.where(fits, num, num_high)
            low = tl.where(fits, low, middle)
            middle = (low & high) + ((low ^ high) >> 1)
        best = order >= high
        if num_high < count:
            level = order == low
            best |= level & (tl.cumsum(level.to(tl.int32), 0) <= count - num_high)
    return best
