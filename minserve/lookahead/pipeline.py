"""What a decode step does for the working sets of its sparse lanes, as its foreground sees it.

Owns: a step's rows, the queries that are kept, and how many of a lane's tokens count. Does not know: plans, sampling,
models, or how blocks are chosen (background).

A step begins with its rows (`begin`). Every layer first waits for what was fetched for it (`enter`), gives its queries
(`keep`), and says when it has attended (`leave`); some layers do so together (layers.py). Behind the last, the
background is launched (`fetch`), which ranks blocks by these queries and fetches what the next step will want; sampling
asks it whose step has to run again (`most_accepted`).
"""

import torch

from minserve.engine.plan import StepPlan
from minserve.kernels.keep_queries import keep_queries
from minserve.kernels.sparse_rows import SparseRows, advance_ring, sparse_rows
from minserve.lookahead.background import LANES, NEXT_START, RETIRING, START, Background
from minserve.lookahead.layers import groups_of
from minserve.lookahead.order import Kind, Order
from minserve.memory.working_sets import WorkingSets


class SparseStep:
    """The foreground of one step, from its first layer to its last. ahead: [entries] int64, which of a lane's rows
    looks ahead."""

    def __init__(self, lookahead: "Lookahead", rows: SparseRows, lanes: torch.Tensor, ahead: torch.Tensor) -> None:
        self._lookahead, self._lanes, self._ahead = lookahead, lanes, ahead
        self.rows = rows

    def enter(self, layer: int) -> None:
        """Before the layer writes keys and values."""
        lookahead = self._lookahead
        number, layers = lookahead.group_of[layer]
        if layer == layers[0]:
            lookahead.order.fetched[number].wait()

    def keep(self, layer: int, q: torch.Tensor) -> None:
        """Before the layer attends. q: [rows, heads, head_dim]."""
        lookahead = self._lookahead
        keep_queries(q, self._ahead, self._lanes, lookahead.sets.queries[layer])
        if lookahead.recalls:
            lookahead.background.recall(layer, len(self._lanes))

    def leave(self, layer: int) -> None:
        """When it has attended."""
        lookahead = self._lookahead
        number, layers = lookahead.group_of[layer]
        if layer == layers[-1]:
            lookahead.order.attended[number].record()


class Lookahead:
    """Makes the sparse part of steps.

    max_entries: of a step, padding and all. recalls: every layer has what it wants fetched before it attends.
    order: None: that of the device, by signals of this kind; None: the usual one.
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
        signals: Kind | None = None,
        layers_at_once: int | None = None,
        background: type[Background] = Background,
    ) -> None:
        self.sets, self.recalls = sets, recalls
        groups = groups_of(sets.kv.device, sets.kv.shape[0], layers_at_once)
        self.group_of = [(number, layers) for number, layers in enumerate(groups) for _ in layers]
        self.order = order or Order.of(sets.kv.device, len(groups), signals)
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
        own = lanes.clamp_min(0)
        takes_part = (lanes >= 0) & sets.sparse[own]
        last = len(lengths) // max(len(lanes), 1) - 1
        ring = advance_ring(sets.num_tokens, sets.ring_start, sets.sparse, lanes)
        rows = sparse_rows(lengths, places, sets.page_table, sets.sparse, lanes, ring.start, sets.num_slots)
        given[LANES] = torch.where(takes_part, lanes, -1)
        given[START], given[NEXT_START], given[RETIRING] = ring
        if self.recalls:
            self.background.recalled.zero_()
        self.order.begun.record()
        behind = torch.where(sets.looks_ahead[own], sets.num_verified[own] + 1, 0).clamp_max(last)
        # A lane that is resident yet is ranked by the last row there is, when it is demoted.
        return SparseStep(self, rows, lanes, torch.where(takes_part, behind, last))

    def forget(self) -> None:
        """No lane takes part in a background that is launched now. An empty foreground, in order to record others."""
        self.order.foreground()
        self.background.given[LANES].fill_(-1)
        for signal in (self.order.begun, *self.order.attended):
            signal.record()

    def fetch(self, num_entries: int) -> None:
        """Launch the background of a step, when all of its layers have been."""
        with self.order.background():
            self.background.run(num_entries)

    def most_accepted(self, lanes: torch.Tensor, rows_per_entry: int) -> torch.Tensor:
        """[entries] int64: how many of each lane's tokens may count; of the step whose background was launched last."""
        sets, own = self.sets, lanes.clamp_min(0)
        self.order.ranked.wait()
        verified = 1 + sets.num_verified[own]
        most = torch.where((lanes >= 0) & sets.sparse[own], verified, rows_per_entry)
        return torch.where(self.background.again[: len(lanes)], 0, most)

    def fetched(self, num_entries: int) -> torch.Tensor:
        """[entries, 5] int64, the fields of `Fetched`, of the same step. Overwritten by the next."""
        self.order.counted.wait()
        return self.background.counters[:num_entries]
