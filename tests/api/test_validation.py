"""Bad requests: a 400 that names the field and what is allowed, before any work; and the server still answers."""

import msgspec
import pytest

from minserve.protocol import MAX_MODEL_END_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from tests.api.checks import CHAT, COMPLETIONS, RESPONSES, completion_body, refused
from tests.api.conftest import chat_body
from tests.api.tiny import SPECIAL_TOKENS


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", 101, "at most 100"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 1.5, "at most 1"),
        ("repetition_penalty", 0, "at least 0.01"),
        ("presence_penalty", 2.5, "at most 2"),
        ("frequency_penalty", -2.5, "at least -2"),
        ("n", 0, "at least 1"),
        ("n", 129, "at most 128"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("seed", 2**64, "at most"),
        ("prompt_logprobs", 21, "at most 20"),
    ],
)
async def test_a_number_out_of_bounds_is_refused_with_the_bound(running, name, value, allowed):
    await refused(running, CHAT, chat_body(**{name: value}), name, allowed, str(value))
    await refused(running, COMPLETIONS, completion_body(**{name: value}), name, allowed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 1.5),
        ("n", "2"),
        ("stream", "yes"),
        ("logit_bias", [1]),
        ("stop_token_ids", 3),
        ("seed", "x"),
        ("ignore_eos", 1),
        ("cache_salt", 5),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", "\0"),
        ("model", 5),
    ],
)
async def test_a_wrong_value_is_refused_by_name(running, name, value):
    await refused(running, CHAT, chat_body(**{name: value}), name, name)
    await refused(running, COMPLETIONS, completion_body(**{name: value}), name, name)


@pytest.mark.parametrize("key", ["191222", "abc", "-1", "1_0", "٣", "1.0", "", "9" * 5000])
async def test_a_logit_bias_for_what_is_no_token_is_refused(running, key):
    await refused(running, CHAT, chat_body(logit_bias={key: 5}), "logit_bias")


async def test_a_logit_bias_out_of_bounds_is_refused(running):
    await refused(running, CHAT, chat_body(logit_bias={"5": 101}), "logit_bias", "at most 100")
    await refused(running, CHAT, chat_body(logit_bias={"5": -101}), "logit_bias", "at least -100")


async def test_a_legal_logit_bias_reaches_the_engine_as_numbers(running):
    await running.chat(logit_bias={"5": -100, "7": 2.5})
    assert running.engine.submits[0].params.logit_bias == {5: -100.0, 7: 2.5}


@pytest.mark.parametrize("prompt", [[999999], [-1], [[1, 2], [999999]], [2**70]])
async def test_prompt_ids_outside_the_vocabulary_are_refused(running, prompt):
    await refused(running, COMPLETIONS, {"prompt": prompt}, "prompt", "from 0 to")


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""]])
async def test_an_empty_prompt_is_refused(running, prompt):
    await refused(running, COMPLETIONS, {"prompt": prompt}, "prompt", "empty")


@pytest.mark.parametrize("prompt", [[1, "a"], [1.5], [True], [["a"]], [{"a": 1}], {"a": 1}, 5, [[1], "a"], [[[1]]]])
async def test_a_prompt_of_another_form_is_refused(running, prompt):
    await refused(running, COMPLETIONS, {"prompt": prompt}, "prompt")


async def test_too_many_prompts_are_refused(running):
    await refused(running, COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, "prompt", "1024")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_is_a_400_with_counts_on_every_route_before_any_event(start, stream):
    running = await start(engine_options={"max_model_len": 50})
    too_long = "x" * 60
    messages = [{"role": "user", "content": too_long}]
    for path, body, param in (
        (CHAT, {"messages": messages}, "messages"),
        (COMPLETIONS, {"prompt": too_long}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 50}, "prompt"),
        (RESPONSES, {"input": too_long}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": too_long}]}, "input"),
    ):
        await refused(running, path, body | {"stream": stream}, param, "maximum context length is 50 tokens")
        status, answer = await running.post(path, body | {"stream": stream})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_asking_for_more_tokens_than_fit_is_a_400_with_counts(start):
    running = await start(engine_options={"max_model_len": 50})
    body = {"prompt": [1] * 40, "max_tokens": 11}
    await refused(running, COMPLETIONS, body, "prompt", "51 tokens", "40 in the prompt", "11 in the completion")
    await running.complete(prompt=[1] * 40, max_tokens=10)


@pytest.mark.parametrize(
    "fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": False, "top_logprobs": None}]
)
async def test_every_legal_pair_of_logprobs_and_top_logprobs_is_taken(running, fields):
    await running.chat(**fields)


async def test_top_logprobs_without_logprobs_are_refused(running):
    await refused(running, CHAT, chat_body(top_logprobs=2), "top_logprobs", "logprobs")


@pytest.mark.parametrize(
    ("stop", "param", "words"),
    [
        ("", "stop", "empty"),
        (["a", ""], "stop[1]", "empty"),
        (["x"] * 17, "stop", "at most 16 items"),
        ("y" * 1025, "stop", "at most 1024 characters"),
    ],
)
async def test_stop_strings_that_are_empty_too_long_or_too_many_are_refused(running, stop, param, words):
    await refused(running, CHAT, chat_body(stop=stop), param, words)


async def test_token_ids_may_be_any_of_the_vocabulary_and_no_other(running):
    width = running.engine.info.vocab_size
    for token_id in (-1, width, 2**31, 2**70):
        await refused(running, CHAT, chat_body(stop_token_ids=[token_id]), "stop_token_ids")
        await refused(running, CHAT, chat_body(logit_bias={str(token_id): 1}), "logit_bias", f"0 to {width - 1}")
        await refused(running, COMPLETIONS, {"prompt": [token_id]}, "prompt")
    for token_id in (0, width - 1):
        await running.chat(stop_token_ids=[token_id], logit_bias={str(token_id): 1})
        await running.complete(prompt=[token_id])


async def test_a_prompt_may_fill_the_context_but_for_one_token(start):
    running = await start(engine_options={"max_model_len": 50})
    assert (await running.complete(prompt=[1] * 49, max_tokens=1))["choices"][0]["finish_reason"] == "length"
    assert (await running.post(COMPLETIONS, {"prompt": [1] * 50, "max_tokens": 1}))[0] == 400


async def test_stop_token_ids_leave_room_for_the_models_own_ends(running):
    most = MAX_STOP_TOKEN_IDS - MAX_MODEL_END_TOKEN_IDS
    await refused(running, CHAT, chat_body(stop_token_ids=list(range(most + 1))), "stop_token_ids", f"{most}")
    await running.chat(stop_token_ids=list(range(100, 100 + most)))


async def test_lists_are_counted_before_their_members_are_looked_at(running):
    longest = running.engine.info.max_model_len
    for prompt, words in (([1] * longest + ["x"], "maximum context"), (["a"] * 1024 + [{}], "at most 1024")):
        await refused(running, COMPLETIONS, {"prompt": prompt}, "prompt", words)
    a_million = b'{"prompt":[' + b",".join([b'"a"'] * 10**6) + b"]}"
    await refused(running, COMPLETIONS, a_million, "prompt", "at most 1024")
    await refused(running, "/detokenize", {"tokens": [-1] * (longest + 1)}, "tokens", f"at most {longest}")
    messages = [{"role": "user", "content": ""}] * longest
    await refused(running, CHAT, {"messages": messages}, "messages", "maximum context")


async def test_more_log_probabilities_of_prompts_than_memory_holds_are_refused(running):
    prompt = [1] * 4000
    await refused(running, COMPLETIONS, {"prompt": prompt, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs")
    body = {"prompt": [prompt] * 64, "echo": True, "logprobs": 20}
    await refused(running, COMPLETIONS, body, "logprobs", "too many")
    body = chat_body(n=128, prompt_logprobs=20, messages=[{"role": "user", "content": "x" * 3000}])
    await refused(running, CHAT, body, "prompt_logprobs")


async def test_a_text_whose_tokens_the_model_lacks_is_refused(running):
    # Some tokenizers have more tokens than their model.
    info = running.engine.info
    running.engine.info = msgspec.structs.replace(info, vocab_size=info.vocab_size - len(SPECIAL_TOKENS))
    await refused(running, COMPLETIONS, {"prompt": "a<|im_start|>"}, "prompt", "from 0 to")
    await running.complete(prompt="a")


async def test_min_tokens_above_max_tokens_are_refused(running):
    await refused(running, CHAT, chat_body(min_tokens=5, max_tokens=4), "min_tokens", "max_tokens")


@pytest.mark.parametrize(
    "field",
    [
        *("guided_json", "guided_regex", "best_of", "audio", "modalities"),
        *("functions", "logits_processors", "reasoning_effort", "json_schema"),
    ],
)
async def test_a_field_that_would_change_the_output_and_is_not_here_is_refused_by_name(running, field):
    await refused(running, CHAT, chat_body(**{field: {"type": "json_object"}}), field, field, "not supported")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"guided_json": None},
        {"parallel_tool_calls": True},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k"},
        {"temperature": None, "stop": None, "n": None, "stream_options": None, "max_tokens": None, "seed": None},
    ],
)
async def test_a_field_that_asks_for_nothing_is_taken(running, fields):
    await running.chat(**fields)


async def test_an_unknown_field_is_refused_with_the_nearest_name(running):
    await refused(running, CHAT, chat_body(max_token=5), "max_token", "max_tokens")
    await refused(running, CHAT, chat_body(qqq=1), "qqq", "unknown")
    await refused(running, COMPLETIONS, completion_body(messages=[]), "messages", "unknown")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_a_bad_message_is_refused_by_its_place(running, messages, param):
    await refused(running, CHAT, {"messages": messages}, param)


@pytest.mark.parametrize("value", [-1, 0, 2**31, 10**9])
@pytest.mark.parametrize("name", ["n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "max_tokens"])
async def test_a_senseless_count_is_refused_before_any_work(running, name, value):
    path = CHAT if name == "top_logprobs" else COMPLETIONS
    body = (chat_body() if path == CHAT else completion_body()) | {name: value}
    if value == 0 and name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        assert (await running.post(path, body))[0] == 200
    else:
        in_context = name == "max_tokens" and value == 10**9
        await refused(running, path, body, "prompt" if in_context else name, "context" if in_context else name)


async def test_a_bool_is_no_number_even_where_python_takes_it_for_one(running):
    await refused(running, COMPLETIONS, completion_body(best_of=True), "best_of", "allowed: 1")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_more_tools_or_template_variables_than_anybody_needs_are_refused_with_the_bound(running, path):
    tool = {"type": "function", "function": {"name": "f"}}
    await refused(running, path, chat_body(tools=[tool] * 1025), "tools", "at most 1024 items")
    kwargs = {f"x{number}": number for number in range(65)}
    await refused(running, path, chat_body(chat_template_kwargs=kwargs), "chat_template_kwargs", "at most 64")


async def test_the_options_of_reasoning_are_bools_of_chats_and_completions_take_none_of_them(running):
    for name in ("include_reasoning", "separate_reasoning"):
        await refused(running, CHAT, chat_body(**{name: "yes"}), name, "bool")
        await refused(running, COMPLETIONS, completion_body(**{name: False}), name, "allowed: True")
    await refused(running, CHAT, chat_body(stream_reasoning=False), "stream_reasoning", "allowed: True")
    await running.complete(include_reasoning=True, separate_reasoning=True)


async def test_missing_fields_are_named(running):
    await refused(running, CHAT, {}, "messages", "required")
    await refused(running, COMPLETIONS, {}, "prompt", "required")


async def test_stream_options_without_stream_are_refused(running):
    await refused(running, CHAT, chat_body(stream_options={"include_usage": True}), "stream_options")
    body = chat_body(stream=True, stream_options={"include_use": True})
    await refused(running, CHAT, body, "stream_options.include_use")


async def test_an_unknown_model_is_a_404_that_names_those_served(running):
    for path, body in ((CHAT, chat_body(model="gpt-4")), (COMPLETIONS, completion_body(model="gpt-4"))):
        status, answer = await running.post(path, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        assert "tiny" in answer["error"]["message"]


async def test_the_server_answers_after_all_of_this(running):
    for body in (b"{", b'{"prompt":[999999]}', b'{"prompt":""}', b'{"prompt":"a","logit_bias":{"-1":1}}'):
        await running.post(COMPLETIONS, body)
    assert (await running.complete())["choices"][0]["text"] == "hello world"
