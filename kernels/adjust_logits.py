"""What requests ask to be done to logits before sampling: bias, end tokens barred for a while, penalties.

    x = logits + bias;  x[end tokens] = -inf while the text is too short;  then for tokens that were seen
    x = x / repetition if x > 0 else x * repetition                     prompt and output (CTRL, arXiv 1909.05858)
    x = x - presence * (count > 0) - frequency * count                  output only (OpenAI's definition)

On the device one kernel converts and penalizes all columns, and one then works out anew, from the logits as they were,
the few columns that have a bias or are barred. What a row needs is read from its lane's tables.
"""

from dataclasses import dataclass

import torch

from minserve.kernels.lang import tl, triton

_TILE = 4096
_COUNT_ROWS = 128


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The lane tables that adjust_logits reads.

    num_tokens, min_position: [num_lanes] int64              end tokens are barred while num_tokens < min_position
    end_ids: [num_lanes, max_ends] int64                     -1 where unused
    bias_ids, bias: [num_lanes, max_bias] int64, float32     no id twice in a lane; -1 where unused
    repetition, presence, frequency: [num_lanes] float32     1, 0, 0: no penalties
    prompt_seen: [num_lanes, vocab] bool; output_counts: [num_lanes, vocab] int32
    """

    num_tokens: torch.Tensor
    min_position: torch.Tensor
    end_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    prompt_seen: torch.Tensor
    output_counts: torch.Tensor


def apply_penalties(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """repetition divides positive and multiplies negative logits of all seen tokens (CTRL, arXiv 1909.05858);
    presence and frequency are OpenAI's: subtracted once, and once per occurrence, for generated tokens.

    logits: [rows, vocab]; prompt_seen: the same, bool; output_counts: the same, int; the rest: [rows].
    """
    seen = prompt_seen | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    counts = output_counts.to(logits.dtype)
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def adjust_logits(logits: torch.Tensor, lanes: torch.Tensor, state: Adjustments) -> torch.Tensor:
    """Adjusted logits [rows, vocab] float32. A row that asks for nothing is converted; a padding row is undefined.

    logits: [rows, vocab], any float type; lanes: [rows] int64, -1 for padding.
    """
    rows, vocab = logits.shape
    (num_lanes,) = state.num_tokens.shape
    assert lanes.shape == (rows,)
    for table, width in ((state.end_ids, None), (state.bias_ids, None), (state.output_counts, vocab)):
        assert table.shape == (num_lanes, width or table.shape[1])
    assert state.bias.shape == state.bias_ids.shape
    assert state.prompt_seen.shape == state.output_counts.shape
    for table in (state.min_position, state.repetition, state.presence, state.frequency):
        assert table.shape == (num_lanes,)
    assert state.prompt_seen.dtype == torch.bool
    assert state.output_counts.dtype == torch.int32
    for table in (state.bias, state.repetition, state.presence, state.frequency):
        assert table.dtype == torch.float32
    integers = (lanes, state.num_tokens, state.min_position, state.end_ids, state.bias_ids)
    assert all(table.dtype == torch.int64 for table in integers)
    floats = (logits, state.bias, state.repetition, state.presence, state.frequency)
    assert all(table.is_contiguous() for table in (*integers, *floats, state.prompt_seen, state.output_counts))
    return (adjust_logits_triton if logits.is_cuda and rows > 0 else adjust_logits_reference)(logits, lanes, state)


def adjust_logits_reference(logits: torch.Tensor, lanes: torch.Tensor, state: Adjustments) -> torch.Tensor:
    own = lanes.clamp_min(0)
    out = _scatter_add(logits.float(), state.bias_ids[own], state.bias[own])
    ends = state.end_ids[own]
    barred = torch.where((state.num_tokens < state.min_position)[own, None], ends, -1)
    out = _scatter_add(out, barred, torch.full_like(ends, -torch.inf, dtype=torch.float32))
    penalties = (state.repetition[own], state.presence[own], state.frequency[own])
    penalized = (lanes >= 0) & ((penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0))
    rows = penalized.nonzero()[:, 0]
    if len(rows):
        tables = (state.prompt_seen[own[rows]], state.output_counts[own[rows]])
        out[rows] = apply_penalties(out[rows], *tables, *(penalty[rows] for penalty in penalties))
    return out


def _scatter_add(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """logits with values[r, i] added at ids[r, i]; ids of -1 are none."""
    values = torch.where(ids >= 0, values, 0.0)
    return logits.scatter_add(1, ids.clamp_min(0), values)


def adjust_logits_triton(logits: torch.Tensor, lanes: torch.Tensor, state: Adjustments) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    seen, counts = state.prompt_seen.view(torch.uint8), state.output_counts
    penalties = (state.repetition, state.presence, state.frequency)
    _penalize_kernel[(rows, triton.cdiv(vocab, _TILE))](
        logits, lanes, seen, counts, *penalties, out, vocab, tile=_TILE, num_warps=8
    )
    max_bias, max_ends = state.bias_ids.shape[1], state.end_ids.shape[1]
    _columns_kernel[(rows,)](
        logits, lanes, seen, counts, *penalties, state.bias_ids, state.bias, state.end_ids,
        state.num_tokens, state.min_position, out, vocab, max_bias, max_ends,
        bias_width=triton.next_power_of_2(max_bias), ends_width=triton.next_power_of_2(max_ends), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _penalized(x, lane, ids, used, vocab, prompt_seen, output_counts, repetition, presence, frequency):
    """x with the lane's penalties; ids: which tokens x are the logits of."""
    r, p, f = tl.load(repetition + lane), tl.load(presence + lane), tl.load(frequency + lane)
    if (r != 1.0) | (p != 0.0) | (f != 0.0):
        count = tl.load(output_counts + lane * vocab + ids, mask=used, other=0).to(tl.float32)
        seen = (tl.load(prompt_seen + lane * vocab + ids, mask=used, other=0) != 0) | (count > 0)
        factor = tl.where(seen, r, 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.where(count > 0, p, 0.0) - f * count
    return x


@triton.jit
def _penalize_kernel(
    logits, lanes, prompt_seen, output_counts, repetition, presence, frequency, out, vocab, tile: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    if lane >= 0:
        ids = tl.program_id(1) * tile + tl.arange(0, tile)
        used = ids < vocab
        x = tl.load(logits + row * vocab + ids, mask=used, other=0.0).to(tl.float32)
        x = _penalized(x, lane, ids, used, vocab, prompt_seen, output_counts, repetition, presence, frequency)
        tl.store(out + row * vocab + ids, x, mask=used)


@triton.jit
def _columns_kernel(
    logits, lanes, prompt_seen, output_counts, repetition, presence, frequency, bias_ids, bias, end_ids,
    num_tokens, min_position, out, vocab, max_bias, max_ends, bias_width: tl.constexpr, ends_width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    if lane >= 0:
        place = tl.arange(0, bias_width)
        ids = tl.load(bias_ids + lane * max_bias + place, mask=place < max_bias, other=-1)
        used = ids >= 0
        x = tl.load(logits + row * vocab + ids, mask=used, other=0.0).to(tl.float32)
        x += tl.load(bias + lane * max_bias + place, mask=used, other=0.0)
        x = _penalized(x, lane, ids, used, vocab, prompt_seen, output_counts, repetition, presence, frequency)
        tl.store(out + row * vocab + ids, x, mask=used)
        # An end token that has a bias is written twice, by two threads: the bar comes last.
        tl.debug_barrier()
        if tl.load(num_tokens + lane) < tl.load(min_position + lane):
            end_place = tl.arange(0, ends_width)
            ends = tl.load(end_ids + lane * max_ends + end_place, mask=end_place < max_ends, other=-1)
            nothing = tl.full([ends_width], -float("inf"), tl.float32)
            tl.store(out + row * vocab + ends, nothing, mask=ends >= 0)


def count_tokens(
    tokens: torch.Tensor, lanes: torch.Tensor, output_counts: torch.Tensor, penalized: torch.Tensor
) -> None:
    """output_counts[lane, token] += 1 for each row whose lane has penalties.

    tokens, lanes: [rows] int64, no lane twice, -1 for padding; output_counts: [num_lanes, vocab] int32;
    penalized: [num_lanes] bool.
    """
    assert tokens.shape == lanes.shape == (len(lanes),)
    assert tokens.dtype == lanes.dtype == torch.int64
    assert output_counts.dtype == torch.int32
    assert penalized.shape == (len(output_counts),)
    assert penalized.dtype == torch.bool
    assert all(tensor.is_contiguous() for tensor in (tokens, lanes, output_counts, penalized))
    count = count_tokens_triton if tokens.is_cuda and len(tokens) > 0 else count_tokens_reference
    count(tokens, lanes, output_counts, penalized)


def count_tokens_reference(
    tokens: torch.Tensor, lanes: torch.Tensor, output_counts: torch.Tensor, penalized: torch.Tensor
) -> None:
    counted = (lanes >= 0) & penalized[lanes.clamp_min(0)]
    output_counts[lanes[counted], tokens[counted]] += 1


def count_tokens_triton(
    tokens: torch.Tensor, lanes: torch.Tensor, output_counts: torch.Tensor, penalized: torch.Tensor
) -> None:
    rows, vocab = len(lanes), output_counts.shape[1]
    _count_kernel[(triton.cdiv(rows, _COUNT_ROWS),)](
        tokens, lanes, output_counts, penalized.view(torch.uint8), rows, vocab, tile=_COUNT_ROWS, num_warps=4
    )


@triton.jit(do_not_specialize=["rows"])
def _count_kernel(tokens, lanes, output_counts, penalized, rows, vocab, tile: tl.constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    lane = tl.load(lanes + row, mask=row < rows, other=-1)
    counted = (lane >= 0) & (tl.load(penalized + lane, mask=lane >= 0, other=0) != 0)
    place = output_counts + lane * vocab + tl.load(tokens + row, mask=counted, other=0)
    tl.store(place, tl.load(place, mask=counted, other=0) + 1, mask=counted)
