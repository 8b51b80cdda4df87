"""Where a text ends and what is said of it: stop strings, stop tokens, finish reasons; whole and streamed alike."""

import pytest

from tests.api.conftest import finish_reasons, joined_text


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
@pytest.mark.parametrize(
    ("reply", "stop", "text"),
    [
        ("ABCDEFGHIJKLM", "DEFGHIJ", "ABC"),
        ("Thought\nObservation: none", ["\nObservation"], "Thought"),
        ("The capital is Paris, it amazes", ["it am"], "The capital is Paris, "),
        ("The capital is Paris", ["Pari"], "The capital is "),
        ("1 2 3 4 5 6 7 8", ["7"], "1 2 3 4 5 6 "),
        ("DEFGHI and no more", "DEFGHIJ", "DEFGHI and no more"),
    ],
)
async def test_no_character_of_a_stop_string_is_sent_streamed_or_whole(running, reply, stop, text, tokens_per_delta):
    running.engine.reply = reply
    running.engine.tokens_per_delta = tokens_per_delta
    whole = await running.complete(stop=stop)
    events = await running.completion_events(stop=stop)
    assert whole["choices"][0]["text"] == text
    assert joined_text(events) == text
    chat = await running.chat(stop=stop)
    assert chat["choices"][0]["message"]["content"] == text
    assert joined_text(await running.chat_events(stop=stop)) == text


async def test_a_stop_string_ends_the_engines_request_too(running):
    running.engine.reply = "one. two. three."
    await running.complete(stop="two")
    assert running.engine.aborted == [running.engine.submits[0].request_id]
    assert not running.engine.running


async def test_the_stop_string_is_named_and_can_be_included(running):
    running.engine.reply = "1 2 3 4"
    choice = (await running.complete(stop=["9", "3"]))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", "3", "1 2 ")
    choice = (await running.complete(stop="3", include_stop_str_in_output=True))["choices"][0]
    assert choice["text"] == "1 2 3"


async def test_text_tokens_logprobs_and_usage_end_at_the_token_that_completes_the_stop_string(running):
    running.engine.reply = "abcdefgh"
    running.engine.tokens_per_delta = 5
    answer = await running.complete(stop="c", logprobs=0)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_end_token_gives_stop_and_no_reason_of_its_own(running):
    answer = await running.chat()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None


async def test_the_end_token_is_no_text_even_if_special_tokens_are_shown(running):
    answer = await running.complete(skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "hello world"


async def test_a_requested_stop_token_is_named(running):
    running.engine.reply = "abcd"
    stop_id = running.service.tokenizer.encode("c", add_special_tokens=False)[0]
    choice = (await running.complete(stop_token_ids=[stop_id]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", stop_id)


async def test_running_into_max_tokens_gives_length(running):
    running.engine.reply = "abcdefgh"
    assert (await running.chat(max_tokens=3))["choices"][0]["finish_reason"] == "length"
    assert finish_reasons(await running.chat_events(max_tokens=3)) == ["length"]


async def test_text_held_back_for_a_stop_string_is_delivered_at_the_end(running):
    running.engine.reply = "abcdefgh"
    assert joined_text(await running.chat_events(max_tokens=3, stop="cdx")) == "abc"


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop": "w"}, {"n": 2}])
async def test_each_choice_ends_with_exactly_one_chunk_of_its_own_that_carries_no_text(running, fields):
    for events in (await running.chat_events(**fields), await running.completion_events(**fields)):
        for index in range(fields.get("n", 1)):
            choices = [c for event in events for c in event["choices"] if c["index"] == index]
            assert [c["finish_reason"] is not None for c in choices] == [False] * (len(choices) - 1) + [True]
            assert choices[-1].get("text", "") == ""
            assert choices[-1].get("delta", {}) == {}


async def test_stop_strings_do_not_match_before_min_tokens(running):
    running.engine.reply = "aaaa"
    assert (await running.complete(stop="a", min_tokens=2))["choices"][0]["text"] == "aa"
