"""What the server answers: one Struct a JSON object, in OpenAI's shapes with vLLM's additions.

Owns: field names and their order on the wire. UNSET fields are left out; None is sent as null.
Does not know: where the values come from.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from minserve.protocol import SparseUsage

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Every failure, as a body or as an event of a stream."""

    error: ErrorBody


class CachedTokensDetails(msgspec.Struct):
    """Where cached tokens were: in pages on the device, or in host memory, from where they were loaded."""

    device: int
    host: int


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class DraftTokensDetails(msgspec.Struct):
    """Drafts of the answer's tokens that were verified, and those that were right."""

    draft_tokens: int
    accepted_tokens: int


class SparseDetails(msgspec.Struct):
    """What the working set of a request did that was sparse: in blocks of one KV head of one layer, over all steps.

    from_token: the first token whose KV was computed from a part of the KV before it. steps: from there on; retries:
    those that ran again, since what they wanted most was not there. hit_rate: the share of the blocks wanted for the
    next step that were there already; null if none was wanted. misses: the others; cut_misses: those of them that
    were not fetched. asked: blocks that a step's own token wanted; surprises: those that it had to do without.
    bytes_fetched: from host memory.
    """

    from_token: int
    steps: int
    retries: int
    hit_rate: float | None
    hits: int
    misses: int
    cut_misses: int
    surprises: int
    asked: int
    bytes_fetched: int

    @classmethod
    def of(cls, used: SparseUsage) -> "SparseDetails":
        """The counters as they are, and their rate."""
        wanted = used.hits + used.misses
        return cls(hit_rate=round(used.hits / wanted, 4) if wanted else None, **msgspec.structs.asdict(used))


class Usage(msgspec.Struct):
    """completion_tokens_details: of chats with a model whose reasoning is told from its answers. draft_tokens_details:
    where the server drafts. sparse_details: of requests that were sparse for a while."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    draft_tokens_details: DraftTokensDetails | UnsetType = UNSET
    sparse_details: SparseDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, null for the first: token id (as text) -> its logprob."""


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """reasoning: under the names of vLLM and of DeepSeek; null if there was none, absent if it is not looked for."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to the call of that index: at first its id and name, then pieces of its arguments."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists. token_logprobs and top_logprobs of the first token of an echoed prompt are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """A whole answer, and a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "minserve"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class StatusResponse(msgspec.Struct):
    status: str


class VersionResponse(msgspec.Struct):
    version: str


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int,
    num_cached_on_host: int,
    drafts: tuple[int, int],
    sparse: SparseUsage | None,
) -> Usage:
    """The token counts of one request, all its choices together. num_cached_on_host: a part of num_cached_tokens.

    drafts: those that were verified, and those that were right. sparse: None if no choice was.
    """
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            num_cached_tokens, CachedTokensDetails(num_cached_tokens - num_cached_on_host, num_cached_on_host)
        ),
        draft_tokens_details=DraftTokensDetails(*drafts) if drafts[0] else UNSET,
        sparse_details=UNSET if sparse is None else SparseDetails.of(sparse),
    )
