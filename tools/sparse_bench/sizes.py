"""How much memory requests take, and what a step moves: arithmetic, before anything is there.

Owns: which requests fit, and the least that a step can take. Does not know: how long it takes.
"""

import math
from dataclasses import dataclass

import torch

from minserve.kernels.build_digests import digest_dtype, digest_shapes, extremes_shape
from minserve.kernels.shortlist_blocks import shortlist_length
from minserve.kernels.sparse_rows import RING
from minserve.lookahead.background import Background
from minserve.memory.blocks import blocks_for
from minserve.memory.host_pool import HostPool
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.memory.working_sets import WorkingSets
from minserve.models.config import ModelConfig
from minserve.runner.graphs import graph_sizes

READ_BYTES_S, LINK_BYTES_S = 4.4e12, 55e9
"""Of an H200, as in tools/kernel_clock.py, and of its link."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of requests of one length. dtype: of pages; host_dtype: of host blocks; weights_bytes: of the model, which every
    step reads; draft_bytes: of a lane's keys and values in a draft head; context: tokens of a lane at most; num_slots:
    K."""

    model: ModelConfig
    dtype: torch.dtype
    host_dtype: torch.dtype
    weights_bytes: int
    draft_bytes: int
    context: int
    num_slots: int

    @property
    def num_blocks(self) -> int:
        """Of a lane."""
        return blocks_for(self.context)

    @property
    def pages_per_lane(self) -> int:
        return self.num_slots + RING

    @property
    def block_bytes(self) -> int:
        """Of a page."""
        return KVPages.bytes_per_page(self.model, self.dtype)

    @property
    def piece_bytes(self) -> int:
        """Of a host block for one KV head of one layer: what a fetch moves over the link."""
        host_block_bytes = KVPages.bytes_per_page(self.model, self.host_dtype)
        return host_block_bytes // (self.model.num_layers * self.model.num_kv_heads)

    @property
    def digest_bytes(self) -> int:
        """Of the digests of one block, on a GPU."""
        _, keys = digest_shapes(self.model.num_kv_heads, self.model.head_dim)
        return self.extremes_bytes + self.model.num_layers * math.prod(keys)

    @property
    def extremes_bytes(self) -> int:
        """Of these, the extremes, which a step reads of every block."""
        numbers = self.model.num_layers * math.prod(extremes_shape(self.model.num_kv_heads, self.model.head_dim))
        return numbers * digest_dtype(torch.device("cuda"), self.dtype).itemsize

    def full_caps(self, cap: int) -> int:
        """Pieces that a lane fetches in a step in which every KV head of every layer takes its cap."""
        return cap * self.model.num_layers * self.model.num_kv_heads

    def memory(self, num_requests: int) -> int:
        """Bytes on the GPU for so many, each block with digests and scales of its own: pages, and all tables."""
        lanes = Lanes(num_requests, self.num_blocks, self.model.vocab_size, torch.device("meta")).nbytes
        sets = WorkingSets.bytes_for(
            self.model,
            self.dtype,
            torch.device("cuda"),
            num_lanes=num_requests,
            max_blocks=self.num_blocks,
            num_slots=self.num_slots,
            num_host_blocks=num_requests * self.num_blocks,
        )
        entries = graph_sizes(num_requests)[-1]
        passes = Background.bytes_for(self.model, self.num_slots, self.num_blocks, entries, recalls=False)
        scales = self.num_blocks * HostPool.device_bytes_per_block(self.model, self.host_dtype)
        own = self.pages_per_lane * self.block_bytes + scales + self.draft_bytes
        return num_requests * own + lanes + sets + passes

    def num_fitting(self, memory_bytes: int) -> int:
        """How many requests fit."""
        low, high = 0, 1
        while self.memory(high) <= memory_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.memory(middle) <= memory_bytes else (low, middle)
        return low

    def read_bytes(self, num_requests: int) -> float:
        """What a step reads of the GPU's memory at least: weights, pages, all extremes, digests of the shortlists."""
        listed = min(shortlist_length(self.num_slots) / self.num_blocks, 1.0)
        digests = self.extremes_bytes + listed * self.digest_bytes
        lane = self.pages_per_lane * self.block_bytes + self.num_blocks * digests
        return self.weights_bytes + num_requests * lane

    def dense_bytes(self, num_requests: int) -> int:
        """The same of dense requests."""
        return self.weights_bytes + num_requests * self.num_blocks * self.block_bytes

    def expected_s(self, num_requests: int, cap: int) -> float:
        """Seconds of a step: what the slower of memory and link takes, with a third on top."""
        link = num_requests * self.full_caps(cap) * self.piece_bytes / LINK_BYTES_S
        return 1.33 * max(link, self.read_bytes(num_requests) / READ_BYTES_S)
