"""From a checked request to the engine's SamplingParams: the limits that depend on the model, and the defaults.

Owns: vocabulary and context limits, seeds, the order of defaults: request, generation_config.json, OpenAI's.
Does not know: HTTP, text.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence

from minserve.api.schemas import GenerationRequest
from minserve.errors import RequestError
from minserve.protocol import Ready, SamplingParams
from minserve.text.tokenizer import SamplingDefaults

GREEDY_BELOW = 1e-5
"""A smaller temperature would overflow the logits, and means greedy."""

MAX_PROMPT_LOGPROBS = 2**20
"""Entries that one answer may report of its prompts: they are all in memory at once, at some 300 bytes each."""

OPENAI_DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    info: Ready,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """The parameters of the request's first choice. Raises RequestError for token ids outside the vocabulary."""
    chosen = {
        name: next(value for value in (getattr(request, name), getattr(defaults, name), fallback) if value is not None)
        for name, fallback in OPENAI_DEFAULTS.items()
    }
    if request.min_tokens > max_tokens:
        raise RequestError(f"min_tokens must be at most the {max_tokens} tokens that fit", param="min_tokens")
    check_token_ids(request.stop_token_ids, info.vocab_size, "stop_token_ids")
    temperature = float(chosen["temperature"])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=float(chosen["top_p"]),
        top_k=max(0, int(chosen["top_k"])),
        min_p=float(chosen["min_p"]),
        repetition_penalty=float(chosen["repetition_penalty"]),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias, info.vocab_size),
        seed=secrets.randbits(63) if request.seed is None else request.seed & (2**63 - 1),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the request's own for the first, so that n = 1 and n > 1 agree on it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RequestError for the first id that is not in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"{param}: token ids must be from 0 to {vocab_size - 1}, got {wrong}", param=param)


def check_prompt_logprobs(num_prompt_tokens: int, num_top: int | None, param: str) -> None:
    """Raises RequestError for more than can be held. num_prompt_tokens: of all choices together."""
    if num_top is not None and num_prompt_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{param}: {num_top} alternatives for each of {num_prompt_tokens} prompt tokens (of all choices together) "
            f"are too many; one answer may hold {MAX_PROMPT_LOGPROBS} log probabilities of prompts",
            param=param,
        )


def fit_context(num_prompt_tokens: int, limit: int | None, default: int | None, max_model_len: int, param: str) -> int:
    """How many tokens to generate. limit: what the client asked for, refused if it does not fit; default: cut to fit.

    The wording and the code are OpenAI's, because clients look for them.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise context_overflow(f"{num_prompt_tokens}", max_model_len, param)
    if limit is None:
        return room if default is None else min(default, room)
    if limit > room:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + limit} tokens ({num_prompt_tokens} in the {param}, {limit} in the completion). "
            f"Please reduce the length of the {param} or of the completion.",
            param=param,
            code="context_length_exceeded",
        )
    return limit


def context_overflow(num_prompt_tokens: str, max_model_len: int, param: str) -> RequestError:
    """The error for a prompt that leaves no room for a single token."""
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {param} resulted in "
        f"{num_prompt_tokens} tokens, and one more is needed for the completion. "
        f"Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal alone lets other scripts' digits through, and int("1_0") is 10.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, got {key[:40]!r}", param="logit_bias"
            )
        checked[int(key)] = value
    return checked
