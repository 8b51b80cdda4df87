"""The background of a step: what is fetched for the next one, layer by layer.

Owns: the order of predict, select and fetch, whose step has to run again, and what is counted. Does not know: how
tokens are made, or what a step's plan says.

It begins with what the step's foreground found (`given`), which it copies, so that the next foreground may change
that. All of it is a function of tensors on the device, so that a graph may hold it.

Whether a step runs again is known when all layers have been ranked, and fetches do not wait for that. So what the row
that runs again lacks is fetched behind what its lookahead row wants, and is counted in its next step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from minserve.kernels.select_blocks import FetchPlan
from minserve.kernels.sparse_rows import Ring
from minserve.lookahead.layers import LAYERS_AT_ONCE, LayerGroup
from minserve.lookahead.order import NUM_FETCHERS, Order
from minserve.memory.working_sets import WorkingSets
from minserve.models.config import ModelConfig

LANES, START, NEXT_START, RETIRING = range(4)
"""The rows of what is given."""

COUNTERS = 5
"""As in `Fetched`: hits, misses, cut, surprises, asked."""


class Entries(NamedTuple):
    """lanes: [entries] int64, -1 for padding and for who is not sparse; own, at: the same, with lane 0 in place of -1,
    and with the row behind all lanes; ring; step: [1] int32, the clock of slot_used."""

    lanes: torch.Tensor
    own: torch.Tensor
    at: torch.Tensor
    ring: Ring
    step: torch.Tensor


class Background:
    """Of steps of up to so many entries. groups: of layers, as from `groups_of`.

    given: [4, max_entries] int64, by the rows above; again: [max_entries] bool, whose step has to run again;
    counters: [max_entries, 5] int64, the fields of `Fetched`; recalled: [max_entries, 3] int64, what the foreground has
    fetched by itself, where it recalls.
    """

    def __init__(
        self, sets: WorkingSets, order: Order, max_entries: int, *, groups: Sequence[range], recalls: bool
    ) -> None:
        self._sets, self._order, self._recalls = sets, order, recalls
        device, num_layers = sets.kv.device, sets.kv.shape[0]
        self._groups = [LayerGroup(sets, layers, cut=order.on_host) for layers in groups]
        singles = [range(layer, layer + 1) for layer in range(num_layers)] if recalls else []
        self._layers = [LayerGroup(sets, layers, cut=order.on_host) for layers in singles]
        self.given = torch.full((4, max_entries + max_entries % 2), -1, dtype=torch.int64, device=device)
        self.again = torch.zeros(max_entries, dtype=torch.bool, device=device)
        self.counters = torch.zeros(max_entries, COUNTERS, dtype=torch.int64, device=device)
        self.recalled = torch.zeros(max_entries, 3, dtype=torch.int64, device=device)

    @staticmethod
    def bytes_for(model: ModelConfig, num_slots: int, max_blocks: int, max_entries: int) -> int:
        """Bytes that passes on a GPU need beside the working sets: what is wanted, and the plans, of all layers, and
        the logits, scores and lists of a few groups. Twice: those of graphs, and of a pass that is in none."""
        each_layer = 2 * max_blocks + 8 * num_slots
        passing = 20 * max_blocks + (1 + NUM_FETCHERS) * 24 * num_slots
        heads = model.num_kv_heads * (model.num_layers * each_layer + LAYERS_AT_ONCE * passing)
        return 2 * max_entries * (heads + LAYERS_AT_ONCE * model.num_heads * 8 * max_blocks)

    def run(self, num_entries: int) -> None:
        """Of the step whose foreground has been launched last, up to its logits. On the background's stream."""
        sets, order = self._sets, self._order
        order.begun.wait()
        entries = self._take_given(num_entries)
        order.taken.record()
        wanted, plans, lacking = self._fetch(entries)
        counters = torch.cat([group.counters(plan) for group, plan in zip(self._groups, plans, strict=True)])
        totals = counters.sum(dim=0)
        again = (lacking > sets.retry_above[entries.own]) & ~sets.retried[entries.own] & (entries.lanes >= 0)
        self.again[:num_entries] = again
        order.ranked.record()
        self._count(entries, counters, totals)
        order.counted.record()
        with order.streams.finishing():
            late = self._finish(entries, again, wanted)
        order.streams.join()
        sets.late[entries.at] = late.sum(dim=0)
        sets.retried[entries.at] = again
        if not self._recalls:  # else nobody runs again, and the foreground counts
            sets.by_layer[:, 1] += late.sum(dim=1)
        order.ended.record()

    def _take_given(self, num_entries: int) -> Entries:
        sets = self._sets
        # Of even width, so that every row begins at 16 bytes: kernels are compiled for that.
        given = self.given[:, : num_entries + num_entries % 2].clone()
        lanes, start, next_start, retiring = given[:, :num_entries]
        at = torch.where(lanes < 0, sets.num_lanes, lanes)
        takes_part = torch.zeros_like(sets.retried)
        takes_part.index_fill_(0, at, True)  # `takes_part[at] = True` would have the host wait
        more, most = sets.refills.clone()
        more = torch.where(sets.retried[:-1], 0, more)  # a lane has what it has for a token, not for a step
        refilled = torch.minimum(sets.allowance + more, most)
        sets.allowance.copy_(torch.where(takes_part[:-1], refilled, sets.allowance))
        return Entries(lanes, lanes.clamp_min(0), at, Ring(start, next_start, retiring), sets.step.clone())

    def _fetch(self, entries: Entries) -> tuple[list[torch.Tensor], list[FetchPlan], torch.Tensor]:
        """What each group's lookahead rows want. Returns what is wanted, as from `rank`, the plans, and what is
        lacking, the mean over layers and KV heads: [entries] float32."""
        sets, order = self._sets, self._order
        caps = torch.zeros_like(entries.lanes) if self._recalls else sets.cap[entries.own]
        wanted, plans, lacking = [], [], []
        for number, group in enumerate(self._groups):
            order.attended[number].wait()
            group.look_up()
            ranked = group.rank(entries.lanes, entries.ring.start, entries.ring.next_start)
            plan = group.select(
                entries.lanes,
                ranked.wanted[:, LOOKAHEAD],
                ranked.scores[:, LOOKAHEAD],
                ranked.wanted[:, NORMAL],
                entries.ring.start,
                sets.allowance[group.part],
                entries.step,
                caps,
            )
            with order.streams.fetching(number):
                group.fetch(plan, entries.lanes, entries.step)
            wanted.append(ranked.wanted)
            plans.append(plan)
            lacking.append(ranked.lacking.view(group.num_layers, -1, group.num_kv_heads))
        return wanted, plans, torch.cat(lacking).mean(dim=(0, 2))

    def _count(self, entries: Entries, counters: torch.Tensor, totals: torch.Tensor) -> None:
        """counters: [layers, entries, 5], zero for who takes no part; totals: their sum over the layers."""
        sets, num_entries = self._sets, len(totals)
        spent = (counters[..., 1] - counters[..., 2]).to(torch.int32)
        sets.allowance.index_add_(1, entries.own, spent, alpha=-1)
        if self._recalls:
            totals[:, :3] = self.recalled[:num_entries]
        else:
            sets.by_layer += counters[..., :4].sum(dim=1)
        totals[:, 1] += torch.where(entries.lanes >= 0, sets.late[entries.own], 0)
        self.counters[:num_entries] = totals

    def _finish(self, entries: Entries, again: torch.Tensor, ranked: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fetches what rows lack that run again, and retires what leaves the rings, layer by layer. Returns how many
        blocks of each layer were fetched: [layers, entries] int64."""
        order = self._order
        lanes, retiring = torch.where(again, entries.lanes, -1), entries.ring.retiring
        # The ring of who runs again begins a block later then: that block has to be there, and evict nothing wanted.
        own_retiring, again_retiring = torch.where(again, -1, retiring), torch.where(again, retiring, -1)
        runs_again = not order.on_host or bool(again.any())
        fetched = []
        for number, (group, wanted) in enumerate(zip(self._groups, ranked, strict=True)):
            order.streams.wait_for(number)
            if runs_again:
                plan = self._take_all(group, lanes, wanted[:, NORMAL], entries.ring.start, entries.step)
                fetched.append(group.counters(plan))
                group.retire(again_retiring, entries.lanes, wanted[:, NORMAL], entries.step)
            group.retire(own_retiring, entries.lanes, wanted[:, LOOKAHEAD], entries.step)
            order.fetched[number].record()
        if not runs_again:
            return torch.zeros(len(self._sets.by_layer), len(lanes), dtype=torch.int64, device=lanes.device)
        counters = torch.cat(fetched)
        return counters[..., 1] - counters[..., 2]

    def _take_all(
        self,
        group: LayerGroup,
        lanes: torch.Tensor,
        wanted: torch.Tensor,
        ring_start: torch.Tensor,
        step: torch.Tensor,
    ) -> FetchPlan:
        """Fetch all that is wanted and not there. There are slots for it, so that no score decides."""
        num_slots = self._sets.num_slots
        unlimited = torch.full_like(self._sets.allowance[group.part], group.num_kv_heads * num_slots)
        caps = torch.full_like(lanes, num_slots)
        scores = torch.zeros(wanted.shape, device=wanted.device)
        plan = group.select(lanes, wanted, scores, wanted, ring_start, unlimited, step, caps)
        group.fetch(plan, lanes, step)
        return plan

    def recall(self, layer: int, num_entries: int) -> None:
        """Fetch all that the layer's normal rows want, in the foreground, before they attend. They rank what the
        background will, so that nothing surprises it."""
        sets, group = self._sets, self._layers[layer]
        lanes, ring_start, end, _ = self.given[:, :num_entries]
        wanted = group.rank(lanes, ring_start, end).wanted
        plan = self._take_all(group, lanes, wanted[:, NORMAL], ring_start, sets.step)
        counters = group.counters(plan)[0, :, :3]
        sets.by_layer[layer, :3] += counters.sum(dim=0)
        self.recalled[:num_entries] += counters
