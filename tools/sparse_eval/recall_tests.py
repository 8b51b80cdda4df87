"""Whether what was read is still found when a question comes: needles, and passages to be copied.

Owns: the trials. The context is read densely; then the lane is demoted, without knowing what it will be asked. The
question is fed token by token, as if it were decoded, so that all that it needs has to be fetched while it is read; a
step that runs again is given its token again. The answer is the model's own.
"""

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from statistics import mean
from typing import NamedTuple

from .bench import Bench
from .policies import Policy
from .report import Row
from .texts import Task
from .traffic import Traffic


class Trial(NamedTuple):
    """A task under a policy. score: 0 to 1."""

    policy: Policy
    depth: float
    score: float


Score = Callable[[Task, Sequence[int]], float]


def copied(task: Task, answer: Sequence[int]) -> float:
    """The share of the passage that was repeated, in its order."""
    blocks = SequenceMatcher(None, task.answer, answer, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(task.answer)


def measure_recall(bench: Bench, policies: Sequence[Policy], tasks: Sequence[Task], score: Score) -> list[Row]:
    """Each task is read once, and asked under every policy."""
    trials: list[Trial] = []
    traffic = [Traffic() for _ in policies]
    for task in tasks:
        given = [*task.context, *task.question]
        start = bench.start(task.context, given, keep=False)
        for number, policy in enumerate(policies):
            tokens = list(start.token_ids)
            for seen in bench.follow(start, policy, len(given) + len(task.answer), given):
                if len(tokens) < len(given):
                    traffic[number].add([seen])
                tokens += seen.tokens
            trials.append(Trial(policy, task.depth, score(task, tokens[len(given) :])))
    return [_row(bench, policy, own, trials) for policy, own in zip(policies, traffic, strict=True)]


def _row(bench: Bench, policy: Policy, traffic: Traffic, trials: Sequence[Trial]) -> Row:
    own = [trial for trial in trials if trial.policy == policy]
    depths = sorted({trial.depth for trial in own})
    moved = traffic.row(bench)
    return {
        "policy": policy.name,
        "score": mean(trial.score for trial in own),
        "trials": len(own),
        "retries": moved["retries"],
        "lacking": moved["lacking"],
        "fetched": moved["fetched"],
        "bytes_per_step": moved["bytes_per_step"],
        "question_steps": moved["steps"] / len(own),
        "K": policy.num_slots,
        "depths": depths,
        "by_depth": [mean(trial.score for trial in own if trial.depth == depth) for depth in depths],
    }
