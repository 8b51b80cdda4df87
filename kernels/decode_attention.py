"""Attention of decode rows over pages, split over the keys and merged (pytorch.org/blog/flash-decoding).

    out[r, h] = sum over t < lengths[r] of softmax_t(q[r, h] . k[t, g] / sqrt(head_dim)) v[t, g]

where g = h // (heads / kv_heads), and t runs over the tokens of the row's sequence, in pages named by its page table.
RoPE is in the keys already.

On CUDA the keys of an entry are cut into splits, each attended by a program of its own, which leaves o_s, the softmax
over its own keys alone, and L_s = log2 sum over its t of 2^(log2(e) q . k[t] / sqrt(head_dim)). Then

    out = sum over s of 2^L_s o_s / sum over s of 2^L_s

Few splits are merged by the one that ends last, many by a second kernel, which has more programs for it.

Softmax is in base 2 throughout, as exp2 is the instruction there is; log2(e) is part of the scale.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from minserve.kernels.gather_pages import gather_pages, page_rows
from minserve.kernels.lang import tl, triton

FEW_SPLITS, MAX_SPLITS = 8, 64


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """What the torch reference makes of a batch: where its keys lie, and who sees them.

    rows: from page_rows, a sequence an entry; num_keys: how many keys are looked at.
    mask: [entries, 1, rows_per_entry, num_keys], what is added to scores: 0, or -inf past a row's end; None if no row
    ends before.
    """

    rows: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """What all layers of a step share: the arguments of `decode_batch`.

    gathered: None on CUDA. ended: [entries * kv_heads] int32, how many splits have ended; zeros between kernels.
    """

    page_table: torch.Tensor
    lanes: torch.Tensor
    lengths: torch.Tensor
    gathered: GatheredKeys | None
    ended: torch.Tensor

    @property
    def rows_per_entry(self) -> int:
        return self.lengths.shape[0] // self.lanes.shape[0]


def decode_batch(page_table: torch.Tensor, lanes: torch.Tensor, lengths: torch.Tensor, kv: torch.Tensor) -> DecodeBatch:
    """Rows of `entries` sequences, the same number of each, one entry's after the other's.

    page_table: [num_lanes, max_blocks] int32, the page of each block of each lane; anything past a lane's end.
    lanes: [entries] int64. -1 is padding: on CUDA it costs nothing; what comes out of its rows is undefined.
    lengths: [rows] int64: how many keys each row sees, at least one; rows of one entry differ by few. Their keys and
    values are finite; what lies behind them in their last page may be anything on CUDA, and is finite on a CPU.
    kv: the pages of any layer, as in `decode_attention`.
    """
    assert (page_table.ndim, page_table.dtype, page_table.is_contiguous()) == (2, torch.int32, True)
    assert (lanes.ndim, lanes.dtype, lanes.is_contiguous()) == (1, torch.int64, True)
    assert (lengths.ndim, lengths.dtype, lengths.is_contiguous()) == (1, torch.int64, True)
    assert lengths.shape[0] % lanes.shape[0] == 0
    gathered = None if kv.is_cuda else _gather_keys(page_table, lanes, lengths, kv)
    ended = torch.zeros(lanes.shape[0] * kv.shape[1], dtype=torch.int32, device=kv.device)
    return DecodeBatch(page_table, lanes, lengths, gathered, ended)


def decode_attention(q: torch.Tensor, kv: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
    """q: [rows, heads, head_dim]; kv: [pages, kv_heads, 2 (K, V), 16, head_dim], one layer's, of the same dtype.

    heads is a multiple of kv_heads; on CUDA q is contiguous, and head_dim 64 or 128. Returns q's shape and dtype.
    """
    _, kv_heads, sides, _, head_dim = kv.shape
    assert q.shape == (batch.lengths.shape[0], q.shape[1], head_dim)
    assert (sides, q.shape[1] % kv_heads, q.dtype) == (2, 0, kv.dtype)
    assert kv.is_contiguous()
    return decode_attention_triton(q, kv, batch) if q.is_cuda else decode_attention_reference(q, kv, batch)


def _gather_keys(
    page_table: torch.Tensor, lanes: torch.Tensor, lengths: torch.Tensor, kv: torch.Tensor
) -> GatheredKeys:
    entries, rows, block_size = lanes.shape[0], lengths.shape[0], kv.shape[3]
    lanes, lengths = lanes.clamp_min(0), lengths.clamp_min(1)  # padding reads somebody's first key
    num_keys = int(lengths.max())
    num_blocks = -(-num_keys // block_size)
    table = page_table[lanes, :num_blocks]
    if rows == 1:
        return GatheredKeys(page_rows(table, kv.shape[1]), num_keys, None)
    # An entry with fewer blocks than others reads its own first page in place of those it lacks, masked.
    starts = torch.arange(num_blocks, device=kv.device) * block_size
    longest = lengths.view(entries, -1).amax(1)
    table = torch.where(starts[None, :] < longest[:, None], table, table[:, :1])
    num_keys = num_blocks * block_size
    outside = torch.arange(num_keys, device=kv.device)[None, :] >= lengths[:, None]
    mask = torch.zeros(outside.shape, dtype=kv.dtype, device=kv.device).masked_fill(outside, -torch.inf)
    return GatheredKeys(page_rows(table, kv.shape[1]), num_keys, mask.view(entries, 1, -1, num_keys))


def decode_attention_reference(q: torch.Tensor, kv: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
    """`decode_attention` in plain torch, on any device."""
    gathered = batch.gathered or _gather_keys(batch.page_table, batch.lanes, batch.lengths, kv)
    num_rows, heads, head_dim = q.shape
    entries, kv_heads, rows_per_entry = batch.lanes.shape[0], kv.shape[1], batch.rows_per_entry
    k, v = gather_pages(kv, gathered.rows, entries)
    k, v = k[:, :, : gathered.num_keys], v[:, :, : gathered.num_keys]
    # The query heads of one KV head are rows of one product, so K and V are read once for all of them.
    if rows_per_entry == 1:
        grouped = q.view(entries, kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=gathered.mask).reshape(num_rows, heads, head_dim)
    grouped = q.view(entries, rows_per_entry, kv_heads, -1, head_dim).transpose(1, 2)
    mask = None if gathered.mask is None else gathered.mask.repeat_interleave(grouped.shape[3], dim=2)
    out = F.scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask)
    return out.view(grouped.shape).transpose(1, 2).reshape(num_rows, heads, head_dim)


@triton.jit
def _ranges(lengths, entry, max_keys, num_splits, min_keys, rows: tl.constexpr, tile: tl.constexpr):
    """Of one entry: the keys of its longest row, the keys of a split, and how many splits have any."""
    row = tl.arange(0, 16)
    length = tl.max(tl.load(lengths + entry * rows + row, mask=row < rows, other=0).to(tl.int32), 0)
    # Never past the end of the page table, whatever stands in lengths.
    length = tl.minimum(length, max_keys)
    share = (length + num_splits - 1) // num_splits
    share = tl.maximum((share + tile - 1) // tile * tile, min_keys)
    return length, share, (length + share - 1) // share


@triton.jit
def _merged(
    partial, partial_lse, first, used, is_query,
    stride: tl.constexpr, head_dim: tl.constexpr, queries: tl.constexpr,
):  # fmt: skip
    """[queries, head_dim]: what the splits have left, from slots `first` on. Other SMs wrote most of it, so it is
    read past this one's own cache."""
    d = tl.arange(0, head_dim)
    peak = tl.full([queries], -1e30, tl.float32)
    total = tl.full([queries], 0.0, tl.float32)
    acc = tl.full([queries, head_dim], 0.0, tl.float32)
    for split in range(used):
        slot = first + split * stride
        lse = tl.load(partial_lse + slot, mask=is_query, other=-1e30, cache_modifier=".cg")
        mean = tl.load(
            partial + slot[:, None] * head_dim + d[None, :], mask=is_query[:, None], other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, lse)
        weight, decay = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        total = total * decay + weight
        acc = acc * decay[:, None] + mean * weight[:, None]
        peak = new_peak
    return acc / total[:, None]


@triton.jit
def _attend(
    q, kv, page_table, ended, lanes, lengths, out, partial, partial_lse, max_blocks, min_keys, scale,
    rows: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, queries: tl.constexpr, tile: tl.constexpr, is_merged: tl.constexpr,
):  # fmt: skip
    """One split of one (entry, KV head): all its rows * group queries, padded to `queries`, over the split's keys.

    The only split of an entry writes to out; several write to partial and partial_lse, and the last of them to out, or,
    unless is_merged, `_merge` follows.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    entry, kv_head = pair // kv_heads, pair % kv_heads
    lane = tl.load(lanes + entry)
    length, share, used = _ranges(lengths, entry, max_blocks * block_size, num_splits, min_keys, rows, tile)
    if (lane < 0) | (split >= used):
        return

    i = tl.arange(0, queries)
    d = tl.arange(0, head_dim)
    is_query = i < rows * group
    row = entry * rows + i // group
    place = ((row * kv_heads + kv_head) * group + i % group)[:, None] * head_dim + d[None, :]
    query = tl.load(q + place, mask=is_query[:, None], other=0.0)
    row_length = tl.load(lengths + row, mask=is_query, other=0).to(tl.int32)
    table = page_table + lane * max_blocks

    # The running maximum starts at a finite value, so that a row that sees nothing of a tile computes no inf - inf.
    peak = tl.full([queries], -1e30, tl.float32)
    total = tl.full([queries], 0.0, tl.float32)
    acc = tl.full([queries, head_dim], 0.0, tl.float32)
    t = tl.arange(0, tile)
    begin, end = split * share, tl.minimum((split + 1) * share, length)
    # Pages are looked up a tile ahead. So the loop's only loads that depend on another are a whole tile behind it, and
    # the compiler keeps num_stages - 1 tiles of K and V in flight; of a chain of two loads it keeps half as many.
    page = tl.load(table + (begin + t) // block_size, mask=begin + t < end, other=0)
    for start in range(begin, end, tile):
        token = start + t
        is_held = token < end
        piece = ((page.to(tl.int64) * kv_heads + kv_head) * (2 * block_size) + token % block_size) * head_dim
        page = tl.load(table + (token + tile) // block_size, mask=token + tile < end, other=0)
        # Values past the end are loaded as 0: a weight of 0 times whatever lies there might be NaN.
        k = tl.load(kv + piece[:, None] + d[None, :], mask=is_held[:, None], other=0.0)
        v = tl.load(kv + block_size * head_dim + piece[:, None] + d[None, :], mask=is_held[:, None], other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(token[None, :] < row_length[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak

    # A row whose end lies before this split: the log-sum-exp is that finite value, a weight of 0 to `_merge`.
    total = tl.where(total > 0, total, 1.0)
    mean = acc / total[:, None]
    if used == 1:
        tl.store(out + place, mean.to(out.dtype.element_ty), mask=is_query[:, None])
    else:
        slot = (pair.to(tl.int64) * num_splits + split) * (rows * group) + i
        tl.store(partial + slot[:, None] * head_dim + d[None, :], mean, mask=is_query[:, None])
        tl.store(partial_lse + slot, peak + tl.log2(total), mask=is_query)
        if is_merged:
            tl.debug_barrier()  # all threads have stored
            if tl.atomic_add(ended + pair, 1, sem="acq_rel") == used - 1:
                tl.store(ended + pair, 0)
                first = pair.to(tl.int64) * num_splits * (rows * group) + i
                merged = _merged(partial, partial_lse, first, used, is_query, rows * group, head_dim, queries)
                tl.store(out + place, merged.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    lanes, lengths, out, partial, partial_lse, max_blocks, min_keys, num_splits,
    rows: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, max_splits: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One query head of one row: the mean of what the splits of its keys have left, weighted by their sums."""
    pid = tl.program_id(0)
    row, head = pid // (kv_heads * group), pid % (kv_heads * group)
    entry = row // rows
    lane = tl.load(lanes + entry)
    _, _, used = _ranges(lengths, entry, max_blocks * block_size, num_splits, min_keys, rows, tile)
    if (lane < 0) | (used <= 1):
        return

    s = tl.arange(0, max_splits)
    d = tl.arange(0, head_dim)
    pair = (entry * kv_heads + head // group).to(tl.int64)
    slot = (pair * num_splits + s) * (rows * group) + (row % rows) * group + head % group
    lse = tl.load(partial_lse + slot, mask=s < used, other=float("-inf"))
    mean = tl.load(partial + slot[:, None] * head_dim + d[None, :], mask=(s < used)[:, None], other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    merged = tl.sum(mean * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + pid * head_dim + d, merged.to(out.dtype.element_ty))


@cache
def _num_sms(device: torch.device) -> int:
    # Triton's interpreter has none; it gets those of an H100.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def choose_min_keys(num_pairs: int, num_sms: int) -> int:
    """How many keys are worth a split: the more programs there are without one, the more. See `choose_splits`."""
    return 128 if num_pairs < num_sms else 512 if num_pairs < 2 * num_sms else 1024


def choose_splits(num_pairs: int, max_keys: int, min_keys: int, num_sms: int) -> int:
    """How many splits each of num_pairs (entry, KV head) pairs may have.

    A function of shapes alone, since a CUDA graph keeps the grid. Eight programs an SM: about three fit on one at a
    time, so the last wave is a small part of the whole, and entries of different lengths even out.
    """
    wanted = -(-8 * num_sms // num_pairs)
    return max(1, min(wanted, -(-max_keys // min_keys), MAX_SPLITS))


def decode_attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: DecodeBatch,
    *,
    splits: int | None = None,
    tile: int | None = None,
    min_keys: int | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
) -> torch.Tensor:
    """`decode_attention` by Triton. Two stages leave room for more programs on an SM, which hides more than a third.

    splits: the most programs that share an entry's keys, up to MAX_SPLITS; tile: keys a program looks at at a time, a
    power of two; min_keys: fewer are not worth a split, a multiple of tile; num_warps, num_stages: of each program.
    """
    rows, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[1], kv.shape[3]
    entries, max_blocks = batch.lanes.shape[0], batch.page_table.shape[1]
    group = heads // kv_heads
    assert q.is_contiguous()
    assert head_dim in (64, 128), head_dim
    assert batch.rows_per_entry <= 16

    # A stage holds a tile of K and one of V, 32 KB of shared memory at head_dim 128; float32 is for tests.
    if tile is None:
        tile = 64 if q.itemsize == 2 else 32
    if min_keys is None:
        min_keys = choose_min_keys(entries * kv_heads, _num_sms(q.device))
    if splits is None:
        splits = choose_splits(entries * kv_heads, max_blocks * block_size, min_keys, _num_sms(q.device))
    assert min_keys % tile == 0
    assert 1 <= splits <= MAX_SPLITS

    out = torch.empty_like(q)
    # With one split all is written to out, and nothing is merged.
    parts = (entries, kv_heads, splits if splits > 1 else 0, batch.rows_per_entry * group)
    partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    common = (batch.lanes, batch.lengths, out, partial, partial_lse, max_blocks, min_keys)
    shape = {
        "rows": batch.rows_per_entry,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "block_size": block_size,
        "tile": tile,
    }
    scale = math.log2(math.e) / math.sqrt(head_dim)
    queries = max(16, triton.next_power_of_2(batch.rows_per_entry * group))
    launch = {"num_warps": num_warps, "num_stages": num_stages}
    shape |= {"queries": queries, "is_merged": splits <= FEW_SPLITS}
    _attend[(entries * kv_heads, splits)](q, kv, batch.page_table, batch.ended, *common, scale, **shape, **launch)
    if splits > FEW_SPLITS:
        del shape["queries"], shape["is_merged"]
        _merge[(rows * heads,)](*common, splits, max_splits=MAX_SPLITS, **shape, num_warps=4)
    return out
