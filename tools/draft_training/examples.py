"""Batches of texts for training.

Owns: which texts lie side by side, in which order, and what each row of them weighs. Does not know: models.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .answers import Text

MULTIPLE = 64
"""Texts of a batch are padded to such a length."""


def padded(num_tokens: int) -> int:
    """As many tokens as a text takes in a batch."""
    return -(-num_tokens // MULTIPLE) * MULTIPLE


@dataclass(frozen=True)
class Batch:
    """token_ids: [texts, tokens] int64; lengths: [texts]; weights: [texts, tokens] float32 of the chain that starts at
    each row: one where it drafts what the target wrote, less in what it was asked. On the host."""

    token_ids: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, of texts one after another, whose chain has a step of this number, and their weights. The step's
        target is `step + 1` rows later."""
        width = self.token_ids.shape[1]
        is_there = torch.arange(width) + 1 + step < self.lengths[:, None]
        weights = torch.where(is_there, self.weights, 0.0).flatten()
        rows = weights.nonzero()[:, 0]
        return rows, weights[rows]


def collate(texts: Sequence[Text], prompt_weight: float) -> Batch:
    """prompt_weight: of rows before the first answer."""
    width = padded(max(len(text.ids) for text in texts))
    token_ids = torch.zeros(len(texts), width, dtype=torch.int64)
    weights = torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        token_ids[row, : len(text.ids)] = torch.tensor(text.ids)
        # Row t drafts what follows token t + 1.
        weights[row, : max(0, text.start - 1)] = prompt_weight
        weights[row, max(0, text.start - 1) : len(text.ids)] = 1.0
    return Batch(token_ids, torch.tensor([len(text.ids) for text in texts]), weights)


def batches(texts: Sequence[Text], batch_tokens: int, document_share: float, seed: int) -> Iterator[list[Text]]:
    """For ever: texts of similar lengths, that padded take batch_tokens or are one. document_share: of the batches."""
    rng = random.Random(seed)
    pools = {kind: [text for text in texts if text.kind == kind] for kind in ("chat", "document")}
    shares = {"chat": 1.0 - document_share, "document": document_share}
    kinds = [kind for kind in pools if pools[kind] and shares[kind]]
    endless = {kind: _endless(pools[kind], batch_tokens, random.Random(f"{seed} {kind}")) for kind in kinds}
    while True:
        [kind] = rng.choices(kinds, [shares[kind] for kind in kinds])
        yield next(endless[kind])


def _endless(texts: list[Text], batch_tokens: int, rng: random.Random) -> Iterator[list[Text]]:
    while True:
        # Almost by length: little padding, and other neighbours each time.
        ordered = sorted(texts, key=lambda text: len(text.ids) * rng.uniform(0.85, 1.15))
        found: list[list[Text]] = [[]]
        longest = 0
        for text in ordered:
            longest = max(longest, padded(len(text.ids)))
            if found[-1] and longest * (len(found[-1]) + 1) > batch_tokens:
                found.append([])
                longest = padded(len(text.ids))
            found[-1].append(text)
        rng.shuffle(found)
        yield from found


def choose_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> torch.Tensor:
    """[size] int64, ascending: the ids that the target says most often.

    What it was asked counts a tenth: there are more of such ids than it ever says, and they show what it might.
    """
    size = min(size, vocab_size)
    counts = Counter[int]()
    for text in texts:
        counts.update(dict(Counter(text.ids[: text.start])))
        for token, count in Counter(text.ids[text.start :]).items():
            counts[token] += 10 * count
    ordered = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ordered[:size]))
