"""POST /v1/responses: what of its input reaches the model, and whole answers, through the openai client and by hand."""

import json

import openai
import pydantic
import pytest

from minserve.text.chat import ChatTemplate
from minserve.text.renderer import Renderer
from tests.api import tiny
from tests.api.checks import RESPONSES
from tests.api.conftest import MODEL
from tests.api.test_structured import SCHEMA, accepts

ADD = {"type": "function", "name": "add", "description": "a<b", "parameters": SCHEMA}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
async def running(start):
    return await start(tool_call_parser="hermes")


@pytest.fixture
async def thinking(start, tmp_path):
    """A model that opens its reasoning itself."""
    folder = tiny.write_model_folder(tmp_path, template=tiny.THINKING_TEMPLATE)
    return await start(folder=folder, tool_call_parser="hermes")


@pytest.fixture
async def seen(start):
    """seen(input, ...) -> the messages as the template is given them."""
    renderer = Renderer(ChatTemplate({"default": "{{ messages | tojson }}"}))
    running = await start(renderer=renderer, tool_call_parser="hermes")

    async def see(given, **fields):
        status, answer = await running.post(RESPONSES, {"input": given} | fields)
        assert status == 200, answer
        return json.loads(running.service.tokenizer.decode(running.engine.submits[-1].prompt_token_ids))

    yield see
    renderer.close()


def shown(running, number=-1):
    prompt = running.engine.submits[number].prompt_token_ids
    return running.service.tokenizer.decode(prompt, skip_special_tokens=False)


async def test_the_openai_client_gets_a_whole_answer(running):
    answer = await running.openai.responses.create(model=MODEL, input="hi")
    assert answer.output_text == "hello world"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", MODEL)
    assert (answer.error, answer.incomplete_details, answer.previous_response_id) == (None, None, None)
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.id.startswith("resp_")
    assert message.id.startswith("msg_")


async def test_the_prompt_is_that_of_the_same_chat(running):
    await running.chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    await running.openai.responses.create(model=MODEL, instructions="Be brief.", input="hi")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    await running.openai.responses.create(model=MODEL, instructions="Be brief.", input=parts)
    assert len({tuple(submit.prompt_token_ids) for submit in running.engine.submits}) == 1


async def test_items_are_the_messages_of_a_chat(seen):
    assert await seen(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None,
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}', "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "user", "content": "And?"},
        ],
        instructions="You add.",
    ) == [
        {"role": "system", "content": "You add."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
            ],
            **dict.fromkeys(("reasoning_content", "thinking"), "Hm."),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip


async def test_two_answers_with_nothing_between_them_are_two_turns_and_reasoning_begins_one(seen):
    said = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    roles = [(m["role"], m["content"]) for m in await seen([*said, thought, {"role": "user", "content": "c"}])]
    assert roles == [("assistant", "a"), ("assistant", "b"), ("assistant", ""), ("user", "c")]


async def test_reasoning_of_which_only_a_summary_is_left_is_no_message(seen):
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Much."}]}
    assert await seen([summary, {"role": "user", "content": "hi"}]) == [{"role": "user", "content": "hi"}]


async def test_it_says_what_it_answers_to(running):
    answer = await running.openai.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5, top_p=0.9,
        tools=[ADD], tool_choice="auto", metadata={"a": "b"}, user="ann", store=False,
        extra_body={"top_k": 3, "seed": 7, "chat_template_kwargs": {"x": 1}},
    )  # fmt: skip
    assert (answer.instructions, answer.max_output_tokens, answer.temperature) == ("Be brief.", 50, 0.5)
    assert (answer.top_p, answer.metadata, answer.user) == (0.9, {"a": "b"}, "ann")
    assert answer.tools[0].name == "add"
    assert (answer.tool_choice, answer.parallel_tool_calls, answer.text.format.type) == ("auto", True, "text")
    assert answer.model_extra["store"] is False
    params = running.engine.submits[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (50, 0.5, 0.9, 3, 7)


async def test_usage_has_this_routes_names(thinking):
    thinking.engine.reply = "<think>\nHm.\n</think>\n\nok"
    thinking.engine.cached_tokens = 16
    usage = (await thinking.openai.responses.create(model=MODEL, input="hi")).usage
    assert usage.input_tokens == len(thinking.engine.submits[0].prompt_token_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.output_tokens == usage.output_tokens_details.reasoning_tokens + len("\n\nok") + 1


async def test_an_answer_that_is_cut_is_incomplete_and_says_why(running):
    answer = await running.openai.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text) == ("incomplete", "hello ")


async def test_a_stop_string_ends_an_answer_completely(running):
    answer = await running.openai.responses.create(model=MODEL, input="hi", extra_body={"stop": "wo"})
    assert (answer.status, answer.output_text) == ("completed", "hello ")


async def test_an_empty_answer_is_an_empty_message(running):
    running.engine.reply = ""
    answer = await running.openai.responses.create(model=MODEL, input="hi")
    assert [part.text for part in answer.output[0].content] == [""]


async def test_reasoning_is_an_item_before_the_answer(thinking):
    thinking.engine.reply = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    answer = await thinking.openai.responses.create(model=MODEL, input="hi")
    thought, message = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Two and two.", [])
    assert message.content[0].text == answer.output_text == "It is 4."


async def test_text_and_calls_are_items_in_the_order_in_which_they_were_said(running):
    running.engine.reply = f"One {CALL} two {CALL}{CALL}"
    answer = await running.openai.responses.create(model=MODEL, input="hi", tools=[ADD])
    assert [item.type for item in answer.output] == [
        "message", "function_call", "message", "function_call", "function_call",
    ]  # fmt: skip
    calls = [item for item in answer.output if item.type == "function_call"]
    assert {(call.name, call.arguments, call.status) for call in calls} == {("add", '{"a": 1}', "completed")}
    assert len({call.call_id for call in calls}) == 3
    assert answer.status == "completed"


async def test_a_call_that_is_cut_is_incomplete_and_one_that_was_whole_is_not(running):
    running.engine.reply = CALL
    for max_tokens, status in ((36, "incomplete"), (100, "completed")):
        answer = await running.openai.responses.create(
            model=MODEL, input="hi", tools=[ADD], max_output_tokens=max_tokens
        )
        assert (answer.status, answer.output[-1].type, answer.output[-1].status) == (status, "function_call", status)
    running.engine.reply = CALL[: -len("</tool_call>")] + " " * 50
    answer = await running.openai.responses.create(model=MODEL, input="hi", tools=[ADD], max_output_tokens=60)
    assert (answer.status, answer.output[-1].status) == ("incomplete", "completed")


async def test_a_second_turn_is_made_of_the_first_ones_items(thinking):
    thinking.engine.reply = f"<think>\nAdd.\n</think>\n\nLet me see. {CALL}"
    user = {"role": "user", "content": "hi"}
    first = await thinking.openai.responses.create(model=MODEL, input=[user], tools=[ADD])
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    for output in (first.output, [item.model_dump() for item in first.output]):
        answer = await thinking.openai.responses.create(model=MODEL, input=[user, *output, result], tools=[ADD])
        assert answer.status == "completed"
        assert shown(thinking).endswith("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")
        assert "<|im_start|>assistant\nLet me see." in shown(thinking)


async def test_tools_are_shown_to_the_model_as_a_chat_shows_them(running):
    await running.openai.responses.create(model=MODEL, input="hi", tools=[ADD | {"strict": False}])
    function = {name: ADD[name] for name in ("name", "description", "parameters")}
    await running.chat(tools=[{"type": "function", "function": function}])
    assert shown(running, 0) == shown(running, 1)
    await running.openai.responses.create(model=MODEL, input="hi", tools=[ADD], tool_choice="none")
    assert "<|im_start|>tools" not in shown(running)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
async def test_a_call_may_be_forced_and_strict(running, choice):
    await running.openai.responses.create(
        model=MODEL, input="hi", tools=[ADD | {"strict": True}], tool_choice=choice, parallel_tool_calls=False
    )
    grammar = running.engine.submits[0].grammar
    assert accepts(grammar, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert not accepts(grammar, "hello")


async def test_text_may_be_held_to_a_schema(running):
    running.engine.reply = '{"a": 1}'

    class Sum(pydantic.BaseModel):
        a: int

    answer = await running.openai.responses.parse(model=MODEL, input="hi", text_format=Sum)
    assert answer.output_parsed == Sum(a=1)
    grammar = running.engine.submits[0].grammar
    assert accepts(grammar, '{"a": 12}')
    assert not accepts(grammar, '{"a": "b"}')
    await running.openai.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
    assert accepts(running.engine.submits[1].grammar, '{"b": []}')


async def test_a_failure_of_a_whole_answer_is_a_500(running):
    running.engine.fail_at = 3
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        await running.openai.responses.create(model=MODEL, input="hi")


async def test_keys_and_limits_hold_here_too(start):
    running = await start(api_keys=("k",), max_requests_per_key=1, key="k")
    running.engine.hold_at = 1
    stream = await running.openai.responses.create(model=MODEL, input="hi", stream=True)
    with pytest.raises(openai.RateLimitError):
        await running.openai.responses.create(model=MODEL, input="hi")
    running.engine.release()
    await stream.close()
    with pytest.raises(openai.AuthenticationError):
        await running.openai.with_options(api_key="other").responses.create(model=MODEL, input="hi")
    assert running.engine.submits[0].cache_salt


def item(**fields):
    return {"input": [{"role": "user", "content": "hi"}, fields]}


def call(arguments):
    return item(type="function_call", call_id="c", name="f", arguments=arguments)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"store": True}, "store", "false or absent"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "use input"),
        ({"conversation": "conv_1"}, "conversation", "use input"),
        ({"prompt": {"id": "p"}}, "prompt", "use input"),
        ({"background": True}, "background", "False or absent"),
        ({"truncation": "auto"}, "truncation", "'disabled' or absent"),
        ({"include": ["message.output_text.logprobs"]}, "include", "[] or absent"),
        ({"top_logprobs": 2}, "top_logprobs", "0 or absent"),
        ({"max_tool_calls": 1}, "max_tool_calls", ""),
        ({"messages": []}, "messages", "use input"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"n": 2}, "n", "1 or absent"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "null"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "null"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "null"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", ""),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "at most 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, "input", "in the input"),
        ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "max_output_tokens (3)"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
        ({"input": 3}, "input", ""),
        (item(type="item_reference", id="x"), "input[1].type", "function_call_output"),
        (item(role="tool", content="x"), "input[1].role", ""),
        (item(role="user"), "input[1].content", "required"),
        (item(role="user", content="x", name="ann"), "input[1].name", "unknown"),
        (item(role="user", content=[{"type": "input_image"}]), "input[1].content[0].type", "input_text"),
        (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text", "string"),
        (item(type="reasoning", encrypted_content="x"), "input[1].encrypted_content", "unknown"),
        (item(type="reasoning", content=[{"type": "text"}]), "input[1].content[0].type", "reasoning_text"),
        (call("{bad"), "input[1].arguments", "input[1].arguments is not valid JSON"),
        (call("[]"), "input[1].arguments", "must be a JSON object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tools": [ADD | {"strict": True}]}, "tools[0].strict", "tools[0].strict"),
        ({"tools": [ADD | {"parameters": {"type": "x"}}], "tool_choice": "required"}, "tools[0].parameters.type", ""),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice", '"name"'),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", '"name"'),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other'"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "required"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_by_the_name_that_the_client_gave_it(running, fields, param, word):
    status, answer = await running.post(RESPONSES, {"input": "hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert word in answer["error"]["message"]
    assert not running.engine.submits


async def test_a_schema_that_cannot_be_compiled_is_blamed_on_its_own_field(running):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}
    status, answer = await running.post(RESPONSES, {"input": "hi", "text": {"format": form}})
    assert (status, answer["error"]["param"]) == (400, "text.format.schema")


async def test_what_the_template_objects_to_is_the_items_fault(start):
    renderer = Renderer(ChatTemplate({"default": "{{ raise_exception('no two users') }}"}))
    running = await start(renderer=renderer)
    status, answer = await running.post(RESPONSES, {"input": "hi"})
    renderer.close()
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "no two users" in answer["error"]["message"]
