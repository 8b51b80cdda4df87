"""One step of the engine: what the scheduler decided, immutable, and what the runner made of it.

Owns: the words that scheduler, memory and runner exchange. Imports no torch.

A plan names requests by their lanes. It names neither tokens nor positions of decode rows: those may not be known on
the host yet, and are read on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minserve.grammar import Mask
from minserve.protocol import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSetup:
    """A request takes a lane: its sampling state has to be written before its first row.

    token_ids: the prompt and, for a request that was preempted, what it had generated; given if it is penalized.
    num_tokens: how many these are; start: the first position that is computed in this lane; end: no token will ever
    stand at or after this position.
    end_token_ids: tokens that end it, not to be sampled before min_tokens. last_token: the input of its first decode
    row, if it comes back with all other KV cached. constrained: every step in which it samples brings a mask.
    """

    lane: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_tokens: int
    start: int
    end: int
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    last_token: int
    penalized: bool
    constrained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a prompt: token_ids are those at positions [start, start + len(token_ids)) of the lane.

    samples: it reaches the end, so its last row yields the next token. following: the token after it, which is known if
    that is not so; else -1.
    prompt_targets: the tokens whose log probabilities are wanted, one a row: the next prompt token of each (at most
    as many as rows); prompt_logprobs: with how many alternatives.
    """

    lane: int
    start: int
    token_ids: Sequence[int]
    samples: bool
    following: int = -1
    prompt_targets: Sequence[int] = ()
    prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A lane that yields tokens.

    logprobs: how many alternatives to report of each, or None. adjusted: it has a grammar, penalties, bias or a minimum
    length.
    """

    lane: int
    logprobs: int | None
    adjusted: bool


@dataclass(frozen=True, slots=True)
class SparsePolicy:
    """How a sparse lane chooses its blocks.

    looks_ahead: by the draft row behind those that it verifies, else by the normal row. num_verified: drafts that one
    step accepts at most. cap: blocks that a KV head of a layer takes in per step at most. retry_above: what is lacking
    of the normal row's attention (kernels/rank_blocks.py; mean over layers and heads) above which a step accepts
    nothing, fetches what matters of it, and runs again, sooner in the first step and for some behind one that ran
    again; None: never.
    """

    looks_ahead: bool
    num_verified: int
    cap: int
    retry_above: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demotion:
    """A resident lane becomes sparse, in its own pages. None of its rows is under way.

    Of its num_tokens tokens all but the last have KV. With start = max((num_tokens - 1) // 16 - 1, 0), the blocks from
    start on are in the ring, and min(start, K) of those before go into slots, for each layer and KV head by the
    queries that its last step has left.

    pages: of each block, before. slot_pages: K; slot_blocks: the block that each of these holds before, if it is one
    before start that nobody else needs there; -1: nothing of value, as in all but the first min(start, K).
    ring_pages: 3, block b in ring_pages[b % 3]; ring_copies: (page, page), what has to be copied for that.
    host_blocks: of the blocks before start, which they hold by now.
    """

    lane: int
    policy: SparsePolicy
    num_tokens: int
    pages: Sequence[int]
    slot_pages: Sequence[int]
    slot_blocks: Sequence[int]
    ring_pages: Sequence[int]
    ring_copies: Sequence[tuple[int, int]]
    host_blocks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does, in this order: set lanes up, write new pages into tables, demote, run chunks, decode, sample.

    new_pages: (lane, first block, pages). decodes: lanes that compute their last token and num_drafts drafts behind it,
    one row each. samples: those of the chunks that reach their end, then one for each of decodes; all of them propose
    num_proposals drafts for the next step. masked: lanes whose next token a grammar chooses from, and masks: of
    each of them, for its rows (`Grammars.masks`).

    keeps_queries: some lane of decodes is sparse, or may become so before its next step. stored: (sparse lane, block,
    host block), full blocks, still in the ring, that host blocks hold by now; to be taken after the demotions, since
    what is demoted in this plan has its newest full block among them. refills: (sparse lane, blocks, most), what
    it may fetch more in each layer, over all heads, and how much of that it may have saved up.
    """

    step: int
    setups: Sequence[LaneSetup] = ()
    new_pages: Sequence[tuple[int, int, Sequence[int]]] = ()
    chunks: Sequence[Chunk] = ()
    decodes: Sequence[int] = ()
    num_drafts: int = 0
    num_proposals: int = 0
    samples: Sequence[Sample] = ()
    masked: Sequence[int] = ()
    masks: Mask = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int32))
    keeps_queries: bool = False
    demotions: Sequence[Demotion] = ()
    stored: Sequence[tuple[int, int, int]] = ()
    refills: Sequence[tuple[int, int, int]] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decodes)


class Fetched(NamedTuple):
    """What a step did for the working set of a lane, over all layers and KV heads: blocks of one head each.

    hits, misses: wanted for the next step, and held or not; cut: misses that were not fetched.
    surprises: what the normal row of this step wanted and did not have; asked: all that it wanted outside the ring.
    """

    hits: int
    misses: int
    cut: int
    surprises: int
    asked: int


@dataclass(slots=True)
class StepResult:
    """What a step gave: for each of the plan's samples one token, and one more for each draft that was accepted; their
    log probabilities, where asked for. None at all for a sparse lane whose step has to run again.

    prompt_logprobs: one list for each of the plan's chunks, one entry for each of its prompt_targets.
    seconds: what such a step takes; None if this one does not tell.
    drafts: what was proposed to each of the plan's masked lanes, -1 where nothing; empty if nothing was to any.
    fetched: one for each of the plan's decodes, zeros for resident lanes; empty if the plan keeps no queries.
    """

    step: int
    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = field(default_factory=list)
    seconds: float | None = None
    drafts: Sequence[Sequence[int]] = ()
    fetched: Sequence[Fetched] = ()
