"""One step of the engine: what the scheduler decided, immutable, and what the runner made of it.

Owns: the words that scheduler, memory and runner exchange. Imports no torch.

A plan names requests by their lanes. It does not name the tokens of decode rows: those may not be known on the host
yet, and are read on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minserve.protocol import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSetup:
    """A request takes a lane: its sampling state has to be written before its first row.

    token_ids: the prompt and, for a request that was preempted, what it had generated; given if it is penalized.
    num_tokens: how many these are.
    end_token_ids: tokens that end it, not to be sampled before min_tokens. last_token: the input of its first decode
    row, if it comes back with all other KV cached.
    """

    lane: int
    params: SamplingParams
    token_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    last_token: int
    penalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a prompt: token_ids are those at positions [start, start + len(token_ids)) of the lane.

    samples: it reaches the end, so its last row yields the next token.
    prompt_targets: the tokens whose log probabilities are wanted, one a row: the next prompt token of each (at most
    as many as rows); prompt_logprobs: with how many alternatives.
    """

    lane: int
    start: int
    token_ids: Sequence[int]
    samples: bool
    prompt_targets: Sequence[int] = ()
    prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One decode row: the lane's last token, at `position`."""

    lane: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row that yields a token, which will stand at `position`.

    logprobs: how many alternatives to report, or None. adjusted: the lane has penalties, bias or a minimum length.
    """

    lane: int
    position: int
    logprobs: int | None
    adjusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does, in this order: set lanes up, write new pages into tables, run chunks, run rows, sample.

    new_pages: (lane, first block, pages). samples: those of the chunks that reach their end, then one for each row.
    """

    step: int
    setups: Sequence[LaneSetup] = ()
    new_pages: Sequence[tuple[int, int, Sequence[int]]] = ()
    chunks: Sequence[Chunk] = ()
    rows: Sequence[Row] = ()
    samples: Sequence[Sample] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(slots=True)
class StepResult:
    """What a step gave: one token for each of the plan's samples; log probabilities where asked for.

    prompt_logprobs: one list for each of the plan's chunks, one entry for each of its prompt_targets.
    """

    step: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = field(default_factory=list)
