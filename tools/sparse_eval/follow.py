"""A lane that decodes under a policy, step by step: what it says, wants, gets and lacks.

Owns: how texts are forced on it, and what must hold of every step. Does not know: what is asked of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minserve.engine.plan import Fetched
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from tools.sparse_lab import Snapshot, SparseLab, Step

from .policies import Policy


class Seen(NamedTuple):
    """A step. tokens: none if it runs again; losses: of each, what the model would have been charged for it; best: what
    it would have said.

    ahead, normal: [layers, kv_heads, blocks] bool, what the next step is expected to want, and what this one wanted
    outside the ring; None of a resident lane. right: the draft that looks ahead, and those before it, are what the text
    goes on with; False where no draft looks ahead. lacking: of its attention, as `rank_blocks` has it, the mean.
    """

    tokens: list[int]
    losses: list[float]
    best: list[int]
    fetched: Fetched | None
    ahead: torch.Tensor | None
    normal: torch.Tensor | None
    right: bool
    lacking: float


def follow(lab: SparseLab, start: Snapshot, policy: Policy, until: int, text: Sequence[int] = ()) -> Iterator[Seen]:
    """From a resident lane on, until it has `until` tokens. text: all of it that is given, from the first token on;
    behind its end the lane's tokens are the model's own."""
    lab.num_drafts = policy.num_proposed
    lab.use(max(policy.num_slots, 1), recalls=policy.recalls)
    lab.restore(start)
    if policy.num_slots:
        lab.demote(policy.rules)
    kv_heads = lab.kv.shape[2]
    refill, saved = policy.refill(kv_heads)
    before: Seen | None = None
    while len(lab.token_ids) < until:
        forced = text[len(lab.token_ids) :][: policy.num_drafts + 1]
        drafts = forced[: policy.num_drafts] if policy.lookahead == "perfect" else None
        step = lab.decode(forced, refill, saved, drafts)
        seen = _seen(lab, policy, step)
        if seen.fetched is not None:
            _check(policy, seen, before)
        before = seen
        yield seen


def _seen(lab: SparseLab, policy: Policy, step: Step) -> Seen:
    rows = lab.sampler.logits[: len(step.tokens)]
    logprobs = rows.log_softmax(dim=-1).gather(1, lab.sampler.drawn[: len(rows), None])[:, 0]
    losses, best = (-logprobs).tolist(), rows.argmax(dim=-1).tolist()
    if not policy.num_slots:
        return Seen(step.tokens, losses, best, None, None, None, False, 0.0)
    assert step.fetched is not None
    watched = lab.lookahead.background
    ahead, normal = watched.wanted[:, LOOKAHEAD], watched.wanted[:, NORMAL, :, : watched.ring_start]
    # The row that looks ahead is the one behind the verified ones, or the last.
    behind = min(policy.num_verified + 1, len(step.drafts))
    right = policy.looks_ahead and behind > 0 and step.drawn[:behind] == step.drafts[:behind]
    return Seen(step.tokens, losses, best, step.fetched, ahead, normal, right, watched.lacking)


def _check(policy: Policy, seen: Seen, before: Seen | None) -> None:
    """That the accounts add up."""
    fetched, normal, ahead = seen.fetched, seen.normal, seen.ahead
    assert fetched is not None
    assert normal is not None
    assert ahead is not None
    num_layers, kv_heads, ring_start = normal.shape
    assert fetched.misses >= fetched.cut >= 0, fetched
    assert fetched.asked == int(normal.sum()) >= fetched.surprises >= 0, fetched
    if policy.recalls:
        assert fetched.surprises == fetched.cut == seen.lacking == 0, seen
        return
    # What a step that had to run again fetched for its own row is counted in the next one.
    late = fetched.hits + fetched.misses - int(ahead[..., :ring_start].sum())
    was_again = before is not None and not before.tokens
    assert 0 <= late <= (before.fetched.asked if was_again and before is not None and before.fetched else 0), fetched
    admitted = fetched.misses - late - fetched.cut
    assert admitted <= num_layers * policy.refill(kv_heads)[1], fetched
    if policy.fetch == "fixed":
        assert admitted <= num_layers * kv_heads * policy.cap, fetched
