"""What /v1/responses answers: the response, its items, and the events of its stream, in OpenAI's shapes.

Owns: field names. Does not know: where the values come from, in which order the events are.
"""

from typing import Any, Literal

import msgspec

from minserve.api.items_request import ReasoningOptions, TextOptions
from minserve.api.responses import PromptTokensDetails, Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
Nothing = tuple[()]
"""An empty list, where OpenAI has what we have not."""


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: Nothing = ()
    logprobs: Nothing = ()


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's reasoning in its own words: there are no summaries."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: Nothing = ()


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall
OutputPart = OutputText | ReasoningText


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ItemsUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, num_reasoning_tokens: int) -> "ItemsUsage":
        """The counts of a chat under the names of this route."""
        return cls(
            usage.prompt_tokens,
            usage.prompt_tokens_details,
            usage.completion_tokens,
            OutputTokensDetails(num_reasoning_tokens),
            usage.total_tokens,
        )


class ItemsError(msgspec.Struct):
    """Why a response has failed."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """The answer, and what it is an answer to. Nothing of it is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    error: ItemsError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOptions
    store: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ItemsUsage | None = None
    user: str | None


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """One event. sequence_number: from 0 in each stream."""

    sequence_number: int = 0


class ResponseCreated(Event, tag="response.created"):
    response: Response


class ResponseInProgress(Event, tag="response.in_progress"):
    response: Response


class ResponseCompleted(Event, tag="response.completed"):
    response: Response


class ResponseIncomplete(Event, tag="response.incomplete"):
    response: Response


class ResponseFailed(Event, tag="response.failed"):
    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class PartAdded(Event, tag="response.content_part.added"):
    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class PartDone(Event, tag="response.content_part.done"):
    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class TextDelta(Event, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: Nothing = ()


class TextDone(Event, tag="response.output_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: Nothing = ()


class ReasoningDelta(Event, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(Event, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Event, tag="error"):
    """What has failed before there was a response, in a stream that had to be begun to keep it alive."""

    code: str | None
    message: str
    param: str | None


EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    ItemAdded,
    PartAdded,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
    ArgumentsDelta,
    ArgumentsDone,
    PartDone,
    ItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    ErrorEvent,
)
