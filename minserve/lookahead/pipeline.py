"""What a decode step does for the working sets of its sparse lanes, as its foreground sees it.

Owns: a step's rows, which queries are kept, and what limits the tokens that count. Does not know: plans, sampling,
models, or how blocks are chosen (background).

A step begins with its rows (`begin`). Every layer first waits for what was fetched for it (`enter`), says when its
queries are kept (`kept`) and when it has attended (`leave`); some layers do so together (layers.py). Behind the last,
the background is launched (`fetch`), which ranks blocks by these queries and fetches what the next step will want;
sampling asks it whose step has to run again (`limits`).
"""

import torch

from minserve.engine.plan import StepPlan
from minserve.kernels.accept_drafts import Limits
from minserve.kernels.keep_queries import Keep
from minserve.kernels.sparse_rows import LaneTables, SparseRows, begin_rows
from minserve.lookahead.background import Background
from minserve.lookahead.layers import groups_of
from minserve.lookahead.order import Order
from minserve.memory.working_sets import WorkingSets


class SparseStep:
    """The foreground of one step, from its first layer to its last. ahead: [entries] int64, which of a lane's rows
    looks ahead."""

    def __init__(self, lookahead: "Lookahead", rows: SparseRows, lanes: torch.Tensor, ahead: torch.Tensor) -> None:
        self._lookahead, self._lanes, self._ahead = lookahead, lanes, ahead
        self.rows = rows

    def enter(self, layer: int) -> Keep:
        """Before the layer writes keys and values; says which of its queries are kept."""
        lookahead = self._lookahead
        number, layers = lookahead.group_of[layer]
        if layer == layers[0]:
            lookahead.order.fetched[number].wait()
        return Keep(self._ahead, self._lanes, lookahead.sets.queries[layer])

    def kept(self, layer: int) -> None:
        """When they are; before the layer attends."""
        if self._lookahead.recalls:
            self._lookahead.background.recall(layer, len(self._lanes))

    def leave(self, layer: int) -> None:
        """When it has attended."""
        lookahead = self._lookahead
        number, layers = lookahead.group_of[layer]
        if layer == layers[-1]:
            lookahead.order.attended[number].record()


class Lookahead:
    """Makes the sparse part of steps.

    max_entries: of a step, padding and all. recalls: every layer has what it wants fetched before it attends.
    order: None: that of the device.
    layers_at_once: that the background ranks and fetches for in one call; None: as layers.py has it.
    background: its class, for whoever wants to watch it.
    """

    def __init__(
        self,
        sets: WorkingSets,
        *,
        recalls: bool,
        max_entries: int | None = None,
        order: Order | None = None,
        layers_at_once: int | None = None,
        background: type[Background] = Background,
    ) -> None:
        self.sets, self.recalls = sets, recalls
        self._tables = LaneTables(sets.num_tokens, sets.ring_start, sets.sparse, sets.looks_ahead, sets.num_verified)
        groups = groups_of(sets.kv.device, sets.kv.shape[0], layers_at_once)
        self.group_of = [(number, layers) for number, layers in enumerate(groups) for _ in layers]
        self.order = order or Order.of(sets.kv.device, len(groups))
        room = max_entries or sets.num_lanes
        self.background = background(sets, self.order, room, groups=groups, recalls=recalls)

    def prepare(self, plan: StepPlan) -> None:
        """Write what the plan changes. Before its step."""
        self.order.taken.wait()
        if plan.demotions or not plan.keeps_queries:
            self.order.ended.wait()
        self.sets.prepare(plan)

    def settle(self) -> None:
        """Wait, on the host, until the background of the last step has ended."""
        self.order.streams.synchronize()

    def begin(self, lanes: torch.Tensor, lengths: torch.Tensor, places: torch.Tensor) -> SparseStep:
        """A step of these lanes, resident ones among them. lanes: [entries] int64, -1: padding; lengths, places: [rows]
        int64, from `step_inputs`."""
        self.order.foreground()
        sets, given = self.sets, self.background.given[:, : len(lanes)]
        rows, ahead = begin_rows(lengths, places, sets.page_table, self._tables, lanes, given, sets.num_slots)
        if self.recalls:
            self.background.recalled.zero_()
        self.order.begun.record()
        return SparseStep(self, rows, lanes, ahead)

    def forget(self) -> None:
        """No lane takes part in a background that is launched now. An empty foreground, in order to record others."""
        self.order.foreground()
        self.background.given[0].fill_(-1)
        for signal in (self.order.begun, *self.order.attended):
            signal.record()

    def fetch(self, num_entries: int) -> None:
        """Launch the background of a step, when all of its layers have been."""
        with self.order.background():
            self.background.run(num_entries)

    def limits(self, num_entries: int) -> Limits:
        """Which tokens may count of the step whose background was launched last."""
        self.order.ranked.wait()
        return Limits(self.background.again[:num_entries], self.sets.sparse, self.sets.num_verified)

    def fetched(self, num_entries: int) -> torch.Tensor:
        """[entries, 5] int64, the fields of `Fetched`, of the same step; behind `limits`, which waits for them.
        Overwritten by the next."""
        return self.background.counters[:num_entries]
