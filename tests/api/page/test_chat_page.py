"""The page's chat, in a browser."""

import pytest
from playwright.async_api import expect

from minserve.api.auth import ANYBODY
from tests.api import tiny

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def thinking_folder(tmp_path):
    return tiny.write_model_folder(tmp_path, template=tiny.THINKING_TEMPLATE)


async def finished(visit, text="hello world"):
    """Wait for the end of an answer that says text."""
    await expect(visit.answer.locator(".prose")).to_have_text(text)
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_visible()


def asked(running):
    """What the engine was asked last, as text."""
    return running.engine.tokenizer.decode(running.engine.submits[-1].prompt_token_ids)


async def set_field(visit, name, value):
    summary = visit.page.get_by_text("System prompt and sampling")
    field = visit.page.get_by_label(name, exact=True)
    if not await field.is_visible():
        await summary.click()
    await field.fill(value)


async def test_it_names_the_model_and_its_context(looked):
    _, visit = await looked(served_model_names=("org/some-model",))
    await expect(visit.page.locator("#model")).to_have_text("org/some-model · context 4,096 tokens")


async def test_of_several_names_one_is_chosen(looked):
    _, visit = await looked(served_model_names=("one", "two"))
    await visit.page.get_by_label("Model").select_option("two")
    await visit.send("hi")
    await finished(visit)
    assert '"model":"two"' in visit.bodies[-1]


async def test_an_answer_is_shown_with_its_figures(looked):
    running, visit = await looked()
    running.engine.cached_tokens = 3
    running.engine.share_accepted = 0.5
    await visit.send("hi")
    await finished(visit)
    for figure in ("first token", "8 tokens", "3 of 21 cached", "drafts 50% accepted"):
        await expect(visit.answer.locator(".figures")).to_contain_text(figure)


async def test_an_answer_is_shown_as_it_comes_and_its_figures_with_it(looked):
    running, visit = await looked()
    running.engine.hold_at = 2
    await visit.send("hi")
    await expect(visit.answer.locator(".prose")).to_have_text("hello")
    await expect(visit.answer.locator(".figures")).to_contain_text("2 tokens")
    running.engine.release()
    await finished(visit)


async def test_reasoning_is_folded(looked, thinking_folder):
    running, visit = await looked(folder=thinking_folder)
    running.engine.reply = "<think>\nhmm, hello\n</think>\n\nhello world"
    await visit.send("hi")
    await finished(visit)
    thoughts = visit.answer.locator(".thoughts div")
    await expect(thoughts).not_to_be_visible()
    await visit.answer.get_by_text("Reasoning,").click()
    await expect(thoughts).to_be_visible()
    await expect(thoughts).to_have_text("hmm, hello")


@pytest.mark.parametrize("by", ["button", "Escape"])
async def test_stopping_aborts_the_request_and_keeps_what_has_come(looked, by):
    running, visit = await looked()
    running.engine.hold_at = 2
    await visit.send("hi")
    await expect(visit.answer.locator(".prose")).to_have_text("hello")
    if by == "button":
        await visit.page.get_by_role("button", name="Stop").click()
    else:
        await visit.page.keyboard.press(by)
    await running.engine.until(lambda engine: len(engine.aborted) == 1)
    await finished(visit, "hello")
    await expect(visit.answer.locator(".figures")).to_contain_text("stopped")
    running.engine.hold_at = None
    await visit.send("go on")
    await finished(visit)
    assert "hello" in asked(running)


async def test_system_prompt_and_sampling_are_sent_and_what_is_left_empty_is_not(looked):
    running, visit = await looked()
    await set_field(visit, "System prompt", "Be brief.")
    for name, value in (("temperature", "0.5"), ("top p", "0.9"), ("max tokens", "2"), ("seed", "7")):
        await set_field(visit, name, value)
    await visit.send("hi")
    await expect(visit.answer.locator(".figures")).to_contain_text("cut at max tokens")
    params = running.engine.submits[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 2, 7)
    assert params.top_k == 0
    assert "Be brief." in asked(running)


async def test_again_asks_the_same_and_edit_takes_the_question_back(looked):
    running, visit = await looked()
    await visit.send("first")
    await finished(visit)
    running.engine.reply = "another"
    await visit.answer.get_by_role("button", name="Again").click()
    await finished(visit, "another")
    first, second = running.engine.submits
    assert first.prompt_token_ids == second.prompt_token_ids
    await visit.page.get_by_role("button", name="Edit").click()
    await expect(visit.page.get_by_label("Message", exact=True)).to_have_value("first")
    await expect(visit.page.get_by_role("article")).to_have_count(0)


async def test_new_chat_forgets_the_old(looked):
    running, visit = await looked()
    await visit.send("a secret")
    await finished(visit)
    await visit.page.get_by_role("button", name="New chat").click()
    await expect(visit.page.get_by_text("Ask the model something.")).to_be_visible()
    await visit.send("hi")
    await finished(visit)
    assert "secret" not in asked(running)


async def test_shift_enter_begins_a_line(looked):
    running, visit = await looked()
    field = visit.page.get_by_label("Message", exact=True)
    await field.press_sequentially("one")
    await field.press("Shift+Enter")
    await field.press_sequentially("two")
    await field.press("Enter")
    await finished(visit)
    assert "one\ntwo" in asked(running)


class TestErrors:
    """What goes wrong is said where it went wrong, and can be tried again."""

    async def test_a_refused_field_is_named_and_has_the_focus(self, looked):
        _, visit = await looked()
        visit.may_fail = True
        await set_field(visit, "temperature", "-1")
        await visit.send("hi")
        alert = visit.answer.get_by_role("alert")
        await expect(alert).to_contain_text("The server refused this request")
        await expect(alert).to_contain_text("temperature: must be at least 0")
        field = visit.page.get_by_label("temperature", exact=True)
        await expect(field).to_be_focused()
        await expect(field).to_have_attribute("aria-invalid", "true")
        await set_field(visit, "temperature", "1")
        await alert.get_by_role("button", name="Try again").click()
        await finished(visit)
        await expect(field).to_have_attribute("aria-invalid", "false")

    async def test_what_is_no_number_is_not_sent(self, looked):
        running, visit = await looked()
        await set_field(visit, "max tokens", "many")
        await visit.send("hi")
        await expect(visit.answer.get_by_role("alert")).to_contain_text("max tokens must be a whole number")
        assert not running.engine.submits

    async def test_a_full_server_says_when_to_try_again(self, looked):
        running, visit = await looked(max_num_waiting=0, engine_options={"max_num_seqs": 1})
        visit.may_fail = True
        with running.service.admission.enter(ANYBODY) as place:
            place.take()
            await visit.send("hi")
            await expect(visit.answer.get_by_role("alert")).to_contain_text("Try again in 2 s")
        await visit.answer.get_by_role("button", name="Try again").click()
        await finished(visit)

    async def test_an_answer_that_breaks_off_keeps_what_has_come(self, looked):
        running, visit = await looked()
        running.engine.fail_at = 2
        await visit.send("hi")
        await expect(visit.answer.get_by_role("alert")).to_contain_text("out of memory")
        await expect(visit.answer.locator(".prose")).to_have_text("hello")

    async def test_a_question_that_got_no_answer_is_not_asked_along_with_the_next(self, looked):
        running, visit = await looked()
        visit.may_fail = True
        running.engine.fail_at = 0
        await visit.send("a secret")
        await expect(visit.answer.get_by_role("alert")).to_be_visible()
        running.engine.fail_at = None
        await visit.send("hi")
        await finished(visit)
        assert "secret" not in asked(running)
        await expect(visit.page.get_by_role("button", name="Try again")).not_to_be_visible()

    async def test_a_server_that_is_gone_is_said_to_be(self, looked):
        running, visit = await looked()
        visit.may_fail = True
        await expect(visit.page.get_by_role("status").first).to_have_text("live")
        running.server.request_stop()
        assert await running.exit_code == 0
        await visit.send("hi")
        await expect(visit.answer.get_by_role("alert")).to_contain_text("The server cannot be reached")
        await expect(visit.page.locator("#state")).to_have_attribute("data-state", "lost")


async def test_everything_is_done_by_keyboard(looked):
    _, visit = await looked()
    page = visit.page
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    await page.keyboard.type("hi")
    await page.keyboard.press("Enter")
    await finished(visit)
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    for name in ("New chat", "System prompt and sampling", "Again", "Copy", "Edit"):
        while await page.evaluate("document.activeElement.textContent") != name:
            before = await page.evaluate("document.activeElement.outerHTML")
            await page.keyboard.press("Shift+Tab")
            assert await page.evaluate("document.activeElement.outerHTML") != before, f"{name} is not reached"
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"the focus on {name} is not seen"
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Message", exact=True)).to_have_value("hi")
