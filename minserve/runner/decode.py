"""One decode step as functions of device tensors alone, run as they stand or replayed from CUDA graphs (graphs).

Owns: the order of a decode step. Does not know: plans, requests, the queue.

A step reads which lanes take part and finds all else in the lanes' tables: last tokens, drafts, lengths, pages,
sampling state. Nothing in it depends on values that the host knows, so what was captured once serves every step of its
shape.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.step_inputs import step_inputs
from minserve.lookahead.pipeline import Lookahead
from minserve.memory.lanes import Lanes
from minserve.memory.transfer import to_device
from minserve.models.causal_lm import AuxStates, CausalLM
from minserve.runner.attention import DecodeAttention, KVContext
from minserve.runner.sampler import Sampler
from minserve.spec.draft import Drafter, NoDrafter

PADDING = -1
"""The lane of an entry that stands for nobody: it reads and writes nothing."""


class StepKind(NamedTuple):
    """What the host decides of a decode step.

    num_drafts: rows of each lane behind its first; num_proposals: drafts to propose for the next step; adjusted: some
    lane has bias, penalties or a least length; keeps_queries: some lane is sparse, or may soon be.
    """

    num_drafts: int = 0
    num_proposals: int = 0
    adjusted: bool = False
    keeps_queries: bool = False


class DecodeRows(NamedTuple):
    """What the model is given for the rows of a decode. token_ids: [lanes * rows] int64."""

    token_ids: torch.Tensor
    attend: DecodeAttention


class Decoded(NamedTuple):
    """What a step gave. logits: [lanes * rows, vocab] in the model's dtype; tokens: [lanes, rows] int64, what follows
    each row; counts: [lanes] int64, how many of a lane's are its text; fetched: [lanes, 5] int64, the fields of
    `Fetched`, if queries were kept."""

    logits: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    fetched: torch.Tensor | None = None


def new_aux(drafter: Drafter | NoDrafter, model: CausalLM, num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Room for the states of so many rows of the model that the drafter reads, in the dtype and on the device of
    `like`."""
    return like.new_empty(num_rows, len(drafter.aux_layers) * model.config.hidden_size)


class Decode:
    """The parts of a step, and a whole one. lane_ids: [lanes] int64, each lane at most once; or PADDING."""

    def __init__(
        self,
        model: CausalLM,
        context: KVContext,
        lanes: Lanes,
        sampler: Sampler,
        drafter: Drafter | NoDrafter,
        lookahead: Lookahead | None = None,
    ) -> None:
        """lookahead: None: no lane is ever sparse."""
        self.lookahead = lookahead
        self._model = model
        self._context = context
        self._lanes = lanes
        self._sampler = sampler
        self._drafter = drafter

    @property
    def has_drafter(self) -> bool:
        """Whether `propose` does anything."""
        return bool(self._drafter.aux_layers)

    def rows(self, lane_ids: torch.Tensor, num_drafts: int, *, keeps_queries: bool = False) -> DecodeRows:
        """Each lane's newest token, and its drafts behind it."""
        lanes, context = self._lanes, self._context
        token_ids, positions, places, lengths = step_inputs(
            lanes.last_token,
            lanes.drafts,
            lanes.num_tokens,
            lanes.end,
            context.page_table,
            lane_ids,
            num_drafts,
            BLOCK_SIZE,
        )
        sparse = None
        if keeps_queries:
            assert self.lookahead is not None, "a plan keeps queries where no lane is ever sparse"
            sparse = self.lookahead.begin(lane_ids, lengths, places)
        attend = DecodeAttention(context, lane_ids, positions, places, lengths, sparse)
        return DecodeRows(token_ids, attend)

    def forward(
        self, lane_ids: torch.Tensor, num_drafts: int, aux: torch.Tensor, *, keeps_queries: bool = False
    ) -> torch.Tensor:
        """Logits [lanes * rows, vocab] of these rows, in the model's dtype.

        aux: [lanes * rows, aux_size], filled with the states that the drafter reads.
        """
        rows = self.rows(lane_ids, num_drafts, keeps_queries=keeps_queries)
        states = self._model(rows.token_ids, rows.attend, AuxStates(self._drafter.aux_layers, aux))
        return self._model.logits(states)

    def sample(
        self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool, keeps_queries: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, counts) as in `Decoded`; they are also written to the lanes. keeps_queries: as in the step, whose
        background has been launched."""
        limits = self.lookahead.limits(len(lane_ids)) if keeps_queries and self.lookahead is not None else None
        return self._sampler.sample(logits, lane_ids, adjusted=adjusted, limits=limits)

    def propose(
        self, aux: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, lane_ids: torch.Tensor, num_proposals: int
    ) -> None:
        """Write the lanes' next drafts into the lanes."""
        self._drafter.propose(aux, tokens, counts, lane_ids, num_proposals)

    def new_aux(self, num_rows: int) -> torch.Tensor:
        """As the function."""
        return new_aux(self._drafter, self._model, num_rows, self._context.kv)

    def drafts_of(self, lanes: Sequence[int]) -> torch.Tensor:
        """[lanes, MAX_DRAFT_TOKENS] int64: what these lanes will verify."""
        return self._lanes.drafts[to_device(lanes, torch.int64, self._lanes.device)]

    def run(self, lanes: Sequence[int], kind: StepKind) -> Decoded:
        """A step of these lanes."""
        lane_ids = to_device(lanes, torch.int64, self._lanes.device)
        aux = self.new_aux(len(lanes) * (1 + kind.num_drafts))
        logits = self.forward(lane_ids, kind.num_drafts, aux, keeps_queries=kind.keeps_queries)
        return self.finish(logits, lane_ids, aux, kind)

    def finish(self, logits: torch.Tensor, lane_ids: torch.Tensor, aux: torch.Tensor, kind: StepKind) -> Decoded:
        """What comes behind `forward`: fetch for the working sets, sample, propose."""
        lookahead = self.lookahead if kind.keeps_queries else None
        if lookahead is not None:
            lookahead.fetch(len(lane_ids))
        tokens, counts = self.sample(logits, lane_ids, adjusted=kind.adjusted, keeps_queries=kind.keeps_queries)
        self.propose(aux, tokens, counts, lane_ids, kind.num_proposals)
        fetched = None if lookahead is None else lookahead.fetched(len(lane_ids))
        return Decoded(logits, tokens, counts, fetched)
