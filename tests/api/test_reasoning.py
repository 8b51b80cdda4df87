"""Reasoning: set apart from the answer, whole and streamed alike, whoever opens it."""

import pytest

from tests.api import tiny
from tests.api.conftest import (
    MODEL,
    calls_of,
    finish_reasons,
    joined_calls,
    joined_reasoning,
    joined_text,
)

HI = [{"role": "user", "content": "hi"}]
ANSWER = "<think>\nTwo and two.\nFour?\n</think>\n\nIt is 4."
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Model folders: "closing" (the model opens), "opening" (the template does), "special" (the tags are tokens)."""
    tags = {"more_special_tokens": ("<think>", "</think>")}
    options = {
        "closing": {"template": tiny.THINKING_TEMPLATE},
        "opening": {"template": tiny.OPENING_TEMPLATE},
        "special": {"template": tiny.THINKING_TEMPLATE, **tags},
    }
    return {name: tiny.write_model_folder(tmp_path_factory.mktemp(name), **o) for name, o in options.items()}


@pytest.fixture
async def running(start, folders):
    """A model that opens its reasoning itself."""
    return await start(folder=folders["closing"], tool_call_parser="hermes")


async def both(running, **fields):
    """(reasoning, content) of a whole answer; the streamed one must say the same."""
    choice = (await running.chat(**fields))["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    events = await running.chat_events(**fields)
    assert joined_reasoning(events) == (message["reasoning"] or "")
    assert joined_text(events) == (message["content"] or "")
    assert joined_calls(events) == calls_of(choice)
    assert finish_reasons(events) == [choice["finish_reason"]]
    return message["reasoning"], message["content"]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
@pytest.mark.parametrize("kind", ["closing", "special"])
async def test_reasoning_that_the_model_opens_is_set_apart_however_its_tags_are_split(
    start, folders, kind, tokens_per_delta
):
    running = await start(folder=folders[kind])
    running.engine.reply = ANSWER
    running.engine.tokens_per_delta = tokens_per_delta
    assert await both(running) == ("Two and two.\nFour?", "It is 4.")
    assert await both(running, skip_special_tokens=False) == ("Two and two.\nFour?", "It is 4.")


async def test_where_the_template_opens_it_all_before_the_closing_tag_is_reasoning(start, folders):
    running = await start(folder=folders["opening"])
    running.engine.reply = "Hm.\n</think>\n\nIt is 4."
    assert await both(running) == ("Hm.", "It is 4.")
    running.engine.reply = ANSWER  # A model may open it once more.
    assert await both(running) == ("Two and two.\nFour?", "It is 4.")


async def test_without_thinking_all_text_is_content(running):
    running.engine.reply = "It is 4."
    assert await both(running, chat_template_kwargs={"enable_thinking": False}) == (None, "It is 4.")
    assert await both(running) == (None, "It is 4.")
    running.engine.reply = "<think>\n</think>\n\nIt is 4."
    assert await both(running) == (None, "It is 4.")


async def test_tags_in_a_users_words_or_in_the_answer_are_text(running):
    running.engine.reply = "The tag <think> opens it, </think> closes it."
    messages = [{"role": "user", "content": "What is <think>?"}]
    assert await both(running, messages=messages) == (None, running.engine.reply)


async def test_an_answer_cut_while_the_model_reasons_has_reasoning_only_and_can_be_sent_back(running):
    running.engine.reply = ANSWER
    assert await both(running, max_tokens=12) == ("Two ", None)
    answer = await running.openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.reasoning_content == "Two "
    await running.chat(messages=[*HI, answer.choices[0].message.model_dump(), *HI])


async def test_a_stop_string_in_the_reasoning_ends_the_text_and_what_came_before_is_delivered(running):
    running.engine.reply = ANSWER
    assert await both(running, stop=["Four"]) == ("Two and two.\n", None)
    assert await both(running, stop=["4", "\n</think>"]) == ("Two and two.\nFour?", None)
    assert await both(running, stop=["</thing", "4"]) == ("Two and two.\nFour?", "It is ")


async def test_calls_are_looked_for_in_the_answer_only(running):
    running.engine.reply = f"<think>\nLike {CALL}?\n</think>\n\n{CALL}"
    choice = (await running.chat(tools=TOOLS))["choices"][0]
    assert choice["message"]["reasoning"] == f"Like {CALL}?"
    assert choice["finish_reason"] == "tool_calls"
    assert await both(running, tools=TOOLS) == (f"Like {CALL}?", None)
    assert calls_of(choice) == [("add", '{"a": 1}')]


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 100])
async def test_usage_counts_the_tokens_up_to_the_answer(running, tokens_per_delta):
    running.engine.tokens_per_delta = tokens_per_delta
    for reply, num_reasoning in (
        ("<think>ab</think>cd", len("<think>ab</think>")),
        ("<think>ab", len("<think>ab") + 1),  # The end token too
        ("abcd", 0),
        ("<", 0),
    ):
        running.engine.reply = reply
        usage = (await running.chat(n=2))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}
        events = await running.chat_events(n=2, stream_options={"include_usage": True})
        assert events[-1]["usage"] == usage


async def test_logprobs_of_a_stream_are_those_of_the_whole_answer_reasoning_included(running):
    running.engine.reply = ANSWER
    whole = (await running.chat(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    events = await running.chat_events(logprobs=True, top_logprobs=1)
    streamed = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == whole


async def test_reasoning_can_be_left_out_or_left_in_the_content(running):
    running.engine.reply = ANSWER
    assert await both(running, include_reasoning=False) == (None, "It is 4.")
    assert await both(running, separate_reasoning=False) == (None, ANSWER)


@pytest.mark.parametrize(
    ("final", "reply", "expected"),
    [
        ("<think>\nTwo", " and two.\n</think>\n\n4", (" and two.", "4")),
        ("<think>\nTwo\n</think>\n\nIt", " is 4.", (None, " is 4.")),
        ("It", " is <think>.", (None, " is <think>.")),
        ("", "<think>Hm</think>4", ("Hm", "4")),
    ],
)
async def test_an_answer_that_goes_on_with_a_message_goes_on_in_its_reasoning(running, final, reply, expected):
    running.engine.reply = reply
    messages = [*HI, {"role": "assistant", "content": final}]
    assert await both(running, messages=messages, continue_final_message=True) == expected


async def test_the_parser_can_be_chosen_or_switched_off(start, folders):
    off = await start(folder=folders["closing"], reasoning_parser="none")
    off.engine.reply = ANSWER
    message = (await off.chat())["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ANSWER}
    # An early DeepSeek-R1 reasons without anybody having opened it, but not where the template has closed it.
    always = await start(folder=folders["closing"], reasoning_parser="deepseek_r1")
    always.engine.reply = "Hm.</think>It is 4."
    assert await both(always) == ("Hm.", "It is 4.")
    always.engine.reply = "It is 4."
    assert await both(always, chat_template_kwargs={"enable_thinking": False}) == (None, "It is 4.")


async def test_a_model_whose_template_knows_no_reasoning_is_left_alone(start):
    running = await start()
    running.engine.reply = ANSWER
    answer = await running.chat()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    assert "completion_tokens_details" not in answer["usage"]
