"""What clients may send: one Struct a route, one table of bounds, one table of what is refused and why.

Owns: field names, types, bounds and defaults that are the same for every model.
Does not know: the model (limits that depend on it are in `sampling`), HTTP, text.
"""

import difflib
from typing import Any, NamedTuple, TypeVar

import msgspec

from minserve.api.body import MAX_NAME_CHARS, convert
from minserve.api.messages import Message
from minserve.errors import RequestError
from minserve.protocol import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_REQUEST_STOP_TOKEN_IDS

MAX_CHOICES = 1024
"""Texts that one request may ask for: prompts times n."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256


class Bound(NamedTuple):
    """low <= value <= high, or low < value if open."""

    low: float
    high: float
    open: bool = False

    def check(self, name: str, value: float) -> None:
        above = value > self.low if self.open else value >= self.low
        if not above or value > self.high:
            allowed = f"above {self.low}" if self.open else f"at least {self.low}"
            raise RequestError(f"{name} must be {allowed} and at most {self.high}, got {value}", param=name)


BOUNDS: dict[str, Bound] = {
    "n": Bound(1, 128),
    "max_tokens": Bound(1, 2**31 - 1),
    "max_completion_tokens": Bound(1, 2**31 - 1),
    "min_tokens": Bound(0, 2**31 - 1),
    "temperature": Bound(0, 100),
    "top_p": Bound(0, 1, open=True),
    "top_k": Bound(-1, 2**31 - 1),
    "min_p": Bound(0, 1),
    "repetition_penalty": Bound(0.01, 100),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "seed": Bound(-(2**63), 2**63 - 1),
    "logprobs": Bound(0, MAX_LOGPROBS),
    "top_logprobs": Bound(0, MAX_LOGPROBS),
    "prompt_logprobs": Bound(0, MAX_LOGPROBS),
}

INERT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""OpenAI's fields that cannot change the output: taken and not used."""

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 0),
    "suffix": ("",),
    "priority": (0,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    **dict.fromkeys(
        (
            "audio", "prediction", "web_search_options", "verbosity", "reasoning_effort", "reasoning", "thinking",
            "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_decoding_backend", "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "grammar",
            "structural_tag", "allowed_token_ids", "logit_processors", "custom_logit_processor", "custom_params",
            "truncate_prompt_tokens", "chat_template", "lora_path", "kv_transfer_params", "vllm_xargs", "prompt_embeds",
            "top_a", "mirostat", "typical_p", "no_stop_trim", "stop_regex", "request_id",
        ),
        (),
    ),
}  # fmt: skip
"""Fields of OpenAI's or another server's API that are not here yet, with the values that ask for nothing."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far, in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions share. None: not given, so the model's or OpenAI's default holds."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    cache_salt: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if the client said."""
        return self.max_tokens


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions.

    include_reasoning: send it (vLLM's field). separate_reasoning: set it apart from the content (SGLang's).
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize, with a prompt or with messages. add_special_tokens: true for a prompt, false for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=msgspec.Struct)


def parse(fields: dict[str, Any], kind: type[R]) -> R:
    """The fields of a body as a request: known names, right types, inside the bounds. Raises RequestError."""
    known = set(kind.__struct_fields__)
    _check_names(fields, known)
    request = convert({name: value for name, value in fields.items() if name in known}, kind)
    for name, bound in BOUNDS.items():
        value = getattr(request, name, None)
        if value is not None and not isinstance(value, bool):
            bound.check(name, value)
    if isinstance(request, GenerationRequest):
        _check_generation(request)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request


def _check_names(fields: dict[str, Any], known: set[str]) -> None:
    for name, value in fields.items():
        if name in known or name in INERT:
            continue
        if name in NOT_SUPPORTED:
            neutral = NOT_SUPPORTED[name]
            if value in neutral:
                continue
            allowed = f"; allowed: {', '.join(map(repr, neutral))} or absent" if neutral else ""
            raise RequestError(f"{name} is not supported{allowed}", param=name, code="unsupported_parameter")
        name = name[:MAX_NAME_CHARS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise RequestError(f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")


def _check_generation(request: GenerationRequest) -> None:
    stops = request.stop_strings
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}", param="stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise RequestError(f"stop strings must have 1 to {MAX_STOP_CHARS} characters each", param="stop")
    for name, most in (("stop_token_ids", MAX_REQUEST_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS)):
        if len(getattr(request, name)) > most:
            raise RequestError(f"{name} may hold at most {most} entries", param=name)
    if request.limit is not None and request.min_tokens > request.limit:
        raise RequestError(f"min_tokens must be at most max_tokens ({request.limit})", param="min_tokens")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    salt = request.cache_salt
    if salt is not None and not (1 <= len(salt) <= MAX_SALT_CHARS and salt.isprintable()):
        raise RequestError(f"cache_salt must be 1 to {MAX_SALT_CHARS} printable characters", param="cache_salt")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
