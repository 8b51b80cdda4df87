"""Grammars, compiled by llguidance: which tokens may come next.

Owns: what is compiled, under which limits, and the matchers of the texts that are being made. Imports no torch.
Does not know: what clients ask for (text.grammars makes the grammars), requests, tables on a device.

A grammar is JSON as llguidance reads it. It comes from a client, and llguidance recurses as deep as it does: whoever
compiles one that nobody has tried yet does so where the process can be lost (text.grammar_process), on a smaller stack
than any that it will have later.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from minserve.errors import RequestError

MAX_GRAMMAR_BYTES = 2**17
"""Of the grammar of one request."""

NUM_KEPT = 64
"""Compiled grammars that are kept for the next request with the same."""

COMPILING_STACK_BYTES = 16 * 2**20
TRYING_STACK_BYTES = 2**20
"""A chain of some 300 rules or references is the longest that fits into the smaller one."""

_MAX_REASON_CHARS = 400

Mask = NDArray[np.int32]


class Vocabulary(NamedTuple):
    """What matchers know of a model's tokens.

    tokens: the bytes of each, as many as the logits are wide; none for what is no token. special_token_ids: those that
    no text contains. end_token_ids: those that end a text. encode: the model's own spelling of a text, in tokens; it is
    asked for what a grammar leaves no choice about, so that the model reads what it is used to.
    """

    tokens: list[bytes]
    special_token_ids: frozenset[int]
    end_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


BYTES = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b"<end>"],
    special_token_ids=frozenset({256}),
    end_token_ids=(256,),
    encode=lambda text: list(text.encode()),
)
"""What is there without a model."""


class Matcher:
    """Follows one text. end_token_ids: what the grammar takes for its end, where it may end.

    error: why nothing more can be said under the grammar; empty as long as that is not so.
    """

    def __init__(self, matcher: LLMatcher, end_token_ids: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.end_token_ids = end_token_ids
        self.error = ""

    def take(self, token_id: int) -> bool:
        """The text goes on with a token; whether it may go on after that. False with an error set: it may not end."""
        if token_id in self.end_token_ids:
            # Where a grammar has come to nothing, or a limit was hit, the masks leave nothing but an end.
            if not self.matcher.is_accepting():
                self.error = _reason(self.matcher)
            return False
        if not self.matcher.consume_token(token_id):
            self.error = _reason(self.matcher)
            return False
        if self.matcher.is_stopped() and not self.matcher.is_accepting():
            self.error = _reason(self.matcher)
        return not self.matcher.is_stopped()


class Grammars:
    """The compiled grammars of one model. load: called once, when the first grammar comes.

    compile may be called from any thread; the rest belongs to the one that makes steps.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._end_token_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._executor: LLExecutor | None = None

    def compile(self, grammar: str) -> None:
        """Make ready what `matcher` will be asked for; what is wrong with it is told then."""
        self._compile(grammar)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher of a new text. Raises RequestError for a grammar that cannot be compiled."""
        compiled = self._compile(grammar)
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_reason(compiled)}", param="grammar")
        return Matcher(compiled.deep_copy(), self._end_token_ids)

    def masks(self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], num_drafts: int) -> Mask:
        """Which tokens may follow each text, and which if its first drafts were part of it: [texts, 1 + num_drafts,
        words], token i is bit i % 32 of word i // 32.

        drafts: at most num_drafts each. Behind a draft that is not allowed, and behind the last one, a row allows all.
        """
        assert self._tokenizer is not None, "a matcher without a tokenizer"
        rows = 1 + num_drafts
        masks = np.full((len(matchers), rows, -(-self._tokenizer.vocab_size // 32)), -1, dtype=np.int32)
        row_bytes = masks.shape[2] * masks.itemsize
        self._executor = self._executor or LLExecutor()
        entries = list(zip(matchers, range(0, len(matchers) * rows, rows), drafts, strict=True))
        where = (masks.ctypes.data, row_bytes, len(matchers) * rows)
        if plain := [(matcher.matcher, row) for matcher, row, own in entries if not own]:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted := [(matcher.matcher, row, list(own)) for matcher, row, own in entries if own]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        return masks

    def _compile(self, grammar: str) -> LLMatcher:
        with self._loading:
            if self._tokenizer is None:
                vocabulary = self._load()
                self._end_token_ids = vocabulary.end_token_ids
                self._tokenizer = _Wrapper(vocabulary).tokenizer()
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:  # compiled without the lock: steps go on meanwhile, and look up others
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
        return compiled


class Trial:
    """Says whether grammars can be compiled for a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = _Wrapper(vocabulary).tokenizer()

    def fault(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None if nothing is. It may overflow the stack: see the module."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_accepting() or not matcher.is_stopped():
            return None
        return _reason(matcher)


class _Wrapper:
    """A vocabulary as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces: LLTokenizer | None = None
        # Without an end token a grammar that may end would look like one that must: a text then ends where it must.
        ends = vocabulary.end_token_ids or (len(vocabulary.tokens),)
        self._end_token_ids = list(ends)
        self.tokens = [*vocabulary.tokens, *([] if vocabulary.end_token_ids else [b"<end>"])]
        self.special_token_ids = sorted({*vocabulary.special_token_ids, *ends})
        self.eos_token_id = ends[0]
        self.bos_token_id = None

    def tokenizer(self) -> LLTokenizer:
        """llguidance's own object. Takes a fifth of a second for each 50,000 tokens."""
        self._pieces = LLTokenizer(TokenizerWrapper(self), eos_token=self._end_token_ids)
        return self._pieces

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text: the model's own spelling, or any if that one does not give back the same bytes."""
        if self._pieces is None:  # llguidance tries whether it may be given bytes
            return []
        spelled = text.decode("utf-8", "replace")
        ids = self._vocabulary.encode(spelled)
        is_plain = not any(token_id in self._vocabulary.special_token_ids for token_id in ids)
        if is_plain and b"".join(self._vocabulary.tokens[token_id] for token_id in ids) == text:
            return ids
        return self._pieces.greedy_tokenize(spelled)


def _limits() -> LLParserLimits:
    """What one mask may take: some 15 ms, and of memory a tenth of a gigabyte. Errors quote no grammar."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def bar(row: Mask, token_ids: Sequence[int]) -> None:
    """Take tokens out of what a mask's row allows, if it allows anything else."""
    kept = row.copy()
    for token_id in token_ids:
        kept[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
    if kept.any():
        row[:] = kept


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher has stopped, in a line or a few: an error quotes what is wrong, which may be long."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if not error or error.startswith("NoExtension"):
        return "no text of the model's tokens fits it"
    return error[:_MAX_REASON_CHARS]
