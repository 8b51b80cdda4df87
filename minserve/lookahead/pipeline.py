"""What a decode step does for the working sets of its sparse lanes: predict, select, fetch.

Owns: the order of these, and when a step has to run again. Does not know: plans, sampling, models.

A step begins with its rows (`begin`), keeps two queries of each lane in every layer (`keep`), ranks blocks by them
(`rank`), and fetches what the next step will want (`fetch`), which the CPU does when the step has sampled. All layers
are ranked and fetched in one call: a layer of a lane stands as a lane of its own, since each has its own maps.
"""

from typing import NamedTuple

import torch

from minserve.kernels.fetch_blocks import fetch_blocks, retire_block
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL, score_blocks, wanted_blocks
from minserve.kernels.select_blocks import SlotMaps, select_blocks
from minserve.kernels.sparse_rows import RING, Ring, SparseRows, advance_ring, sparse_rows
from minserve.memory.working_sets import WorkingSets


class Ranking(NamedTuple):
    """Of each (layer, entry), one after the other. scores: [layers * entries, 2, kv_heads, blocks]; wanted: bool,
    the same shape. again: [entries] bool, whose step has to run again."""

    scores: torch.Tensor
    wanted: torch.Tensor
    again: torch.Tensor


class SparseStep:
    """One step. lanes: [entries] int64, -1: padding; lengths, places: [rows] int64, from `step_inputs`.

    recalls: every layer has what it wants fetched before it attends.
    """

    def __init__(
        self,
        sets: WorkingSets,
        lanes: torch.Tensor,
        lengths: torch.Tensor,
        places: torch.Tensor,
        *,
        recalls: bool,
    ) -> None:
        self._sets, self._lanes, self._recalls = sets, lanes, recalls
        self._own = lanes.clamp_min(0)
        self._takes_part = (lanes >= 0) & sets.sparse[self._own]
        self._rows_per_entry = len(lengths) // len(lanes)
        self.ring: Ring = advance_ring(sets.num_tokens, sets.ring_start, sets.sparse, lanes)
        self.rows: SparseRows = sparse_rows(
            lengths, places, sets.page_table, sets.sparse, lanes, self.ring.start, sets.num_slots
        )
        behind = (sets.num_verified[self._own] + 1).clamp_max(self._rows_per_entry - 1)
        self._ahead = torch.where(sets.looks_ahead[self._own] & self._takes_part, behind, 0)
        # A lane that is resident yet is ranked by the last row there is, when it is demoted.
        self._ahead = torch.where(self._takes_part, self._ahead, self._rows_per_entry - 1)
        self._at = torch.where(lanes < 0, sets.num_lanes, lanes)
        self._recalled = torch.zeros(len(lanes), 3, dtype=torch.int64, device=lanes.device)
        self._ranking: Ranking | None = None

    def keep(self, layer: int, q: torch.Tensor) -> None:
        """Before the layer attends. q: [rows, heads, head_dim]."""
        rows = q.view(len(self._lanes), self._rows_per_entry, *q.shape[1:])
        ahead = rows[torch.arange(len(rows), device=q.device), self._ahead]
        self._sets.queries[layer, self._at] = torch.stack((ahead, rows[:, 0]), dim=1)
        if self._recalls:
            self._recall(layer)

    def most_accepted(self) -> torch.Tensor:
        """[entries] int64: how many of each lane's tokens may count. Ranks; call it when all layers have attended."""
        ranking = self._ranking = self._rank(self.ring.next_start, slice(None))
        verified = 1 + self._sets.num_verified[self._own]
        most = torch.where(self._takes_part, verified, self._rows_per_entry)
        return torch.where(ranking.again, 0, most)

    @property
    def ranking(self) -> Ranking:
        """Of all layers. When `most_accepted` has been called."""
        assert self._ranking is not None, "nothing has been ranked"
        return self._ranking

    def fetch(self) -> torch.Tensor:
        """[entries, 5] int64, the fields of `Fetched`. When the step has sampled."""
        sets, ranking = self._sets, self.ranking
        wanted, scores, normal = ranking.wanted[:, LOOKAHEAD], ranking.scores[:, LOOKAHEAD], ranking.wanted[:, NORMAL]
        caps = torch.zeros_like(self._lanes) if self._recalls else sets.cap[self._own]
        counters = self._take(slice(None), wanted, scores, normal, sets.allowance, caps)
        spent = counters[..., 1] - counters[..., 2]
        sets.allowance.index_put_(
            (torch.arange(sets.allowance.shape[0], device=spent.device)[:, None], self._own),
            torch.where(self._takes_part, -spent, 0).to(torch.int32),
            accumulate=True,
        )
        if not self._recalls:
            sets.by_layer += counters[..., :4].sum(dim=1)
        counters = counters.sum(dim=0)
        if bool(ranking.again.any()):
            counters[:, :3] += self._take_for_again(ranking)
        self._retire(wanted)
        sets.retried[self._at] = ranking.again
        done = self._recalled if self._recalls else counters[:, :3]
        return torch.cat((done, counters[:, 3:]), dim=1)

    def _take_for_again(self, ranking: Ranking) -> torch.Tensor:
        """What the row wants that has to run again, whatever was saved up. [entries, 3] int64, as of `Fetched`.

        Behind what the lookahead wants, since whether a step runs again is known when all layers have been ranked, and
        fetches do not wait for that.
        """
        sets = self._sets
        wanted, scores = ranking.wanted[:, NORMAL], ranking.scores[:, NORMAL]
        unlimited = torch.full_like(sets.allowance, wanted.shape[1] * sets.num_slots)
        caps = torch.full_like(self._lanes, sets.num_slots)
        lanes = torch.where(ranking.again, self._lanes, -1)
        counters = self._take(slice(None), wanted, scores, wanted, unlimited, caps, lanes)
        # Hits and misses are those of the lookahead; what is fetched here is a miss more.
        by_layer = counters[..., 1] - counters[..., 2]
        sets.by_layer[:, 1] += by_layer.sum(dim=1)
        fetched = by_layer.sum(dim=0)
        return torch.stack((torch.zeros_like(fetched), fetched, torch.zeros_like(fetched)), dim=1)

    # ---- the stages, of some layers at once ----

    def _rank(self, end: torch.Tensor, layers: slice) -> Ranking:
        """Blocks [1, end) of each lane, by the queries that were kept."""
        sets = self._sets
        queries = sets.queries[layers, self._own]
        num_layers, num_entries = queries.shape[:2]
        digests = sets.digests[layers]
        columns = max(1, int(end.max()))
        places = sets.host_table[self._own, :columns]
        offsets = torch.arange(num_layers, device=places.device, dtype=torch.int32) * digests.shape[1]
        table = torch.where(places >= 0, places + offsets[:, None, None], -1).flatten(0, 1)
        entries = torch.arange(num_layers * num_entries, device=places.device)
        takes_part = self._takes_part.repeat(num_layers)
        scores = score_blocks(
            queries.flatten(0, 1),
            digests.flatten(0, 1),
            table,
            torch.where(takes_part, entries, -1),
            end.repeat(num_layers),
        )
        wanted = wanted_blocks(scores, sets.num_slots - 1)
        missing, asked = self._surprises(wanted[:, NORMAL], layers)
        share = missing / asked.clamp_min(1)
        again = self._takes_part & (share > sets.retry_above[self._own]) & ~sets.retried[self._own]
        return Ranking(scores, wanted, again)

    def _surprises(self, wanted: torch.Tensor, layers: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks the normal row wants outside the ring and does not have, and wants there in all; [entries]
        each, over these layers and all heads. wanted: [layers * entries, kv_heads, blocks]."""
        columns = wanted.shape[2]
        slots = self._sets.maps.block_slot[layers, self._own, :, :columns].flatten(0, 1)
        outside = torch.arange(columns, device=slots.device) < self.ring.start[:, None]
        asked = wanted.view(-1, *self._lanes.shape, *wanted.shape[1:]) & outside[None, :, None]
        missing = asked & (slots < 0).view_as(asked)
        return missing.sum(dim=(0, 2, 3)), asked.sum(dim=(0, 2, 3))

    def _take(
        self,
        layers: slice,
        wanted: torch.Tensor,
        scores: torch.Tensor,
        normal_wanted: torch.Tensor,
        allowance: torch.Tensor,
        caps: torch.Tensor,
        lanes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Select, and fetch. allowance: [layers, lanes]; lanes: [entries], -1 for who is left out; None: all of the
        step's. Returns select's counters, [layers, entries, 5] int64."""
        sets, maps = self._sets, self._flat_maps(layers)
        lanes = self._flat_lanes(layers, lanes)
        num_layers = allowance.shape[0]
        plan = select_blocks(
            wanted,
            scores,
            normal_wanted,
            maps,
            lanes,
            sets.sparse.repeat(num_layers),
            self.ring.start.repeat(num_layers),
            allowance.flatten(),
            sets.step,
            sets.num_slots,
            caps.repeat(num_layers),
        )
        most = max(1, int((plan.blocks >= 0).sum(dim=2).max()))
        used = plan._replace(blocks=plan.blocks[..., :most].contiguous(), slots=plan.slots[..., :most].contiguous())
        pieces = sets.host.view(-1, 1, *sets.host.shape[2:])
        kv, table = self._flat_pages(layers)
        places = sets.host_pieces[layers].flatten(0, 1)
        fetch_blocks(used, maps, lanes, sets.step, pieces, 0, places, kv, table)
        return plan.counters.view(num_layers, len(self._lanes), -1, 5).sum(dim=2)

    def _retire(self, wanted: torch.Tensor) -> None:
        kv, table = self._flat_pages(slice(None))
        retiring = self.ring.retiring.repeat(self._sets.kv.shape[0])
        lanes, maps = self._flat_lanes(slice(None)), self._flat_maps(slice(None))
        retire_block(retiring, wanted, maps, lanes, self._sets.step, kv, table)

    def _recall(self, layer: int) -> None:
        """All that the normal row wants of this layer, before it attends."""
        sets, layers = self._sets, slice(layer, layer + 1)
        ranking = self._rank(self.ring.start, layers)
        wanted, scores = ranking.wanted[:, NORMAL], ranking.scores[:, NORMAL]
        unlimited = torch.full_like(sets.allowance[layers], wanted.shape[1] * sets.num_slots)
        caps = torch.full_like(self._lanes, sets.num_slots)
        counters = self._take(layers, wanted, scores, wanted, unlimited, caps)[0, :, :3]
        sets.by_layer[layer, :3] += counters.sum(dim=0)
        self._recalled += counters

    # ---- layers as lanes ----

    def _flat_lanes(self, layers: slice, lanes: torch.Tensor | None = None) -> torch.Tensor:
        lanes = self._lanes if lanes is None else lanes
        num_layers = len(range(*layers.indices(self._sets.kv.shape[0])))
        offsets = torch.arange(num_layers, device=lanes.device)[:, None] * self._sets.num_lanes
        return torch.where(lanes >= 0, lanes + offsets, -1).flatten()

    def _flat_maps(self, layers: slice) -> SlotMaps:
        return SlotMaps(*(table[layers].flatten(0, 1) for table in self._sets.maps))

    def _flat_pages(self, layers: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sets = self._sets
        kv = sets.kv[layers]
        offsets = torch.arange(kv.shape[0], device=kv.device, dtype=torch.int32)[:, None, None] * kv.shape[1]
        return kv.flatten(0, 1), (sets.page_table[:, : sets.num_slots + RING] + offsets).flatten(0, 1)


class Lookahead:
    """Makes the sparse part of steps. See `SparseStep`."""

    def __init__(self, sets: WorkingSets, *, recalls: bool) -> None:
        self.sets = sets
        self._recalls = recalls

    def begin(self, lanes: torch.Tensor, lengths: torch.Tensor, places: torch.Tensor) -> SparseStep:
        """A step of these lanes, resident ones among them."""
        return SparseStep(self.sets, lanes, lengths, places, recalls=self._recalls)
