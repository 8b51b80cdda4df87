"""Who may become sparse, and how they choose their blocks then: the server's rules, and what a request makes of them.

Owns: what the options mean. Does not know: who is sparse now. Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from minserve.engine.plan import SparsePolicy
from minserve.errors import RequestError
from minserve.protocol import MAX_DRAFT_TOKENS, SparseParams

RETRY_ABOVE = 0.0045
"""What is lacking of a row's attention (kernels/rank_blocks.py) above which it runs again, and behind such a
step sooner (kernels/fetch_accounts.py): about 3% of the steps of a text of the model's own (tools/NOTES.md)."""

MAX_VERIFIED = MAX_DRAFT_TOKENS - 1
"""Drafts that one step accepts and drafts of the next are 15 at most, together: the ring has no room for more."""

MissPolicy = Literal["approximate", "retry", "recall"]
Fetch = Literal["fixed", "adaptive"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How one request may become sparse, and what it is then.

    above: it becomes so with more than so many tokens; None: only when others need its pages.
    allowance: blocks that it may fetch on average per step and layer, over all heads; fixed: no more at any time.
    key: stands for all of that which changes numbers (see `KeyChain`).
    """

    above: int | None
    policy: SparsePolicy
    allowance: int
    fixed: bool
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRules:
    """The server's. A request may ask for another mode, looks_ahead, num_verified, cap, fetch and miss_policy.

    mode, above: as EngineConfig's sparse and sparse_above. num_slots: K. looks_ahead, num_verified, cap: as in
    `SparsePolicy`; of fetch "adaptive", cap is what a head gets on average. has_head: drafts are proposed.
    num_layers, num_kv_heads: of the model; head_block_bytes: of the keys and values of a block for one head of a layer,
    as they are in host memory. link_bytes_s: what is fetched from there in a second at most; None: nobody waits for it.
    """

    mode: Literal["never", "pressure", "above"]
    above: int
    num_slots: int
    looks_ahead: bool
    num_verified: int
    cap: int
    fetch: Fetch
    miss_policy: MissPolicy
    has_head: bool
    num_layers: int
    num_kv_heads: int
    head_block_bytes: int
    link_bytes_s: float | None = None

    @classmethod
    def of(
        cls,
        *,
        mode: Literal["never", "pressure", "above"],
        above: int,
        num_slots: int,
        fetch: Fetch,
        fetch_ratio: float,
        lookahead: Literal["draft", "current"] | None,
        num_verified: int | None,
        miss_policy: MissPolicy,
        has_head: bool,
        num_layers: int,
        num_kv_heads: int,
        head_block_bytes: int,
        link_bytes_s: float | None,
    ) -> "SparseRules":
        """From the values of a configuration, as these are called there."""
        return cls(
            mode=mode,
            above=above,
            num_slots=num_slots,
            looks_ahead=has_head and lookahead != "current",
            num_verified=min(num_verified or 0, MAX_VERIFIED) if has_head else 0,
            cap=max(1, round(fetch_ratio * num_slots)),
            fetch=fetch,
            miss_policy=miss_policy,
            has_head=has_head,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_block_bytes=head_block_bytes,
            link_bytes_s=link_bytes_s,
        )

    @property
    def block_bytes(self) -> int:
        """Of a whole host block."""
        return self.head_block_bytes * self.num_kv_heads * self.num_layers

    def terms(self, params: SparseParams | None) -> Terms | None:
        """What holds for a request; None: it never becomes sparse. Raises RequestError for what cannot be."""
        params = params or SparseParams()
        mode = params.mode or self.mode
        if params.lookahead == "draft" and not self.has_head:
            raise RequestError(
                "lookahead by drafts needs a draft head, and this server has none", param="sparse.lookahead"
            )
        if mode == "never":
            return None
        looks_ahead = self.looks_ahead if params.lookahead is None else params.lookahead == "draft"
        num_verified = self.num_verified if params.verify_drafts is None else params.verify_drafts
        miss_policy = params.miss_policy or self.miss_policy
        fixed = (params.fetch or self.fetch) == "fixed"
        cap = min(params.cap or self.cap, self.num_slots)
        policy = SparsePolicy(
            looks_ahead=looks_ahead,
            num_verified=min(num_verified, MAX_VERIFIED) if self.has_head else 0,
            cap=cap if fixed else self.num_slots,
            retry_above=RETRY_ABOVE if miss_policy == "retry" and self.miss_policy != "recall" else None,
        )
        return Terms(
            above={"pressure": None, "above": self.above, "always": 0}[mode],
            policy=policy,
            allowance=cap * self.num_kv_heads,
            fixed=fixed,
            key=f"sparse {self.num_slots} {policy} {cap} {fixed} {self.miss_policy == 'recall'}".encode(),
        )
