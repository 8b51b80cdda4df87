"""A device that fails under the engine: nobody is told less than that, and nothing is served by it any more.

Memory is taken at the start and no step needs more, so that running out of it in a step is a fault like any other.
"""

import asyncio
import json

import aiohttp
import pytest

from tests.api import tiny
from tests.api.faulty import FAULTS
from tests.api.real import RealServer

pytestmark = pytest.mark.slow

BODY = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(params=sorted(FAULTS))
def failing(request, tmp_path):
    """A server of two requests at a time whose device will fail, and the device's words."""
    tiny.write_model_folder(tmp_path)
    tiny.write_random_model(tmp_path)
    flags = ("--model", str(tmp_path), "--load-format", "dummy", "--max-num-seqs", "2")
    server = RealServer(*flags, module=("tests.api.faulty", request.param))
    yield server, FAULTS[request.param]
    server.end()


async def test_a_fault_of_the_device_is_an_error_of_every_request_and_ends_the_server_with_1(failing):
    server, words = failing
    async with aiohttp.ClientSession() as http:

        async def ask(**fields):
            async with http.post(f"{server.url}/v1/completions", json=BODY | fields) as response:
                return response.status, await response.text()

        # One is streamed and one is not; the others wait for them.
        answers = await asyncio.gather(*(ask(stream=stream) for stream in (True, False, True, False)))
        for status, text in answers:
            *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines_of(text)]
            assert words in last["error"]["message"]
            assert status == (200 if chunks else 500)
            assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert any(status == 200 for status, _ in answers)
        try:
            async with http.get(f"{server.url}/health") as response:
                assert response.status == 503
        except aiohttp.ClientConnectionError:
            pass  # it has ended already
    assert await asyncio.to_thread(server.wait) == 1
    assert any(words in line for line in server.lines)


def lines_of(text):
    """The JSON of a whole answer, or of each event of a stream."""
    return [line for line in text.splitlines() if line and line != "data: [DONE]"]
