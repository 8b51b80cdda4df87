"""The attention logit that a query head may expect to find in each block of a shortlist, from the levels of its keys.

    logit(key)   = sum over slow d of q_d (min_d + (max_d - min_d) level_d / 3) / sqrt(head_dim)
    logit(block) = log sum over its 16 keys of exp logit(key)

with min, max, levels and the slow coordinates as in build_digests.py.
"""

import torch

from minserve.kernels.build_digests import LEVELS, Digests, slow_column, slow_coordinates, unpack_levels
from minserve.kernels.lang import BITS, fast_log2, tl, triton
from minserve.kernels.score_blocks import MOST, score_blocks
from minserve.kernels.shortlist_blocks import shortlist_blocks

TILE, NUM_WARPS = 16, 4
"""Blocks that a program scores at a time, and its warps."""

PROGRAMS = 1024
"""How many programs are enough to keep a GPU busy."""


def expect_in_blocks(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    end: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """As `score_blocks`, but -inf also where a block is not among the `count` that are worth a second look."""
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
    """Writes the logits of the blocks on the lists, and no others.

    queries, digest_table, lanes: as in `score_blocks`; digests: one layer's; every listed block has one
    shortlist: [entries, kv_heads, count] int32, as `shortlist_blocks` returns it
    logits: [entries, 2, kv_heads, blocks, group] float16 or float32, as `score_blocks` returns them
    """
    entries, rows, heads, head_dim = queries.shape
    kv_heads, num_blocks = shortlist.shape[1], digest_table.shape[1]
    digests.check(kv_heads, head_dim)
    assert logits.shape == (entries, rows, kv_heads, num_blocks, heads // kv_heads), (logits.shape, queries.shape)
    assert (rows, heads % kv_heads, len(shortlist)) == (2, 0, entries), (queries.shape, shortlist.shape)
    assert (digest_table.dtype, digest_table.stride(1)) == (torch.int32, 1), digest_table
    assert (lanes.shape, lanes.dtype, shortlist.dtype) == ((entries,), torch.int64, torch.int32), (lanes, shortlist)
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
    kv_heads, count = shortlist.shape[1:]
    half, is_listed = head_dim // 2, shortlist >= 0
    blocks = torch.where(is_listed, shortlist, 0).to(torch.int64)
    places = digest_table[lanes.clamp_min(0)].gather(1, blocks.flatten(1)).view_as(blocks)
    source = torch.where(is_listed, places, 0).to(torch.int64) * kv_heads
    source = (source + torch.arange(kv_heads, device=lanes.device)[:, None]).flatten(1)
    grouped = slow_coordinates(queries.to(torch.float32)).mul(head_dim**-0.5).view(entries, rows, kv_heads, -1, half)
    grouped = grouped.transpose(1, 2).flatten(2, 3)
    found = grouped.new_empty(*grouped.shape[:3], count)
    for entry in range(entries):  # one at a time, so that its keys stay in caches
        extremes, keys = (table.flatten(0, 1).index_select(0, source[entry]) for table in digests)
        least, most = extremes.to(torch.float32).unsqueeze(2).unbind(1)
        keys = unpack_levels(keys, half).to(torch.float32).mul_((most - least) / (LEVELS - 1)).add_(least)
        own = grouped[entry] @ keys.view(kv_heads, -1, half).transpose(1, 2)
        own = own.nan_to_num_(nan=-MOST).clamp_(-MOST, MOST).view(*own.shape[:2], count, -1)
        found[entry] = own.transpose(2, 3).contiguous().logsumexp(dim=2)
    found = found.view(entries, kv_heads, rows, -1, count).permute(0, 2, 1, 4, 3).to(logits.dtype)
    # What is not on a list stands for block 0, which is never ranked.
    logits.scatter_(
        3, blocks[:, None, :, :, None].expand_as(found), found.masked_fill(~is_listed[:, None, :, :, None], -torch.inf)
    )


@triton.jit
def _load_queries(
    q, row_stride, column, plane: tl.constexpr, dtype: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """[width, columns]: of the coordinates whose levels are in bits 2 plane and 2 plane + 1 of a key's bytes."""
    byte = tl.arange(0, width)[:, None]
    number = plane * size + byte
    source = q + (column // group * row_stride + column % group * head_dim)[None, :]
    is_known = (column < 2 * group)[None, :] & (byte < size) & (number < head_dim // 2)
    return tl.load(source + slow_column(number, head_dim), mask=is_known, other=0.0).to(dtype)


@triton.jit
def _find_in_plane(
    word, extremes, q, plane: tl.constexpr, dtype: tl.constexpr, half: tl.constexpr, size: tl.constexpr,
    width: tl.constexpr, tile: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """What the coordinates of a plane add to the logits of a tile's keys. word: [tile, tokens, width] int16."""
    byte = tl.arange(0, width)[None, :]
    is_known = (byte < size) & (plane * size + byte < half)
    least = tl.load(extremes + plane * size + byte, mask=is_known, other=0.0).to(dtype)
    most = tl.load(extremes + plane * size + byte + half, mask=is_known, other=0.0).to(dtype)
    step = (most - least) * (1 / 3)
    level = (word >> (2 * plane)) & 3
    if dtype == tl.float16:
        level = (level | 0x6400).to(tl.float16, bitcast=True) - 1024.0  # 1024 and so much more: quicker than to convert
    else:
        level = level.to(dtype)
    key = level * step[:, None, :] + least[:, None, :]
    return tl.dot(tl.reshape(key, [tile * tokens, width]).to(dtype), q, input_precision="ieee")


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "count"])
def _score_keys_kernel(
    queries, extremes, keys, digest_table, lanes, shortlist, logits, num_blocks, table_stride, count,
    scale: tl.constexpr, worst: tl.constexpr, bits: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    head_dim: tl.constexpr, tokens: tl.constexpr, members: tl.constexpr, columns: tl.constexpr, size: tl.constexpr,
    width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One program for both rows of one KV head of an entry, and its share of the list, a tile at a time. members,
    columns, width: group, 2 * group and size, the bytes of a key, padded."""
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads
    num_splits = tl.num_programs(0) // kv_heads
    entry = tl.program_id(1).to(tl.int64)
    share = ((count + num_splits - 1) // num_splits + tile - 1) // tile * tile
    first = split * share
    stop = tl.minimum(first + share, count)
    listed = shortlist + (entry * kv_heads + head) * count
    t = tl.arange(0, tile)
    block = tl.load(listed + first + t, mask=first + t < stop, other=-1)
    if tl.max(block, 0) < 0:
        return
    table = digest_table + tl.maximum(tl.load(lanes + entry), 0) * table_stride
    place = tl.load(table + tl.maximum(block, 0), mask=block >= 0, other=0)

    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = tl.float16 if queries.dtype.element_ty.primitive_bitwidth == 16 else tl.float32
    column = tl.arange(0, columns)
    q = queries + (entry * 2 * kv_heads + head) * (group * head_dim)
    stride: tl.constexpr = kv_heads * group * head_dim
    q0 = _load_queries(q, stride, column, 0, dtype, group, head_dim, size, width)
    q1 = _load_queries(q, stride, column, 1, dtype, group, head_dim, size, width)
    q2 = _load_queries(q, stride, column, 2, dtype, group, head_dim, size, width)
    q3 = _load_queries(q, stride, column, 3, dtype, group, head_dim, size, width)
    key = tl.arange(0, tokens)[None, :, None] * size + tl.arange(0, width)[None, None, :]
    is_byte = (tl.arange(0, width) < size)[None, None, :]
    out = logits + ((entry * 2 + column // group) * kv_heads + head) * num_blocks * members + column % group
    for start in range(first, stop, tile):
        source = place.to(tl.int64) * kv_heads + head
        word = tl.load(keys + (source * (tokens * size))[:, None, None] + key, mask=is_byte, other=0).to(tl.int16)
        of_block = extremes + (source * head_dim)[:, None]
        # Blocks and places are looked up a tile ahead, as pages are in decode_attention.py.
        at, known = out[None, :] + block[:, None] * members, (block >= 0)[:, None] & (column < 2 * group)[None, :]
        block = tl.load(listed + start + tile + t, mask=start + tile + t < stop, other=-1)
        place = tl.load(table + tl.maximum(block, 0), mask=block >= 0, other=0)
        logit = _find_in_plane(word, of_block, q0, 0, dtype, half, size, width, tile, tokens)
        logit += _find_in_plane(word, of_block, q1, 1, dtype, half, size, width, tile, tokens)
        logit += _find_in_plane(word, of_block, q2, 2, dtype, half, size, width, tile, tokens)
        logit += _find_in_plane(word, of_block, q3, 3, dtype, half, size, width, tile, tokens)
        logit = tl.minimum(tl.maximum(logit * scale, -worst), worst) * bits  # of a number and none, the number
        logit = tl.reshape(logit, [tile, tokens, columns])
        most = tl.max(logit, 1)
        total = tl.sum(tl.exp2(logit - most[:, None, :]), 1)
        tl.store(at, (most + fast_log2(total)) * (1 / bits), mask=known)


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
    entries, _, kv_heads, num_blocks, group = logits.shape
    strides = (2 * kv_heads * num_blocks, kv_heads * num_blocks, num_blocks, 1)
    members, count = logits.stride(3), shortlist.shape[2]
    assert logits.stride() == (*(members * stride for stride in strides), 1), (logits.shape, logits.stride())
    (tokens, size), head_dim = digests.keys.shape[2:], queries.shape[3]
    if splits is None:
        splits = max(1, min(-(-PROGRAMS // max(entries * kv_heads, 1)), -(-count // TILE)))
    columns, width = max(triton.next_power_of_2(2 * group), 8), max(triton.next_power_of_2(size), 16)
    _score_keys_kernel[(splits * kv_heads, entries)](
        queries, digests.extremes, digests.keys, digest_table, lanes, shortlist, logits, num_blocks,
        digest_table.stride(0), count, head_dim**-0.5, MOST, BITS, kv_heads, group, head_dim, tokens, members, columns,
        size, width, TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
