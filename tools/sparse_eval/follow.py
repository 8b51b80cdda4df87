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
    goes on with; False where no draft looks ahead.
    """

    tokens: list[int]
    losses: list[float]
    best: list[int]
    fetched: Fetched | None
    ahead: torch.Tensor | None
    normal: torch.Tensor | None
    right: bool


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
    while len(lab.token_ids) < until:
        forced = text[len(lab.token_ids) :][: policy.num_drafts + 1]
        drafts = forced[: policy.num_drafts] if policy.lookahead == "perfect" else None
        step = lab.decode(forced, refill, saved, drafts)
        yield _seen(lab, policy, step)


def _seen(lab: SparseLab, policy: Policy, step: Step) -> Seen:
    rows = lab.sampler.logits[: len(step.tokens)]
    logprobs = rows.log_softmax(dim=-1).gather(1, lab.sampler.drawn[: len(rows), None])[:, 0]
    losses, best = (-logprobs).tolist(), rows.argmax(dim=-1).tolist()
    if not policy.num_slots:
        return Seen(step.tokens, losses, best, None, None, None, False)
    assert step.fetched is not None
    watched = lab.lookahead.step
    ring_start = int(watched.ring.start)
    wanted = watched.ranking.wanted.view(lab.kv.shape[0], 2, lab.kv.shape[2], -1)
    ahead, normal = wanted[:, LOOKAHEAD], wanted[:, NORMAL, :, :ring_start]
    # The row that looks ahead is the one behind the verified ones, or the last.
    behind = min(policy.num_verified + 1, len(step.drafts))
    right = policy.looks_ahead and behind > 0 and step.drawn[:behind] == step.drafts[:behind]
    _check(lab, policy, step, ahead[..., :ring_start], normal)
    return Seen(step.tokens, losses, best, step.fetched, ahead, normal, right)


def _check(lab: SparseLab, policy: Policy, step: Step, ahead: torch.Tensor, normal: torch.Tensor) -> None:
    """That the accounts add up."""
    fetched = step.fetched
    assert fetched is not None
    num_layers, kv_heads = ahead.shape[:2]
    assert fetched.misses >= fetched.cut >= 0, fetched
    assert fetched.asked == int(normal.sum()) >= fetched.surprises >= 0, fetched
    if policy.recalls:
        assert fetched.surprises == fetched.cut == 0, fetched
        return
    wanted = ahead if step.tokens else normal
    assert fetched.hits + fetched.misses == int(wanted.sum()), (fetched, int(wanted.sum()))
    if step.tokens:
        assert fetched.misses - fetched.cut <= num_layers * policy.refill(kv_heads)[1], fetched
        if policy.fetch == "fixed":
            assert fetched.misses - fetched.cut <= num_layers * kv_heads * policy.cap, fetched
