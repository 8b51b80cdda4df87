"""A real browser in front of a server with a scripted engine. One browser, and one event loop, serve all tests here."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Request, async_playwright, expect

from minserve.api import stats
from minserve.api.in_flight import InFlight
from minserve.api.stats import StatsEvent
from tests.api.conftest import servers

TIMEOUT_MS = 20_000
"""As good as for ever: nothing here waits for it unless something is wrong."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium. CI has it; elsewhere these tests are left out without it."""
    path = shutil.which("chromium")
    if path is None:
        assert not os.environ.get("CI"), "chromium is missing: .ci/run installs it"
        pytest.skip("needs a browser: apt-get install chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def start(model_folder, renderers):
    """As in the other tests of the API, on the browser's event loop."""
    async with servers(model_folder, renderers) as begin:
        yield begin


class Visit:
    """A page of a new browser, and all that must not happen there: messages of the console, faults of scripts, dialogs,
    requests to anybody but the server. may_fail: a request may, and the browser say so in the console."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.paths: list[str] = []
        self.bodies: list[str] = []
        self.may_fail = False
        self._origin = origin
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self._note(request))

    def _note(self, request: Request) -> None:
        url = request.url
        self.bodies += [request.post_data] if request.post_data else []
        if url.startswith(self._origin):
            self.paths.append(url.removeprefix(self._origin))
        elif not url.startswith("data:"):
            self.foreign.append(url)

    async def send(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.page.keyboard.press("Enter")

    @property
    def answer(self):
        """The last answer."""
        return self.page.get_by_role("article", name="Answer").last


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser):
    """visit(url, **options of the browser) -> Visit. At the end nothing may have been complained of."""
    visits = []

    async def begin(url: str, **options) -> Visit:
        context = await browser.new_context(**{"viewport": {"width": 1360, "height": 860}} | options)
        visit = Visit(await context.new_page(), url)
        visits.append(visit)
        await visit.page.goto(url + "/")
        return visit

    yield begin
    for visit in visits:
        await visit.page.context.close()
        if not visit.may_fail:
            assert visit.complaints == []
        assert visit.foreign == []


@pytest_asyncio.fixture(loop_scope="session")
async def looked(start, visit):
    """looked(**options of the server) -> (server, visit) with the page open and showing figures."""

    async def begin(browser_options=None, **options):
        running = await start(**{"stats_interval_s": 0.05} | options)
        visited = await visit(f"http://127.0.0.1:{running.port}", **(browser_options or {}))
        return running, visited

    return begin


class Played:
    """What a server says of itself, by a script. A stream begins with all that has been put here; one that asks for a
    request, with the last of it."""

    def __init__(self) -> None:
        self._events: list[StatsEvent] = []
        self._num_ends = 0
        self._changed = asyncio.Event()

    def put(self, *events: StatsEvent) -> None:
        """Say this to all who look."""
        self._events += events
        self._wake()

    def end(self) -> None:
        """End all streams, and forget what was said."""
        self._events = []
        self._num_ends += 1
        self._wake()

    async def stream(self, _service, _caller, request_id) -> AsyncIterator[StatsEvent]:
        num_ends = self._num_ends
        place = 0 if request_id is None else max(0, len(self._events) - 1)
        while num_ends == self._num_ends:
            for event in self._events[place:]:
                yield event if request_id else msgspec.structs.replace(event, working_set=msgspec.UNSET)
                place += 1
            if place == len(self._events):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@pytest.fixture
def figures(monkeypatch) -> Played:
    """The script of what the server says of itself."""
    played = Played()
    monkeypatch.setattr(stats, "stats_events", played.stream)
    monkeypatch.setattr(InFlight, "has", lambda *_: True)
    return played
