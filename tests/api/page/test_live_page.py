"""The page's view of the server: plots, requests, and the heat map of a working set."""

import asyncio

import msgspec
import pytest
from playwright.async_api import expect

from minserve.api import stats
from minserve.api.stats import RequestFigures
from tests.api.page import scene

pytestmark = pytest.mark.asyncio(loop_scope="session")

PHONE = {"viewport": {"width": 375, "height": 720}}


def plot(visit, title):
    return visit.page.get_by_role("figure").filter(has=visit.page.get_by_role("heading", name=title, exact=True))


async def heat_map(looked, figures):
    """A page on which a sparse request has been chosen; show(second) shows its working set of then."""
    _, visit = await looked()
    last = scene.history(sparse=True)[-1]
    figures.put(last)
    await visit.page.get_by_role("radio").first.check()

    async def show(second, **size):
        event = scene.history(sparse=True)[-1]
        event.time += second
        event.working_set = scene.working_set(event.requests[0].request_id, second, **size)
        figures.put(event)

    return visit, show


async def begun(running, visit):
    """The id of an answer of this page that has begun and does not end."""
    running.engine.hold_at = 2
    await visit.send("hi")
    await expect(visit.answer.locator(".prose")).not_to_be_empty()
    return running.engine.submits[-1].request_id


def with_request(event, request_id):
    """The event with one request more, which is the last."""
    return msgspec.structs.replace(event, requests=[*event.requests, RequestFigures(request_id, 20, 0, 2)])


def pixels(visit):
    return visit.page.locator("#map").evaluate("canvas => canvas.toDataURL()")


async def test_the_real_figures_of_a_server_are_shown(looked):
    running, visit = await looked()
    running.engine.counters.num_pages_used = 16
    await expect(plot(visit, "KV pages").locator(".value")).to_have_text("16 of 64")
    await expect(plot(visit, "Requests").locator(".value")).to_have_text("0 run0 wait")
    running.engine.hold_at = 2
    await visit.send("hi")
    await expect(plot(visit, "Requests").locator(".value")).to_have_text("1 run0 wait")
    row = visit.page.locator("#requests tbody tr")
    await expect(row).to_contain_text("this chat")
    await expect(row.get_by_role("cell")).to_have_text(
        [running.engine.submits[0].request_id + " this chat", "21", "0", "2"]
    )
    running.engine.release()
    await expect(row).to_have_count(0)
    await expect(plot(visit, "Time to first token")).to_be_visible()


async def test_there_is_a_plot_for_each_figure_that_there_is_and_no_other(looked, figures):
    _, visit = await looked()
    dense = ["Requests", "Generated", "Prompts read", "Time to first token", "KV pages", "Host blocks", "Prefix hits"]
    figures.put(*scene.history())
    await expect(visit.page.locator(".plot:visible h3")).to_have_text([*dense, "Drafts accepted"])
    await expect(visit.page.get_by_role("radio")).to_have_count(0)
    figures.put(*scene.history(sparse=True))
    sparse = ["Working set hits", "Link", "Surprises"]
    await expect(visit.page.locator(".plot:visible h3")).to_have_text([*dense, "Drafts accepted", *sparse])
    await expect(plot(visit, "Link").locator(".value")).to_have_text("12.7 GB/s")
    await expect(visit.page.get_by_role("radio")).to_have_count(3)


async def test_a_plot_tells_its_past_to_who_points_at_it(looked, figures):
    _, visit = await looked()
    events = scene.history()
    figures.put(*events)
    pages = plot(visit, "KV pages")
    await expect(pages.locator(".value")).to_contain_text(f"{events[-1].figures.num_pages_used:,}")
    box = await pages.locator("svg").bounding_box()
    await visit.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    await expect(visit.page.locator("#when")).to_contain_text("s ago")
    back = int((await visit.page.locator("#when").inner_text()).split()[0])
    assert back == pytest.approx(150, abs=3)
    await expect(pages.locator(".value")).to_contain_text(f"{events[-1 - back].figures.num_pages_used:,}")
    await visit.page.mouse.move(0, 0)
    await expect(visit.page.locator("#when")).to_have_text("")


async def test_the_heat_map_changes_when_the_working_set_does_and_only_then(looked, figures):
    visit, show = await heat_map(looked, figures)
    await show(0)
    await expect(visit.page.locator("#map")).to_be_visible()
    said = visit.page.locator("#map-figures")
    await expect(said).to_contain_text("fetched in the last second")
    first, told = await pixels(visit), await said.inner_text()
    await show(5)
    await expect(said).not_to_have_text(told)
    second, told = await pixels(visit), await said.inner_text()
    assert first != second
    await show(0)
    await expect(said).not_to_have_text(told)
    assert await pixels(visit) == first


async def test_the_colours_of_the_heat_map_are_those_of_the_bits(looked, figures):
    visit, show = await heat_map(looked, figures)
    await show(0, num_blocks=16, layers=2, heads=2)
    await expect(visit.page.locator("#map")).to_be_visible()
    last = scene.working_set("x", 0, num_blocks=16, layers=2, heads=2)
    width, data = await visit.page.locator("#map").evaluate(
        "map => [map.width, [...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]]"
    )

    def colour(row, block):
        x, y = int(30 + (block + 0.5) * (width - 30) / 16), row * 8 + 4
        return tuple(data[4 * (y * width + x) :][:3])

    wanted = {(0, 0): (230, 232, 236), (1, 0): (29, 95, 209), (1, 1): (221, 106, 18)}
    for row in range(4):
        for block in range(16):
            held, fetched = (bits[row * 2 + block // 8] >> block % 8 & 1 for bits in (last.held, last.fetched))
            assert colour(row, block) == wanted[held, fetched], (row, block)


async def test_a_cell_of_the_heat_map_is_read_by_keyboard(looked, figures):
    visit, show = await heat_map(looked, figures)
    await show(0)
    await visit.page.locator("#map").focus()
    cell = visit.page.locator("#cell")
    await visit.page.keyboard.press("ArrowRight")
    await expect(cell).to_have_text("Layer 0, KV head 0, block 0, tokens 0 to 15: in pages")
    for key in ("ArrowRight", "ArrowDown", "PageDown"):
        await visit.page.keyboard.press(key)
    await expect(cell).to_contain_text("Layer 1, KV head 1, block 1, tokens 16 to 31")
    await visit.page.keyboard.press("End")
    await expect(cell).to_contain_text("block 1023, tokens 16,368 to 16,383: in pages")
    await visit.page.keyboard.press("Tab")
    await expect(cell).to_have_text("")


async def test_a_chosen_request_that_is_dense_is_said_to_be(looked, figures):
    visit, _ = await heat_map(looked, figures)
    figures.put(*scene.history(sparse=True)[-1:])
    await expect(visit.page.get_by_text("this request is dense: every block of it is in pages")).to_be_visible()
    await expect(visit.page.locator("#map")).not_to_be_visible()


@pytest.mark.parametrize("known", ["before it begins", "only later"])
async def test_a_chat_of_this_page_is_chosen_by_itself_where_requests_are_sparse(looked, figures, known):
    running, visit = await looked()
    events = {"before it begins": scene.history(sparse=True)[-1], "only later": scene.history()[-1]}
    figures.put(events[known])
    await expect(visit.page.locator("#requests tbody tr")).to_have_count(3)
    own = await begun(running, visit)
    if known == "only later":
        figures.put(with_request(scene.history()[-1], own))
        await expect(visit.page.get_by_role("cell", name="this chat")).to_be_visible()
        assert not any("request=" in path for path in visit.paths)
    figures.put(with_request(scene.history(sparse=True)[-1], own))
    await expect(visit.page.get_by_role("radio", name="this chat")).to_be_checked()
    assert f"/stats/stream?request={own}" in visit.paths


async def test_a_request_that_was_chosen_by_hand_stays_chosen_while_it_runs(looked, figures):
    running, visit = await looked()
    figures.put(last := scene.history(sparse=True)[-1])
    first = visit.page.get_by_role("radio").first
    await first.check()
    own = await begun(running, visit)
    figures.put(with_request(last, own))
    await expect(visit.page.get_by_role("radio")).to_have_count(4)
    await expect(first).to_be_checked()
    figures.put(msgspec.structs.replace(with_request(last, own), requests=with_request(last, own).requests[-1:]))
    await expect(visit.page.get_by_role("radio", name="this chat")).to_be_checked()


async def test_the_stream_is_open_only_while_somebody_looks(looked):
    running, visit = await looked(PHONE)
    viewers = running.server.app[stats.VIEWERS]
    assert not any(path.startswith("/stats") for path in visit.paths)
    await expect(visit.page.locator("#state")).not_to_be_visible()
    await visit.page.get_by_role("tab", name="Server").click()
    await expect(visit.page.locator("#state")).to_have_attribute("data-state", "live")
    assert viewers.num == 1
    await visit.page.get_by_role("tab", name="Chat").click()
    await visit.send("hi")
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_visible()
    async with asyncio.timeout(10):
        while viewers.num:  # the server hears of it in its own time
            await running.chat()


@pytest.mark.parametrize("tab", ["Chat", "Server"])
async def test_nothing_is_wider_than_a_phone(looked, figures, tab):
    running, visit = await looked(PHONE)
    running.engine.reply = scene.REPLY + "\n" + "x" * 500
    await visit.send("y" * 500)
    await expect(visit.answer.get_by_role("button", name="Again")).to_be_visible()
    await visit.page.get_by_role("tab", name=tab).click()
    if tab == "Server":
        figures.put(*scene.history(sparse=True))
        await expect(visit.page.locator("#requests tbody tr")).to_have_count(3)
    too_wide = await visit.page.evaluate(
        """() => [document.documentElement, document.getElementById("log"), document.getElementById("server")]
            .filter(each => each.scrollWidth > each.clientWidth).map(each => each.id || each.tagName)"""
    )
    assert too_wide == []


async def test_tabs_are_moved_between_by_arrow_keys(looked):
    _, visit = await looked(PHONE)
    await visit.page.get_by_role("tab", name="Chat").focus()
    await visit.page.keyboard.press("ArrowRight")
    await expect(visit.page.get_by_role("tab", name="Server")).to_be_focused()
    await expect(visit.page.get_by_role("region", name="Server")).to_be_visible()
    await expect(visit.page.get_by_role("region", name="Chat")).not_to_be_visible()


async def test_a_server_that_comes_back_is_looked_at_again(looked, figures):
    _, visit = await looked()
    figures.put(*scene.history()[-1:])
    state = visit.page.locator("#state")
    await expect(state).to_have_attribute("data-state", "live")
    figures.end()
    await expect(state).to_have_attribute("data-state", "lost")
    figures.put(*scene.history()[-1:])
    await expect(state).to_have_attribute("data-state", "live")


async def test_a_request_that_has_ended_is_not_asked_for_when_the_server_comes_back(looked, figures):
    _, visit = await looked()
    figures.put(last := scene.history(sparse=True)[-1])
    await visit.page.get_by_role("radio").first.check()
    await expect(visit.page.locator("#working-set")).to_be_visible()
    figures.put(msgspec.structs.replace(last, time=last.time + 1, requests=[]))
    await expect(visit.page.get_by_role("radio")).to_have_count(0)
    num_before = len(visit.paths)
    figures.end()
    figures.put(last)
    await expect(visit.page.get_by_role("radio")).to_have_count(3)
    assert visit.paths[num_before:] == ["/stats/stream"]
