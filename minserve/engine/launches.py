"""The steps under way: from decisions to a plan, and from its result back to the requests that it was for.

Owns: the numbers of steps, and what each launched step does for whom. Imports no torch.
Does not know: pages, the queue, or what a result means for a request.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from minserve.engine.decisions import Decisions, Launched
from minserve.engine.plan import Fetched, LaneSetup, StepPlan, StepResult
from minserve.engine.request import Request, Status
from minserve.engine.sparsity import Sparsity
from minserve.grammar import Grammars, Matcher, bar
from minserve.protocol import Stats, TokenLogprobs
from minserve.spec.lengths import DraftLengths

NOTHING_FETCHED = Fetched(0, 0, 0, 0, 0)


class Yield(NamedTuple):
    """What a step gave for one request. token_ids: empty if it did not sample, or runs again. drafts: what it will
    verify, if it has a grammar. fetched: for its working set, if it is sparse."""

    entry: Launched
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs]
    drafts: Sequence[int]
    fetched: Fetched

    @property
    def runs_again(self) -> bool:
        return self.entry.is_sparse and not self.token_ids


class Launches:
    """drafts: how many each step proposes; the next one verifies them. grammars: whose masks a plan brings. sparsity:
    what it says of working sets."""

    def __init__(self, drafts: DraftLengths, grammars: Grammars, sparsity: Sparsity) -> None:
        self._drafts = drafts
        self._sparsity = sparsity
        self._grammars = grammars
        self._under_way: deque[tuple[int, list[Launched]]] = deque()
        self.last_step = 0
        self.num_proposed = 0

    @property
    def next_step(self) -> int:
        """The number that the next plan will have."""
        return self.last_step + 1

    @property
    def is_idle(self) -> bool:
        """No step is under way."""
        return not self._under_way

    def launch(self, requests: Sequence[Request], decisions: Decisions, setups: Sequence[LaneSetup]) -> StepPlan:
        """The plan of what was decided; empty if that is nothing. Counts its tokens as computed.

        requests: those that run, in order; setups: the lanes that are new to some of them.
        """
        counts = decisions.counts
        launched = [
            _advance(request, counts[request], decisions.num_drafts) for request in requests if request in counts
        ]
        if not launched:
            return StepPlan(step=self.last_step)
        launched.sort(key=lambda entry: entry.chunk is None)
        samples = [entry.request.next_sample() for entry in launched if entry.samples]
        decoding = [entry.request for entry in launched if entry.chunk is None]
        self.num_proposed = self._choose_drafts(launched, decoding)
        masked = [(e.request, e.request.matcher) for e in launched if e.samples and e.request.matcher is not None]
        self.last_step += 1
        self._under_way.append((self.last_step, launched))
        return StepPlan(
            step=self.last_step,
            setups=setups,
            new_pages=decisions.new_pages,
            chunks=[entry.chunk for entry in launched if entry.chunk is not None],
            decodes=[request.lane for request in decoding],
            num_drafts=decisions.num_drafts,
            samples=samples,
            num_proposals=self.num_proposed,
            demotions=decisions.demotions,
            **self._sparsity.words(decoding),
            **self._masks(masked, decisions.num_drafts),
        )

    def _choose_drafts(self, launched: Sequence[Launched], decoding: Sequence[Request]) -> int:
        """What pays for the requests that verify all that is proposed; but not fewer than sparse ones need."""
        chosen = self._drafts.choose([e.request.num_tokens for e in launched if e.samples and not e.is_sparse])
        return max(chosen, min(self._sparsity.num_drafts(decoding), self._drafts.most))

    def _masks(self, constrained: Sequence[tuple[Request, Matcher]], num_drafts: int) -> dict[str, Any]:
        """What a plan says of these requests' next tokens."""
        if not constrained:
            return {}
        requests, matchers = zip(*constrained, strict=True)
        masks = self._grammars.masks(matchers, [request.drafts[:num_drafts] for request in requests], num_drafts)
        for request, rows in zip(requests, masks, strict=True):
            for ahead, row in enumerate(rows):
                if barred := request.barred(ahead):
                    bar(row, barred)
        return {"masked": [request.lane for request in requests], "masks": masks}

    def take(self, result: StepResult) -> Iterator[Yield]:
        """The result of the oldest step under way, request by request."""
        step, launched = self._under_way.popleft()
        assert step == result.step, f"step {step} was launched, {result.step} came back"
        yielded = iter(zip(result.token_ids, result.logprobs, strict=True))
        prompt_logprobs = iter(result.prompt_logprobs)
        proposed = iter(result.drafts)
        fetched = iter(result.fetched)
        for entry in launched:
            token_ids, logprobs = next(yielded) if entry.samples else ((), None)
            drafts = next(proposed, ()) if entry.samples and entry.request.matcher is not None else ()
            of_prompt = next(prompt_logprobs) if entry.chunk is not None else ()
            of_set = next(fetched, NOTHING_FETCHED) if entry.chunk is None else NOTHING_FETCHED
            yield Yield(entry, token_ids, logprobs, of_prompt, [draft for draft in drafts if draft >= 0], of_set)

    def run_again(self, entry: Launched) -> None:
        """A sparse request's row has not yielded its token: its next one is the same."""
        entry.request.num_in_flight -= 1
        entry.request.num_drafts_in_flight -= entry.num_drafts
        if entry.request.status is Status.RUNNING:  # else nothing of it is computed any more
            entry.request.num_computed -= 1

    def note_accepted(self, accepted: Sequence[tuple[Launched, int]], seconds: float | None, stats: Stats) -> None:
        """How many drafts of each request were accepted. See `DraftLengths.note`: of sparse ones it learns nothing, as
        they do not verify all that is proposed. stats: count those that were verified."""
        for entry, count in accepted:
            stats.note_drafts(entry.num_drafts, [count])
        resident = [(entry, count) for entry, count in accepted if not entry.is_sparse]
        if resident:
            lengths = [entry.request.num_tokens for entry, _ in resident]
            self._drafts.note(resident[0][0].num_drafts, lengths, [count for _, count in resident], seconds)


def _advance(request: Request, count: int, num_drafts: int) -> Launched:
    chunk = None if request.is_decoding else request.next_chunk(count)
    request.num_computed += count
    entry = Launched(
        request=request,
        num_computed=request.num_computed,
        samples=request.num_computed == request.num_tokens,
        chunk=chunk,
        num_drafts=request.num_verified(num_drafts) if chunk is None else 0,
        is_sparse=chunk is None and request.policy is not None,
    )
    request.num_in_flight += entry.samples
    request.num_drafts_in_flight += entry.num_drafts
    return entry
