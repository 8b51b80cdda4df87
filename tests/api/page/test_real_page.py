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


async def test_the_heat_map_shows_the_working_set_of_a_chat_while_it_is_answered(start_real, visit, request):
    """Sparse from its first step, with so few slots that blocks come and go. The server outlives the visit: a page asks
    one that stops again and again, and the browser complains of each answer."""
    flags = ("--host-kv", "256MiB", "--sparse", "above:0", "--working-set-blocks", "8", "--max-num-seqs", "4")
    server = start_real(*flags, "--draft", "none", "--fetch", "fixed", "--miss-policy", "approximate")
    visit = await visit(server.url)
    await set_field(visit, "temperature", "0")
    await set_field(visit, "max tokens", "400")
    people = " ".join(f"Person {number} likes the number {number}." for number in range(40))
    await visit.send(f"Tell a long story of these people. {people}")
    said = visit.page.locator("#map-figures")
    await expect(visit.page.get_by_role("radio", name="this chat")).to_be_checked()  # by itself
    await expect(visit.page.locator("#map")).to_be_visible()
    await expect(said).to_contain_text("of its blocks in pages")
    drawing = "canvas => canvas.toDataURL()"
    told, drawn = await said.inner_text(), await visit.page.locator("#map").evaluate(drawing)
    await expect(said).not_to_have_text(told)
    assert await visit.page.locator("#map").evaluate(drawing) != drawn
    await expect(said).to_have_text(re.compile(r"^([1-9]|[1-9]\d)(\.\d+)?% of its blocks"))
    for name in ("Working set hits", "Link", "Surprises"):
        await expect(visit.page.locator(".plot:visible h3").filter(has_text=name)).to_be_visible()
    if folder := request.config.getoption("pictures"):
        await visit.page.screenshot(path=folder / "working-set-of-a-chat.png")
    await visit.page.get_by_role("button", name="Stop").click()
    assert server.faults == []
