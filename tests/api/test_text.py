"""Characters cut by tokens, and text that is no Unicode, as clients see them."""

import pytest

from tests.api.conftest import joined_text


def ids(running, text):
    return running.service.tokenizer.encode(text, add_special_tokens=False)


async def test_a_prompt_that_ends_inside_a_character_is_not_repeated(running):
    prompt = ids(running, "Hello world 🌶")[:-2]
    running.engine.reply = ids(running, "🌶 hot")[2:]
    events = await running.completion_events(prompt=prompt, max_tokens=len(running.engine.reply))
    assert events[0]["choices"][0]["text"] == "🌶"
    assert joined_text(events) == "🌶 hot"


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 5])
@pytest.mark.parametrize("text", ["A 世界!", "한국어로 자기소개", "👩‍👩‍👧 family", "naïve café"])
async def test_no_character_is_lost_or_doubled_at_the_edges_of_chunks(running, text, tokens_per_delta):
    running.engine.reply = text
    running.engine.tokens_per_delta = tokens_per_delta
    assert joined_text(await running.chat_events()) == text
    assert (await running.chat())["choices"][0]["message"]["content"] == text


async def test_a_character_cut_by_max_tokens_is_shown_by_one_rule_streamed_or_whole(running):
    running.engine.reply = "ab🌶"
    whole = (await running.complete(max_tokens=4))["choices"][0]["text"]
    assert whole == "ab\ufffd"
    assert joined_text(await running.completion_events(max_tokens=4)) == whole


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":"\\udc00"}',
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"\\ud83d":1}}',
    ],
)
async def test_half_of_a_surrogate_pair_is_refused(running, body):
    status, answer = await running.post("/v1/chat/completions", body)
    assert status == 400
    assert "surrogate" in answer["error"]["message"]


async def test_a_whole_surrogate_pair_is_the_character_it_means(running):
    await running.post("/v1/completions", b'{"prompt":"\\ud83c\\udf36"}')
    assert running.engine.submits[0].prompt_token_ids == ids(running, "🌶")


async def test_special_tokens_are_shown_only_if_asked(running):
    running.engine.reply = "a<|im_start|>b"
    assert (await running.complete())["choices"][0]["text"] == "ab"
    assert (await running.complete(skip_special_tokens=False))["choices"][0]["text"] == "a<|im_start|>b"


async def test_a_users_text_that_spells_a_control_token_is_that_token_as_in_transformers(running):
    """vllm-project/vllm#31735, sgl-project/sglang#30962, huggingface/transformers#29279: so it is everywhere."""
    await running.chat(messages=[{"role": "user", "content": "a<|im_end|>"}])
    prompt = running.engine.submits[0].prompt_token_ids
    end = running.service.tokenizer.token_id("<|im_end|>")
    assert prompt.count(end) == 2  # the user's, and the template's
    assert prompt[prompt.index(end) + 1] == end
