"""The attention that models are given for chunks of prompts.

Owns: how chunks and the KV before them are cut into the few shapes that cuDNN has planned.
Does not know: requests, sampling, or how qkv was made.

A chunk's tokens [start, end) attend to themselves and to [0, start), whose KV is in pages. With base = start rounded
down to whole KEY_STEPs:

    [0, base)            pieces of sizes from PIECE_KEYS, all of which every token of the chunk sees
    [base, start)        joined to the chunk: rows of zeros stand for the queries that are not wanted there
    [start, end)         the chunk; with the part before it a causal square, padded at its end to one of the row sizes

so nothing needs a mask, and log-sum-exp merges the square and the pieces.

Short chunks would spend their time on launches. All of a step are one: cut into tiles of a few rows, they are attended
as the rows of decodes are, each row up to its own position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Chunk
from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.gather_pages import gather_keys, gather_pages, page_rows
from minserve.kernels.merge_attention import merge_attention
from minserve.kernels.norm_rope_store import norm_rope_store
from minserve.kernels.prefill_attention import chunk_mask, flash_attention, masked_attention
from minserve.kernels.rope import gather_rope
from minserve.memory.blocks import blocks_for
from minserve.memory.transfer import to_device
from minserve.runner.attention import DecodeAttention, KVContext

KEY_STEP = 1024
PIECE_KEYS = tuple(KEY_STEP << power for power in range(7, -1, -1))
"""Sizes of the pieces that earlier KV is cut into, the largest first; the last is the step. There is at most one of
each but the largest."""

SHORT_PAIRS = 2**19
"""Rows times keys of the longest chunk that is cut into tiles: 16 rows at the end of 32K tokens, or a prompt of 724."""

TILE_QUERIES = 64
"""Query heads of one KV head times rows of a tile, at most."""


@dataclass(frozen=True, slots=True)
class FlashShapes:
    """The shapes that are planned, ascending. squares: sides of causal squares; rows: of what attends to pieces."""

    squares: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def for_chunks_of(cls, max_tokens: int) -> "FlashShapes":
        """For chunks of up to max_tokens, which may begin anywhere."""
        largest = -(-max_tokens // KEY_STEP) * KEY_STEP
        small = [size for size in (128, 256, 512, 1024) if size <= largest]
        steps = [size for size in (2048, 3072, 4096, 6144, 8192, 12288, 16384) if size < largest]
        rows = [size for size in (128, 512, 2048) if size < largest]
        return cls(squares=tuple(sorted({*small, *steps, largest, largest + KEY_STEP})), rows=(*rows, largest))

    def square(self, num_rows: int) -> int:
        return next(size for size in self.squares if size >= num_rows)

    def row_size(self, num_rows: int) -> int:
        return next(size for size in self.rows if size >= num_rows)

    def all(self, max_keys: int) -> list[tuple[int, int, bool]]:
        """(rows, keys, causal) of every shape that a context of max_keys tokens can need."""
        squares = [(side, side, True) for side in self.squares if self.square(min(side, max_keys)) == side]
        pieces = [(rows, keys, False) for keys in PIECE_KEYS if keys < max_keys for rows in self.rows]
        return squares + pieces


class _Part(Protocol):
    """One chunk's attention."""

    def attend(self, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """kv: one layer's pages, the chunk's own keys in them; q: [tokens, heads, head_dim]. Returns q's shape."""


class PrefillAttention:
    """Chunks of prompts, their tokens one after another, and behind them the rows of a decode, if there is one. What
    follows is asked of the last row of a chunk that samples, and of all rows of the decode.

    shapes: None computes with masks, in any dtype and on any device; else with flash attention in these shapes.
    """

    def __init__(
        self,
        context: KVContext,
        chunks: Sequence[Chunk],
        shapes: FlashShapes | None,
        decode: DecodeAttention | None = None,
    ) -> None:
        self._decode = decode
        device = context.kv.device
        self._kv, self._eps = context.kv, context.norm_eps
        lanes = [chunk.lane for chunk in chunks for _ in chunk.token_ids]
        positions = [chunk.start + offset for chunk in chunks for offset in range(len(chunk.token_ids))]
        lane_ids, at = to_device([lanes, positions], torch.int64, device)
        self._places = context.page_table[lane_ids, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        self._rope = gather_rope(context.rope_table, at)
        self._ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        sampling = [(end - 1, chunk.lane) for end, chunk in zip(self._ends, chunks, strict=True) if chunk.samples]
        last, last_lanes = to_device([*zip(*sampling)] or [(), ()], torch.int64, device)
        self._last_batch = (
            decode_batch(context.page_table, last_lanes, at[last] + 1, context.kv[0]) if sampling else None
        )
        self._last = self.wanted = last
        if decode is not None:
            decode_rows = torch.arange(self._ends[-1], self._ends[-1] + decode.num_rows, device=device)
            self.wanted = torch.cat([last, decode_rows])
        self._parts: list[_Part | None] = []
        short: list[tuple[int, int, int]] = []
        for end, chunk in zip(self._ends, chunks, strict=True):
            count = len(chunk.token_ids)
            if shapes is None:
                self._parts.append(_MaskedChunk(context, chunk))
            elif count * (chunk.start + count) <= SHORT_PAIRS:
                self._parts.append(None)
                short.append((chunk.lane, end - count, end))
            else:
                self._parts.append(_FlashChunk(context.page_table[chunk.lane], chunk.start, count, shapes))
        self._tiles = _Tiles(context, short, at) if short else None

    def __call__(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """qkv: [tokens, heads + 2 * kv_heads, head_dim]. Returns [tokens, heads * head_dim]."""
        q, kv = self._store(layer, qkv, norms), self._kv[layer]
        starts = [0, *self._ends[:-1]]
        short = iter(self._tiles.attend(kv, q) if self._tiles is not None else ())
        outs = [
            (next(short) if part is None else part.attend(kv, q[a:b])).flatten(1)
            for part, a, b in zip(self._parts, starts, self._ends, strict=True)
        ]
        return self._with_decode(outs, layer, qkv, norms)

    def last(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """As `AttendLast`. A chunk's last row sees what a decode of one row would see."""
        out = self._store(layer, qkv, norms)[self._last]
        if self._last_batch is not None:
            out = decode_attention(out, self._kv[layer], self._last_batch)
        return self._with_decode([out.flatten(1)], layer, qkv, norms)

    def _store(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Keys and values of the chunks into their pages; the queries."""
        own = qkv[: self._ends[-1]]
        return norm_rope_store(own, norms, self._eps, self._rope, self._kv[layer], self._places)

    def _with_decode(
        self, outs: list[torch.Tensor], layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        if self._decode is not None:
            outs.append(self._decode(layer, qkv[self._ends[-1] :], norms))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _MaskedChunk:
    def __init__(self, context: KVContext, chunk: Chunk) -> None:
        num_tokens = len(chunk.token_ids)
        self._num_keys = chunk.start + num_tokens
        table = context.page_table[chunk.lane, : blocks_for(self._num_keys)]
        self._mask = chunk_mask(chunk.start, num_tokens, self._num_keys, table.device)
        self._rows = page_rows(table[None, :], context.kv.shape[2])

    def attend(self, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        keys, values = gather_pages(kv, self._rows, 1)
        return masked_attention(q, keys[0, :, : self._num_keys], values[0, :, : self._num_keys], self._mask)


def tile_rows(group: int) -> int:
    """Rows of a tile, of a model with so many query heads for each KV head."""
    return max(1, min(16, TILE_QUERIES // (1 << (group - 1).bit_length())))


class _Tiles:
    """Short chunks, all of them at once.

    chunks: (lane, first row, row behind the last) of each; positions: [rows] int64.
    """

    def __init__(self, context: KVContext, chunks: Sequence[tuple[int, int, int]], positions: torch.Tensor) -> None:
        size = tile_rows(context.num_heads // context.kv.shape[2])
        rows: list[int] = []
        lanes: list[int] = []
        own: list[int] = []
        for lane, begin, end in chunks:
            num_tiles = -(-(end - begin) // size)
            own += range(len(rows), len(rows) + end - begin)
            rows += [*range(begin, end), *[end - 1] * (num_tiles * size - (end - begin))]  # the last one fills its tile
            lanes += [lane] * num_tiles
        self._sizes = [end - begin for _, begin, end in chunks]
        device = positions.device
        self._rows, lane_ids, self._own = (to_device(ids, torch.int64, device) for ids in (rows, lanes, own))
        self._batch = decode_batch(context.page_table, lane_ids, positions[self._rows] + 1, context.kv[0])

    def attend(self, kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """kv: one layer's pages; q: [rows, heads, head_dim], of all chunks. Returns that of each short one."""
        return torch.split(decode_attention(q[self._rows], kv, self._batch)[self._own], self._sizes)


class _FlashChunk:
    def __init__(self, page_row: torch.Tensor, start: int, num_tokens: int, shapes: FlashShapes) -> None:
        self._page_row = page_row
        base = start // KEY_STEP * KEY_STEP
        self._front = start - base
        self._num_tokens = num_tokens
        self._base = base
        self._side = shapes.square(self._front + num_tokens)
        self._num_rows = shapes.row_size(num_tokens)
        self._pieces = cut_into_pieces(base)

    def attend(self, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        own, own_lse = self._attend_to_itself(kv, q)
        if not self._pieces:
            return own
        padded = _padded(q, 0, self._num_rows)
        outs, lses = [own.contiguous()], [own_lse]
        for first, num_keys in self._pieces:
            keys, values = self._gather(kv, first, num_keys, num_keys)
            out, lse = flash_attention(padded, keys, values, causal=False)
            outs.append(out[: self._num_tokens].contiguous())
            lses.append(lse[:, : self._num_tokens])
        return merge_attention(outs, torch.stack(lses))

    def _attend_to_itself(self, kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self._front, self._front + self._num_tokens)
        keys, values = self._gather(kv, self._base, self._side, rows.stop)
        out, lse = flash_attention(_padded(q, self._front, self._side), keys, values, causal=True)
        return out[rows], lse[:, rows]

    def _gather(self, kv: torch.Tensor, first: int, num_keys: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [first, first + num_keys); zeros from first + valid on."""
        keys, values = kv.new_empty(2, kv.shape[1], num_keys, kv.shape[-1])
        gather_keys(kv, self._page_row, first // BLOCK_SIZE, keys, values, valid)
        return keys, values


def cut_into_pieces(num_keys: int) -> list[tuple[int, int]]:
    """(first, size) of pieces that make up [0, num_keys), a multiple of KEY_STEP."""
    pieces, first = [], 0
    for size in PIECE_KEYS:
        while num_keys - first >= size:
            pieces.append((first, size))
            first += size
    assert first == num_keys
    return pieces


def _padded(q: torch.Tensor, front: int, num_rows: int) -> torch.Tensor:
    """q as rows [front, front + tokens) of num_rows; the others hold zeros."""
    if q.shape[0] == num_rows:
        return q
    padded = q.new_zeros(num_rows, *q.shape[1:])
    padded[front : front + q.shape[0]] = q
    return padded
