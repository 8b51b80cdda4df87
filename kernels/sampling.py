"""Choosing the next token from logits.

    token = argmax over ids of  filtered(logits / temperature)[id] + g(seed, position, id)

g is Gumbel noise, so the argmax is a draw from softmax(filtered logits / temperature) (the Gumbel-max trick). It is a
function of (seed, position, id) alone (gumbel.py). So a seeded text does not depend on who else is in the batch, on
preemption, or on whether a draft proposed the token first. At temperature 0 the noise is left out. Of equal sums the
lower id wins.

A step has R rows for each entry of its batch, and row j of them is about the position num_tokens[lane] + j. A draft
head draws here too, with the noise of the position that it guesses at, which is how it comes to guess right
(accept_drafts.py). Its columns may stand for some of the ids only. The noise is then that of the ids, and of equal sums
the lower column wins.

On the device: one kernel finds where the filters cut (filter_logits.py) and does nothing for rows without any; one
reads every row in several parts, each of which yields its best column; one picks the best of these. What a row needs is
read from its lane's tables, so one captured graph serves any mix of requests.
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
    "draw",
    "filter_logits",
    "gumbel_noise",
]

_TILE = 1024
_MAX_PARTS = 128
_PROGRAMS = 2048  # enough to fill a GPU; a row is read in so many parts that there are about as many


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The lane tables that sampling reads.

    temperature, top_p, min_p: [num_lanes] float32   temperature 0: greedy; top_p from 1, min_p 0: off
    top_k: [num_lanes] int64                         0: off
    seed: [num_lanes, 2] int64                       two halves of 32 bits
    num_tokens: [num_lanes] int64                    the position where the next token will stand
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    num_tokens: torch.Tensor


def draw(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    state: SamplingState,
    allowed: torch.Tensor | None = None,
    *,
    ahead: int = 0,
    id_offsets: torch.Tensor | None = None,
    filtered: bool = True,
) -> torch.Tensor:
    """The next token of each row, [entries * R] int64.

    logits: [entries * R, vocab], any float type; lanes: [entries] int64, -1 for padding, whose tokens are 0.
    allowed: [vocab] bool, the columns that may be drawn; None: all.
    ahead: row j is about the position num_tokens[lane] + j + ahead.
    id_offsets: [vocab] int64, column i stands for token i + id_offsets[i]; None: for token i.
    filtered: False leaves out top-k, top-p and min-p.
    """
    (rows, vocab), (entries,) = logits.shape, lanes.shape
    (num_lanes,) = state.temperature.shape
    assert rows == entries * (rows // max(entries, 1)), (rows, entries)
    assert lanes.dtype == torch.int64
    for table in (state.temperature, state.top_p, state.min_p):
        assert table.shape == (num_lanes,)
        assert table.dtype == torch.float32
    for table in (state.top_k, state.num_tokens):
        assert table.shape == (num_lanes,)
        assert table.dtype == torch.int64
    assert state.seed.shape == (num_lanes, 2)
    assert state.seed.dtype == torch.int64
    for columns, dtype in ((allowed, torch.bool), (id_offsets, torch.int64)):
        assert columns is None or (columns.shape == (vocab,) and columns.dtype == dtype and columns.is_contiguous())
    tables = (state.temperature, state.top_p, state.min_p, state.top_k, state.seed, state.num_tokens)
    assert all(tensor.is_contiguous() for tensor in (logits, lanes, *tables))
    run = draw_triton if logits.is_cuda and rows > 0 else draw_reference
    return run(logits, lanes, state, allowed, ahead=ahead, id_offsets=id_offsets, filtered=filtered)


def draw_reference(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    state: SamplingState,
    allowed: torch.Tensor | None = None,
    *,
    ahead: int = 0,
    id_offsets: torch.Tensor | None = None,
    filtered: bool = True,
) -> torch.Tensor:
    """draw in plain torch, for a step that is not captured: it looks at the values, to do no more than is asked."""
    rows_per_entry = max(1, len(logits) // max(len(lanes), 1))
    lanes = lanes.repeat_interleave(rows_per_entry)
    temperature = torch.where(lanes < 0, 0.0, state.temperature[lanes])
    logits = logits.float()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    random = temperature.nonzero()[:, 0]
    drawn = logits.argmax(dim=-1) if len(random) < len(lanes) else torch.empty_like(lanes)
    if len(random):
        own = lanes[random]
        scores = logits[random].div_(temperature[random, None])
        top_k, top_p, min_p = state.top_k[own], state.top_p[own], state.min_p[own]
        if filtered and bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
            scores = filter_logits(scores, top_k, top_p, min_p)
        positions = state.num_tokens[own] + random % rows_per_entry + ahead
        ids = torch.arange(logits.shape[1], device=logits.device)
        ids = ids if id_offsets is None else ids + id_offsets
        drawn[random] = scores.add_(gumbel_noise(state.seed[own], positions, ids)).argmax(dim=-1)
    tokens = drawn if id_offsets is None else drawn + id_offsets[drawn]
    return tokens.masked_fill_(lanes < 0, 0)


def draw_triton(
    logits: torch.Tensor,
    lanes: torch.Tensor,
    state: SamplingState,
    allowed: torch.Tensor | None = None,
    *,
    ahead: int = 0,
    id_offsets: torch.Tensor | None = None,
    filtered: bool = True,
    tile: int = _TILE,
    cut_tile: int = CUT_TILE,
) -> torch.Tensor:
    """draw by three kernels, or two. tile, cut_tile: columns that a program reads at once, powers of two."""
    rows, vocab = logits.shape
    masked, mapped = allowed is not None, id_offsets is not None
    # Where there is nothing to read, any tensor will do.
    mask = lanes if allowed is None else allowed.view(torch.uint8)
    offsets = lanes if id_offsets is None else id_offsets
    num_tiles = triton.cdiv(vocab, tile)
    part_tiles = triton.cdiv(num_tiles, min(_MAX_PARTS, max(1, _PROGRAMS // rows)))
    parts = triton.cdiv(num_tiles, part_tiles)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_column = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    cut, last_tie = best, best_column
    if filtered:
        cut, last_tie = find_cuts_triton(
            logits, lanes, state.temperature, state.top_k, state.top_p, state.min_p, mask if masked else None, cut_tile
        )
    _draw_kernel[(rows, parts)](
        logits, mask, offsets, lanes, state.temperature, state.seed, state.num_tokens, cut, last_tie, best, best_column,
        vocab, part_tiles, parts, rows // len(lanes), ahead,
        masked=masked, mapped=mapped, filtered=filtered, tile=tile, num_warps=4,
    )  # fmt: skip
    tokens = lanes.new_empty(rows)
    _take_kernel[(rows,)](
        best, best_column, offsets, lanes, tokens, parts, rows // len(lanes),
        mapped=mapped, max_parts=_MAX_PARTS, num_warps=1,
    )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize=["part_tiles", "parts", "rows_per_entry", "ahead"])
def _draw_kernel(
    logits, allowed, id_offsets, lanes, temperatures, seeds, num_tokens, cuts, last_ties, best, best_column,
    vocab, part_tiles, parts, rows_per_entry, ahead,
    masked: tl.constexpr, mapped: tl.constexpr, filtered: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The best column of one part of one row."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    entry = tl.program_id(0) // rows_per_entry
    lane = tl.load(lanes + entry)
    own = tl.maximum(lane, 0)
    temperature = tl.load(temperatures + own)
    random = temperature > 0
    position = tl.load(num_tokens + own) + (tl.program_id(0) - entry * rows_per_entry + ahead)
    first, second = row_keys(tl.load(seeds + own * 2), tl.load(seeds + own * 2 + 1), position)
    row = logits + index * vocab
    # Multiples of tile, and seen to be: else the loads would not be wide ones.
    begin = part * part_tiles * tile
    end = tl.where(lane >= 0, tl.minimum(begin + part_tiles * tile, vocab), begin)
    top = tl.full([tile], -float("inf"), tl.float32)
    top_column = tl.zeros([tile], tl.int32)
    if filtered:
        cut, last_tie = tl.load(cuts + index), tl.load(last_ties + index)
    for start in range(begin, end, tile):
        columns = start + tl.arange(0, tile)
        x = load_logits(row, allowed, columns, vocab, masked)
        kept = columns < vocab
        if filtered:
            kept = (x > cut) | ((x == cut) & (columns <= last_tie))
        if random:
            ids = columns
            if mapped:
                ids += tl.load(id_offsets + columns, mask=columns < vocab, other=0).to(tl.int32)
            # Triton's own `/` is not the IEEE quotient that torch computes.
            x = tl.div_rn(x, temperature + tl.zeros_like(x)) + noise(ids, first, second)
        # Only what is better takes a place, so that of equal ones in it the first stays.
        better = kept & (x > top)
        top = tl.where(better, x, top)
        top_column = tl.where(better, columns, top_column)
    winner = tl.max(top, 0)
    tl.store(best + index * parts + part, winner)
    tl.store(best_column + index * parts + part, tl.min(tl.where(top == winner, top_column, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["parts", "rows_per_entry"])
def _take_kernel(
    best, best_column, id_offsets, lanes, tokens, parts, rows_per_entry, mapped: tl.constexpr, max_parts: tl.constexpr
):
    """The token of the best column of all parts of a row."""
    index = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + tl.program_id(0) // rows_per_entry)
    part = tl.arange(0, max_parts)
    top = tl.load(best + index * parts + part, mask=part < parts, other=-float("inf"))
    column = tl.load(best_column + index * parts + part, mask=part < parts, other=0x7FFFFFFF)
    token = tl.min(tl.where(top == tl.max(top, 0), column, 0x7FFFFFFF), 0).to(tl.int64)
    if mapped:
        token += tl.load(id_offsets + token)
    tl.store(tokens + index, tl.where(lane >= 0, token, 0))
