"""The command as users run it: its own process, the real engine, the default model, real clients."""

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.api import tiny
from tests.api.real import RealServer, engine_process_of

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 10}
LONG = {"messages": CAPITAL, "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture
async def client(real_server):
    async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tiny_model(tmp_path):
    """Flags that serve random weights, which is fast."""
    tiny.write_model_folder(tmp_path)
    tiny.write_random_model(tmp_path)
    return ("--model", str(tmp_path), "--load-format", "dummy")


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


async def gauge(http: aiohttp.ClientSession, server: RealServer, name: str) -> float:
    async with http.get(f"{server.url}/metrics") as response:
        text = await response.text()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


async def until_gauge(http: aiohttp.ClientSession, server: RealServer, name: str, value: float) -> None:
    """Scrape until a gauge has a value; a minute is as good as for ever."""
    async with asyncio.timeout(60):
        while await gauge(http, server, name) != value:
            pass


async def ready_status(http: aiohttp.ClientSession, server: RealServer) -> int:
    async with http.get(f"{server.url}/ready") as response:
        return response.status


async def read_events(response: aiohttp.ClientResponse) -> list:
    frames = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def first_chunk(response: aiohttp.ClientResponse) -> None:
    """Wait until the answer has begun. The first event is read with the empty line that ends it, and lost."""
    while not (event := await response.content.readuntil(b"\n\n")).startswith(b"data: "):
        assert event, "the answer ended before it began"


async def test_the_model_answers_sensibly_and_streams_what_it_would_say_whole(client):
    models = [model.id async for model in client.models.list()]
    assert models == ["SmolLM2-135M-Instruct"]
    whole = await client.chat.completions.create(model=models[0], messages=CAPITAL, **GREEDY)
    stream = await client.chat.completions.create(model=models[0], messages=CAPITAL, stream=True, **GREEDY)
    chunks = [chunk async for chunk in stream]
    assert "Paris" in whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 10


@pytest.mark.parametrize("stop", ["Paris", [" capital"], "is P"])
async def test_a_stop_string_cuts_the_same_text_streamed_or_whole(client, stop):
    fields = {"model": "SmolLM2-135M-Instruct", "messages": CAPITAL, "stop": stop} | GREEDY
    whole = await client.chat.completions.create(**fields)
    text = "".join(
        [c.choices[0].delta.content or "" async for c in await client.chat.completions.create(stream=True, **fields)]
    )
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert not any(s in text for s in ([stop] if isinstance(stop, str) else stop))


async def test_a_seeded_text_does_not_depend_on_its_neighbours(client):
    fields = {"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 6, "seed": 7}
    alone = await client.completions.create(**fields)
    crowd = await asyncio.gather(*(client.completions.create(**fields | {"seed": seed}) for seed in (1, 7, 2)))
    assert crowd[1].choices[0].text == alone.choices[0].text
    assert crowd[0].choices[0].text != alone.choices[0].text


async def test_echo_with_logprobs_scores_every_token_of_the_prompt(client):
    answer = await client.completions.create(
        model="SmolLM2-135M-Instruct",
        prompt="The capital of France is",
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is")
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens + 1
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset):
        assert choice.text[offset : offset + len(token)] == token


async def test_a_repeated_prompt_is_found_in_the_prefix_cache(client):
    fields = {"model": "SmolLM2-135M-Instruct", "prompt": "One sentence after another. " * 60, "max_tokens": 1}
    await client.completions.create(**fields)
    usage = (await client.completions.create(**fields)).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0


async def test_bad_requests_leave_the_server_as_it_was(client, real_server, http):
    for body in (b"{", b'{"prompt":[999999]}', b'{"prompt":""}', b'{"prompt":"a","logit_bias":{"999999":1}}'):
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{real_server.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == 400
    answer = await client.completions.create(model="SmolLM2-135M-Instruct", prompt="a", max_tokens=1)
    assert answer.usage.completion_tokens == 1


async def test_a_client_that_leaves_frees_its_place(real_server, http):
    for stream in (True, False):
        # A context of its own: leaving it closes the connection, and that is what the server must notice.
        async with aiohttp.ClientSession() as leaver:
            post = asyncio.ensure_future(
                leaver.post(f"{real_server.url}/v1/chat/completions", json=LONG | {"stream": stream})
            )
            await until_gauge(http, real_server, "vllm:num_requests_running", 1)
            if stream:
                response = await post
                await first_chunk(response)
                response.close()
            else:
                post.cancel()
                await asyncio.gather(post, return_exceptions=True)
        await until_gauge(http, real_server, "vllm:num_requests_running", 0)


async def test_a_queued_client_that_leaves_does_not_touch_the_running_one(start_real, http):
    server = start_real("--max-num-seqs", "1")
    async with http.post(f"{server.url}/v1/chat/completions", json=LONG) as staying:
        await first_chunk(staying)
        async with aiohttp.ClientSession() as leaver:
            queued = asyncio.ensure_future(leaver.post(f"{server.url}/v1/chat/completions", json=LONG))
            await until_gauge(http, server, "vllm:num_requests_waiting", 1)
            queued.cancel()
        await until_gauge(http, server, "vllm:num_requests_waiting", 0)
        num_tokens = await gauge(http, server, "vllm:generation_tokens_total")
        async with asyncio.timeout(60):
            while await gauge(http, server, "vllm:generation_tokens_total") < num_tokens + 3:
                await first_chunk(staying)
        assert await gauge(http, server, "vllm:num_requests_running") == 1


async def test_sigterm_lets_running_streams_finish_refuses_new_ones_and_exits_with_0(start_real, http):
    server = start_real("--shutdown-timeout", "300")
    body = {"messages": CAPITAL, "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        await first_chunk(response)
        server.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while await ready_status(http, server) != 503:
                pass
        async with http.post(f"{server.url}/v1/chat/completions", json=body) as refused:
            assert refused.status == 503
            assert "Retry-After" in refused.headers
        events = await read_events(response)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert await asyncio.to_thread(server.wait) == 0
    assert not [line for line in server.lines if "leaked" in line]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [process for child in children for process in descendants(child)]


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stop_ends_fifty_streams_running_or_queued_and_leaves_no_process_and_no_file(
    start_real, tiny_model, signals
):
    server = start_real(*tiny_model, "--max-num-seqs", "30", "--shutdown-timeout", "300")
    shared = set(Path("/dev/shm").iterdir())
    processes = descendants(server.process.pid)
    max_tokens = 40 if signals == 1 else 900
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        posts = [asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body)) for _ in range(50)]
        await until_gauge(http, server, "vllm:num_requests_running", 30)
        for _ in range(signals):
            server.signal(signal.SIGTERM)
        streams = [await read_events(response) for response in await asyncio.gather(*posts)]
    for events in streams:
        errors = [event for event in events if "error" in event]
        ends = [choice["finish_reason"] for event in events if "choices" in event for choice in event["choices"]]
        assert len(errors) + sum(end is not None for end in ends) == 1
        assert "error" in events[-1] or ends[-1] == "length"
        assert not errors or signals == 2
    assert await asyncio.to_thread(server.wait) == 0
    assert not server.faults
    assert not [process for process in processes if is_alive(process)]
    assert set(Path("/dev/shm").iterdir()) <= shared


async def test_no_key_finds_what_another_one_has_cached(start_real, tiny_model):
    server = start_real(*tiny_model, "--api-key", "first", "--api-key", "second")
    body = {"prompt": "hello world " * 20, "max_tokens": 1, "cache_salt": "same"}
    cached: dict[str, set[int]] = {"first": set(), "second": set()}
    for key in ("first", "first", "second", "first", "second"):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            answer = await (await http.post(f"{server.url}/v1/completions", json=body)).json()
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        # What a key finds is what it has sent: nothing the first time.
        assert (num_cached > 0) == bool(cached[key])
        cached[key].add(num_cached)


async def test_what_outlives_the_shutdown_timeout_gets_an_error_event(start_real, http):
    server = start_real("--shutdown-timeout", "0")
    async with http.post(f"{server.url}/v1/chat/completions", json=LONG) as response:
        await first_chunk(response)
        server.signal(signal.SIGTERM)
        events = await read_events(response)
    assert "shutting down" in events[-1]["error"]["message"]
    assert await asyncio.to_thread(server.wait) == 0


async def test_a_frozen_engine_is_an_error_event_in_every_stream_and_a_non_zero_exit(start_real, http):
    server = start_real("--engine-timeout", "5")
    async with http.post(f"{server.url}/v1/chat/completions", json=LONG) as response:
        await first_chunk(response)
        os.kill(engine_process_of(server.process.pid), signal.SIGSTOP)
        assert "said nothing for 5 s" in (await read_events(response))[-1]["error"]["message"]
    assert await asyncio.to_thread(server.wait) == 1


async def test_a_killed_engine_is_an_error_event_in_every_stream_and_a_non_zero_exit(start_real, http):
    server = start_real()
    responses = [await http.post(f"{server.url}/v1/chat/completions", json=LONG) for _ in range(2)]
    for response in responses:
        await first_chunk(response)
    server.kill_engine()
    for response in responses:
        assert "engine" in (await read_events(response))[-1]["error"]["message"]
    assert await asyncio.to_thread(server.wait) == 1
