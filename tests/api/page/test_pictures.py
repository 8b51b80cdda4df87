"""Pictures of the page, to look at: `pytest tests/api/page/test_pictures.py --pictures FOLDER`.

README.md shows one of them: `-k "the_page and light" --pictures tools/page`.
"""

import pytest
from playwright.async_api import expect

from tests.api import tiny
from tests.api.page import scene
from tests.api.page.test_chat_page import set_field

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_BYTES = 150_000


@pytest.fixture
def folder(request, tmp_path):
    """Where they go: the folder that was asked for, or one that nobody keeps."""
    return request.config.getoption("pictures") or tmp_path


async def conversation(looked, figures, *, sparse, **browser_options):
    """A server that has worked for five minutes, and a chat with it."""
    running, visit = await looked(browser_options, served_model_names=("example",))
    running.engine.reply = scene.REPLY
    running.engine.cached_tokens = 16
    running.engine.share_accepted = 0.61
    await visit.send(scene.QUESTION)
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_attached()
    figures.put(*scene.history(sparse=sparse))
    await expect(visit.page.locator("#requests tbody tr")).to_have_count(3)
    return visit


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page(looked, figures, folder, scheme):
    size = {"width": 1240, "height": 690}
    visit = await conversation(looked, figures, sparse=False, color_scheme=scheme, viewport=size)
    path = folder / f"page-{scheme}.png"
    await visit.page.screenshot(path=path)
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_working_set(looked, figures, folder, scheme):
    size = {"width": 1360, "height": 1080}
    visit = await conversation(looked, figures, sparse=True, color_scheme=scheme, viewport=size)
    await visit.page.locator("#requests input").first.check()
    for event in scene.history(sparse=True)[-3:]:
        event.working_set = scene.working_set(event.requests[0].request_id, 3)
        figures.put(event)
    await expect(visit.page.locator("#map")).to_be_visible()
    await visit.page.screenshot(path=folder / f"working-set-{scheme}.png")


@pytest.mark.parametrize("tab", ["Chat", "Server"])
async def test_on_a_phone(looked, figures, folder, tab):
    running, visit = await looked({"viewport": {"width": 375, "height": 720}, "device_scale_factor": 2})
    running.engine.reply = scene.REPLY
    await visit.send(scene.QUESTION)
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_attached()
    if tab == "Server":
        await visit.page.get_by_role("tab", name=tab).click()
        figures.put(*scene.history())
        await expect(visit.page.locator("#requests tbody tr")).to_have_count(3)
    await visit.page.screenshot(path=folder / f"phone-{tab.lower()}.png")


async def test_what_a_newcomer_sees(looked, folder):
    _, visit = await looked(served_model_names=("example",))
    await expect(visit.page.locator("#state")).to_have_attribute("data-state", "live")
    await visit.page.screenshot(path=folder / "empty.png")


async def test_an_error(looked, folder):
    _, visit = await looked(served_model_names=("example",))
    visit.may_fail = True
    await visit.send(scene.QUESTION)
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_visible()
    await set_field(visit, "top p", "1.5")
    await visit.send("And what is a page?")
    await expect(visit.answer.get_by_role("alert")).to_be_visible()
    await visit.page.screenshot(path=folder / "error.png")


async def test_the_question_for_a_key(looked, folder):
    _, visit = await looked(api_keys=("k",))
    visit.may_fail = True
    await expect(visit.page.get_by_role("dialog")).to_be_visible()
    await visit.page.get_by_label("API key", exact=True).fill("wrong")
    await visit.page.keyboard.press("Enter")
    await expect(visit.page.get_by_role("dialog").get_by_role("alert")).to_contain_text("does not know")
    await visit.page.screenshot(path=folder / "key.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_an_answer_on_its_way(looked, figures, folder, scheme, tmp_path):
    thinking = tiny.write_model_folder(tmp_path, template=tiny.THINKING_TEMPLATE)
    running, visit = await looked({"color_scheme": scheme}, folder=thinking, served_model_names=("example",))
    running.engine.reply = f"<think>\n{scene.REASONING}\n</think>\n\n{scene.REPLY}"
    running.engine.hold_at = 350
    await visit.send(scene.QUESTION)
    await visit.answer.get_by_text("Reasoning", exact=False).first.click()
    await expect(visit.answer.locator(".figures")).to_contain_text("350 tokens")
    figures.put(*scene.history(seconds=80))
    await expect(visit.page.locator("#requests tbody tr")).to_have_count(3)
    await visit.page.screenshot(path=folder / f"streaming-{scheme}.png")
