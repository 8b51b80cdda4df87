"""Proposing drafts with an EAGLE-3 head.

Owns: the head's keys and values, and the order of its passes. Does not know: whether a draft is accepted, or plans.

The head computes an entry for each token x(t + 1) that stands behind a state h(t) of the target, at position t. A step's
own entries come from the target's states; the entries of a chain of drafts come from the head's, and are overwritten when
the target has spoken. Of a lane's entries only the first block and the last `window` tokens are kept, in pages of its own:

    block 0 in page 0;  block b > 0 in page 1 + (b - 1) mod ring;  ring = window / 16 + 2

so what a lane takes does not grow with its text, and what rejected drafts leave behind spoils no block in the window.
Longer attention would not help: heads are trained on short texts, and accept less when they see more.
"""

from collections.abc import Sequence

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Chunk
from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.norm_rope_store import norm_rope_store
from minserve.kernels.prefill_attention import masked_attention
from minserve.kernels.rope import gather_rope
from minserve.kernels.sampling import draw
from minserve.memory.lanes import Lanes
from minserve.memory.pages import zeros
from minserve.memory.transfer import to_device
from minserve.models.eagle3 import Eagle3Head
from minserve.models.layers import Norms


class Drafter:
    """window: tokens, a multiple of 16. head: on its device, with shared weights and RoPE table."""

    def __init__(self, head: Eagle3Head, lanes: Lanes, window: int) -> None:
        assert window % BLOCK_SIZE == 0
        config = head.config
        self._head = head
        self._lanes = lanes
        self._window_blocks = window // BLOCK_SIZE
        self._pages_per_lane = 1 + self._window_blocks + 2
        shape = (lanes.num_lanes, self._pages_per_lane, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
        self._kv = zeros((config.num_layers, *shape), head.fc.weight.dtype, lanes.device.type)
        self._offsets = None
        if head.target_ids is not None:
            self._offsets = head.target_ids - torch.arange(len(head.target_ids), device=lanes.device)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs the head reads."""
        return self._head.config.aux_layers

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all lanes."""
        return self._kv.nbytes

    def forget(self, lanes: Sequence[int]) -> None:
        """Lanes have changed hands: nothing of what they held is ever read again."""
        self._kv[:, to_device(lanes, torch.int64, self._lanes.device)] = 0

    def read_chunks(self, chunks: Sequence[Chunk], aux: torch.Tensor, sampled: torch.Tensor) -> None:
        """Take in the target's states of chunks of prompts. aux: [tokens, 3 * target_hidden_size]; sampled: [those of
        the chunks that sample] int64."""
        tokens = [token for chunk in chunks for token in (*chunk.token_ids[1:], chunk.following)]
        token_ids = to_device(tokens, torch.int64, aux.device)
        ends = [row for row, token in enumerate(tokens) if token < 0]
        if ends:
            token_ids[to_device(ends, torch.int64, aux.device)] = sampled
        rows, lanes, positions, sizes = self._kept_rows(chunks)
        at, own, where = to_device([rows, lanes, positions], torch.int64, aux.device)
        attend = _FillAttention(self, self._places(own, where), where, sizes)
        self._head(token_ids[at], self._head.combine(aux[at]), attend)

    def propose(
        self, aux: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, lane_ids: torch.Tensor, num_proposals: int
    ) -> None:
        """Write num_proposals drafts behind the lanes' newest tokens into the lanes; 0: only take in the states.

        aux: [entries * rows, 3 * target_hidden_size]; tokens: [entries, rows] int64, the token that was sampled behind
        each row; counts: [entries] int64, how many of these are accepted; lane_ids: [entries] int64, -1: padding.
        """
        entries, num_rows = tokens.shape
        own = lane_ids.clamp_min(0)
        num_tokens = self._lanes.num_tokens[own]
        first = num_tokens - counts - 1
        view = _View(self, lane_ids, own, first + num_rows - 1 + num_proposals)
        rows = torch.arange(num_rows, device=aux.device)
        positions = (first[:, None] + rows).clamp_min(0)
        states = self._head(tokens.flatten(), self._head.combine(aux), view.attention(positions))
        last = (counts - 1).clamp_min(0)[:, None, None]
        hidden = states.view(entries, num_rows, -1).take_along_dim(last, dim=1)[:, 0]
        self._lanes.set_drafts(lane_ids, self._chain(hidden, view, lane_ids, num_tokens, num_proposals))

    def _chain(
        self, hidden: torch.Tensor, view: "_View", lane_ids: torch.Tensor, num_tokens: torch.Tensor, num_proposals: int
    ) -> list[torch.Tensor]:
        drafts: list[torch.Tensor] = []
        state = self._lanes.sampling
        for number in range(num_proposals):
            logits = self._head.logits(hidden)
            drafts.append(draw(logits, lane_ids, state, ahead=number, id_offsets=self._offsets, filtered=False))
            if number + 1 < num_proposals:
                hidden = self._head(drafts[-1], hidden, view.attention((num_tokens - 1 + number)[:, None]))
        return drafts

    def _kept_rows(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Which of the chunks' rows have a place when all are computed: (rows, lanes, positions, rows of each chunk)."""
        rows, lanes, positions, sizes = [], [], [], []
        begin = 0
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            oldest = (end // BLOCK_SIZE - self._window_blocks) * BLOCK_SIZE
            kept = [at for at in range(chunk.start, end) if at < BLOCK_SIZE or at >= oldest]
            rows += [begin + at - chunk.start for at in kept]
            lanes += [chunk.lane] * len(kept)
            positions += kept
            sizes.append(len(kept))
            begin += len(chunk.token_ids)
        return rows, lanes, positions, sizes

    def _places(self, lanes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where entries at these positions of these lanes are kept: page * 16 + slot."""
        return (lanes * self._pages_per_lane + self._page(positions // BLOCK_SIZE)) * BLOCK_SIZE + positions % BLOCK_SIZE

    def _page(self, block: torch.Tensor) -> torch.Tensor:
        """The page of a block, among its lane's."""
        return torch.where(block == 0, 0, 1 + (block - 1) % (self._pages_per_lane - 1))


class _FillAttention:
    """Stores keys and values. Only layers with others behind them attend, and then within their chunk."""

    def __init__(self, drafter: Drafter, places: torch.Tensor, positions: torch.Tensor, sizes: Sequence[int]) -> None:
        self._drafter = drafter
        self._places = places
        self._rope = gather_rope(drafter._head.rope_table, positions)
        self._sizes = list(sizes)

    def __call__(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        """As `Attend`."""
        ...
