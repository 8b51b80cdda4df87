"""The engine's logprobs in the shapes that clients read.

Owns: the clamp of -inf, which JSON cannot carry.
Does not know: where the numbers come from.
"""

from collections.abc import Sequence

from minserve.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from minserve.protocol import TokenLogprobs
from minserve.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, as in vLLM."""


def clamp(logprob: float) -> float:
    """logprob as a number that JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """OpenAI's chat shape."""
    return ChatLogprobs(
        [
            TokenLogprob(
                token=tokenizer.token_text(entry.token_id),
                logprob=clamp(entry.logprob),
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    TopLogprob(tokenizer.token_text(token_id), clamp(logprob), list(tokenizer.token_bytes(token_id)))
                    for token_id, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's prompt_logprobs: the alternatives by rank, and the prompt's own token with its rank."""
    positions: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            positions.append(None)
            continue
        ranked = {
            str(token_id): PromptLogprob(clamp(logprob), rank, tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        own = PromptLogprob(clamp(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
        positions.append({**ranked, str(entry.token_id): own})
    return positions


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
) -> CompletionLogprobs:
    """OpenAI's completions shape. The sampled token is always among the alternatives."""
    result = CompletionLogprobs([], [], [], list(text_offsets))
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = tokenizer.token_text(token_id)
        result.tokens.append(text)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        # Several ids may have one text (parts of characters): the likeliest speaks for it.
        for other_id, logprob in entry.top:
            top.setdefault(tokenizer.token_text(other_id), clamp(logprob))
        top.setdefault(text, clamp(entry.logprob))
        result.token_logprobs.append(clamp(entry.logprob))
        result.top_logprobs.append(top)
    return result
