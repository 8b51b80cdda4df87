"""What a working set looks like from outside, for people who look at it once a second.

Owns: what was seen last, so that it can tell what has come since. Does not know: who looks. While nobody does, nothing
here runs.
"""

from collections import OrderedDict

import numpy as np

from minserve.memory.working_sets import Blocks, WorkingSets
from minserve.protocol import WorkingSet

MAX_LOOKS = 16
"""Requests whose last look is remembered."""


class Looks:
    """sets: of the engine; None: nobody is ever sparse."""

    def __init__(self, sets: WorkingSets | None) -> None:
        self._sets = sets
        self._seen: OrderedDict[str, Blocks] = OrderedDict()

    def look(self, request_id: str, lane: int, num_blocks: int) -> WorkingSet | None:
        """At a sparse request in this lane, of whose text so many blocks are begun."""
        if self._sets is None:
            return None
        held, is_local = self._sets.held_blocks(lane, num_blocks)
        before = self._seen.pop(request_id, held | is_local)
        self._seen[request_id] = held | is_local
        while len(self._seen) > MAX_LOOKS:
            self._seen.popitem(last=False)
        fetched = held.copy()
        # What the last look had not, but had not been written yet either, was never fetched.
        known = min(before.shape[2], num_blocks)
        fetched[..., :known] &= ~before[..., :known]
        fetched[..., known:] = False
        num_layers, num_kv_heads, _ = held.shape
        return WorkingSet(request_id, num_blocks, num_layers, num_kv_heads, _bits(held | is_local), _bits(fetched))

    def table(self) -> str:
        """What all working sets have done so far, by layer. Waits for the device."""
        if self._sets is None:
            return "working sets: none, since no request is ever sparse here"
        lines = [
            "working sets, by layer: blocks of a KV head",
            f"{'layer':>5} {'hits':>12} {'misses':>12} {'cut':>12} {'surprises':>12}",
        ]
        for layer, counts in enumerate(self._sets.by_layer.tolist()):
            lines.append(" ".join([f"{layer:5}", *(f"{count:12}" for count in counts)]))
        return "\n".join(lines)


def _bits(rows: Blocks) -> bytes:
    """rows: [layers, kv_heads, blocks] bool, as in `WorkingSet`."""
    return np.packbits(rows, axis=-1, bitorder="little").tobytes()
