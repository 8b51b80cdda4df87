"""A tokenizer as grammars need it.

Owns: which of a model's tokens can be parts of a text under a grammar. Does not know: grammars, requests.
"""

from minserve.grammar import Vocabulary
from minserve.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, width: int, end_token_ids: tuple[int, ...]) -> Vocabulary:
    """The tokens that logits of this width can choose. A tokenizer may have more or fewer of them than its model."""
    special = {token_id for token_id in (*tokenizer.special_token_ids, *end_token_ids) if token_id < width}
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(width)],
        special_token_ids=frozenset(special),
        end_token_ids=end_token_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
