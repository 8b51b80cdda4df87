"""Keys of blocks for the prefix cache: each covers its own tokens and, through its parent, all that come before.

Owns: how a key is made. Does not know where blocks are.

The hash is keyed with a secret of this process, so that no client can make two prompts collide; the chain begins
with the tenant's salt, so that tenants who must not see each other never share a block.

KV that was computed while its request was sparse is not what dense attention would have given, nor is what was computed
after it, however it was computed. Such blocks have the policy in their keys: only who has the same one finds them.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from minserve.config import BLOCK_SIZE

KEY_BYTES = 16


@dataclass(slots=True)
class KeyChain:
    """The keys of one request's full blocks, as far as they are known.

    policy: in the keys of the blocks from sparse_from on; None: there are no such blocks, all are exact.
    """

    salt: str = ""
    keys: list[bytes] = field(default_factory=list)
    policy: bytes = b""
    sparse_from: int | None = None

    def branch(self, block: int, policy: bytes) -> "KeyChain":
        """The same up to this block, and from there on computed under a policy."""
        return KeyChain(self.salt, self.keys[:block], policy, block)

    def become(self, other: "KeyChain") -> None:
        """From now on, the request's blocks are those of the other chain."""
        self.keys, self.policy, self.sparse_from = other.keys, other.policy, other.sparse_from

    def policy_of(self, block: int) -> bytes:
        return self.policy if self.sparse_from is not None and block >= self.sparse_from else b""


class BlockHasher:
    """Makes the keys of consecutive full blocks. secret: at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def extend(self, chain: KeyChain, token_ids: Sequence[int], num_tokens: int) -> None:
        """Append the keys that are missing for the full blocks within the first num_tokens of token_ids."""
        keys = chain.keys
        for block in range(len(keys), num_tokens // BLOCK_SIZE):
            parent = keys[-1] if keys else self._digest(b"", chain.salt.encode())
            tokens = array("q", token_ids[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])
            keys.append(self._digest(parent, tokens.tobytes() + chain.policy_of(block)))

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=KEY_BYTES, key=self._secret).digest()
