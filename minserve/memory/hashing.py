"""Keys of blocks for the prefix cache: each covers its own tokens and, through its parent, all that come before.

Owns: how a key is made. Does not know where blocks are.

The hash is keyed with a secret of this process, so that no client can make two prompts collide; the chain begins
with the tenant's salt, so that tenants who must not see each other never share a block.
"""

import hashlib
from array import array
from collections.abc import Sequence

from minserve.config import BLOCK_SIZE

KEY_BYTES = 16


class BlockHasher:
    """Makes the keys of consecutive full blocks. secret: at most 64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def extend(self, keys: list[bytes], token_ids: Sequence[int], num_tokens: int, salt: str) -> None:
        """Append the keys that are missing for the full blocks within the first num_tokens of token_ids."""
        parent = keys[-1] if keys else self._digest(b"", salt.encode())
        for block in range(len(keys), num_tokens // BLOCK_SIZE):
            tokens = array("q", token_ids[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])
            parent = self._digest(parent, tokens.tobytes())
            keys.append(parent)

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=KEY_BYTES, key=self._secret).digest()
