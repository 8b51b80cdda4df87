"""What clients may send: one Struct a route, one table of bounds, one table of what is refused and why.

Owns: field names, types, bounds and defaults that are the same for every model.
Does not know: the model (limits that depend on it are in `sampling`), HTTP, text.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from minserve.api.messages import Message
from minserve.api.strict_json import MAX_NAME_CHARS, convert
from minserve.errors import RequestError
from minserve.grammar import MAX_GRAMMAR_BYTES
from minserve.protocol import (
    MAX_LOGIT_BIAS,
    MAX_REQUEST_STOP_TOKEN_IDS,
    LogitBias,
    NumLogprobs,
    Penalty,
    PositiveShare,
    RepetitionPenalty,
    Share,
    SparseParams,
    Temperature,
)

MAX_CHOICES = 1024
"""Texts that one request may ask for: prompts times n."""

# The bounds, as types: msgspec holds requests to them, /openapi.json shows them. Those of sampling are the engine's.
NumChoices = Annotated[int, Meta(ge=1, le=128)]
NumTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MinTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
StopTokenIds = Annotated[list[int], Meta(max_length=MAX_REQUEST_STOP_TOKEN_IDS)]
LogitBiases = Annotated[dict[str, LogitBias], Meta(max_length=MAX_LOGIT_BIAS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
StructureText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=2**14)]
Messages = Annotated[list[Message], Meta(min_length=1)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=1024)]
TemplateKwargs = Annotated[dict[str, Any], Meta(max_length=64)]

_TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0}
_PROMPT_FORMS = [
    {"items": {"type": "string", "minLength": 1}, "maxItems": MAX_CHOICES},
    {"items": _TOKEN_ID_SCHEMA},
    {"items": {"type": "array", "items": _TOKEN_ID_SCHEMA, "minItems": 1}, "maxItems": MAX_CHOICES},
]
PromptList = Annotated[list[Any], Meta(extra_json_schema={"minItems": 1, "anyOf": _PROMPT_FORMS})]
"""msgspec cannot tell one kind of list from another; `completions` does."""

INERT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""OpenAI's fields that cannot change the output: taken and not used."""

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
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
            "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_decoding_backend", "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "grammar",
            "structural_tag", "allowed_token_ids", "logit_processors", "custom_logit_processor", "custom_params",
            "truncate_prompt_tokens", "chat_template", "lora_path", "kv_transfer_params", "vllm_xargs", "prompt_embeds",
            "top_a", "mirostat", "typical_p", "no_stop_trim", "stop_regex", "request_id",
        ),
        (),
    ),
}  # fmt: skip
"""Fields of OpenAI's or another server's API that are not here yet, with the values that ask for nothing."""


INSTEAD = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""What other servers have called our fields."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What a route takes. not_supported: known fields that it does not take, with the values that ask for nothing;
    instead: what to use in place of some of them.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED
    instead: ClassVar[Mapping[str, str]] = INSTEAD


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far, in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's json_schema. Name and description are for the client; strict changes nothing: a schema always holds."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's: json_object is any object; json_schema is what the schema says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: exactly one of these. json: a schema, or the text of one; regex: matched from the beginning to the end;
    choice: one of some texts; grammar: in Lark's notation or GBNF's; json_object: any object.
    """

    json: dict[str, Any] | bool | str | None = None
    regex: StructureText | None = None
    choice: Choices | None = None
    grammar: StructureText | None = None
    json_object: bool | None = None


class SamplingRequest(Body, frozen=True, kw_only=True):
    """What every route that generates takes. None: not given, so the model's or OpenAI's default holds."""

    model: str | None = None
    stream: bool = False
    seed: Seed | None = None
    stop: StopString | StopStrings = []
    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBiases = {}
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens = 0
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds = []
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: CacheSalt | None = None
    structured_outputs: StructuredOutputs | None = None
    sparse: SparseParams | None = None


class GenerationRequest(SamplingRequest, frozen=True, kw_only=True):
    """What chat and completions share."""

    stream_options: StreamOptions | None = None
    n: NumChoices = 1
    max_tokens: NumTokens | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None

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

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    tools: Tools = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateKwargs = {}

    @property
    def forces_call(self) -> bool:
        """The answer is to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: Annotated[str, Meta(min_length=1)] | PromptList
    echo: bool = False
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize, with a prompt or with messages. add_special_tokens: true for a prompt, false for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = {}
    return_token_strs: bool = False


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(fields: dict[str, Any], kind: type[B]) -> B:
    """The fields of a body as a request: known names, right types, inside the bounds. Raises RequestError."""
    _check_names(fields, kind)
    request = convert({name: value for name, value in fields.items() if name in kind.__struct_fields__}, kind)
    if isinstance(request, SamplingRequest):
        _check_salt(request.cache_salt)
    if isinstance(request, GenerationRequest):
        _check_generation(request)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request


def _check_names(fields: dict[str, Any], kind: type[Body]) -> None:
    known = kind.__struct_fields__
    for name, value in fields.items():
        if name in known or name in INERT:
            continue
        if name in kind.not_supported:
            neutral = kind.not_supported[name]
            # In Python, True == 1; in JSON they differ.
            if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
                continue
            allowed = f"; allowed: {', '.join(map(repr, neutral))} or absent" if neutral else ""
            if name in kind.instead:
                allowed = f"; use {kind.instead[name]}"
            raise RequestError(f"{name} is not supported{allowed}", param=name, code="unsupported_parameter")
        name = name[:MAX_NAME_CHARS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise RequestError(f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")


def _check_salt(cache_salt: str | None) -> None:
    if cache_salt is not None and not cache_salt.isprintable():
        raise RequestError("cache_salt must be printable characters", param="cache_salt")


def _check_generation(request: GenerationRequest) -> None:
    if request.limit is not None and request.min_tokens > request.limit:
        raise RequestError(f"min_tokens must be at most max_tokens ({request.limit})", param="min_tokens")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
