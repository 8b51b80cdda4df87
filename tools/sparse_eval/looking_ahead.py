"""How well a step knows what the next one wants, and what that costs in tokens: by (n, m), n drafts and m verified.

Owns: the agreement, and its parts. With P what a step expects to be wanted, and N the digests' top K of the next step's
normal row among complete blocks outside the ring,

    agreement = |P and N| / |N|           in each layer and KV head; means are weighted by |N|

A draft looks ahead by the row behind the verified ones if there is one, else by the last of these, which lies in the
past or in a text that is not to be. It is right if it and all drafts before it are what the text goes on with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .bench import MOST_DRAFTS, Bench
from .follow import Seen
from .policies import Policy
from .report import Row

DRAFTS = ((1, 0), (1, 1), (2, 1), (3, 2), (3, 3))
"""(n, m)."""


class Agreement:
    """Sums over steps. hits, wanted: [2 (wrong, right), layers], blocks of all heads."""

    def __init__(self, num_layers: int) -> None:
        self.hits, self.wanted = torch.zeros(2, 2, num_layers, dtype=torch.int64)
        self.num_steps = self.num_tokens = self.num_right = self.num_drafted = 0
        self.lacking = 0.0

    def add(self, steps: Iterable[Seen]) -> None:
        """One lane's steps, in order."""
        before: Seen | None = None
        for seen in steps:
            assert seen.fetched is not None, "a resident lane expects nothing"
            self.num_steps += 1
            self.num_tokens += len(seen.tokens)
            self.num_right += seen.right
            self.lacking += seen.lacking
            if before is not None and before.tokens:
                self._add_pair(before, seen)
            before = seen

    def _add_pair(self, before: Seen, seen: Seen) -> None:
        assert before.ahead is not None
        assert seen.normal is not None
        columns = min(before.ahead.shape[2], seen.normal.shape[2])
        both = before.ahead[..., :columns] & seen.normal[..., :columns]
        self.hits[int(before.right)] += both.sum(dim=(1, 2)).cpu()
        self.wanted[int(before.right)] += seen.normal.sum(dim=(1, 2)).cpu()

    def row(self) -> Row:
        return {
            "tokens_per_step": self.num_tokens / max(self.num_steps, 1),
            "right": self.num_right / max(self.num_steps, 1),
            "agreement": _share(self.hits.sum(), self.wanted.sum()),
            "when_right": _share(self.hits[1].sum(), self.wanted[1].sum()),
            "when_wrong": _share(self.hits[0].sum(), self.wanted[0].sum()),
            "worst_layer": min(by_layer) if (by_layer := _shares(self.hits.sum(0), self.wanted.sum(0))) else None,
            "lacking": self.lacking / max(self.num_steps, 1),
            "steps": self.num_steps,
            "by_layer": by_layer,
            "by_layer_when_right": _shares(self.hits[1], self.wanted[1]),
            "by_layer_when_wrong": _shares(self.hits[0], self.wanted[0]),
        }


def lookahead_policies(base: Policy, has_head: bool) -> list[Policy]:
    """By this step's query; by a head's drafts, if there is one; by drafts that are right, on a text that is given."""
    base = replace(base, lookahead="current", num_drafts=0, num_verified=0)
    policies = [replace(base, name="current")]
    if has_head:
        policies += [
            replace(base, name=f"({n}, {m})", lookahead="draft", num_drafts=n, num_verified=m) for n, m in DRAFTS
        ]
    return [*policies, replace(base, name="perfect", lookahead="perfect", num_drafts=1)]


def measure_agreement(
    bench: Bench,
    policies: Sequence[Policy],
    documents: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    context: int,
    num_tokens: int,
) -> list[Row]:
    """On documents that are given, the first `context` tokens read densely, and on answers to prompts that are the
    model's own, both for so many tokens."""
    rows = []
    for policy in policies:
        forced, own = Agreement(bench.num_layers), Agreement(bench.num_layers)
        for document in documents:
            start = bench.start(document[:context], document)
            forced.add(bench.follow(start, policy, len(document) - MOST_DRAFTS, document))
        if policy.lookahead != "perfect":
            for prompt in prompts:
                own.add(bench.follow(bench.start(prompt), policy, len(prompt) + num_tokens))
        for text, agreement in (("given", forced), ("own", own)):
            if agreement.num_steps:
                kind = {"policy": policy.name, "n": policy.num_drafts, "m": policy.num_verified, "text": text}
                rows.append(kind | agreement.row() | {"K": policy.num_slots, "context": context})
    return rows


def _share(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    return part.item() / whole.item() if whole.item() else None


def _shares(parts: torch.Tensor, wholes: torch.Tensor) -> list[float]:
    """Of each layer; none at all if nothing was wanted."""
    return (parts / wholes).tolist() if bool((wholes > 0).all()) else []
