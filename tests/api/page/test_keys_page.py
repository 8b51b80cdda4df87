"""The page and API keys: asked for when one is needed, never kept."""

import pytest
from playwright.async_api import expect

from tests.api.page.test_chat_page import finished

pytestmark = pytest.mark.asyncio(loop_scope="session")


KEY = "sk-3f9a-of-a-test"


@pytest.fixture
def dialog():
    def of(visit):
        return visit.page.get_by_role("dialog", name="This server asks for an API key")

    return of


async def give(visit, key):
    await visit.page.get_by_label("API key", exact=True).fill(key)
    await visit.page.keyboard.press("Enter")


async def test_without_keys_none_is_asked_for(looked, dialog):
    _, visit = await looked()
    await visit.send("hi")
    await finished(visit)
    await expect(dialog(visit)).not_to_be_visible()


async def test_it_asks_for_a_key_and_again_until_it_is_right(looked, dialog):
    running, visit = await looked(api_keys=(KEY,))
    visit.may_fail = True
    await expect(dialog(visit)).to_be_visible()
    await expect(visit.page.get_by_label("API key", exact=True)).to_be_focused()
    await give(visit, "wrong")
    await expect(dialog(visit).get_by_role("alert")).to_have_text("The server does not know this key.")
    await give(visit, KEY)
    await expect(visit.page.locator("#state")).to_have_attribute("data-state", "live")
    await expect(visit.page.locator("#model")).to_contain_text("tiny")
    await expect(dialog(visit)).not_to_be_visible()
    await visit.send("hi")
    await finished(visit)
    assert len(running.engine.submits) == 1


async def test_who_gives_none_is_asked_again_when_they_want_something(looked, dialog):
    _, visit = await looked(api_keys=(KEY,))
    visit.may_fail = True
    await expect(dialog(visit)).to_be_visible()
    await visit.page.keyboard.press("Escape")
    await expect(dialog(visit)).not_to_be_visible()
    await expect(visit.page.locator("#state")).to_have_attribute("title", "An API key is needed")
    await visit.send("hi")
    await give(visit, KEY)
    await finished(visit)
    await expect(visit.page.locator("#state")).to_have_attribute("data-state", "live")


async def test_a_key_is_kept_nowhere(looked, dialog):
    _, visit = await looked(api_keys=(KEY,))
    visit.may_fail = True
    await give(visit, KEY)
    await expect(visit.page.locator("#state")).to_have_attribute("data-state", "live")
    kept = await visit.page.context.storage_state(indexed_db=True)
    assert kept == {"cookies": [], "origins": []}
    assert KEY not in await visit.page.content()
    assert all(KEY not in path for path in visit.paths)
    await visit.page.reload()
    await expect(dialog(visit)).to_be_visible()
