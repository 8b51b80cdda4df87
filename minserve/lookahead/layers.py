"""Layers whose stages run in one call each: every lane of every one of them stands as a lane of its own, since each
layer has its own maps.

Owns: where the tables of some layers are, and the numbers of their lanes. Does not know: what the stages are for.

On a GPU a group is a few layers: its stages run while the next ones still compute, and every event between the two
costs the foreground time, more so while the link is busy. On a CPU, where the calls themselves cost, it is all layers.
"""

import torch

from minserve.kernels.fetch_blocks import fetch_blocks
from minserve.kernels.rank_blocks import Ranking, rank_blocks
from minserve.kernels.retire_block import retire_block
from minserve.kernels.score_blocks import score_blocks
from minserve.kernels.select_blocks import FetchPlan, SlotMaps, select_blocks
from minserve.kernels.sparse_rows import RING
from minserve.memory.working_sets import WorkingSets

LAYERS_AT_ONCE = 4
"""On a GPU."""


def groups_of(device: torch.device, num_layers: int, layers_at_once: int | None = None) -> list[range]:
    """All layers in their order, so many in each group but the last; None: what suits the device."""
    size = layers_at_once or (num_layers if device.type == "cpu" else LAYERS_AT_ONCE)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


class LayerGroup:
    """Some layers, one after the other. Of tensors by entry, those of the first layer's lanes come first, and so on.

    cut: results and what is read for them are no wider than they need be, which the host has to look up.
    """

    def __init__(self, sets: WorkingSets, layers: range, *, cut: bool) -> None:
        self._sets, self._cut = sets, cut
        self.layers, self.num_layers = layers, len(layers)
        self.part = slice(layers.start, layers.stop)
        self.num_kv_heads = sets.kv.shape[2]
        self._maps = SlotMaps(*(table[self.part].flatten(0, 1) for table in sets.maps))
        self._kv, self._digests = (table[self.part].flatten(0, 1) for table in (sets.kv, sets.digests))
        self._everybody = torch.ones(len(layers) * sets.num_lanes, dtype=torch.bool, device=sets.kv.device)
        number = torch.arange(len(layers), device=sets.kv.device)
        self._lane_offsets = number[:, None] * sets.num_lanes
        self._digest_offsets = (number * sets.digests.shape[1]).to(torch.int32)[:, None, None]
        self._page_offsets = (number * sets.kv.shape[1]).to(torch.int32)[:, None, None]
        self._page_table = sets.page_table
        if self.num_layers > 1:
            self._page_table = sets.page_table.new_zeros(self.num_layers * sets.num_lanes, sets.num_slots + RING)

    def repeat(self, values: torch.Tensor) -> torch.Tensor:
        """[entries] of all lanes of all layers, from [entries] of the lanes."""
        return values if self.num_layers == 1 else values.repeat(self.num_layers)

    def _lanes(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes if self.num_layers == 1 else torch.where(lanes >= 0, lanes + self._lane_offsets, -1).flatten()

    def look_up(self) -> None:
        """Where pages are: before all else in a step."""
        if self.num_layers > 1:
            table = self._page_table.view(self.num_layers, -1, self._page_table.shape[1])
            torch.add(self._sets.page_table[:, : table.shape[2]], self._page_offsets, out=table)

    def rank(self, lanes: torch.Tensor, ring_start: torch.Tensor, end: torch.Tensor) -> Ranking:
        """By the queries that were kept. lanes, ring_start, end: [entries] int64, blocks [1, end) are ranked."""
        sets = self._sets
        columns = max(1, int(end.max())) if self._cut else sets.host_table.shape[1]
        own = lanes.clamp_min(0)
        queries = sets.queries[self.part, own].flatten(0, 1)
        table, rows = sets.host_table[:, :columns], lanes
        if self.num_layers > 1:
            places = table[own]
            table = torch.where(places >= 0, places + self._digest_offsets, -1).flatten(0, 1)
            rows = torch.arange(len(table), device=table.device)
            rows = torch.where(self.repeat(lanes) >= 0, rows, -1)
        logits = score_blocks(queries, self._digests, table, rows, self.repeat(end))
        block_slot, own_start = self._maps.block_slot, self.repeat(ring_start)
        return rank_blocks(logits, block_slot, self._lanes(lanes), own_start, sets.num_slots - 1)

    def select(
        self,
        lanes: torch.Tensor,
        wanted: torch.Tensor,
        scores: torch.Tensor,
        normal_wanted: torch.Tensor,
        ring_start: torch.Tensor,
        allowance: torch.Tensor,
        step: torch.Tensor,
        caps: torch.Tensor,
    ) -> FetchPlan:
        """As `select_blocks`; lanes, ring_start, caps: [entries]; allowance: [layers, num_lanes]."""
        plan = select_blocks(
            wanted,
            scores,
            normal_wanted,
            self._maps,
            self._lanes(lanes),
            self._everybody,
            self.repeat(ring_start),
            allowance.flatten(),
            step,
            self._sets.num_slots,
            self.repeat(caps),
        )
        if not self._cut:
            return plan
        most = max(1, int((plan.blocks >= 0).sum(dim=2).max()))
        return plan._replace(blocks=plan.blocks[..., :most].contiguous(), slots=plan.slots[..., :most].contiguous())

    def counters(self, plan: FetchPlan) -> torch.Tensor:
        """[layers, entries, 5] int64, summed over the heads."""
        return plan.counters.view(self.num_layers, -1, *plan.counters.shape[1:]).sum(dim=2)

    def fetch(self, plan: FetchPlan, lanes: torch.Tensor, step: torch.Tensor) -> None:
        """Carries a plan out."""
        sets = self._sets
        host, scales, layer, table = sets.host, sets.host_scales, self.layers.start, sets.host_table
        if self.num_layers > 1:
            host, layer, table = host.view(-1, 1, *host.shape[2:]), 0, sets.host_pieces[self.part].flatten(0, 1)
            scales = None if scales is None else scales.view(-1, 1, *scales.shape[2:])
        own = self._lanes(lanes)
        fetch_blocks(plan, self._maps, own, step, host, layer, table, self._kv, self._page_table, scales)

    def retire(self, retiring: torch.Tensor, lanes: torch.Tensor, wanted: torch.Tensor, step: torch.Tensor) -> None:
        """As `retire_block`; retiring, lanes: [entries]."""
        own = self._lanes(lanes)
        retire_block(self.repeat(retiring), wanted, self._maps, own, step, self._kv, self._page_table)
