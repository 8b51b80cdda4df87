"""Random bodies: whatever a client sends, the answer is a 200 or a 4xx in the error shape."""

import random

import pytest

from minserve.api.items_request import ResponsesRequest
from minserve.api.schemas import INERT, ChatRequest, CompletionRequest

VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        20,
        2**31,
        2**63,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        "",
        "a",
        "\u0000",
        "世",
        "x" * 3000,
    ),
    *([], [[]], [None], [1], ["a"], [""], [-1], [2**70], {}, {"": None}, {"1": 1}, {"a": [1]}, {"type": "text"}),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "tool", "content": []}], [{}]),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],),
    *([{"type": "function", "function": {"name": "f"}}], {"include_usage": True}, {"enable_thinking": {}}),
    *([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}], [{"type": []}], {"format": {}}),
    *([{"type": "reasoning", "content": [{}]}], [{"role": "assistant", "content": [{"type": "text", "text": []}]}]),
    *([{"type": "function", "name": "f", "strict": True}], {"type": "function", "name": "f"}, {"effort": "low"}),
]


def random_body(rng: random.Random, base: dict, kind: type) -> dict:
    names = [*kind.__struct_fields__, *sorted(INERT), *sorted(kind.not_supported), "no_such_field"]
    return base | {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}


@pytest.mark.parametrize("seed", range(6))
async def test_no_body_gets_a_server_error(running, seed):
    rng = random.Random(seed)
    for _ in range(150):
        path, base, kind = rng.choice(
            [
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, ChatRequest),
                ("/v1/completions", {"prompt": "hi"}, CompletionRequest),
                ("/v1/responses", {"input": "hi"}, ResponsesRequest),
            ]
        )
        body = random_body(rng, base, kind)
        async with running.http.post(path, json=body) as response:
            text = await response.text()
            assert response.status in (200, 400, 404), (body, text)
            assert "internal" not in text, (body, text)
            if response.status != 200:
                assert (await response.json())["error"]["message"]
    assert (await running.complete())["choices"][0]["text"] == "hello world"
