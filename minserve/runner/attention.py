"""The attention that models are given: it stores new keys and values in pages and attends over them.

Owns: how one step's rows and chunks map to pages; what all layers share is worked out once, here.
Does not know: requests, sampling, or how q, k and v were made.
"""

from collections.abc import Sequence

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Chunk, Row
from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.gather_pages import gather_pages, page_rows
from minserve.kernels.kv_write import kv_write
from minserve.kernels.prefill_attention import chunk_mask, prefill_attention
from minserve.memory.blocks import blocks_for


class DecodeAttention:
    """One row a lane. lanes: [rows] int64; positions: [rows] int64."""

    def __init__(self, kv: torch.Tensor, page_table: torch.Tensor, rows: Sequence[Row]) -> None:
        device = kv.device
        self.lanes = torch.tensor([row.lane for row in rows], device=device)
        self.positions = torch.tensor([row.position for row in rows], device=device)
        self._kv = kv
        self._pages = page_table[self.lanes, self.positions // BLOCK_SIZE].to(torch.int64)
        self._slots = self.positions % BLOCK_SIZE
        self._batch = decode_batch(page_table, self.lanes, self.positions + 1, kv[0])

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [rows, heads, head_dim]; k, v: [rows, kv_heads, head_dim]. Returns [rows, heads * head_dim]."""
        kv = self._kv[layer]
        kv_write(kv, self._pages, self._slots, k, v)
        return decode_attention(q, kv, self._batch).flatten(1)


class PrefillAttention:
    """Chunks of prompts, their tokens one after another. positions: [tokens] int64."""

    def __init__(self, kv: torch.Tensor, page_table: torch.Tensor, chunks: Sequence[Chunk]) -> None:
        device = kv.device
        self._kv = kv
        self._parts = [_ChunkIndex(page_table, chunk, kv.shape[2], device) for chunk in chunks]
        self.positions = torch.cat([part.positions for part in self._parts])
        self._pages = torch.cat([part.pages for part in self._parts])
        self._slots = self.positions % BLOCK_SIZE
        self._sizes = [len(chunk.token_ids) for chunk in chunks]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns [tokens, heads * head_dim]."""
        kv = self._kv[layer]
        kv_write(kv, self._pages, self._slots, k, v)
        split = zip(self._parts, *(torch.split(tensor, self._sizes) for tensor in (q, k, v)), strict=True)
        return torch.cat([part.attend(kv, *qkv) for part, *qkv in split]).flatten(1)


class _ChunkIndex:
    """Where one chunk's tokens go and which keys it sees."""

    def __init__(self, page_table: torch.Tensor, chunk: Chunk, kv_heads: int, device: torch.device) -> None:
        num_tokens = len(chunk.token_ids)
        self._num_keys = chunk.start + num_tokens
        self.positions = torch.arange(chunk.start, self._num_keys, device=device)
        table = page_table[chunk.lane, : blocks_for(self._num_keys)].to(torch.int64)
        self.pages = table[self.positions // BLOCK_SIZE]
        self._mask = chunk_mask(chunk.start, num_tokens, self._num_keys, device)
        self._rows = None if chunk.start == 0 else page_rows(table[None, :], kv_heads)

    def attend(self, kv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            return prefill_attention(q, k.transpose(0, 1), v.transpose(0, 1), self._mask)
        keys, values = gather_pages(kv, self._rows, 1)
        return prefill_attention(q, keys[0, :, : self._num_keys], values[0, :, : self._num_keys], self._mask)
