"""How a lane chooses its blocks: what the server does, and what it is compared with.

Owns: names, and what a policy means for plans. Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from minserve.engine.allowance import BURST_STEPS
from minserve.engine.plan import SparsePolicy
from minserve.engine.sparse_rules import RETRY_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """num_slots: K; 0: the lane stays resident.

    fetch: a KV head takes in `cap` blocks a step at most ("fixed"), that on average over the heads and over time
    ("adaptive"), or whatever it wants ("all"). lookahead: by the head's draft row, by the last token's, or by a draft
    that is the text's own next tokens, which a head can only come near to.
    num_drafts, num_verified: n and m, of each step. recalls: what a layer wants is fetched before it attends.
    """

    name: str
    num_slots: int = 0
    fetch: Literal["fixed", "adaptive", "all"] = "all"
    cap: int = 0
    lookahead: Literal["draft", "current", "perfect"] = "current"
    num_drafts: int = 0
    num_verified: int = 0
    retries: bool = False
    recalls: bool = False

    @property
    def looks_ahead(self) -> bool:
        return self.lookahead != "current"

    @property
    def num_proposed(self) -> int:
        """Drafts that the head has to propose in each step."""
        return self.num_drafts if self.lookahead == "draft" else 0

    @property
    def rules(self) -> SparsePolicy:
        return SparsePolicy(
            looks_ahead=self.looks_ahead,
            num_verified=self.num_verified,
            cap=self.cap if self.fetch == "fixed" else self.num_slots,
            retry_above=RETRY_ABOVE if self.retries else None,
        )

    def refill(self, kv_heads: int) -> tuple[int, int]:
        """(blocks of a layer in each step, how many may be saved up)."""
        each = (self.num_slots if self.fetch == "all" else self.cap) * kv_heads
        return each, each * (BURST_STEPS if self.fetch == "adaptive" else 1)


DENSE = Policy(name="dense")
