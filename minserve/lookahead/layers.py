"""Layers whose stages run in one call each: every lane of every one of them stands as a lane of its own, since each
layer has its own maps.

Owns: where the tables of some layers are, and the numbers of their lanes. Does not know: what the stages are for.

On a GPU a group is a few layers: its stages run while the next ones still compute, and every signal between the two
costs the foreground some time. On a CPU, where the calls themselves cost, it is all layers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from minserve.kernels.build_digests import Digests
from minserve.kernels.fetch_blocks import HERE, fetch_blocks
from minserve.kernels.rank_blocks import Ranking, rank_blocks
from minserve.kernels.retire_block import retire_block
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from minserve.kernels.score_keys import expect_in_blocks
from minserve.kernels.select_blocks import FetchPlan, SlotMaps, select_blocks
from minserve.kernels.shortlist_blocks import shortlist_length
from minserve.kernels.sparse_rows import RING
from minserve.memory.working_sets import WorkingSets

LAYERS_AT_ONCE = 5
"""On a GPU."""


def groups_of(device: torch.device, num_layers: int, layers_at_once: int | None = None) -> list[range]:
    """All layers in their order, so many in each group but the last; None: what suits the device. On a GPU the first
    layer is a group, so that the link has work soon."""
    alone = int(layers_at_once is None and device.type != "cpu")
    size = layers_at_once or (LAYERS_AT_ONCE if alone else num_layers)
    rest = [range(first, min(first + size, num_layers)) for first in range(alone, num_layers, size)]
    return [range(1)] * alone + rest


class Stack(NamedTuple):
    """A step's entries in a group of layers, those of its first layer first: what is the same in all groups of a size.

    num_layers: of the group; lanes: [layers * entries] int64, in tables in which each layer's lanes stand behind those
    of the layer before, -1 as in entries. rows, places: the same for digests, by `score_blocks`: which row of the table
    is an entry's. page_table: [layers * lanes, columns] int32, pages of all layers being one behind the other.
    """

    num_layers: int
    lanes: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    page_table: torch.Tensor

    @classmethod
    def of(cls, sets: WorkingSets, num_layers: int, lanes: torch.Tensor, num_blocks: int) -> "Stack":
        """lanes: [entries] int64, -1: padding; num_blocks: of the longest lane at least."""
        table = sets.host_table[:, :num_blocks]
        if num_layers == 1:
            return cls(1, lanes, lanes, table, sets.page_table)
        number = torch.arange(num_layers, device=lanes.device)[:, None]
        stacked = torch.where(lanes >= 0, lanes + number * sets.num_lanes, -1).flatten()
        offsets = (number * sets.digests.extremes.shape[1]).to(torch.int32)[..., None]
        places = table[lanes.clamp_min(0)]
        places = torch.where(places >= 0, places + offsets, -1).flatten(0, 1)
        rows = torch.where(stacked >= 0, torch.arange(len(stacked), device=lanes.device), -1)
        offsets = (number * sets.kv.shape[1]).to(torch.int32)[..., None]
        page_table = (sets.page_table[:, : sets.num_slots + RING] + offsets).flatten(0, 1)
        return cls(num_layers, stacked, rows, places, page_table)

    def repeat(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        """[layers * entries] each, from [entries], all of one dtype."""
        return values if self.num_layers == 1 else torch.stack(values).repeat(1, self.num_layers).unbind()


class LayerGroup:
    """Some layers, one after the other. Tensors by entry are those of a `Stack` of their number.

    cut: results are no wider than they need be, which the host has to look up.
    """

    def __init__(self, sets: WorkingSets, layers: range, *, cut: bool) -> None:
        self._sets, self._cut = sets, cut
        self.layers, self.num_layers = layers, len(layers)
        self.part = slice(layers.start, layers.stop)
        self._maps = SlotMaps(*(table[self.part].flatten(0, 1) for table in sets.maps))
        self._kv = sets.kv[self.part].flatten(0, 1)
        self._digests = Digests(*(table[self.part].flatten(0, 1) for table in sets.digests))
        self._everybody = torch.ones(len(layers) * sets.num_lanes, dtype=torch.bool, device=sets.kv.device)

    def rank(self, stack: Stack, own: torch.Tensor, ring_start: torch.Tensor, end: torch.Tensor) -> Ranking:
        """By the queries that were kept, of layers * entries.

        own: [entries] int64, lanes with 0 in place of -1; ring_start, end: [layers * entries] int64, [1, end) is ranked
        """
        sets = self._sets
        queries = sets.queries[self.part, own].flatten(0, 1)
        if self._cut and torch.equal(queries[:, LOOKAHEAD], queries[:, NORMAL]):
            queries = queries[:, :1].contiguous()  # nobody looks ahead by another row than the last token's own
        count = shortlist_length(sets.num_slots)
        logits = expect_in_blocks(queries, self._digests, stack.places, stack.rows, end, count)
        return rank_blocks(logits, self._maps.block_slot, stack.lanes, ring_start, sets.num_slots - 1)

    def select(
        self,
        lanes: torch.Tensor,
        wanted: torch.Tensor,
        scores: torch.Tensor,
        normal_wanted: torch.Tensor,
        ring_start: torch.Tensor,
        allowance: torch.Tensor,
        step: torch.Tensor,
        caps: torch.Tensor | None,
    ) -> FetchPlan:
        """As `select_blocks`; lanes: as in a stack, or -1; allowance: [layers * lanes]."""
        maps, num_slots = self._maps, self._sets.num_slots
        plan = select_blocks(
            wanted, scores, normal_wanted, maps, lanes, self._everybody, ring_start, allowance, step, num_slots, caps
        )
        if not self._cut:
            return plan
        most = max(1, int((plan.blocks >= 0).sum(dim=2).max()))
        return plan._replace(blocks=plan.blocks[..., :most].contiguous(), slots=plan.slots[..., :most].contiguous())

    def counters(self, plan: FetchPlan) -> torch.Tensor:
        """[layers, entries, 5] int64, summed over the heads."""
        return plan.counters.view(self.num_layers, -1, *plan.counters.shape[1:]).sum(dim=2)

    def fetch(
        self,
        plan: FetchPlan,
        lanes: torch.Tensor,
        step: torch.Tensor,
        page_table: torch.Tensor,
        copying: AbstractContextManager[Any] = HERE,
    ) -> Sequence[torch.Tensor]:
        """Carries a plan out. lanes, page_table: as in a stack; copying, and what is returned: as in `fetch_blocks`."""
        sets = self._sets
        host, scales, layer, table = sets.host, sets.host_scales, self.layers.start, sets.host_table
        if self.num_layers > 1:
            host, layer, table = host.view(-1, 1, *host.shape[2:]), 0, sets.host_pieces[self.part].flatten(0, 1)
            scales = None if scales is None else scales.view(-1, 1, *scales.shape[2:])
        return fetch_blocks(plan, self._maps, lanes, step, host, layer, table, self._kv, page_table, scales, copying)

    def retire(
        self,
        retiring: torch.Tensor,
        wanted: torch.Tensor,
        row: torch.Tensor,
        lanes: torch.Tensor,
        step: torch.Tensor,
        page_table: torch.Tensor,
    ) -> None:
        """As `retire_block`; lanes, page_table: as in a stack."""
        retire_block(retiring, wanted, row, self._maps, lanes, step, self._kv, page_table)
