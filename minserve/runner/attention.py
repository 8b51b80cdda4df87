"""The attention that models are given in a decode step.

Owns: what all layers of the step share, worked out once. Does not know: requests, sampling, or how qkv was made.
"""

from dataclasses import dataclass

import torch

from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.norm_rope_store import norm_rope_store
from minserve.kernels.rope import gather_rope
from minserve.lookahead.pipeline import SparseStep


@dataclass(frozen=True, slots=True)
class KVContext:
    """What the attention of every step reads: the pages and who has which, the RoPE table, the norms' epsilon.

    kv: [layers, pages, kv_heads, 2 (K, V), 16, head_dim]; page_table: [lanes, max_blocks] int32; num_heads: of queries.
    """

    kv: torch.Tensor
    page_table: torch.Tensor
    rope_table: torch.Tensor
    norm_eps: float
    num_heads: int


class DecodeAttention:
    """The same number of rows of each lane, one lane's after the other's.

    lanes: [lanes] int64, -1: padding; positions, places (see norm_rope_store), lengths: [rows] int64.
    sparse: where some lane is: its places, lengths and pages are used, and each layer's queries are kept for it.
    """

    def __init__(
        self,
        context: KVContext,
        lanes: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        lengths: torch.Tensor,
        sparse: SparseStep | None = None,
    ) -> None:
        self.num_rows = positions.shape[0]
        self._kv, self._eps = context.kv, context.norm_eps
        self._rope = gather_rope(context.rope_table, positions)
        self._places, self._sparse = places, sparse
        page_table = context.page_table
        if sparse is not None:
            page_table, lanes, lengths, self._places = sparse.rows
        self._batch = decode_batch(page_table, lanes, lengths, context.kv[0])

    def __call__(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """qkv: [rows, heads + 2 * kv_heads, head_dim]. Returns [rows, heads * head_dim]."""
        kv = self._kv[layer]
        keep = None if self._sparse is None else self._sparse.enter(layer)
        q = norm_rope_store(qkv, norms, self._eps, self._rope, kv, self._places, keep=keep)
        if self._sparse is not None:
            self._sparse.kept(layer)
        attended = decode_attention(q, kv, self._batch).flatten(1)
        if self._sparse is not None:
            self._sparse.leave(layer)
        return attended
