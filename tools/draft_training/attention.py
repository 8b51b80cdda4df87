"""Attention of EAGLE-3's training-time test: each row of a text starts a chain of drafts of its own.

Owns: which keys each step of each chain sees. Does not know: projections, norms, positions.

Chain t starts where the target's state h(t) is known. Its step j stands at position t + j and sees

    step 0's keys at positions up to t, as far as a draft head keeps them: the first block and the last `window` tokens
    its own keys of the steps 1 to j                                        (arXiv 2503.01840, section 3.1, figure 6)

The first part is ordinary attention over the text; the second is a diagonal for each step. Both are one call of torch's
attention for each piece of rows: its keys are those that any row of the piece sees, and a mask picks each row's own.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minserve.config import BLOCK_SIZE

# cuDNN, which torch might choose for masks, plans every new shape for most of a second.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_PIECE = 512
SHORT_PIECE, SHORT_TEXT = 256, 2048


class ChainMasks:
    """The masks, which all layers, batches and texts share. window: a multiple of 16; piece: rows of one; None: by the
    length of the text."""

    def __init__(self, window: int, device: torch.device | str, piece: int | None = None) -> None:
        assert window % BLOCK_SIZE == 0
        self._window = window
        self._device = device
        self._piece = piece
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def pieces(self, num_tokens: int) -> list[tuple[int, int]]:
        """(first row, row behind the last) of each piece of a text."""
        size = self._piece or (SHORT_PIECE if num_tokens <= SHORT_TEXT else MAX_PIECE)
        return [(begin, min(begin + size, num_tokens)) for begin in range(0, num_tokens, size)]

    def oldest(self, row: int) -> int:
        """The first position behind block 0 that this row sees; 0: all."""
        oldest = (row // BLOCK_SIZE - self._window // BLOCK_SIZE) * BLOCK_SIZE
        return oldest if oldest > BLOCK_SIZE else 0

    def mask(self, begin: int, end: int, num_steps: int) -> torch.Tensor:
        """[rows, keys] bool for the rows of a piece at a step that has num_steps before it: keys as `ChainAttention`
        lays them out."""
        key = (begin, end, num_steps)
        if key not in self._masks:
            rows = torch.arange(begin, end, device=self._device)[:, None]
            oldest = torch.tensor([self.oldest(row) for row in range(begin, end)], device=self._device)[:, None]
            first = self.oldest(begin)
            kept = torch.arange(first, end, device=self._device)[None]
            parts = [(kept <= rows) & ((kept >= oldest) | (kept < BLOCK_SIZE))]
            if first:
                parts.insert(0, torch.ones(end - begin, BLOCK_SIZE, dtype=torch.bool, device=self._device))
            parts += [torch.eye(end - begin, dtype=torch.bool, device=self._device)] * num_steps
            self._masks[key] = torch.cat(parts, dim=1)
        return self._masks[key]


class ChainAttention:
    """Of one batch: keeps the keys and values of the steps so far."""

    def __init__(self, masks: ChainMasks) -> None:
        self._masks = masks
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    @property
    def num_steps(self) -> int:
        """Steps that have been taken."""
        return len(self._keys)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The next step. q: [texts, tokens, heads, head_dim], k, v: [texts, tokens, kv_heads, head_dim], row t of the
        chain that starts there, with RoPE for t + step. Returns q's shape."""
        group = q.shape[2] // k.shape[2]
        # Torch's kernels that take a mask have no heads that share keys.
        self._keys.append(k.transpose(1, 2).repeat_interleave(group, dim=1))
        self._values.append(v.transpose(1, 2).repeat_interleave(group, dim=1))
        q = q.transpose(1, 2)
        pieces = []
        for begin, end in self._masks.pieces(q.shape[2]):
            mask = self._masks.mask(begin, end, self.num_steps - 1)
            keys, values = (self._seen(kept, begin, end) for kept in (self._keys, self._values))
            with sdpa_kernel(BACKENDS):
                pieces.append(F.scaled_dot_product_attention(q[:, :, begin:end], keys, values, attn_mask=mask))
        return torch.cat(pieces, dim=2).transpose(1, 2)

    def _seen(self, steps: list[torch.Tensor], begin: int, end: int) -> torch.Tensor:
        """What some row of the piece sees: block 0 if it lies apart, the window, the rows' own later steps."""
        first = self._masks.oldest(begin)
        apart = [steps[0][:, :, :BLOCK_SIZE]] if first else []
        return torch.cat([*apart, steps[0][:, :, first:end], *(step[:, :, begin:end] for step in steps[1:])], dim=2)
