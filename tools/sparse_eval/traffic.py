"""What a policy moves: hits, misses and bytes of each step, on texts of the model's own.

Owns: the sums of `Fetched`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean

from .bench import Bench
from .follow import Seen
from .policies import Policy
from .report import Row


class Traffic:
    """Sums over steps."""

    def __init__(self) -> None:
        self.hits = self.misses = self.cut = self.surprises = 0
        self.num_steps = self.num_tokens = self.num_again = 0
        self.lacking: list[float] = []

    def add(self, steps: Iterable[Seen]) -> None:
        for seen in steps:
            self.num_steps += 1
            self.num_tokens += len(seen.tokens)
            self.num_again += not seen.tokens
            self.lacking.append(seen.lacking)
            if seen.fetched is not None:
                self.hits += seen.fetched.hits
                self.misses += seen.fetched.misses
                self.cut += seen.fetched.cut
                self.surprises += seen.fetched.surprises

    def row(self, bench: Bench) -> Row:
        """For a step and one KV head of one layer, but bytes and retries. lacking: what a step decides by whether to
        run again; lacking_3_above: what 3% of the steps are above."""
        steps = max(self.num_steps, 1)
        ordered = sorted(self.lacking) or [0.0]
        each = steps * bench.heads
        moved = (self.misses - self.cut) * bench.piece_bytes
        return {
            "hits": self.hits / each,
            "misses": self.misses / each,
            "cut": self.cut / each,
            "fetched": (self.misses - self.cut) / each,
            "surprises": self.surprises / each,
            "lacking": sum(self.lacking) / steps,
            "lacking_3_above": ordered[int(0.97 * len(ordered))],
            "bytes_per_step": moved / steps,
            "bytes_per_token": moved / max(self.num_tokens, 1),
            "retries": self.num_again / steps,
            "tokens_per_step": self.num_tokens / steps,
            "steps": self.num_steps,
        }


def traffic_policies(base: Policy, caps: Sequence[int]) -> list[Policy]:
    """base: adaptive, without retries."""
    return [
        *(replace(base, name=f"fixed {cap}", fetch="fixed", cap=cap) for cap in caps),
        replace(base, name="adaptive"),
        replace(base, name="adaptive + retry", retries=True),
        recall_policy(base),
    ]


def recall_policy(base: Policy) -> Policy:
    """It knows what it wants without drafts."""
    return replace(base, name="recall", fetch="all", lookahead="current", num_drafts=0, num_verified=0, recalls=True)


def measure_traffic(
    bench: Bench, policies: Sequence[Policy], prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Row]:
    """Of answers to prompts, so many tokens each."""
    rows = []
    for policy in policies:
        traffic = Traffic()
        for prompt in prompts:
            traffic.add(bench.follow(bench.start(prompt), policy, len(prompt) + num_tokens))
        context = {"policy": policy.name, "K": policy.num_slots, "context": mean(map(len, prompts))}
        rows.append(context | traffic.row(bench))
    return rows
