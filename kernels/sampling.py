"""Choosing the next token from logits.

    token = argmax over ids of  filtered(logits / temperature)[id] + g(seed, position, id)

g is Gumbel noise, so the argmax is a draw from softmax(filtered logits / temperature) (the Gumbel-max trick). It is a
function of (seed, position, id) alone (gumbel.py). So a seeded text does not depend on who else is in the batch, on
preemption, or on whether a draft proposed the token first. At temperature 0 the noise is left out. Of equal sums the
lower id wins.

On the device: one kernel finds where the filters cut (filter_logits.py) and does nothing for rows without any; one
reads every row in several parts, each of which yields its best token; one picks the best of these and writes it to the
lane. What a row needs is read from its lane's tables, so one captured graph serves any mix of requests.
"""

from dataclasses import dataclass

import torch

from minserve.kernels.adjust_logits import Adjustments, adjust_logits, apply_penalties, count_tokens
from minserve.kernels.filter_logits import CUT_TILE, filter_logits, find_cuts_triton, load_logits
from minserve.kernels.gumbel import gumbel_noise, noise, row_keys
from minserve.kernels.lang import tl, triton

__all__ = [
    "Adjustments",
    "SamplingState",
    "adjust_logits",
    "apply_penalties",
    "count_tokens",
    "filter_logits",
    "gumbel_noise",
    "sample",
]

_TILE = 1024
_MAX_PARTS = 128
_PROGRAMS = 2048  # enough to fill a GPU; a row is read in so many parts that there are about as many


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The lane tables that sampling reads, and the two that it writes.

    temperature, top_p, min_p: [num_lanes] float32   temperature 0: greedy; top_p from 1, min_p 0: off
    top_k: [num_lanes] int64                         0: off
    seed: [num_lanes, 2] int64                       two halves of 32 bits
    last_token: [num_lanes] int64                    becomes the new token
    num_tokens: [num_lanes] int64                    the position where the new token will stand; grows by one
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    last_token: torch.Tensor
    num_tokens: torch.Tensor


def sample(
    logits: torch.Tensor, lanes: torch.Tensor, state: SamplingState, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token of each row, [rows] int64, also written to its lane's last_token; num_tokens grows by one.

    logits: [rows, vocab], any float type; lanes: [rows] int64, no lane twice, -1 for padding, whose token is 0.
    allowed: [vocab] bool, the ids that may be drawn; None: all.
    """
    rows, vocab = logits.shape
    (num_lanes,) = state.temperature.shape
    assert lanes.shape == (rows,)
    assert lanes.dtype == torch.int64
    for table in (state.temperature, state.top_p, state.min_p):
        assert table.shape == (num_lanes,)
        assert table.dtype == torch.float32
    for table in (state.top_k, state.last_token, state.num_tokens):
        assert table.shape == (num_lanes,)
        assert table.dtype == torch.int64
    assert state.seed.shape == (num_lanes, 2)
    assert state.seed.dtype == torch.int64
    assert allowed is None or (allowed.shape == (vocab,) and allowed.dtype == torch.bool)
    tables = (state.temperature, state.top_p, state.min_p, state.top_k, state.seed, state.last_token, state.num_tokens)
    assert all(tensor.is_contiguous() for tensor in (logits, lanes, *tables))
    if logits.is_cuda and rows > 0:
        return sample_triton(logits, lanes, state, allowed)
    return sample_reference(logits, lanes, state, allowed)


def sample_reference(
    logits: torch.Tensor, lanes: torch.Tensor, state: SamplingState, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """sample in plain torch, for a step that is not captured: it looks at the values, to do no more than is asked."""
    rows = (lanes >= 0).nonzero()[:, 0]
    own = lanes[rows]
    logits = logits[rows].float()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    temperature, top_k, top_p, min_p = state.temperature[own], state.top_k[own], state.top_p[own], state.min_p[own]
    random = temperature > 0
    if bool(random.any()):
        logits = logits / torch.where(random, temperature, 1.0)[:, None]
        if bool((random & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any()):
            logits = filter_logits(logits, top_k, top_p, min_p)
        logits = logits + gumbel_noise(state.seed[own], state.num_tokens[own], logits.shape[1]) * random[:, None]
    drawn = logits.argmax(dim=-1)
    state.last_token[own] = drawn
    state.num_tokens[own] += 1
    tokens = torch.zeros_like(lanes)
    tokens[rows] = drawn
    return tokens


def sample_triton(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    state: SamplingState,
    allowed: torch.Tensor | None = None,
    tile: int = _TILE,
    cut_tile: int = CUT_TILE,
) -> torch.Tensor:
    """sample by three kernels. tile, cut_tile: tokens that a program reads at once, powers of two."""
    rows, vocab = logits.shape
    masked = allowed is not None
    mask = logits if allowed is None else allowed.view(torch.uint8)
    cut, last_tie = find_cuts_triton(
        logits, lanes, state.temperature, state.top_k, state.top_p, state.min_p, mask if masked else None, cut_tile
    )
    num_tiles = triton.cdiv(vocab, tile)
    part_tiles = triton.cdiv(num_tiles, min(_MAX_PARTS, max(1, _PROGRAMS // rows)))
    parts = triton.cdiv(num_tiles, part_tiles)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows, parts)](
        logits, mask, lanes, state.temperature, state.seed, state.num_tokens, cut, last_tie, best, best_id,
        vocab, part_tiles, parts, masked=masked, tile=tile, num_warps=4,
    )  # fmt: skip
    tokens = torch.empty_like(lanes)
    _take_kernel[(rows,)](
        best, best_id, lanes, tokens, state.last_token, state.num_tokens, parts, max_parts=_MAX_PARTS, num_warps=1
    )
    return tokens


@triton.jit(do_not_specialize=["part_tiles", "parts"])
def _draw_kernel(
    logits, allowed, lanes, temperatures, seeds, positions, cuts, last_ties, best, best_id, vocab, part_tiles, parts,
    masked: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The best token of one part of one row."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.load(lanes + index)
    own = tl.maximum(lane, 0)
    temperature = tl.load(temperatures + own)
    random = temperature > 0
    first, second = row_keys(tl.load(seeds + own * 2), tl.load(seeds + own * 2 + 1), tl.load(positions + own))
    cut, last_tie = tl.load(cuts + index), tl.load(last_ties + index)
    row = logits + index * vocab
    # Multiples of tile, and seen to be: else the loads would not be wide ones.
    begin = part * part_tiles * tile
    end = tl.where(lane >= 0, tl.minimum(begin + part_tiles * tile, vocab), begin)
    top = tl.full([tile], -float("inf"), tl.float32)
    top_id = tl.zeros([tile], tl.int32)
    for start in range(begin, end, tile):
        ids = start + tl.arange(0, tile)
        x = load_logits(row, allowed, ids, vocab, masked)
        kept = (x > cut) | ((x == cut) & (ids <= last_tie))
        if random:
            # Triton's own `/` is not the IEEE quotient that torch computes.
            x = tl.div_rn(x, temperature + tl.zeros_like(x)) + noise(ids, first, second)
        # Only what is better takes a place, so that of equal ones in it the first stays.
        better = kept & (x > top)
        top = tl.where(better, x, top)
        top_id = tl.where(better, ids, top_id)
    winner = tl.max(top, 0)
    tl.store(best + index * parts + part, winner)
    tl.store(best_id + index * parts + part, tl.min(tl.where(top == winner, top_id, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["parts"])
def _take_kernel(best, best_id, lanes, tokens, last_token, num_tokens, parts, max_parts: tl.constexpr):
    """The best token of all parts of a row, into its lane."""
    index = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + index)
    part = tl.arange(0, max_parts)
    top = tl.load(best + index * parts + part, mask=part < parts, other=-float("inf"))
    top_id = tl.load(best_id + index * parts + part, mask=part < parts, other=0x7FFFFFFF)
    winner = tl.min(tl.where(top == tl.max(top, 0), top_id, 0x7FFFFFFF), 0).to(tl.int64)
    tl.store(tokens + index, tl.where(lane >= 0, winner, 0))
    if lane >= 0:
        tl.store(last_token + lane, winner)
        tl.store(num_tokens + lane, tl.load(num_tokens + lane) + 1)
