"""What a bounded working set costs: loss on real texts above that of dense attention, by K and by cap.

Owns: the comparison, token by token on the same text.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev

from minserve.memory.blocks import blocks_for
from tools.sparse_lab import Snapshot

from .bench import MOST_DRAFTS, Bench
from .policies import DENSE, Policy
from .report import Row


def measure_loss(
    bench: Bench,
    documents: Sequence[Sequence[int]],
    context: int,
    base: Policy,
    slots: Sequence[int],
    caps: Sequence[int],
) -> list[Row]:
    """documents: tokens, the first `context` of which are read densely. base: what K and cap are put into; 0: no cap.
    The last row has a slot for every block, which should cost nothing."""
    most = blocks_for(len(documents[0]))
    policies = [
        replace(base, name=f"K {num_slots}", num_slots=num_slots, fetch="fixed" if cap else "all", cap=cap)
        for num_slots in slots
        if num_slots < most
        for cap in caps
    ]
    policies.append(replace(base, name="all blocks", num_slots=most, fetch="all"))
    above: list[list[float]] = [[] for _ in policies]
    same: list[list[bool]] = [[] for _ in policies]
    dense_losses: list[float] = []
    for document in documents:
        start = bench.start(document[:context], document)
        dense, dense_best = _losses(bench, start, DENSE, document)
        dense_losses.append(mean(dense))
        for number, policy in enumerate(policies):
            losses, best = _losses(bench, start, policy, document)
            above[number].append(mean(losses) - mean(dense))
            same[number] += [own == other for own, other in zip(best, dense_best, strict=True)]
    return [
        {
            "K": policy.num_slots,
            "cap": policy.cap if policy.fetch == "fixed" else None,
            "above_dense": mean(own),
            "error": stdev(own) / len(own) ** 0.5 if len(own) > 1 else None,
            "same_token": sum(tokens) / len(tokens),
            "dense": mean(dense_losses),
            "by_document": own,
            "policy": policy.name,
            "context": context,
            "tokens": len(tokens),
        }
        for policy, own, tokens in zip(policies, above, same, strict=True)
    ]


def _losses(bench: Bench, start: Snapshot, policy: Policy, document: Sequence[int]) -> tuple[list[float], list[int]]:
    """Of each token of the document that the lane decodes: its loss, and what the model would have said instead."""
    losses: list[float] = []
    best: list[int] = []
    # A last step of several tokens has to find them all in the document.
    until = len(document) - MOST_DRAFTS
    for seen in bench.follow(start, policy, until, document):
        losses += seen.losses
        best += seen.best
    count = until - len(start.token_ids)
    return losses[:count], best[:count]
