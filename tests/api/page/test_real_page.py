"""The page in front of the real command and its default model."""

import re

import pytest
from playwright.async_api import expect

from tests.api.page.test_chat_page import set_field

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def test_the_default_model_answers_a_chat_and_the_server_is_seen_at_work(visit, real_server):
    visit = await visit(real_server.url)
    await expect(visit.page.locator("#model")).to_contain_text("SmolLM2-135M-Instruct")
    await set_field(visit, "temperature", "0")
    await visit.send("What is the capital of France?")
    answer = visit.answer
    await expect(answer.get_by_role("button", name="Again")).to_be_visible()
    await expect(answer.locator(".prose")).to_have_text("The capital of France is Paris.")
    await expect(answer.locator(".figures")).to_have_text(
        re.compile(r"[\d.,]+ tok/s.*first token.*\d+ tokens.*\d+ of \d+ cached")
    )
    plots = visit.page.locator(".plot:visible h3")
    await expect(plots).to_contain_text(["Requests", "Generated", "Prompts read", "Time to first token", "KV pages"])
    await answer.get_by_role("button", name="Again").click()
    # The prompt's full blocks are there still.
    await expect(visit.answer.locator(".figures")).to_have_text(re.compile(r"[1-9]\d* of \d+ cached"))
    assert real_server.faults == []
