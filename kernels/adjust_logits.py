"""What requests ask to be done to logits before sampling: grammars, bias, end tokens barred for a while, penalties.

    x = logits;  x[not allowed] = -inf                                  by the lane's grammar
    x = x + bias;  x[end tokens] = -inf while the text is too short;  then for tokens that were seen
    x = x / repetition if x > 0 else x * repetition                     prompt and output (CTRL, arXiv 1909.05858)
    x = x - presence * (count > 0) - frequency * count                  output only (OpenAI's definition)

A step has R rows for each entry of its batch. Row j of them comes after the lane's first j drafts, and is adjusted as
if those were output already: they count, and they make the text longer.

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
    drafts: [num_lanes, max_drafts] int64                    the next tokens, perhaps; -1: none, and counts for nothing
    constrained: [num_lanes] bool                            the lane has a grammar, and masks for its rows:
    allowed: [num_lanes, max_rows, ceil(vocab / 32)] int32   token i is bit i % 32 of word i // 32
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
    drafts: torch.Tensor
    constrained: torch.Tensor
    allowed: torch.Tensor


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

    logits: [entries * R, vocab], any float type, R - 1 <= max_drafts; lanes: [entries] int64, -1 for padding.
    """
    rows, vocab = logits.shape
    (num_lanes,) = state.num_tokens.shape
    (entries,) = lanes.shape
    assert rows == entries * (rows // max(entries, 1)) <= entries * (1 + state.drafts.shape[1]), (rows, entries)
    assert state.output_counts.shape == (num_lanes, vocab)
    for table in (state.end_ids, state.bias_ids, state.drafts):
        assert table.shape == (num_lanes, table.shape[1])
    assert state.bias.shape == state.bias_ids.shape
    assert state.prompt_seen.shape == state.output_counts.shape
    for table in (state.min_position, state.repetition, state.presence, state.frequency):
        assert table.shape == (num_lanes,)
    assert state.constrained.shape == (num_lanes,)
    assert state.allowed.shape == (num_lanes, 1 + state.drafts.shape[1], -(-vocab // 32))
    assert state.prompt_seen.dtype == state.constrained.dtype == torch.bool
    assert state.output_counts.dtype == state.allowed.dtype == torch.int32
    for table in (state.bias, state.repetition, state.presence, state.frequency):
        assert table.dtype == torch.float32
    integers = (lanes, state.num_tokens, state.min_position, state.end_ids, state.bias_ids, state.drafts)
    assert all(table.dtype == torch.int64 for table in integers)
    floats = (logits, state.bias, state.repetition, state.presence, state.frequency)
    assert all(table.is_contiguous() for table in (*integers, *floats, state.prompt_seen, state.output_counts))
    assert state.constrained.is_contiguous()
    assert state.allowed.is_contiguous()
    return (adjust_logits_triton if logits.is_cuda and rows > 0 else adjust_logits_reference)(logits, lanes, state)


def adjust_logits_reference(logits: torch.Tensor, lanes: torch.Tensor, state: Adjustments) -> torch.Tensor:
    lanes, ahead = _each_row(logits, lanes)
    own = lanes.clamp_min(0)
    out = _scatter_add(_masked(logits.float(), lanes, ahead, state), state.bias_ids[own], state.bias[own])
    ends = state.end_ids[own]
    barred = torch.where((state.num_tokens[own] + ahead < state.min_position[own])[:, None], ends, -1)
    out = _scatter_add(out, barred, torch.full_like(ends, -torch.inf, dtype=torch.float32))
    penalties = (state.repetition[own], state.presence[own], state.frequency[own])
    penalized = (lanes >= 0) & ((penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0))
    rows = penalized.nonzero()[:, 0]
    if len(rows):
        own = own[rows]
        counts, drafts = state.output_counts[own], state.drafts[own]
        counted = (drafts >= 0) & (torch.arange(drafts.shape[1], device=drafts.device) < ahead[rows, None])
        counts = counts.scatter_add(1, drafts.clamp_min(0), counted.to(counts.dtype))
        out[rows] = apply_penalties(out[rows], state.prompt_seen[own], counts, *(each[rows] for each in penalties))
    return out


def _each_row(rows: torch.Tensor, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lane, place among the lane's own rows) of each row."""
    rows_per_entry = len(rows) // max(len(lanes), 1)
    return lanes.repeat_interleave(rows_per_entry), torch.arange(rows_per_entry, device=lanes.device).repeat(len(lanes))


def _masked(logits: torch.Tensor, lanes: torch.Tensor, ahead: torch.Tensor, state: Adjustments) -> torch.Tensor:
    """logits with what the grammars of constrained lanes do not allow at -inf. lanes, ahead: one a row."""
    rows = ((lanes >= 0) & state.constrained[lanes.clamp_min(0)]).nonzero()[:, 0]
    if len(rows) == 0:
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = (state.allowed[lanes[rows], ahead[rows]][:, ids // 32] >> (ids % 32)) & 1
    return logits.index_put((rows,), logits[rows].masked_fill(allowed == 0, -torch.inf))


def _scatter_add(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """logits with values[r, i] added at ids[r, i]; ids of -1 are none."""
    values = torch.where(ids >= 0, values, 0.0)
    return logits.scatter_add(1, ids.clamp_min(0), values)


def adjust_logits_triton(logits: torch.Tensor, lanes: torch.Tensor, state: Adjustments) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    rows_per_entry = rows // len(lanes)
    tables = (state.prompt_seen.view(torch.uint8), state.output_counts, state.drafts)
    masks = (state.constrained.view(torch.uint8), state.allowed, state.allowed.shape[2])
    penalties = (state.repetition, state.presence, state.frequency)
    _penalize_kernel[(rows, triton.cdiv(vocab, _TILE))](
        logits, lanes, *tables, *penalties, *masks, out, vocab, state.drafts.shape[1], rows_per_entry,
        tile=_TILE, num_warps=8,
    )  # fmt: skip
    max_bias, max_ends = state.bias_ids.shape[1], state.end_ids.shape[1]
    _columns_kernel[(rows,)](
        logits, lanes, *tables, *penalties, *masks, state.bias_ids, state.bias, state.end_ids,
        state.num_tokens, state.min_position, out, vocab, state.drafts.shape[1], max_bias, max_ends, rows_per_entry,
        bias_width=triton.next_power_of_2(max_bias), ends_width=triton.next_power_of_2(max_ends), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _load_allowed(logits, lane, ids, used, constrained, allowed):
    """A row's logits of some ids, -inf where the lane's grammar does not allow them. allowed: the row's own mask."""
    x = tl.load(logits + ids, mask=used, other=0.0).to(tl.float32)
    if tl.load(constrained + lane) != 0:
        word = tl.load(allowed + (ids >> 5), mask=used, other=0)
        x = tl.where(((word >> (ids & 31).to(tl.int32)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _penalized(
    x, lane, ids, used, vocab, prompt_seen, output_counts, own_drafts, ahead, repetition, presence, frequency
):
    """x with the lane's penalties, when `ahead` of its drafts are output; ids: which tokens x are the logits of."""
    r, p, f = tl.load(repetition + lane), tl.load(presence + lane), tl.load(frequency + lane)
    if (r != 1.0) | (p != 0.0) | (f != 0.0):
        count = tl.load(output_counts + lane * vocab + ids, mask=used, other=0).to(tl.float32)
        for i in range(ahead):
            count += tl.where(ids == tl.load(own_drafts + i).to(tl.int32), 1.0, 0.0)
        seen = (tl.load(prompt_seen + lane * vocab + ids, mask=used, other=0) != 0) | (count > 0)
        factor = tl.where(seen, r, 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.where(count > 0, p, 0.0) - f * count
    return x


@triton.jit(do_not_specialize=["rows_per_entry", "num_words"])
def _penalize_kernel(
    logits, lanes, prompt_seen, output_counts, drafts, repetition, presence, frequency, constrained, allowed, num_words,
    out, vocab, max_drafts, rows_per_entry, tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(0) // rows_per_entry
    lane = tl.load(lanes + entry)
    if lane >= 0:
        ahead = tl.program_id(0) - entry * rows_per_entry
        mask = allowed + (lane * (max_drafts + 1) + ahead) * num_words
        ids = tl.program_id(1) * tile + tl.arange(0, tile)
        used = ids < vocab
        x = _load_allowed(logits + row * vocab, lane, ids, used, constrained, mask)
        x = _penalized(
            x, lane, ids, used, vocab, prompt_seen, output_counts, drafts + lane * max_drafts,
            ahead, repetition, presence, frequency,
        )  # fmt: skip
        tl.store(out + row * vocab + ids, x, mask=used)


@triton.jit(do_not_specialize=["rows_per_entry", "num_words"])
def _columns_kernel(
    logits, lanes, prompt_seen, output_counts, drafts, repetition, presence, frequency, constrained, allowed, num_words,
    bias_ids, bias, end_ids, num_tokens, min_position, out, vocab, max_drafts, max_bias, max_ends, rows_per_entry,
    bias_width: tl.constexpr, ends_width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(0) // rows_per_entry
    lane = tl.load(lanes + entry)
    if lane >= 0:
        ahead = tl.program_id(0) - entry * rows_per_entry
        mask = allowed + (lane * (max_drafts + 1) + ahead) * num_words
        place = tl.arange(0, bias_width)
        ids = tl.load(bias_ids + lane * max_bias + place, mask=place < max_bias, other=-1)
        used = ids >= 0
        x = _load_allowed(logits + row * vocab, lane, ids, used, constrained, mask)
        x += tl.load(bias + lane * max_bias + place, mask=used, other=0.0)
        x = _penalized(
            x, lane, ids, used, vocab, prompt_seen, output_counts, drafts + lane * max_drafts,
            ahead, repetition, presence, frequency,
        )  # fmt: skip
        tl.store(out + row * vocab + ids, x, mask=used)
        # An end token that has a bias is written twice, by two threads: the bar comes last.
        tl.debug_barrier()
        if tl.load(num_tokens + lane) + ahead < tl.load(min_position + lane):
            end_place = tl.arange(0, ends_width)
            ends = tl.load(end_ids + lane * max_ends + end_place, mask=end_place < max_ends, other=-1)
            nothing = tl.full([ends_width], -float("inf"), tl.float32)
            tl.store(out + row * vocab + ends, nothing, mask=ends >= 0)


def count_tokens(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    counts: torch.Tensor,
    output_counts: torch.Tensor,
    penalized: torch.Tensor,
) -> None:
    """output_counts[lane, token] += 1 for each of the first counts[e] tokens of an entry e whose lane has penalties.
    A token that is twice among them counts twice.

    tokens: [entries * R] int64; lanes, counts: [entries] int64, no lane twice, -1 for padding; output_counts:
    [num_lanes, vocab] int32; penalized: [num_lanes] bool.
    """
    (entries,) = lanes.shape
    assert counts.shape == (entries,)
    assert tokens.shape == (entries * (len(tokens) // max(entries, 1)),), (tokens.shape, entries)
    assert tokens.dtype == lanes.dtype == counts.dtype == torch.int64
    assert output_counts.dtype == torch.int32
    assert penalized.shape == (len(output_counts),)
    assert penalized.dtype == torch.bool
    assert all(tensor.is_contiguous() for tensor in (tokens, lanes, counts, output_counts, penalized))
    count = count_tokens_triton if tokens.is_cuda and len(tokens) > 0 else count_tokens_reference
    count(tokens, lanes, counts, output_counts, penalized)


def count_tokens_reference(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    counts: torch.Tensor,
    output_counts: torch.Tensor,
    penalized: torch.Tensor,
) -> None:
    num_counted = torch.where((lanes >= 0) & penalized[lanes.clamp_min(0)], counts, 0)
    own, place = _each_row(tokens, lanes)
    counted = place < _each_row(tokens, num_counted)[0]
    own, tokens = own[counted], tokens[counted]
    output_counts.index_put_((own, tokens), torch.ones_like(own, dtype=torch.int32), accumulate=True)


def count_tokens_triton(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    counts: torch.Tensor,
    output_counts: torch.Tensor,
    penalized: torch.Tensor,
) -> None:
    rows, vocab = len(tokens), output_counts.shape[1]
    _count_kernel[(triton.cdiv(rows, _COUNT_ROWS),)](
        tokens, lanes, counts, output_counts, penalized.view(torch.uint8), rows, vocab, rows // len(lanes),
        tile=_COUNT_ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "rows_per_entry"])
def _count_kernel(
    tokens, lanes, counts, output_counts, penalized, rows, vocab, rows_per_entry, tile: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    entry = row // rows_per_entry
    lane = tl.load(lanes + entry, mask=row < rows, other=-1)
    counted = (lane >= 0) & (tl.load(penalized + lane, mask=lane >= 0, other=0) != 0)
    counted &= row - entry * rows_per_entry < tl.load(counts + entry, mask=counted, other=0)
    token = tl.load(tokens + row, mask=counted, other=0)
    # Atomic, since two rows of an entry may have the same token.
    tl.atomic_add(output_counts + lane * vocab + token, 1, mask=counted, sem="relaxed")
