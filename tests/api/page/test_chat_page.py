"""The page's chat, in a browser."""

import pytest
from playwright.async_api import expect

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_answer_is_streamed_and_shown_with_its_figures(looked):
    running, visit = await looked()
    running.engine.cached_tokens = 3
    running.engine.share_accepted = 0.5
    await visit.send("hi")
    await expect(visit.answer.locator(".prose")).to_have_text("hello world")
    for figure in ("tok/s", "first token", "8 tokens", "3 of 21 cached", "drafts 50% accepted"):
        await expect(visit.answer.locator(".figures")).to_contain_text(figure)
