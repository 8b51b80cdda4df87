"""POST /v1/chat/completions through the openai client and by hand."""

import json

from minserve.text.chat import ChatTemplate
from minserve.text.renderer import Renderer
from tests.api.conftest import MODEL, finish_reasons, joined_text

HI = [{"role": "user", "content": "hi"}]


async def test_the_openai_client_gets_a_whole_answer(running):
    answer = await running.openai.chat.completions.create(model=MODEL, messages=HI)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"


async def test_the_openai_client_streams_the_same_answer(running):
    stream = await running.openai.chat.completions.create(model=MODEL, messages=HI, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "hello world"


async def test_the_model_may_be_left_out_and_the_answer_names_it(start):
    running = await start(served_model_names=("first", "second"))
    assert (await running.chat(model=None))["model"] == "first"
    assert (await running.chat(model="second"))["model"] == "second"


async def test_the_prompt_is_the_rendered_template_with_nothing_added(running):
    await running.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    shown = running.service.tokenizer.decode(running.engine.submits[0].prompt_token_ids, skip_special_tokens=False)
    assert shown == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_our_own_answer_can_be_sent_back_as_the_openai_client_dumps_it(running):
    answer = await running.openai.chat.completions.create(model=MODEL, messages=HI)
    history = [*HI, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    again = await running.openai.chat.completions.create(model=MODEL, messages=history)
    assert again.choices[0].message.content == "hello world"


async def test_content_in_text_parts_is_text(running):
    await running.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    shown = running.service.tokenizer.decode(running.engine.submits[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>user\nhello<|im_end|>" in shown


async def test_messages_reach_the_template_in_its_own_terms(start):
    renderer = Renderer(ChatTemplate({"default": "{{ messages | tojson }}"}))
    running = await start(renderer=renderer)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    await running.chat(messages=messages)
    renderer.close()
    shown = running.service.tokenizer.decode(running.engine.submits[0].prompt_token_ids)
    assert json.loads(shown) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": "a b"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
            **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Hm."),
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]


async def test_n_choices_differ_in_index_and_seed_and_the_first_has_the_requests_own(running):
    running.engine.reply = lambda submit: f"seed {submit.params.seed}"
    answer = await running.chat(n=3, seed=7)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert texts[0] == "seed 7"
    assert len(set(texts)) == 3
    again = await running.chat(n=3, seed=7)
    assert [choice["message"]["content"] for choice in again["choices"]] == texts


async def test_n_choices_are_streamed_side_by_side_each_with_one_end(running):
    running.engine.reply = lambda submit: f"seed {submit.params.seed}"
    whole = await running.chat(n=4, seed=7)
    events = await running.chat_events(n=4, seed=7)
    for index in range(4):
        assert joined_text(events, index) == whole["choices"][index]["message"]["content"]
        assert finish_reasons(events, index) == ["stop"]


async def test_usage_counts_the_prompt_once_and_all_choices(running):
    running.engine.cached_tokens = 16
    answer = await running.chat(n=2)
    num_prompt_tokens = len(running.engine.submits[0].prompt_token_ids)
    # "hello", " ", "w", "o", "r", "l", "d" and the end token.
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 16,
        "total_tokens": num_prompt_tokens + 16,
        "prompt_tokens_details": {"cached_tokens": 16, "cached_tokens_details": {"device": 16, "host": 0}},
    }


async def test_usage_says_how_many_drafts_were_right(running):
    running.engine.share_accepted = 0.5
    answer = await running.chat(n=2)
    assert answer["usage"]["draft_tokens_details"] == {"draft_tokens": 16, "accepted_tokens": 8}


async def test_max_tokens_default_to_the_rest_of_the_context(start):
    running = await start(engine_options={"max_model_len": 200})
    await running.chat()
    submit = running.engine.submits[0]
    assert len(submit.prompt_token_ids) + submit.params.max_tokens == 200


async def test_max_completion_tokens_is_the_newer_name_and_wins(running):
    running.engine.reply = "abcdefghijkl"
    for fields in ({"max_completion_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 8}):
        answer = await running.chat(**fields)
        assert answer["choices"][0]["message"]["content"] == "abcd"
        assert answer["usage"]["completion_tokens"] == 4


async def test_the_answer_continues_the_exact_text_of_the_final_message(running):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure:\n"}]
    await running.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    shown = running.service.tokenizer.decode(running.engine.submits[0].prompt_token_ids, skip_special_tokens=False)
    assert shown.endswith("<|im_start|>assistant\nSure:\n")


async def test_a_model_without_a_template_says_so(start, tmp_path):
    from tests.api.tiny import write_model_folder

    running = await start(folder=write_model_folder(tmp_path, template=None))
    status, answer = await running.post("/v1/chat/completions", {"messages": HI})
    assert status == 400
    assert "chat template" in answer["error"]["message"]


async def test_a_long_prompt_is_tokenized_off_the_event_loop_and_gives_the_same_ids(running):
    text = "hello wörld " * 300
    await running.chat(messages=[{"role": "user", "content": text}])
    shown = running.service.tokenizer.decode(running.engine.submits[0].prompt_token_ids, skip_special_tokens=False)
    assert text in shown
