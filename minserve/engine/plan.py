"""One step of the engine: what the scheduler decided, immutable, and what the runner made of it.

Owns: the words that scheduler, memory and runner exchange. Imports no torch.

A plan names requests by their lanes. It names neither tokens nor positions of decode rows: those may not be known on
the host yet, and are read on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does, in this order: set lanes up, write new pages into tables, run chunks, decode, sample.

    new_pages: (lane, first block, pages). decodes: lanes that compute their last token and num_drafts drafts behind it,
    one row each. samples: those of the chunks that reach their end, then one for each of decodes; all of them propose
    num_proposals drafts for the next step. masked: lanes whose next token a grammar chooses from, and masks: of
    each of them, for its rows (`Grammars.masks`).
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

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decodes)


@dataclass(slots=True)
class StepResult:
    """What a step gave: for each of the plan's samples one token, and one more for each draft that was accepted; their
    log probabilities, where asked for.

    prompt_logprobs: one list for each of the plan's chunks, one entry for each of its prompt_targets.
    seconds: what such a step takes; None if this one does not tell.
    drafts: what was proposed to each of the plan's masked lanes, -1 where nothing; empty if nothing was to any.
    """

    step: int
    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = field(default_factory=list)
    seconds: float | None = None
    drafts: Sequence[Sequence[int]] = ()
