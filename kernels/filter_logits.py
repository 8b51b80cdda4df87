"""Min-p, top-k and top-p (arXiv 2407.01082, 1805.04833, 1904.09751), and how to find where they cut without sorting.

What the filters keep of a row are its best tokens, of equal ones those with lower ids. So two numbers say it all:

    kept(id) = x[id] > cut, or x[id] == cut and id <= last_tie              x: logits

Min-p is a comparison with the best logit. Top-k and top-p are one search: for the largest value at which the tokens
from there upwards weigh enough. For top-p a token weighs exp((x - best) / temperature), and enough is top_p of the
whole; for top-k every token weighs 1, which is exp(0 * (x - best)), and enough is k.

The search halves an interval of values, reading the row once for each half, until what lies in the interval fits into
one block; that is collected, and halved in registers down to a single float. One program does all of a row.

Counts are exact. Weights are summed in float32, in an order of their own, so a token at the very edge of top-p may be
kept here and dropped by the reference, or the reverse. And values are compared before the temperature divides them,
which may round two neighbours among the float32 to one; the reference then takes them for a tie.
"""

from typing import Any

import torch

from minserve.kernels.lang import tl, triton

CUT_TILE = 8192
"""Tokens that a program reads at once, and as many as it collects."""


def filter_logits(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep, in each row, the tokens of probability >= min_p x the largest, then the top_k best, then the smallest set
    of the best of these whose probability reaches top_p; the rest become -inf. The best token always stays.

    logits: [rows, vocab], divided by the temperature; top_k: [rows] int64, 0 is off; top_p, min_p: [rows].
    """
    best = logits.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(logits < best + min_p.clamp_min(1e-38).log()[:, None], -torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ranks[None, :] >= limit[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (ranks > 0)[None, :]
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def find_cuts_triton(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    allowed: torch.Tensor | None,
    tile: int = CUT_TILE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cut [rows] float32, last_tie [rows] int32) of what filter_logits keeps; (-inf, vocab) where nothing is filtered.

    logits: [entries * R, vocab], not divided by the temperature; lanes: [entries] int64, -1 for padding, the lane of R
    rows each; the next four: [num_lanes]; allowed: [vocab] uint8 or None. Rows of temperature 0 are not filtered: they
    take the best token.
    """
    rows, vocab = logits.shape
    cut = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last_tie = torch.empty(rows, dtype=torch.int32, device=logits.device)
    scratch = torch.empty(rows, tile, dtype=torch.float32, device=logits.device)
    masked = allowed is not None
    _cut_kernel[(rows,)](
        logits, allowed if masked else logits, lanes, temperature, top_k, top_p, min_p, scratch, cut, last_tie, vocab,
        rows // len(lanes), masked=masked, tile=tile, num_warps=16,
    )  # fmt: skip
    return cut, last_tie


@triton.jit
def load_logits(row, allowed, ids, vocab, masked: tl.constexpr) -> Any:
    """Float32 logits at ids; -inf where the id is none, or not allowed."""
    real = ids < vocab
    x = tl.load(row + ids, mask=real, other=-float("inf")).to(tl.float32)
    if masked:
        x = tl.where(tl.load(allowed + ids, mask=real, other=0) != 0, x, -float("inf"))
    return x


@triton.jit
def _order(x):
    """An integer for each float32, ordered as they are, and next to each other where they are; 0 for both zeros."""
    size = tl.abs(x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(x < 0, -size, size)


@triton.jit
def _value(order):
    """The float32 of such an integer."""
    size = tl.abs(order).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -size, size)


@triton.jit
def _middle(low, high, rounds):
    """Between low and high, neither of them. Logits are spread evenly by value, so halves of that come first; halves
    of the order end in 32 rounds, whatever the logits are."""
    by_value = _order(0.5 * _value(low) + 0.5 * _value(high))
    middle = tl.where(rounds < 20, by_value, low + (high - low) // 2)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _weights(x, lowest, best, slope):
    """exp(slope * (x - best)) of those that are at least `lowest`, 0 of the others."""
    counted = x >= lowest
    return tl.where(counted, tl.exp(slope * (tl.where(counted, x, best) - best)), 0.0)


@triton.jit
def _weigh_one(x, best, slope):
    """The weight of a scalar, never 0, so that it can divide."""
    return tl.maximum(tl.exp(slope * (x - best)), 1e-37)


@triton.jit
def _extremes(row, allowed, vocab, masked: tl.constexpr, tile: tl.constexpr):
    """The best value of a row, and the lowest above -inf."""
    best = tl.full([tile], -float("inf"), tl.float32)
    lowest = tl.full([tile], float("inf"), tl.float32)
    for start in range(0, vocab, tile):
        x = load_logits(row, allowed, start + tl.arange(0, tile), vocab, masked)
        best = tl.maximum(best, x)
        lowest = tl.minimum(lowest, tl.where(x > -float("inf"), x, float("inf")))
    # A row of nothing but -inf is nobody's; it only has to end.
    top = tl.maximum(tl.max(best, 0), -3e38)
    return top, tl.minimum(tl.min(lowest, 0), top)


@triton.jit
def _weigh(row, allowed, vocab, lowest, best, slope, masked: tl.constexpr, tile: tl.constexpr):
    """(how many, their weight) of the tokens that are at least `lowest`. The weight never grows with `lowest`: it is
    the same sum with terms left out."""
    count = tl.zeros([tile], tl.int32)
    weight = tl.zeros([tile], tl.float32)
    for start in range(0, vocab, tile):
        x = load_logits(row, allowed, start + tl.arange(0, tile), vocab, masked)
        count += (x >= lowest).to(tl.int32)
        weight += _weights(x, lowest, best, slope)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _collect(row, allowed, vocab, lowest, end, scratch, masked: tl.constexpr, tile: tl.constexpr):
    """The values in [lowest, end), which the caller knows to be no more than tile, as one block padded with -inf."""
    found = 0
    for start in range(0, vocab, tile):
        x = load_logits(row, allowed, start + tl.arange(0, tile), vocab, masked)
        inside = (x >= lowest) & (x < end)
        num = tl.sum(inside.to(tl.int32), 0)
        if num > 0:
            place = found + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(scratch + place, x, mask=inside & (place < tile))
        found += num
    # Other threads of this program wrote what a thread now reads.
    tl.debug_barrier()
    places = tl.arange(0, tile)
    return tl.load(scratch + places, mask=places < found, other=-float("inf"))


@triton.jit
def _narrow(row, allowed, vocab, low, best, count, target, slope, masked: tl.constexpr, tile: tl.constexpr):
    """(low, high, above): the cut's order lies in [low, high), where tile tokens lie at most, or high is low + 1; what
    is from high upwards weighs `above`. On entry `count` tokens are at least `low`, and weigh no less than target."""
    high = _order(best) + 1
    above = 0.0
    num_above = 0
    rounds = 0
    while (count - num_above > tile) & (high - low > 1):
        middle = _middle(low, high, rounds)
        num, weight = _weigh(row, allowed, vocab, _value(middle), best, slope, masked, tile)
        enough = weight >= target
        low = tl.where(enough, middle, low)
        count = tl.where(enough, num, count)
        high = tl.where(enough, high, middle)
        num_above = tl.where(enough, num_above, num)
        above = tl.where(enough, above, weight)
        rounds += 1
    return low, high, above


@triton.jit
def _finish(x, low, high, above, best, target, slope):
    """(low, above) when the interval that _narrow left, whose values are x, is down to one float: the cut."""
    weight_high = above
    rounds = 0
    while high - low > 1:
        middle = _middle(low, high, rounds)
        upper = x >= _value(middle)
        weight = above + tl.sum(_weights(x, _value(middle), best, slope), 0)
        enough = weight >= target
        # The bounds go on to the next value that there is, since in between there is nothing to find.
        next_low = tl.minimum(_order(tl.min(tl.where(upper, x, float("inf")), 0)), high - 1)
        next_high = _order(tl.max(tl.where(upper, -float("inf"), x), 0)) + 1
        low = tl.where(enough, next_low, low)
        high = tl.where(enough, high, next_high)
        weight_high = tl.where(enough, weight_high, weight)
        rounds += 1
    return low, weight_high


@triton.jit
def _last_tie(row, allowed, vocab, cut, ties, masked: tl.constexpr, tile: tl.constexpr):
    """The id of the ties-th token whose value is the cut, or of the last one if they are fewer. ties: float32."""
    seen = 0
    last = -1
    for start in range(0, vocab, tile):
        ids = start + tl.arange(0, tile)
        tie = load_logits(row, allowed, ids, vocab, masked) == cut
        num = tl.sum(tie.to(tl.int32), 0)
        if num > 0:
            rank = seen + tl.cumsum(tie.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(tie & (rank.to(tl.float32) <= ties), ids, -1), 0))
        seen += num
    return last


@triton.jit(do_not_specialize=["rows_per_entry"])
def _cut_kernel(
    logits, allowed, lanes, temperatures, top_ks, top_ps, min_ps, scratch, cuts, last_ties, vocab, rows_per_entry,
    masked: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    tl.store(cuts + index, -float("inf"))
    tl.store(last_ties + index, vocab)
    lane = tl.load(lanes + tl.program_id(0) // rows_per_entry)
    own = tl.maximum(lane, 0)
    temperature, min_p = tl.load(temperatures + own), tl.load(min_ps + own)
    top_k, top_p = tl.load(top_ks + own), tl.load(top_ps + own)
    by_k = (top_k > 0) & (top_k < vocab)
    if (lane >= 0) & (temperature > 0) & (by_k | (top_p < 1) | (min_p > 0)):
        row = logits + index * vocab
        best, lowest = _extremes(row, allowed, vocab, masked, tile)
        # 2**-126 stands for the reference's 1e-38, which a GPU may take for 0. Neither is ever drawn.
        lowest = tl.maximum(lowest, best + temperature * tl.log(tl.maximum(min_p, 1.1754943508222875e-38)))
        # Kept so far: what is above the value of `low`, and the first `ties` of what is equal to it.
        low = _order(lowest) - 1
        ties = 0.0
        for stage in range(2):
            if ((stage == 0) & by_k) | ((stage == 1) & (top_p < 1)):
                slope = stage / tl.maximum(temperature, 1e-30)
                count, weight = _weigh(row, allowed, vocab, _value(low + 1), best, slope, masked, tile)
                each = _weigh_one(_value(low), best, slope)
                # Above 0, so that the best token is always wanted.
                share = tl.maximum(top_p, 1e-30) * (weight + ties * each)
                target = tl.where(stage == 0, top_k.to(tl.float32), share)
                if weight >= target:
                    low, high, above = _narrow(row, allowed, vocab, low + 1, best, count, target, slope, masked, tile)
                    if high - low > 1:
                        x = _collect(
                            row, allowed, vocab, _value(low), _value(high), scratch + index * tile, masked, tile
                        )
                        low, above = _finish(x, low, high, above, best, target, slope)
                    ties = tl.ceil((target - above) / _weigh_one(_value(low), best, slope))
                else:
                    ties = tl.minimum(ties, tl.ceil((target - weight) / each))
        cut = _value(low)
        tl.store(cuts + index, cut)
        tl.store(last_ties + index, _last_tie(row, allowed, vocab, cut, ties, masked, tile))
