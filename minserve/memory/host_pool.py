"""The host tier's memory: whole blocks, all layers and KV heads of one side by side.

Owns: the tensor, and how blocks move between it and the pages. Does not know whose blocks they are.

Blocks may be in 8 bits (kernels/fp8_blocks.py): then their scales lie on the device, and what is loaded is not quite
what was stored.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch

from minserve.kernels.fetch_blocks import copy_pieces
from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from minserve.memory.copies import Copy
from minserve.memory.pages import KVPages, zeros
from minserve.memory.pinned import PinnedMemory
from minserve.memory.transfer import to_device
from minserve.models.config import ModelConfig

LINK_PIECES, LINK_TRIALS = 16384, 5
"""What the link's speed is measured by: 128 MiB at a head_dim of 128, the first time with the kernel's compilation."""

AT_ONCE = 8
"""Blocks that are gathered on the device for one copy; in each direction twice, as one is being copied."""


class HostPool:
    """dtype: that of the pages, or FP8.

    kv: [host blocks, layers, kv_heads, 2 (K, V), 16, head_dim]; of a GPU's pages it is memory that the GPU reads by its
    address. scales: [host blocks, layers, kv_heads, 2] float32, on the pages' device; None: kv is in their dtype.
    """

    def __init__(
        self,
        num_blocks: int,
        pages: KVPages,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        num_layers, _, *rest = pages.kv.shape
        assert dtype in (pages.kv.dtype, FP8), (dtype, pages.kv.dtype)
        shape = (num_blocks, num_layers, *rest)
        self._pages = pages
        self._memory: PinnedMemory | None = None
        device = pages.kv.device
        self.scales = zeros(shape[:4], torch.float32, device.type) if dtype == FP8 else None
        if device.type != "cuda" or num_blocks == 0:
            self.kv = zeros(shape, dtype, "cpu")
            return
        block_bytes = num_layers * pages.kv[0, 0].numel() * dtype.itemsize
        self._memory = PinnedMemory(num_blocks * block_bytes, block_bytes, device, progress)
        self.kv = self._memory.bytes.view(dtype).view(shape)
        if self.scales is not None:
            quantize_blocks(pages.kv[:1, :1])  # compiled now, and not when the first block is full

    @staticmethod
    def device_bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that a block takes on the device: its scales."""
        return config.num_layers * config.num_kv_heads * 2 * torch.float32.itemsize if dtype == FP8 else 0

    def move(self, copy: Copy) -> None:
        """Copy one block's data, now."""
        page = self._pages.kv[:, copy.page]
        if copy.kind == "store":
            store_block(page, self.kv, self.scales, copy.host)
        else:
            page.copy_(load_block(self.kv, self.scales, copy.host, page))

    def move_all(self, copies: Sequence[Copy]) -> None:
        """Launch copies of one kind, on the current stream of a GPU; the host waits for none."""
        for begin in range(0, len(copies), AT_ONCE):
            some = copies[begin : begin + AT_ONCE]
            numbers = [[copy.page for copy in some], [copy.host for copy in some]]
            pages, hosts = to_device(numbers, torch.int64, self._pages.kv.device)
            if some[0].kind == "store":
                self._store(some, pages, hosts)
            else:
                self._load(some, pages, hosts)

    def _store(self, copies: Sequence[Copy], pages: torch.Tensor, hosts: torch.Tensor) -> None:
        content = self._pages.kv[:, pages].transpose(0, 1).contiguous()
        if self.scales is not None:
            content, self.scales[hosts] = quantize_blocks(content)
        for copy, block in zip(copies, content, strict=True):
            self.kv[copy.host].copy_(block, non_blocking=True)

    def _load(self, copies: Sequence[Copy], pages: torch.Tensor, hosts: torch.Tensor) -> None:
        kv = self._pages.kv
        content = torch.empty(len(copies), *self.kv.shape[1:], dtype=self.kv.dtype, device=kv.device)
        for copy, block in zip(copies, content, strict=True):
            block.copy_(self.kv[copy.host], non_blocking=True)
        if self.scales is not None:
            content = dequantize_blocks(content, self.scales[hosts], kv.dtype)
        kv[:, pages] = content.transpose(0, 1)

    def measure_link(self) -> float | None:
        """Bytes that fetches of a head's blocks from all over the pool move in a second; None: over no link. At the
        start: it writes pages."""
        if self._memory is None:
            return None
        pieces, pages = (kv.view(-1, *kv.shape[3:]) for kv in (self.kv, self._pages.kv))
        scales = None if self.scales is None else self.scales.view(-1, 2)
        targets = torch.arange(LINK_PIECES, device=pages.device) % len(pages)
        copies = torch.stack((torch.randint_like(targets, len(pieces)), targets), dim=1)
        num_copies = copies.new_full((1,), len(copies), dtype=torch.int32)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        seconds: list[float] = []
        for _ in range(LINK_TRIALS):
            begin.record()
            copy_pieces(copies, num_copies, pieces, scales, pages)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return len(copies) * pieces[0].nbytes / min(seconds)

    def close(self) -> None:
        """Give registered memory back, when the device does nothing any more."""
        if self._memory is not None:
            with contextlib.suppress(RuntimeError):  # of a device that has failed: whoever closes says so
                torch.cuda.synchronize(self._pages.kv.device)
            self._memory.close()


def store_block(block: torch.Tensor, kv: torch.Tensor, scales: torch.Tensor | None, host: int) -> None:
    """Write a block, [layers, kv_heads, 2, 16, head_dim], to a host block. kv, scales: as in `HostPool`."""
    if scales is not None:
        block, scales[host] = quantize_blocks(block.contiguous())
    kv[host].copy_(block)


def load_block(kv: torch.Tensor, scales: torch.Tensor | None, host: int, like: torch.Tensor) -> torch.Tensor:
    """What a host block stands for, on the device and in the dtype of `like`."""
    block = kv[host].to(like.device)
    return block if scales is None else dequantize_blocks(block, scales[host], like.dtype)
