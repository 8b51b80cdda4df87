"""POST /v1/completions: forms of prompts, echo, logprobs."""

from tests.api.conftest import MODEL, joined_text


async def test_the_openai_client_gets_a_whole_and_a_streamed_completion(running):
    client = running.openai.completions
    whole = await client.create(model=MODEL, prompt="Say", max_tokens=20)
    assert whole.choices[0].text == "hello world"
    stream = await client.create(model=MODEL, prompt="Say", max_tokens=20, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


async def test_max_tokens_default_to_sixteen(running):
    await running.complete(max_tokens=None)
    assert running.engine.submits[0].params.max_tokens == 16


async def test_the_default_is_cut_to_what_fits(start):
    running = await start(engine_options={"max_model_len": 10})
    await running.complete(prompt=[1] * 6, max_tokens=None)
    assert running.engine.submits[0].params.max_tokens == 4


async def test_several_prompts_in_every_form_are_answered_in_order(running):
    tokenizer = running.service.tokenizer
    running.engine.reply = lambda submit: tokenizer.decode(submit.prompt_token_ids).upper()
    prompts = ["ab", "cd"]
    as_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    for form in (prompts, as_ids):
        answer = await running.complete(prompt=form, n=2)
        assert [choice["text"] for choice in answer["choices"]] == ["AB", "AB", "CD", "CD"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 4
    assert (await running.complete(prompt=as_ids[0]))["choices"][0]["text"] == "AB"


async def test_the_same_prompt_and_seed_give_the_same_choices_whatever_stands_beside(running):
    running.engine.reply = lambda submit: str(submit.params.seed)
    alone = await running.complete(prompt="b", n=2, seed=5)
    beside = await running.complete(prompt=["a", "b"], n=2, seed=5)
    assert [c["text"] for c in beside["choices"][2:]] == [c["text"] for c in alone["choices"]]


async def test_echo_begins_with_the_prompt_streamed_or_whole(running):
    assert (await running.complete(echo=True))["choices"][0]["text"] == "Sayhello world"
    assert joined_text(await running.completion_events(echo=True, n=2), 1) == "Sayhello world"


async def test_echo_with_logprobs_covers_the_prompt_and_the_offsets_are_where_the_tokens_are(running):
    prompt = running.service.tokenizer.encode("hello é", add_special_tokens=False)
    answer = await running.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hello éhello"
    assert logprobs["tokens"] == ["hello", " ", "\ufffd", "\ufffd", "hello"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {" ": -0.5}
    # Both bytes of é lie at the place of é.
    assert logprobs["text_offset"] == [0, 5, 6, 6, 7]


async def test_offsets_begin_at_zero_without_echo(running):
    running.engine.reply = "ab"
    logprobs = (await running.complete(logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_minus_infinity_is_sent_as_a_number_that_json_has(running):
    for answer in (
        await running.complete(echo=True, logprobs=3),
        await running.complete(prompt_logprobs=3),
        await running.chat(logprobs=True, top_logprobs=3),
        await running.chat(prompt_logprobs=3),
    ):
        assert "-9999.0" in str(answer)


async def test_prompt_logprobs_have_an_entry_a_token_and_none_for_the_first(running):
    answer = await running.complete(prompt="abc", prompt_logprobs=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    token_id = str(running.engine.submits[0].prompt_token_ids[1])
    assert entries[0] is None
    assert entries[1] == {token_id: {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    assert len(entries) == 3


async def test_the_cache_salt_reaches_the_engine(running):
    await running.complete(cache_salt="tenant")
    assert running.engine.submits[0].cache_salt == "tenant"


async def test_prompt_logprobs_beside_echo_are_not_forgotten(running):
    choice = (await running.complete(prompt=[5, 6, 7], echo=True, prompt_logprobs=1))["choices"][0]
    assert len(choice["prompt_logprobs"]) == 3
    assert choice["logprobs"] is None
