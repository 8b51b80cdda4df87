"""Tools: what the model is shown, and calls in its answer."""

import json

import pytest

from tests.api.conftest import MODEL, calls_of, chat_body, finish_reasons, joined_calls, joined_text

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "a<b & 'c'", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "</x>"}}</tool_call>'


@pytest.fixture
async def running(start):
    return await start(tool_call_parser="hermes")


async def test_a_call_is_set_apart_from_the_text_and_gives_its_own_finish_reason(running):
    running.engine.reply = f"Let me see. {CALL}"
    choice = (await running.chat(tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "</x>"}


async def test_parallel_calls_are_streamed_with_their_index(running):
    running.engine.reply = CALL + CALL
    events = await running.chat_events(tools=TOOLS)
    parts = [c for e in events for choice in e["choices"] for c in choice["delta"].get("tool_calls", [])]
    begins = [part for part in parts if "id" in part]
    assert [(begin["index"], begin["function"]["name"]) for begin in begins] == [(0, "add"), (1, "add")]
    assert len({begin["id"] for begin in begins}) == 2
    assert joined_calls(events) == [("add", '{"a": 1, "b": "</x>"}')] * 2
    assert joined_text(events) == ""
    assert finish_reasons(events) == ["tool_calls"]


async def test_arguments_are_streamed_as_the_model_writes_them(running):
    running.engine.reply = CALL
    running.engine.hold_at = len('<tool_call>{"name": "add", "arguments": {"a": 1') - len("tool_call>")
    stream = await running.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=TOOLS, stream=True
    )
    arguments = ""
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments += call.function.arguments
            if arguments == '{"a": 1':
                running.engine.release()  # So it has come while the engine was held.
    assert arguments == '{"a": 1, "b": "</x>"}'


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 100])
async def test_whole_and_streamed_answers_have_the_same_calls_and_text(running, tokens_per_delta):
    running.engine.tokens_per_delta = tokens_per_delta
    for reply in (
        f"One {CALL} two {CALL}",
        f"<tool_call>oops</tool_call>{CALL}",
        '<tool_call>{"name": "add", "arguments": {"a": 1',
    ):
        running.engine.reply = reply
        choice = (await running.chat(tools=TOOLS))["choices"][0]
        events = await running.chat_events(tools=TOOLS)
        assert joined_calls(events) == calls_of(choice)
        assert joined_text(events) == (choice["message"]["content"] or "")
        assert finish_reasons(events) == [choice["finish_reason"]]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_the_markers_of_a_call_are_seen_by_the_parser_and_never_by_the_client(running, skip_special_tokens):
    running.engine.reply = f"ok {CALL}"
    answer = await running.chat(tools=TOOLS, skip_special_tokens=skip_special_tokens)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert "tool_call>" not in answer["choices"][0]["message"]["content"]
    assert calls_of(answer["choices"][0]) == [("add", '{"a": 1, "b": "</x>"}')]


async def test_prose_before_a_stop_string_is_delivered_in_full_while_the_parser_buffers(running):
    running.engine.reply = "The sum is <3. And more"
    assert (await running.chat(tools=TOOLS, stop=["."]))["choices"][0]["message"]["content"] == "The sum is <3"
    assert joined_text(await running.chat_events(tools=TOOLS, stop=["."])) == "The sum is <3"


async def test_a_call_that_is_cut_before_its_arguments_is_delivered_as_text_and_ends_by_length(running):
    running.engine.reply = CALL
    choice = (await running.chat(tools=TOOLS, max_tokens=12))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('<tool_call>{"name"')


async def test_a_call_that_is_cut_in_its_arguments_is_delivered_so_far_and_is_no_end_by_calls(running):
    running.engine.reply = CALL
    choice = (await running.chat(tools=TOOLS, max_tokens=36))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert calls_of(choice) == [("add", '{"a": ')]
    choice = (await running.chat(tools=TOOLS, stop=["1"]))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "1")


async def test_a_malformed_call_is_content(running):
    running.engine.reply = "<tool_call>{'name': 'add'}</tool_call>"
    choice = (await running.chat(tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": running.engine.reply}


async def test_calls_in_llamas_format_are_found_by_the_names_of_the_tools(start):
    running = await start(tool_call_parser="llama3_json")
    running.engine.reply = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}'
    choice = (await running.chat(tools=TOOLS))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert calls_of(choice) == joined_calls(await running.chat_events(tools=TOOLS))
    assert calls_of(choice) == [("add", '{"a": 1}'), ("add", "{}")]
    running.engine.reply = '{"name": "Ann", "parameters": {"age": 3}}'
    choice = (await running.chat(tools=TOOLS))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", running.engine.reply)


async def test_our_own_calls_can_be_sent_back_with_their_results(running):
    running.engine.reply = CALL
    user = {"role": "user", "content": "hi"}
    answer = await running.openai.chat.completions.create(model=MODEL, messages=[user], tools=TOOLS)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "42"}]}
    await running.chat(messages=[user, message.model_dump(), result], tools=TOOLS)
    prompt = running.engine.submits[-1].prompt_token_ids
    shown = running.service.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "<|im_start|>tool\n42<|im_end|>" in shown


async def test_tools_are_shown_to_the_model_unless_it_may_use_none(running):
    await running.chat(tools=TOOLS)
    await running.chat(tools=TOOLS, tool_choice="none")
    shown = [
        running.service.tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
        for submit in running.engine.submits
    ]
    assert "a<b & 'c'" in shown[0]
    assert "<|im_start|>tools" not in shown[1]


async def test_auto_needs_the_servers_flags(start):
    running = await start()
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}):
        status, answer = await running.post("/v1/chat/completions", chat_body(**fields))
        assert status == 400
        assert "--enable-auto-tool-choice and --tool-call-parser" in answer["error"]["message"]
    await running.chat(tools=TOOLS, tool_choice="none")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": "add"}, "tools"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(running, fields, param):
    status, answer = await running.post("/v1/chat/completions", chat_body(**fields))
    assert (status, answer["error"]["param"]) == (400, param), answer
