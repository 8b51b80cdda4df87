"""Proposing drafts with an EAGLE-3 head.

Owns: the order of the head's passes. Does not know: plans, or whether a draft will be accepted.

The head has an entry for each token x(t + 1) that stands behind a state h(t) of the target, at position t. Entries of
the text come from the target's states. Entries of a chain of drafts come from the head's own; they are overwritten when
the target has spoken.
"""

from collections.abc import Sequence

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Chunk
from minserve.kernels.decode_attention import DecodeBatch, decode_attention, decode_batch
from minserve.kernels.norm_rope_store import norm_rope_store
from minserve.kernels.prefill_attention import masked_attention
from minserve.kernels.rope import gather_rope
from minserve.kernels.sampling import draw
from minserve.memory.lanes import Lanes
from minserve.memory.transfer import to_device
from minserve.models.eagle3 import Eagle3Head
from minserve.models.layers import Norms
from minserve.spec.draft_kv import DraftKV, View


class Drafter:
    """head: on its device, with shared weights and its RoPE table. window: see `DraftKV`."""

    def __init__(self, head: Eagle3Head, lanes: Lanes, window: int) -> None:
        self.aux_layers = head.config.aux_layers
        self._head = head
        self._lanes = lanes
        self._kv = DraftKV(head.config, lanes.num_lanes, window, head.fc.weight.dtype, lanes.device.type)
        self._id_offsets = None
        if head.target_ids is not None:
            self._id_offsets = head.target_ids - torch.arange(len(head.target_ids), device=lanes.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the head's keys and values, of all lanes."""
        return self._kv.kv.nbytes

    def forget(self, lanes: Sequence[int]) -> None:
        """Lanes have changed hands."""
        self._kv.forget(to_device(lanes, torch.int64, self._lanes.device))

    def read(self, chunks: Sequence[Chunk], aux: torch.Tensor, sampled: torch.Tensor) -> None:
        """Take in the target's states of chunks of prompts, as far as they will be kept.

        aux: [tokens, 3 * target_hidden_size]; sampled: [n] int64, what followed each chunk that samples.
        """
        device = aux.device
        following = [token for chunk in chunks for token in (*chunk.token_ids[1:], chunk.following)]
        token_ids = to_device(following, torch.int64, device)
        unknown = [row for row, token in enumerate(following) if token < 0]
        if unknown:
            token_ids[to_device(unknown, torch.int64, device)] = sampled
        rows, lanes, positions, sizes = self._kept_rows(chunks)
        at, own, where = to_device([rows, lanes, positions], torch.int64, device)
        attend = _FillAttention(self._head, self._kv, self._kv.places(own, where), where, sizes)
        self._head(token_ids[at], self._head.combine(aux[at]), attend)

    def propose(
        self, aux: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, lane_ids: torch.Tensor, num_proposals: int
    ) -> None:
        """Take in the target's states of decodes, and write num_proposals drafts into their lanes.

        aux: [entries * rows, 3 * target_hidden_size]; tokens: [entries, rows] int64, what was sampled behind each row;
        counts: [entries] int64, how many of these were accepted, 0: the step runs again, and the lane keeps its drafts;
        lane_ids: [entries] int64, -1: padding.
        """
        entries, num_rows = tokens.shape
        own, is_padding = lane_ids.clamp_min(0), lane_ids < 0
        num_tokens = self._lanes.num_tokens[own]
        first = (num_tokens - counts - 1).clamp_min(0)
        view = self._kv.view(own, self._lanes.start[own], first + num_rows - 1 + num_proposals)
        positions = first[:, None] + torch.arange(num_rows, device=aux.device)
        attend = _ChainAttention(self._head, self._kv, view, own, positions, is_padding)
        states = self._head(tokens.flatten(), self._head.combine(aux), attend)
        last = (counts - 1).clamp_min(0)[:, None, None]
        hidden = states.view(entries, num_rows, -1).take_along_dim(last, dim=1)[:, 0]
        drafts: list[torch.Tensor] = []
        for number in range(num_proposals):
            if number:
                positions = (num_tokens - 2 + number).clamp_min(0)[:, None]
                attend = _ChainAttention(self._head, self._kv, view, own, positions, is_padding)
                hidden = self._head(drafts[-1], hidden, attend)
            logits = self._head.logits(hidden)
            drafts.append(
                draw(
                    logits,
                    lane_ids,
                    self._lanes.sampling,
                    ahead=number,
                    id_offsets=self._id_offsets,
                    filtered=False,
                )
            )
        self._lanes.set_drafts(torch.where(counts > 0, lane_ids, -1), drafts)

    def _kept_rows(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[int], list[int]]:
        """(rows, their lanes, their positions, how many of each chunk)."""
        rows: list[int] = []
        lanes: list[int] = []
        positions: list[int] = []
        sizes: list[int] = []
        begin = 0
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            kept = [at for at in range(chunk.start, end) if self._kv.is_kept(at, end)]
            rows += [begin + at - chunk.start for at in kept]
            lanes += [chunk.lane] * len(kept)
            positions += kept
            sizes.append(len(kept))
            begin += len(chunk.token_ids)
        return rows, lanes, positions, sizes


class NoDrafter:
    """In place of a drafter where there is none."""

    aux_layers: tuple[int, ...] = ()
    nbytes = 0

    def forget(self, lanes: Sequence[int]) -> None:
        pass

    def read(self, chunks: Sequence[Chunk], aux: torch.Tensor, sampled: torch.Tensor) -> None:
        pass

    def propose(
        self, aux: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, lane_ids: torch.Tensor, num_proposals: int
    ) -> None:
        assert num_proposals == 0


class _ChainAttention:
    """The same number of rows of each entry, over what is kept of its lane. positions: [entries, rows] int64."""

    def __init__(
        self,
        head: Eagle3Head,
        kv: DraftKV,
        view: View,
        lanes: torch.Tensor,
        positions: torch.Tensor,
        is_padding: torch.Tensor,
    ) -> None:
        self._kv, self._eps = kv.kv, head.config.rms_norm_eps
        self._rope = gather_rope(head.rope_table, positions.flatten())
        self._places = torch.where(is_padding[:, None], -1, kv.places(lanes[:, None], positions)).flatten()
        entries = torch.arange(len(lanes), device=lanes.device)
        lengths = (positions + 1 - view.shift[:, None]).clamp_min(1).flatten()
        self._batch: DecodeBatch = decode_batch(view.table, torch.where(is_padding, -1, entries), lengths, kv.kv[0])

    def __call__(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        """As `Attend`."""
        kv = self._kv[layer]
        q = norm_rope_store(qkv, norms, self._eps, self._rope, kv, self._places)
        return decode_attention(q, kv, self._batch).flatten(1)


class _FillAttention:
    """Stores keys and values of chunks' rows. Only layers with others behind them attend, and then within their chunk:
    what the last layer attends to is asked for by nobody. sizes: rows of each chunk."""

    def __init__(
        self,
        head: Eagle3Head,
        kv: DraftKV,
        places: torch.Tensor,
        positions: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        self._kv, self._eps = kv.kv, head.config.rms_norm_eps
        self._num_layers = head.num_layers
        self._rope = gather_rope(head.rope_table, positions)
        self._places = places
        self._sizes = list(sizes)

    def __call__(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        """As `Attend`."""
        kv = self._kv[layer]
        q = norm_rope_store(qkv, norms, self._eps, self._rope, kv, self._places)
        if layer + 1 == self._num_layers:
            return torch.zeros_like(q).flatten(1)
        both = kv[self._places // BLOCK_SIZE, :, :, self._places % BLOCK_SIZE].permute(2, 1, 0, 3)
        keys, values = (torch.split(x, self._sizes, dim=1) for x in both)
        parts = zip(torch.split(q, self._sizes), keys, values, strict=True)
        return torch.cat([masked_attention(own, k, v, None) for own, k, v in parts]).flatten(1)
