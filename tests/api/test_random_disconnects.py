"""A thousand clients that leave at a random moment, over real connections to the real command."""

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct

import aiohttp
import pytest

from tests.api import tiny
from tests.api.real import RealServer

pytestmark = pytest.mark.slow

NUM_LEAVERS = 1000
NUM_CLIENTS = 12
PAGE_BYTES = 2 * 2 * 2 * 16 * 8 * 4
"""2 layers, 2 KV heads, K and V, 16 tokens, 8 dimensions, float32."""

NUM_PAGES = 40
CONTEXT = 512
GREEDY = {"prompt": "The neighbour says hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(tmp_path):
    """Room for six requests, but pages for two or three long ones, so that some wait and some are preempted."""
    tiny.write_model_folder(tmp_path)
    tiny.write_random_model(tmp_path)
    server = RealServer(
        *("--model", str(tmp_path), "--load-format", "dummy", "--dtype", "float32"),
        *("--kv-cache-memory", str(NUM_PAGES * PAGE_BYTES), "--max-model-len", str(CONTEXT)),
        *("--max-num-seqs", "6", "--max-num-batched-tokens", "64"),
    )
    yield server
    server.end()


def random_request(rng: random.Random) -> bytes:
    text = "".join(rng.choices("hello wrd世\n", k=rng.choice([1, 20, 300])))
    path, body = rng.choice(
        [
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": [text, "hello"], "echo": True, "logprobs": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "stop": "hello"}),
        ]
    )
    body |= {"stream": rng.random() < 0.6, "max_tokens": rng.choice([1, 10, 100]), "n": rng.choice([1, 1, 1, 3])}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def leave_at_random(port: int, rng: random.Random) -> None:
    """Ask, and go: in the middle of the request, at once, after a while, or in the middle of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = random_request(rng)
    phase = rng.choice(["asking", "at once", "after a while", "answer begun", "answer under way"])
    writer.write(request[: rng.randrange(len(request))] if phase == "asking" else request)
    await writer.drain()
    if phase == "after a while":
        await asyncio.sleep(rng.random() * 0.1)
    elif phase.startswith("answer"):
        await reader.read(1)
        if phase == "answer under way":
            await reader.read(rng.randrange(1, 4000))
    if rng.random() < 0.5:  # a reset rather than a polite end
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def greedy_text(http: aiohttp.ClientSession) -> str:
    async with http.post("/v1/completions", json=GREEDY) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    return answer["choices"][0]["text"]


async def gauges(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if "_bucket" not in line}


async def until_empty(http: aiohttp.ClientSession) -> None:
    """Scrape until nobody runs, nobody waits and no page is held; half a minute is as good as for ever."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    async with asyncio.timeout(300):
        now = await gauges(http)
        while any(now[name] for name in names):
            now = await gauges(http)


async def test_a_thousand_clients_that_leave_at_a_random_moment_leave_nothing_behind(server):
    rng = random.Random(0)
    port = int(server.url.rsplit(":", 1)[1])
    num_left = 0

    async def leavers() -> None:
        nonlocal num_left
        while num_left < NUM_LEAVERS:
            num_left += 1
            await leave_at_random(port, rng)

    async with aiohttp.ClientSession(server.url) as http:
        expected = await greedy_text(http)
        async with asyncio.timeout(900), asyncio.TaskGroup() as group:
            crowd = [group.create_task(leavers()) for _ in range(NUM_CLIENTS)]
            while not all(task.done() for task in crowd):
                assert await greedy_text(http) == expected
        await until_empty(http)
        assert (await gauges(http))["vllm:num_preemptions_total"] > 0
        # The longest request there can be needs most of the pages: they are there.
        longest = {"prompt": [5] * (CONTEXT - 1), "max_tokens": 1, "cache_salt": "new"}
        async with http.post("/v1/completions", json=longest) as response:
            assert response.status == 200
        assert await greedy_text(http) == expected
    server.signal(signal.SIGTERM)
    assert await asyncio.to_thread(server.wait) == 0
    assert not server.faults
