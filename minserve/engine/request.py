"""One request in the engine.

Owns: what is known of a request. The scheduler is the only one who changes it.

There is no prefill phase and no decode phase, only num_computed catching up with num_tokens:

    [0, num_prompt_tokens)                    the prompt
    [num_prompt_tokens, len(token_ids))       generated and known
    [len(token_ids), num_tokens)              being sampled by launched steps, known to the device only
    [0, num_computed)                         KV is in pages, or will be when the launched steps have ended

Launched steps that verify drafts may yield more tokens than that, num_drafts_in_flight at most: num_tokens and
num_computed are what is certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from minserve.engine.plan import Chunk, LaneSetup, Sample, SparsePolicy
from minserve.grammar import Matcher
from minserve.memory.hashing import KeyChain
from minserve.memory.tables import NOTHING_CACHED, Cached
from minserve.protocol import Delta, FinishReason, SamplingParams, SparseUsage, Submit, TokenLogprobs


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """arrival: its place in the queue, kept when it is preempted. is_set_up: its lane knows of it.

    found: what the caches had for it when it last took pages; cached: when it first computed.
    matcher: follows its text, if that has a grammar; drafts: what its lane will verify next, known if there is one.
    policy: how its lane chooses its blocks; None: it is resident. sparse_usage: if it ever was sparse, at its end.
    error: why it could not be finished.
    """

    id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    chain: KeyChain
    arrival: int
    end_token_ids: tuple[int, ...]
    status: Status = Status.WAITING
    lane: int = -1
    num_computed: int = 0
    num_in_flight: int = 0
    num_drafts_in_flight: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    is_set_up: bool = False
    found: Cached = NOTHING_CACHED
    cached: Cached | None = None
    first_delta_sent: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    matcher: Matcher | None = None
    drafts: Sequence[int] = ()
    policy: SparsePolicy | None = None
    sparse_usage: SparseUsage | None = None
    error: str | None = None

    @classmethod
    def from_submit(
        cls, submit: Submit, arrival: int, model_end_token_ids: tuple[int, ...], matcher: Matcher | None
    ) -> "Request":
        """A waiting request. model_end_token_ids end it as its own stop_token_ids do, unless it ignores them."""
        params = submit.params
        own = set(params.stop_token_ids)
        ends = own if params.ignore_eos else own | set(model_end_token_ids)
        num_prompt_tokens = len(submit.prompt_token_ids)
        return cls(
            id=submit.request_id,
            params=params,
            token_ids=list(submit.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            chain=KeyChain(submit.cache_salt),
            arrival=arrival,
            end_token_ids=tuple(sorted(ends)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * num_prompt_tokens,
            matcher=matcher,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens that it has and that have no KV yet."""
        return self.num_tokens - self.num_computed

    def num_next(self, budget: int, step: int) -> int:
        """How many tokens it computes next: all that are pending, or as many as the budget allows. A chunk that is not
        the last ends at a multiple of `step`, unless a quarter of the budget were lost by that."""
        if self.num_pending <= budget:
            return self.num_pending
        count = (self.num_computed + budget) // step * step - self.num_computed
        return count if 4 * count >= 3 * budget else budget

    def reach(self, count: int, num_drafts: int) -> int:
        """Up to how many tokens may have KV when it has computed `count` more: rows and drafts may stand as far as the
        drafts in flight and its own can carry them, but never where no token will."""
        if not self.is_decoding:
            return self.num_computed + count
        return min(self.num_tokens + self.num_drafts_in_flight + num_drafts, self.end - 1)

    def num_verified(self, num_drafts: int) -> int:
        """How many of a step's drafts its lane verifies."""
        return num_drafts if self.policy is None else min(num_drafts, self.policy.num_verified)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def end(self) -> int:
        """No token will ever stand at this position or after it."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def wants_no_more(self) -> bool:
        """The launched steps will bring it to max_tokens."""
        return self.num_tokens >= self.end

    @property
    def awaits_token(self) -> bool:
        """What may follow its last token depends on which it is, and that is known to the device only."""
        return self.matcher is not None and self.num_in_flight > 0

    @property
    def is_decoding(self) -> bool:
        """Its only token without KV is one that was sampled: its next row reads it on the device."""
        return self.num_pending == 1 and self.num_computed >= self.num_prompt_tokens

    @property
    def penalized(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @property
    def adjusted(self) -> bool:
        """Its logits are changed before they are sampled from."""
        params = self.params
        return self.penalized or bool(params.logit_bias) or params.min_tokens > 0 or self.matcher is not None

    def barred(self, ahead: int) -> Sequence[int]:
        """End tokens that its mask should leave out behind so many drafts. On the device nothing is barred behind the
        mask's back: where the grammar allows nothing but an end, it is the end."""
        if self.matcher is None:
            return ()
        if self.num_output_tokens + ahead < self.params.min_tokens:
            return (*self.end_token_ids, *self.matcher.end_token_ids)
        return self.matcher.end_token_ids if self.params.ignore_eos else ()

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Log probabilities of its prompt are still to be reported, so every prompt token has to be computed."""
        return self.prompt_logprobs is not None and not self.first_delta_sent

    def lane_setup(self) -> LaneSetup:
        """What its lane has to know before its first row or chunk."""
        return LaneSetup(
            lane=self.lane,
            params=self.params if self.matcher is None else msgspec.structs.replace(self.params, min_tokens=0),
            token_ids=tuple(self.token_ids) if self.penalized else (),
            num_tokens=len(self.token_ids),
            start=self.num_computed,
            end=self.end,
            num_prompt_tokens=self.num_prompt_tokens,
            end_token_ids=self.end_token_ids,
            last_token=self.token_ids[-1],
            penalized=self.penalized,
            constrained=self.matcher is not None,
        )

    def next_chunk(self, count: int) -> Chunk:
        """Its next `count` tokens without KV, all known."""
        start, end = self.num_computed, self.num_computed + count
        targets_end = min(end + 1, self.num_prompt_tokens) if self.awaits_prompt_logprobs else 0
        return Chunk(
            lane=self.lane,
            start=start,
            token_ids=self.token_ids[start:end],
            samples=end == self.num_tokens,
            following=self.token_ids[end] if end < len(self.token_ids) else -1,
            prompt_targets=self.token_ids[start + 1 : targets_end],
            prompt_logprobs=self.params.prompt_logprobs or 0,
        )

    def next_sample(self) -> Sample:
        """How its next tokens are chosen."""
        return Sample(
            lane=self.lane,
            logprobs=self.params.logprobs,
            adjusted=self.adjusted,
        )

    def take(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Add tokens, up to the one that ends it: how many, and why it ended if it did."""
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            goes_on = self.matcher is None or self.matcher.take(token_id)
            if self.matcher is not None and self.matcher.error:
                self.error = f"the text cannot go on under its grammar: {self.matcher.error}"
                return count, "error"
            if token_id in self.end_token_ids:
                self.stop_token_id = token_id
            if token_id in self.end_token_ids or not goes_on:
                return count, "stop"
            if len(self.token_ids) >= self.end:
                return count, "length"
        return len(token_ids), None

    def next_delta(self) -> Delta:
        """What is to be said of it now, but for its tokens; the first delta and the last say more than others."""
        delta = Delta(
            request_id=self.id,
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
            draft_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            error=self.error,
        )
        if self.awaits_prompt_logprobs and self.finish_reason != "abort":
            delta.prompt_logprobs = self.prompt_logprobs
        if not self.first_delta_sent or self.finish_reason is not None:
            cached = self.cached or NOTHING_CACHED
            delta.cached_tokens, delta.cached_host_tokens = cached.num_tokens, cached.host
        delta.sparse = self.sparse_usage
        self.first_delta_sent = True
        return delta

    def note_prompt_logprobs(self, chunk: Chunk, entries: Sequence[TokenLogprobs]) -> None:
        """What a chunk said about the prompt tokens after its rows."""
        if self.prompt_logprobs is not None and chunk.prompt_targets:
            self.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + len(entries)] = entries
