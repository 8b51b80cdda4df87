"""The host tier's memory: whole blocks, all layers and KV heads of one side by side.

Owns: the tensor, and how blocks move between it and the pages. Does not know whose blocks they are.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch

from minserve.memory.copies import Copy
from minserve.memory.pages import KVPages, zeros
from minserve.memory.pinned import PinnedMemory
from minserve.memory.transfer import to_device

AT_ONCE = 8
"""Blocks that are gathered on the device for one copy; in each direction twice, as one is being copied."""


class HostPool:
    """kv: [host blocks, layers, kv_heads, 2 (K, V), 16, head_dim], in the dtype of the pages; of a GPU's pages it is
    memory that the GPU reads by its address."""

    def __init__(
        self, num_blocks: int, pages: KVPages, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        num_layers, _, *rest = pages.kv.shape
        shape = (num_blocks, num_layers, *rest)
        self._pages = pages
        self._memory: PinnedMemory | None = None
        if pages.kv.device.type != "cuda" or num_blocks == 0:
            self.kv = zeros(shape, pages.kv.dtype, "cpu")
            return
        block_bytes = num_layers * pages.kv[0, 0].nbytes
        self._memory = PinnedMemory(num_blocks * block_bytes, block_bytes, pages.kv.device, progress)
        self.kv = self._memory.bytes.view(pages.kv.dtype).view(shape)

    def move(self, copy: Copy) -> None:
        """Copy one block's data, now."""
        page, host = self._pages.kv[:, copy.page], self.kv[copy.host]
        if copy.kind == "store":
            host.copy_(page)
        else:
            page.copy_(host)

    def move_all(self, copies: Sequence[Copy]) -> None:
        """Launch copies of one kind, on the current stream of a GPU; the host waits for none."""
        for begin in range(0, len(copies), AT_ONCE):
            some = copies[begin : begin + AT_ONCE]
            pages = to_device([copy.page for copy in some], torch.int64, self._pages.kv.device)
            if some[0].kind == "store":
                content = self._pages.kv[:, pages].transpose(0, 1).contiguous()
                for copy, block in zip(some, content, strict=True):
                    self.kv[copy.host].copy_(block, non_blocking=True)
            else:
                content = self._pages.kv.new_empty(len(some), *self.kv.shape[1:])
                for copy, block in zip(some, content, strict=True):
                    block.copy_(self.kv[copy.host], non_blocking=True)
                self._pages.kv[:, pages] = content.transpose(0, 1)

    def close(self) -> None:
        """Give registered memory back, when the device does nothing any more."""
        if self._memory is not None:
            with contextlib.suppress(RuntimeError):  # of a device that has failed: whoever closes says so
                torch.cuda.synchronize(self._pages.kv.device)
            self._memory.close()
