"""The working sets of sparse lanes: which block each of their pages holds, for every layer and KV head on its own.

Owns: the maps, digests and other tables of sparse lanes, on the device; fixed in size, updated in place.
Does not know: who is sparse or why (the plan says it), or what a step fetches (lookahead).

A lane is resident until a plan demotes it. Digests lie at the place of the block's host block: every block that is
ranked has one, whoever else holds it, so there is nothing to allocate, share or free.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Demotion, StepPlan
from minserve.kernels.build_digests import Digests, build_digests, digest_dtype, digest_shapes
from minserve.kernels.demote_lane import demote_lane, rank_for_demotion
from minserve.kernels.fetch_accounts import JUST_SPARSE, SETTLED
from minserve.kernels.score_blocks import LOOKAHEAD
from minserve.kernels.select_blocks import SlotMaps
from minserve.kernels.sparse_rows import RING
from minserve.memory.lanes import Lanes
from minserve.memory.pages import zeros
from minserve.memory.transfer import to_device
from minserve.models.config import ModelConfig

Blocks = np.ndarray[Any, Any]
"""A number or a bool for each block."""


class HasKV(Protocol):
    """Pages."""

    @property
    def kv(self) -> torch.Tensor:
        """As in `KVPages`."""


class HasHostKV(Protocol):
    """Host blocks."""

    @property
    def kv(self) -> torch.Tensor:
        """As in `HostPool`."""

    @property
    def scales(self) -> torch.Tensor | None:
        """As in `HostPool`."""


class Memory(NamedTuple):
    """Tensors alone, in place of `KVPages` and `HostPool`."""

    kv: torch.Tensor
    scales: torch.Tensor | None = None


class WorkingSets:
    """num_slots: K, the same for all lanes.

    sparse: [lanes] bool                                 others are resident, and all that follows means nothing
    ring_start: [lanes] int64                            see kernels/sparse_rows.py
    host_table: [lanes, max_blocks] int32                the host block of each block, and the place of its digest
    host_pieces: [layers, lanes, max_blocks] int32       the same in each layer: host block * layers + layer, for who
                                                         fetches for several layers in one call
    maps: slot_block, slot_used [layers, lanes, kv_heads, K], block_slot [layers, lanes, kv_heads, max_blocks] int32
    digests: of [layers, host blocks, ...]
    queries: [layers, lanes, 2 (lookahead, normal), heads, head_dim], of the last step that kept them
    allowance: [layers, lanes] int32                     blocks that a lane may still fetch in a layer
    refills: [2 (more, most), lanes] int64               what a step adds to that, and how much there may be then
    looks_ahead: [lanes] bool; num_verified, cap: [lanes] int64; retry_above: [lanes] float32, inf: never
    since_retry: [lanes] int32                           steps since the lane had to run again, 0 in the one that does;
                                                         JUST_SPARSE at first
    late: [lanes + 1] int64                              blocks that were fetched for that, which its next step counts;
                                                         the last is nobody's: what padding writes goes there
    by_layer: [layers, 4 (hits, misses, cut, surprises)] int64, of all lanes and heads so far
    step: [1] int32                                      steps so far: the clock of slot_used
    """

    def __init__(self, pages: HasKV, host: HasHostKV, lanes: Lanes, num_heads: int, num_slots: int) -> None:
        num_layers, _, kv_heads, _, _, head_dim = pages.kv.shape
        device, dtype, num_lanes = lanes.device, pages.kv.dtype, lanes.num_lanes
        max_blocks = lanes.page_table.shape[1]
        assert max_blocks >= num_slots + RING, (max_blocks, num_slots)
        self.kv, self.page_table, self.num_tokens = pages.kv, lanes.page_table, lanes.num_tokens
        self.host, self.host_scales = host.kv, host.scales
        self.num_slots, self.num_lanes = num_slots, num_lanes

        def table(dtype: torch.dtype, *shape: int, fill: float = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.sparse, self.ring_start = table(torch.bool, num_lanes), table(torch.int64, num_lanes)
        self.host_table = table(torch.int32, num_lanes, max_blocks, fill=-1)
        self.host_pieces = table(torch.int32, num_layers, num_lanes, max_blocks, fill=-1)
        slots = (num_layers, num_lanes, kv_heads, num_slots)
        self.maps = SlotMaps(
            slot_block=table(torch.int32, *slots, fill=-1),
            slot_used=table(torch.int32, *slots),
            block_slot=table(torch.int32, *slots[:3], max_blocks, fill=-1),
        )
        extremes, keys = ((num_layers, host.kv.shape[0], *shape) for shape in digest_shapes(kv_heads, head_dim))
        self.digests = Digests(
            extremes=zeros(extremes, digest_dtype(device, dtype), device.type),
            keys=zeros(keys, torch.uint8, device.type),
        )
        self.queries = table(dtype, num_layers, num_lanes, 2, num_heads, head_dim)
        self.allowance, self.refills = table(torch.int32, num_layers, num_lanes), table(torch.int64, 2, num_lanes)
        self.looks_ahead, self.late = table(torch.bool, num_lanes), table(torch.int64, num_lanes + 1)
        self.since_retry = table(torch.int32, num_lanes, fill=SETTLED)
        self.num_verified, self.cap = table(torch.int64, num_lanes), table(torch.int64, num_lanes)
        self.retry_above = table(torch.float32, num_lanes, fill=torch.inf)
        self.by_layer = table(torch.int64, num_layers, 4)
        self.step = table(torch.int32, 1)

    @staticmethod
    def bytes_for(
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_lanes: int,
        max_blocks: int,
        num_slots: int,
        num_host_blocks: int,
    ) -> int:
        """Bytes of the tables of such sets on a device, before there are any."""
        digest_bytes = digest_dtype(device, dtype).itemsize  # of a number, as sets on no device have it in 8 bits
        device = torch.device("meta")
        kv_shape = (config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
        pages = Memory(torch.empty(config.num_layers, 1, *kv_shape, dtype=dtype, device=device))
        host = Memory(torch.empty(num_host_blocks, config.num_layers, *kv_shape, dtype=dtype, device=device))
        lanes = Lanes(num_lanes, max_blocks, 1, device)
        sets = WorkingSets(pages, host, lanes, config.num_heads, num_slots)
        extremes = sets.digests.extremes
        return sets.nbytes + extremes.numel() * digest_bytes - extremes.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that are its own."""
        shared = (self.kv, self.host, self.host_scales, self.page_table, self.num_tokens)
        own = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        own = [table for table in own if all(table is not other for other in shared)]
        return sum(table.nbytes for table in [*own, *self.maps, *self.digests])

    def held_blocks(self, lane: int, num_blocks: int) -> tuple[Blocks, Blocks]:
        """(in slots, in the ring), [layers, kv_heads, num_blocks] bool each, of a sparse lane. Waits for the device."""
        in_slots = self.maps.block_slot[:, lane, :, :num_blocks] >= 0
        in_ring = torch.arange(num_blocks, device=in_slots.device) >= self.ring_start[lane]
        return in_slots.cpu().numpy(), in_ring.expand_as(in_slots).cpu().numpy()

    def prepare(self, plan: StepPlan) -> None:
        """Write what the plan changes, behind the steps before it and before its own rows."""
        if plan.setups:
            lanes = to_device([setup.lane for setup in plan.setups], torch.int64, self.sparse.device)
            self.sparse.index_fill_(0, lanes, False)
            # A step ranks as many blocks as its lanes have, so none may seem to hold one of a longer text before it.
            self.maps.slot_block.index_fill_(1, lanes, -1)
        if plan.keeps_queries:
            self.step += 1
        for demotion in plan.demotions:
            self._demote(demotion)
        if plan.stored:
            self._take_stored(plan.stored)
        if plan.refills:
            refills = to_device(list(zip(*plan.refills, strict=True)), torch.int64, self.sparse.device)
            self.refills[:, refills[0]] = refills[1:]

    def _demote(self, demotion: Demotion) -> None:
        device, lane = self.sparse.device, demotion.lane
        start = len(demotion.host_blocks)
        policy, columns = demotion.policy, self.num_slots + RING
        if demotion.ring_copies:
            sources, targets = to_device(demotion.ring_copies, torch.int64, device).T
            self.kv[:, targets] = self.kv[:, sources]
        slot_pages, slot_blocks = to_device([demotion.slot_pages, demotion.slot_blocks], torch.int64, device)
        maps = SlotMaps(*(table[:, lane] for table in self.maps))
        maps.slot_block.fill_(-1)
        maps.block_slot.fill_(-1)
        self.host_table[lane].fill_(-1)
        self.host_pieces[:, lane].fill_(-1)
        if start:
            pages = to_device(demotion.pages[:start], torch.int64, device)
            places = to_device(demotion.host_blocks, torch.int64, device)
            query, block_slot = self.queries[:, lane, LOOKAHEAD], maps.block_slot.contiguous()
            wanted = rank_for_demotion(self.kv, self.digests, block_slot, query, pages, places, self.num_slots)
            demote_lane(self.kv, maps, wanted, pages, slot_pages, slot_blocks, self.step)
            self._set_hosts(torch.full_like(places, lane), torch.arange(start, device=device), places)
        table = to_device([*demotion.slot_pages, *demotion.ring_pages], torch.int32, device)
        self.page_table[lane, :columns] = table
        self.sparse[lane], self.since_retry[lane], self.ring_start[lane] = True, JUST_SPARSE, start
        self.looks_ahead[lane], self.num_verified[lane] = policy.looks_ahead, policy.num_verified
        self.cap[lane] = policy.cap
        self.retry_above[lane] = torch.inf if policy.retry_above is None else policy.retry_above
        self.allowance[:, lane], self.late[lane] = 0, 0

    def _take_stored(self, stored: Sequence[tuple[int, int, int]]) -> None:
        """Blocks in the ring have host blocks from now on, and digests."""
        lanes, blocks, hosts = to_device(stored, torch.int64, self.sparse.device).T.contiguous()
        self._set_hosts(lanes, blocks, hosts)
        pages = self.page_table[lanes, self.num_slots + blocks % RING].to(torch.int64)
        layer = torch.arange(self.kv.shape[0], device=pages.device)[:, None]
        pages, hosts = layer * self.kv.shape[1] + pages, layer * self.digests.extremes.shape[1] + hosts
        build_digests(self.kv.flatten(0, 1), self.digests.view_all(), pages.flatten(), hosts.flatten())

    def _set_hosts(self, lanes: torch.Tensor, blocks: torch.Tensor, hosts: torch.Tensor) -> None:
        self.host_table[lanes, blocks] = hosts.to(torch.int32)
        num_layers = self.kv.shape[0]
        layer = torch.arange(num_layers, device=hosts.device)[:, None]
        self.host_pieces[:, lanes, blocks] = (hosts * num_layers + layer).to(torch.int32)
