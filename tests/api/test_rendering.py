"""A chat template is a program: whatever it does with a request, the server and everybody else go on."""

import asyncio

import pytest

from minserve.text.chat import ChatTemplate
from minserve.text.renderer import Renderer
from tests.api import tiny
from tests.api.checks import CHAT, refused
from tests.api.conftest import chat_body, joined_text

BOMBS = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one long call": "{{ (7 ** (10 ** 8)) % 10 }}",
    "memory": "{{ 'x' * 9999999999 }}",
    "long": "{% for i in range(99) %}{{ 'x' * 999999 }}{% endfor %}",
}
TEMPLATE = (
    "".join(f"{{% if bomb == '{name}' %}}{source}{{% endif %}}" for name, source in BOMBS.items()) + tiny.TEMPLATE
)


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer(ChatTemplate({"default": TEMPLATE}), max_cpu_s=0.5)
    yield renderer
    renderer.close()


@pytest.fixture
async def running(start, renderer):
    return await start(renderer=renderer)


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_chat_that_is_too_much_for_the_template_is_refused_and_the_next_is_served(running, bomb):
    await refused(running, CHAT, chat_body(chat_template_kwargs={"bomb": bomb}), "messages", "the chat template")
    await refused(running, "/tokenize", chat_body(chat_template_kwargs={"bomb": bomb}), "messages", "chat template")
    assert (await running.chat())["choices"][0]["message"]["content"] == "hello world"


async def test_streams_and_other_routes_go_on_while_a_template_does_not_end(running):
    running.engine.hold_at = 3
    stream = asyncio.create_task(running.chat_events())
    await running.engine.until(lambda engine: engine.running)
    bombs = [
        asyncio.create_task(running.post(CHAT, chat_body(chat_template_kwargs={"bomb": "endless"}))) for _ in range(2)
    ]
    async with running.http.get("/health") as response:
        assert response.status == 200
    running.engine.release()
    assert joined_text(await stream) == "hello world"
    assert (await running.complete())["choices"][0]["text"] == "hello world"
    assert [status for status, _ in await asyncio.gather(*bombs)] == [400, 400]


async def test_numbers_and_text_reach_the_template_as_they_were_sent(running):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"max": 10**30, "x": 0.1, "é": "\u2028<"}}}
    await running.chat(tools=[tool], tool_choice="none")
    for field in ({"tools": [tool]}, {"messages": [{"role": "user", "content": "\u2028 \x00 é"}]}):
        _, answer = await running.post("/tokenize", chat_body(**field))
        shown = running.service.tokenizer.decode(answer["tokens"], skip_special_tokens=False)
        assert all(part in shown for part in (["1" + "0" * 30, "0.1", "\u2028<"] if "tools" in field else ["\x00 é"]))
