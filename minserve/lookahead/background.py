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

from minserve.kernels.fetch_accounts import COUNTERS, Accounts, Outcome, count_fetches, take_given
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from minserve.kernels.select_blocks import FetchPlan
from minserve.kernels.shortlist_blocks import shortlist_length
from minserve.kernels.sparse_rows import Ring
from minserve.lookahead.layers import LAYERS_AT_ONCE, LayerGroup, Stack
from minserve.lookahead.order import Order
from minserve.memory.working_sets import WorkingSets
from minserve.models.config import ModelConfig


class Entries(NamedTuple):
    """lanes: [entries] int64, -1 for padding and for who is not sparse; own, at: the same, with lane 0 in place of -1,
    and with the row behind all lanes; ring; caps: [entries] int64, of own; step: [1] int32, the clock of slot_used.
    stacks: by the number of layers of a group, as far as they were needed. held: what other streams read; if it were
    given back before they have joined, it would be written by whatever comes next.
    """

    lanes: torch.Tensor
    own: torch.Tensor
    at: torch.Tensor
    ring: Ring
    caps: torch.Tensor
    step: torch.Tensor
    stacks: dict[int, tuple[Stack, Sequence[torch.Tensor]]]
    held: list[torch.Tensor]


class Chosen(NamedTuple):
    """Of each group: wanted and worth, as in `Ranking`, and what is fetched. lacking: [layers * entries, kv_heads]
    float32, of all."""

    wanted: list[torch.Tensor]
    worth: list[torch.Tensor]
    plans: list[FetchPlan]
    lacking: torch.Tensor


class Background:
    """Of steps of up to so many entries. groups: of layers, as from `groups_of`.

    given: [4, max_entries] int64, as from `begin_rows`; again: [max_entries] bool, whose step has to run again;
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
        kv_heads, max_blocks = sets.maps.block_slot.shape[2:]
        self._no_scores = torch.zeros(kv_heads * max_blocks, device=device)
        self._accounts = Accounts(sets.refills, sets.cap, sets.allowance, sets.retry_above, sets.since_retry, sets.late)
        unlimited = torch.iinfo(torch.int32).max
        self._unlimited = torch.full((num_layers * sets.num_lanes,), unlimited, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_for(model: ModelConfig, num_slots: int, max_blocks: int, max_entries: int, *, recalls: bool) -> int:
        """Bytes that passes on a GPU need beside the working sets: what is wanted, and the plans, of all layers, and
        the logits, scores and lists of a few groups, and of one layer in the foreground if that recalls. Twice: those
        of graphs, and of a pass that is in none."""
        each_layer = 3 * max_blocks + (8 + 16) * num_slots
        passing = 16 * max_blocks + 24 * num_slots + 4 * shortlist_length(num_slots)
        heads = model.num_kv_heads * (model.num_layers * each_layer + LAYERS_AT_ONCE * passing)
        group = model.num_heads // model.num_kv_heads
        of_logits = 8 * (model.num_kv_heads << (group - 1).bit_length()) * max_blocks
        recalled = model.num_kv_heads * passing + of_logits if recalls else 0
        return 2 * max_entries * (heads + LAYERS_AT_ONCE * of_logits + recalled)

    def run(self, num_entries: int) -> None:
        """Of the step whose foreground has been launched last, up to its logits. On the background's stream."""
        sets, order = self._sets, self._order
        order.begun.wait()
        entries = self._take_given(num_entries)
        order.taken.record()
        chosen = self._fetch(entries)
        counters = torch.cat([plan.counters for plan in chosen.plans])
        counters = counters.view(len(sets.by_layer), num_entries, -1, COUNTERS)
        again, totals = self.again[:num_entries], self.counters[:num_entries]
        lacking = chosen.lacking.view(counters.shape[:3])
        count_fetches(counters, lacking, entries.lanes, self._accounts, Outcome(again, totals))
        if self._recalls:
            totals[:, :3] = self.recalled[:num_entries]
        order.ranked.record()
        with order.streams.finishing():
            late = self._finish(entries, again, chosen)
        by_layer = counters.sum(dim=(1, 2))[:, :4]
        order.streams.join()
        sets.late[entries.at] = late.sum(dim=0)
        if not self._recalls:  # else nobody runs again, and the foreground counts
            sets.by_layer += by_layer
            sets.by_layer[:, 1] += late.sum(dim=1)
        order.ended.record()

    def _take_given(self, num_entries: int) -> Entries:
        taken, step = take_given(self.given[:, :num_entries], self._accounts, self._sets.step)
        lanes, start, next_start, retiring, own, at, caps = taken
        return Entries(lanes, own, at, Ring(start, next_start, retiring), caps, step, {}, [])

    def _stacked(self, entries: Entries, num_layers: int) -> tuple[Stack, Sequence[torch.Tensor]]:
        """And where the rings of this step's rows and of the next one's begin, and caps; made when first needed."""
        if num_layers not in entries.stacks:
            ring = entries.ring
            caps = torch.zeros_like(entries.caps) if self._recalls else entries.caps
            stack = self._stack(num_layers, entries.lanes, ring.next_start)
            entries.stacks[num_layers] = stack, stack.repeat(ring.start, ring.next_start, caps)
        return entries.stacks[num_layers]

    def _stack(self, num_layers: int, lanes: torch.Tensor, end: torch.Tensor) -> Stack:
        """end: [entries], of what is ranked."""
        num_blocks = max(1, int(end.max())) if self._order.on_host else self._sets.host_table.shape[1]
        return Stack.of(self._sets, num_layers, lanes, num_blocks)

    def _fetch(self, entries: Entries) -> Chosen:
        """What each group's lookahead rows want."""
        sets, order = self._sets, self._order
        wanted, worth, plans, lacking = [], [], [], []
        for number, group in enumerate(self._groups):
            stack, (start, end, caps) = self._stacked(entries, group.num_layers)
            order.attended[number].wait()
            ranked = group.rank(stack, entries.own, start, end)
            plan = group.select(
                stack.lanes,
                ranked.wanted[:, LOOKAHEAD],
                ranked.scores,
                ranked.wanted[:, NORMAL],
                start,
                sets.allowance[group.part].flatten(),
                entries.step,
                caps,
            )
            fetching = order.streams.fetching(number)
            entries.held.extend(group.fetch(plan, stack.lanes, entries.step, stack.page_table, fetching))
            wanted.append(ranked.wanted)
            worth.append(ranked.worth)
            plans.append(plan)
            lacking.append(ranked.lacking)
        return Chosen(wanted, worth, plans, torch.cat(lacking))

    def _finish(self, entries: Entries, again: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        """Fetches what is worth it of what rows lack that run again, and retires what leaves the rings, layer by layer.
        Returns how many blocks of each layer were fetched: [layers, entries] int64."""
        order, layers = self._order, len(self._sets.by_layer)
        runs_again = not order.on_host or bool(again.any())
        counters = []
        # The ring of who runs again begins a block later then: that block has to be there, and evict nothing wanted.
        repeated: dict[int, Sequence[torch.Tensor]] = {}
        for size, (stack, _) in entries.stacks.items():
            retiring, row = stack.repeat(entries.ring.retiring, again.to(torch.int64))
            repeated[size] = retiring, row, torch.where(row == NORMAL, stack.lanes, -1)
        for number, (group, wanted, worth) in enumerate(zip(self._groups, chosen.wanted, chosen.worth, strict=True)):
            stack, (start, _, _) = entries.stacks[group.num_layers]
            retiring, row, lanes = repeated[group.num_layers]
            order.streams.wait_for(number)
            if runs_again:
                counters.append(self._take_all(group, stack, lanes, worth, start, entries.step).counters)
            group.retire(retiring, wanted, row, stack.lanes, entries.step, stack.page_table)
            order.fetched[number].record()
        if not runs_again:
            return torch.zeros(layers, len(again), dtype=torch.int64, device=again.device)
        fetched = torch.cat(counters)
        return (fetched[..., 1] - fetched[..., 2]).view(layers, len(again), -1).sum(dim=2)

    def _take_all(
        self,
        group: LayerGroup,
        stack: Stack,
        lanes: torch.Tensor,
        wanted: torch.Tensor,
        ring_start: torch.Tensor,
        step: torch.Tensor,
    ) -> FetchPlan:
        """Fetch all that is wanted and not there. There are slots for it, so that no score decides.

        lanes: those of the stack, or -1.
        """
        scores = self._no_scores[: wanted[0].numel()].view(1, *wanted.shape[1:]).expand_as(wanted)
        unlimited = self._unlimited[: group.num_layers * self._sets.num_lanes]
        plan = group.select(lanes, wanted, scores, wanted, ring_start, unlimited, step, None)
        group.fetch(plan, lanes, step, stack.page_table)
        return plan

    def recall(self, layer: int, num_entries: int) -> None:
        """Fetch all that the layer's normal rows want, in the foreground, before they attend. They rank what the
        background will, so that nothing surprises it."""
        sets, group = self._sets, self._layers[layer]
        lanes, ring_start, end, _ = self.given[:, :num_entries]
        stack = self._stack(1, lanes, end)
        wanted = group.rank(stack, lanes.clamp_min(0), ring_start, end).wanted
        plan = self._take_all(group, stack, lanes, wanted[:, NORMAL], ring_start, sets.step)
        counters = group.counters(plan)[0, :, :3]
        sets.by_layer[layer, :3] += counters.sum(dim=0)
        self.recalled[:num_entries] += counters
