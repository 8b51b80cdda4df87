"""The keys and values of a draft head: a window of each lane's text, in pages of the lane's own.

Owns: the pages, and which entry is where. Does not know: what the head computes.

Of a lane's entries the first block and the last `window` tokens are kept:

    block 0 in page 0;  block b > 0 in page 1 + (b - 1) mod ring;  ring = window / 16 + 2

so what a lane takes does not grow with its text, and what rejected drafts leave behind spoils no block in the window.
Seeing more would not help: heads are trained on short texts, and fewer of their drafts are right when they see more.
"""

from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.memory.pages import zeros
from minserve.models.eagle3_config import Eagle3Config


class View(NamedTuple):
    """What rows of some entries may attend.

    table: [entries, blocks] int32, pages in the order of their blocks; shift: [entries] int64, the tokens that lie
    between block 0 and the window, or in front of all that is kept: a row at position p sees p + 1 - shift keys.
    """

    table: torch.Tensor
    shift: torch.Tensor


class DraftKV:
    """window: tokens, a multiple of 16, at least 32.

    kv: [layers, lanes * pages of a lane, kv_heads, 2 (K, V), 16, head_dim].
    """

    def __init__(self, config: Eagle3Config, num_lanes: int, window: int, dtype: torch.dtype, device: str) -> None:
        assert window % BLOCK_SIZE == 0
        assert window >= 2 * BLOCK_SIZE
        self._window_blocks = window // BLOCK_SIZE
        self._ring = self._window_blocks + 2
        self.pages_per_lane = 1 + self._ring
        shape = (num_lanes * self.pages_per_lane, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
        self.kv = zeros((config.num_layers, *shape), dtype, device)

    def forget(self, lanes: torch.Tensor) -> None:
        """Lanes have changed hands: nothing of what they held is ever read again. lanes: [n] int64."""
        num_layers = self.kv.shape[0]
        self.kv.view(num_layers, -1, self.pages_per_lane, *self.kv.shape[2:]).index_fill_(1, lanes, 0)

    def is_kept(self, position: int, end: int) -> bool:
        """Whether an entry still has its place when the text goes as far as `end`."""
        oldest = (end // BLOCK_SIZE - self._window_blocks) * BLOCK_SIZE
        return position < BLOCK_SIZE or position >= oldest

    def places(self, lanes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where entries at these positions of these lanes are: page * 16 + slot."""
        pages = lanes * self.pages_per_lane + self._page(positions // BLOCK_SIZE)
        return pages * BLOCK_SIZE + positions % BLOCK_SIZE

    def view(self, lanes: torch.Tensor, starts: torch.Tensor, last: torch.Tensor) -> View:
        """lanes: [entries] int64; starts: [entries], the first position of each lane that has an entry; last:
        [entries], a position that no row passes."""
        first_block = starts // BLOCK_SIZE
        has_first = first_block == 0
        oldest = torch.maximum(last // BLOCK_SIZE - self._window_blocks, first_block).clamp_min(1)
        columns = torch.arange(self._window_blocks + 2, device=lanes.device)
        blocks = oldest[:, None] + columns - has_first[:, None].long()
        blocks = torch.where(has_first[:, None] & (columns == 0), 0, blocks)
        table = lanes[:, None] * self.pages_per_lane + self._page(blocks)
        return View(table.to(torch.int32), oldest * BLOCK_SIZE - has_first * BLOCK_SIZE)

    def _page(self, blocks: torch.Tensor) -> torch.Tensor:
        """The page of a block, among its lane's."""
        return torch.where(blocks == 0, 0, 1 + (blocks - 1) % self._ring)
