"""The attention logit that a query head may expect to find in each block of a shortlist, from the levels of its keys.

    logit(key)   = sum over slow d of q_d (min_d + (max_d - min_d) level_d / 3) / sqrt(head_dim)
    logit(block) = log sum over its 16 keys of exp logit(key)

with min, max, levels and the slow coordinates as in build_digests.py: a second look at the blocks that are the best by
extremes (score_blocks.py, shortlist_blocks.py), of both rows at once. No logit of a key is further than MOST from zero,
and one that is no number is -MOST.

On a GPU, where queries have 16 bits and head_dim is a multiple of 32, keys are made in float16, for tensor cores. A
level becomes one by a mask, since 1 + level / 4 and 1 + level / 16 are numbers of float16 whose last bits but some
zeros are the level; so for whichever of the two takes fewer shifts, with s = 4 or 16,

    key = (1 + level / s) a + (min - a)      a = s (max - min) / 3

is one instruction for two coordinates. It is off by about 2^-7 of max - min at most, where the level is by a sixth.

A program's matrices have a row for each token of each block, tokens first, so that a block's 16 logits end up in one
thread, and a block's extremes serve all of its tokens. A row of a digest is read as words of 4 bytes, 16 coordinates:
those of one of the 4 planes, which have the same bits of all bytes, are 4 columns of one matrix.
"""

import torch
import torch.nn.functional as F

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import LEVELS, Digests, slow_column, slow_coordinates
from minserve.kernels.half_pairs import halves, multiply_add, one_and_quarters, one_and_sixteenths, pair, pair_of_e4m3
from minserve.kernels.lang import BITS, fast_log2, tl, triton
from minserve.kernels.score_blocks import MOST, score_blocks
from minserve.kernels.shortlist_blocks import shortlist_blocks

TILE, NUM_WARPS, NUM_STAGES = 8, 1, 2
"""Blocks that a program scores at a time, its warps, and stages: the same for all numbers of entries, since a lane is
made sparse by what steps have compiled. In one warp numbers never move between threads: with more, a tile should have 8
blocks for each."""

PROGRAMS = 8192
"""How many programs are enough to keep a GPU busy: an H200 runs 2,640 at a time."""

SIDE_BY_SIDE = 4 if tuple(map(int, getattr(triton, "__version__", "3.6").split(".")[:2])) < (3, 8) else 2
"""Numbers of a row that a thread hands to the tensor cores in a piece. It is Triton's choice, and no more than speed
depends on knowing it."""


def expect_in_blocks(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    end: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Returns logits by keys of the `count` blocks that are the best by extremes, as `score_blocks` does, which says
    what the arguments are; -inf where a block is not ranked, or is not among them."""
    digests.check(digests.keys.shape[1], queries.shape[3])
    logits = score_blocks(queries, digests.extremes, digest_table, lanes, end)
    shortlist = shortlist_blocks(logits, min(count, logits.shape[3]))
    score_keys(queries, digests, digest_table, lanes, shortlist, logits)
    return logits


def score_keys(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    shortlist: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Writes the logits of listed blocks, and no others.

    queries: [entries, 2, heads, head_dim], after RoPE; one row as in `score_blocks`
    digests: one layer's, or those of several
    digest_table: [num_lanes, blocks] int32, the place of each block's digest; maybe the first columns of a wider one
    lanes: [entries] int64, -1: padding, of which nothing is listed
    shortlist: [entries, kv_heads, count] int32, blocks that have a place, ascending, and -1 behind them
    logits: [entries, 2 (lookahead, normal), kv_heads, blocks, heads / kv_heads], as `score_blocks` returns them
    """
    entries, rows, heads, head_dim = queries.shape
    kv_heads, num_blocks = digests.keys.shape[1], digest_table.shape[1]
    digests.check(kv_heads, head_dim)
    assert (rows in (1, 2), rows == 2 or not queries.is_cuda, heads % kv_heads) == (True, True, 0), queries.shape
    assert (digest_table.dim(), digest_table.dtype) == (2, torch.int32), (digest_table.shape, digest_table.dtype)
    assert digest_table.stride(1) == 1, digest_table.stride()
    assert (lanes.shape, lanes.dtype) == ((entries,), torch.int64), (lanes.shape, lanes.dtype, entries)
    assert (shortlist.shape[:2], shortlist.dtype) == ((entries, kv_heads), torch.int32), (shortlist.shape, lanes.shape)
    assert logits.shape == (entries, rows, kv_heads, num_blocks, heads // kv_heads), (logits.shape, queries.shape)
    assert logits.dtype in (torch.float16, torch.float32), logits.dtype
    assert all(tensor.is_contiguous() for tensor in (queries, lanes, shortlist))
    run = score_keys_triton if queries.is_cuda else score_keys_reference
    run(queries, digests, digest_table, lanes, shortlist, logits)


def score_keys_reference(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    shortlist: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    entries, rows, _, head_dim = queries.shape
    (kv_heads, count), size = shortlist.shape[1:], digests.keys.shape[3]
    is_listed = shortlist >= 0
    blocks = torch.where(is_listed, shortlist, 0).to(torch.int64)
    places = digest_table[lanes.clamp_min(0)].gather(1, blocks.flatten(1)).view_as(blocks)
    # What a table holds for padding may be no place.
    source = torch.where(is_listed, places, 0).to(torch.int64) * kv_heads
    source = (source + torch.arange(kv_heads, device=lanes.device)[:, None]).flatten(1)
    missing = (0, 4 * size - head_dim // 2)  # coordinates that make whole bytes
    grouped = slow_coordinates(queries.to(torch.float32)).view(entries, rows, kv_heads, -1, head_dim // 2)
    grouped = F.pad(grouped.transpose(1, 2).flatten(2, 3), missing).mul_(head_dim**-0.5)
    # Levels stay where they are in a byte: those of a plane are as many times too large.
    ratio = [1 / (LEVELS - 1) / LEVELS**plane for plane in range(4)]
    ratios = torch.tensor(ratio, device=lanes.device).repeat_interleave(size)
    found = grouped.new_empty(*grouped.shape[:3], count)
    for own, queried, logit in zip(source, grouped, found, strict=True):  # one entry's keys fit in a cache
        extremes, keys = (table.flatten(0, 1).index_select(0, own) for table in digests)
        least, most = F.pad(extremes.to(torch.float32), missing).unbind(1)
        keys = _split_planes(keys).to(torch.float32).mul_(((most - least) * ratios)[:, None])
        by_key = (queried @ keys.view(kv_heads, -1, 4 * size).transpose(1, 2)).unflatten(2, (count, -1))
        by_key += (queried @ least.view(kv_heads, count, -1).transpose(1, 2))[..., None]
        by_key = by_key.nan_to_num_(nan=-MOST).clamp_(-MOST, MOST)
        # Sums over what is not side by side are quicker.
        logit.copy_(by_key.transpose(2, 3).contiguous().logsumexp(dim=2))
    found = found.view(entries, kv_heads, rows, -1, count).permute(0, 2, 1, 4, 3).to(logits.dtype)
    at = blocks[:, None, :, :, None].expand_as(found)
    # Behind a list's end, block 0 stays as it is: it is never listed.
    logits.scatter_(3, at, torch.where(is_listed[:, None, :, :, None], found, logits.gather(3, at)))


def _split_planes(keys: torch.Tensor) -> torch.Tensor:
    """[..., 4 * bytes] uint8, of [..., bytes]: each plane's levels, where they are in a byte."""
    size = keys.shape[-1]
    word = torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8
    masks = (int.from_bytes([3 << shift] * word.itemsize, "little", signed=word.is_signed) for shift in (0, 2, 4, 6))
    return torch.cat([keys.view(word) & mask for mask in masks], dim=-1).view(torch.uint8)


@triton.jit
def _load_queries(
    q, row_stride, column, plane: tl.constexpr, dtype: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    size: tl.constexpr, width: tl.constexpr, side_by_side: tl.constexpr,
):  # fmt: skip
    """What one plane's keys are multiplied by: [4 * width, columns], a column for each head of one row, then of the
    other, then zeros. q: the first row's first head of a group; column: [columns]."""
    k = tl.arange(0, 4 * width)[:, None]
    if side_by_side == 4:
        byte = k // 4 * 4 + k % 2 * 2 + k // 2 % 2
    else:
        byte = k % (2 * width) // 2 * 4 + k % 2 * 2 + k // (2 * width)
    number = plane * size + byte
    source = q + (column // group * row_stride + column % group * head_dim)[None, :]
    known = (column < 2 * group)[None, :] & (byte < size) & (number < head_dim // 2)
    return tl.load(source + slow_column(number, head_dim), mask=known, other=0.0).to(dtype)


@triton.jit
def _load_words(keys, source, number, size: tl.constexpr, block_size: tl.constexpr):
    """Of blocks, [16 (tokens), blocks, words] int32. number: of words."""
    token = tl.arange(0, block_size)[:, None, None]
    width: tl.constexpr = number.shape[0]
    if keys.dtype.element_ty.primitive_bitwidth == 32:
        at = keys + (source * (block_size * size // 4))[None, :, None] + token * (size // 4)
        at += number[None, None, :]
        if size == 4 * width:
            word = tl.load(at)
        else:
            word = tl.load(at, mask=(number < size // 4)[None, None, :], other=0)
    else:
        at = keys + (source * (block_size * size))[None, :, None] + token * size + (number * 4)[None, None, :]
        word = tl.zeros([block_size, source.shape[0], width], tl.int32)
        for byte in tl.static_range(4):
            part = tl.load(at + byte, mask=(number * 4 + byte < size)[None, None, :], other=0)
            word |= part.to(tl.int32) << 8 * byte
    return word


@triton.jit
def _load_extremes(
    extremes, source, number, plane: tl.constexpr, byte: tl.constexpr, dtype: tl.constexpr, size: tl.constexpr,
    half: tl.constexpr,
):  # fmt: skip
    """(min, max) of one byte of each word, [blocks, words]."""
    column = number * 4 + byte
    known = ((column < size) & (plane * size + column < half))[None, :]
    at = extremes + (source * (2 * half))[:, None] + (plane * size + column)[None, :]
    return tl.load(at, mask=known, other=0.0).to(dtype), tl.load(at + half, mask=known, other=0.0).to(dtype)


@triton.jit
def _load_extreme_pairs(
    extremes, source, number, plane: tl.constexpr, odd: tl.constexpr, size: tl.constexpr, half: tl.constexpr
):
    """The same of bytes 0 and 2, or 1 and 3, in pairs of float16."""
    if extremes.dtype.element_ty.primitive_bitwidth == 32 and extremes.dtype.element_ty.is_int():  # 4 of E4M3
        at = extremes + (source * (half // 2))[:, None] + (plane * (size // 4) + number)[None, :]
        if size == 4 * number.shape[0]:
            least, most = tl.load(at), tl.load(at + half // 4)
        else:
            known = (number < size // 4)[None, :]
            least, most = tl.load(at, mask=known, other=0), tl.load(at + half // 4, mask=known, other=0)
        least, most = pair_of_e4m3(least, odd), pair_of_e4m3(most, odd)
    else:
        low, high = _load_extremes(extremes, source, number, plane, odd, tl.float16, size, half)
        least, most = _load_extremes(extremes, source, number, plane, odd + 2, tl.float16, size, half)
        least, most = pair(low, least), pair(high, most)
    return least, most


@triton.jit
def _make_keys(
    word, extremes, source, number, plane: tl.constexpr, odd: tl.constexpr, size: tl.constexpr,
    half: tl.constexpr, is_short: tl.constexpr,
):  # fmt: skip
    """One plane of bytes 0 and 2 of each word, or 1 and 3: [16, blocks, words, 2], float16 or float32."""
    field: tl.constexpr = plane + 4 * odd  # 2 bits of each half of a word
    if is_short:
        least, most = _load_extreme_pairs(extremes, source, number, plane, odd, size, half)
        minus_one: tl.constexpr = -0x43FF4400  # pairs of float16, as int32
        minus_zero: tl.constexpr = -0x7FFF8000
        third: tl.constexpr = 0x3D553D55 if plane % 2 == 0 else 0x45554555  # 4 / 3, 16 / 3
        a = multiply_add(multiply_add(least, minus_one, most), third, minus_zero)
        b = multiply_add(a, minus_one, least)
        up: tl.constexpr = 8 - plane % 2 * 2 - 2 * field
        if up > 0:
            word = word << up
        elif up < 0:
            word = word >> -up
        level = one_and_quarters(word) if plane % 2 == 0 else one_and_sixteenths(word)
        low, high = halves(multiply_add(level, a[None, :, :], b[None, :, :]))
    else:
        least, most = _load_extremes(extremes, source, number, plane, odd, tl.float32, size, half)
        level = ((word >> 2 * field) & 3).to(tl.float32)
        low = level * ((most - least) / 3)[None, :, :] + least[None, :, :]
        least, most = _load_extremes(extremes, source, number, plane, odd + 2, tl.float32, size, half)
        level = ((word >> 2 * field + 16) & 3).to(tl.float32)
        high = level * ((most - least) / 3)[None, :, :] + least[None, :, :]
    return tl.join(low, high)


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "count"])
def _score_keys_kernel(
    queries, extremes, keys, digest_table, lanes, shortlist, logits, num_blocks, table_stride, count,
    scale: tl.constexpr, most: tl.constexpr, bits: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    head_dim: tl.constexpr, members: tl.constexpr, columns: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    block_size: tl.constexpr, tile: tl.constexpr, side_by_side: tl.constexpr, is_short: tl.constexpr,
):  # fmt: skip
    """One program for both rows of one KV head of an entry, and its share of the list, a tile at a time. most: before
    the scale. members, columns: group and 2 * group, padded; size: bytes of a row; width: its words, padded."""
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads
    num_splits = tl.num_programs(0) // kv_heads
    entry = tl.program_id(1).to(tl.int64)
    share = ((count + num_splits - 1) // num_splits + tile - 1) // tile * tile
    first = split * share
    stop = tl.minimum(first + share, count)
    if first >= stop:
        return
    listed = shortlist + (entry * kv_heads + head) * count
    if tl.load(listed + first) < 0:
        return

    # Places are looked up a tile ahead. Behind the end of the list, those of block 0 are.
    table = digest_table + tl.maximum(tl.load(lanes + entry), 0) * table_stride
    t = tl.arange(0, tile)
    block = tl.load(listed + first + t, mask=first + t < stop, other=-1)
    place = tl.load(table + tl.maximum(block, 0))
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = tl.float16 if is_short else tl.float32
    column = tl.arange(0, columns)
    q = queries + (entry * 2 * kv_heads + head) * (group * head_dim)
    row: tl.constexpr = kv_heads * group * head_dim
    q0 = _load_queries(q, row, column, 0, dtype, group, head_dim, size, width, side_by_side)
    q1 = _load_queries(q, row, column, 1, dtype, group, head_dim, size, width, side_by_side)
    q2 = _load_queries(q, row, column, 2, dtype, group, head_dim, size, width, side_by_side)
    q3 = _load_queries(q, row, column, 3, dtype, group, head_dim, size, width, side_by_side)
    number = tl.arange(0, width)
    out = logits + ((entry * 2 + column // group) * kv_heads + head) * num_blocks * members + column % group
    for start in range(first, stop, tile):
        source = tl.maximum(place, 0).to(tl.int64) * kv_heads + head
        word = _load_words(keys, source, number, size, block_size)
        logit = tl.zeros([block_size * tile, columns], tl.float32)
        for plane in tl.static_range(4):
            even = _make_keys(word, extremes, source, number, plane, 0, size, half, is_short)
            odd = _make_keys(word, extremes, source, number, plane, 1, size, half, is_short)
            if side_by_side == 4:
                key = tl.permute(tl.join(even, odd), (0, 1, 2, 4, 3))
            else:
                key = tl.permute(tl.join(even, odd), (0, 1, 4, 2, 3))
            key = tl.reshape(key, [block_size * tile, 4 * width])
            own = q0 if plane == 0 else (q1 if plane == 1 else (q2 if plane == 2 else q3))
            logit = tl.dot(key, own, logit, input_precision="ieee")
        known = (block >= 0)[:, None] & (column < 2 * group)[None, :]
        target = out[None, :] + block[:, None] * members
        block = tl.load(listed + start + tile + t, mask=start + tile + t < stop, other=-1)
        place = tl.load(table + tl.maximum(block, 0))

        logit = tl.maximum(logit, -most)  # of a number and none, the number
        if not is_short:  # else what is above rounds to the same float16 in the end
            logit = tl.minimum(logit, most)
        logit = tl.reshape(logit, [block_size, tile, columns])
        top = tl.minimum(tl.max(logit, 0), most)
        total = tl.sum(tl.exp2(logit * (scale * bits) - (top * (scale * bits))[None, :, :]), 0)
        logit = tl.minimum(top * scale + fast_log2(total) * (1 / bits), most * scale + 3)  # log 16 is less
        tl.store(target, logit, mask=known)


def choose_splits(num_pairs: int, count: int, tile: int) -> int:
    """How many programs share the lists of each of num_pairs (entry, KV head) pairs, by shapes alone."""
    return max(1, min(-(-PROGRAMS // max(num_pairs, 1)), -(-count // tile)))


def score_keys_triton(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    shortlist: torch.Tensor,
    logits: torch.Tensor,
    *,
    splits: int | None = None,
) -> None:
    entries, rows, kv_heads, num_blocks, group = logits.shape
    head_dim, count, (extremes, keys) = queries.shape[3], shortlist.shape[2], digests
    size, members = keys.shape[3], logits.stride(3)
    strides = (rows * kv_heads * num_blocks, kv_heads * num_blocks, num_blocks, 1)
    assert logits.stride() == (*(members * stride for stride in strides), 1), (logits.shape, logits.stride())
    if splits is None:
        splits = choose_splits(entries * kv_heads, count, TILE)
    is_whole = head_dim % 32 == 0  # planes are of whole words
    is_short = is_whole and queries.itemsize == 2
    if is_whole:
        keys = keys.view(torch.int32)
        extremes = extremes.view(torch.int32) if is_short and extremes.itemsize == 1 else extremes
    columns, width = max(triton.next_power_of_2(2 * group), 8), max(triton.next_power_of_2(-(-size // 4)), 4)
    # float32, for tests and rare sizes, has both factors in registers.
    num_warps, num_stages = (NUM_WARPS, NUM_STAGES) if is_short else (4, 1)
    _score_keys_kernel[(splits * kv_heads, entries)](
        queries, extremes, keys, digest_table, lanes, shortlist, logits, num_blocks, digest_table.stride(0), count,
        head_dim**-0.5, MOST * head_dim**0.5, BITS, kv_heads, group, head_dim, members, columns, size, width,
        BLOCK_SIZE, TILE, SIDE_BY_SIDE, is_short, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
