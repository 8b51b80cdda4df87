"""GET /: how the page is sent. What it does in a browser: tests/api/page."""

import base64
import hashlib
import re

from minserve.api.page import PATH, read_page

MAX_BYTES = 100_000


async def test_it_is_html_that_needs_no_key_and_is_small(start):
    running = await start(api_keys=("k",))
    async with running.http.get("/") as response:
        assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
        body = await response.read()
    assert body == PATH.read_bytes()
    assert len(body) < MAX_BYTES


async def test_its_policy_lets_run_its_own_script_and_style_and_nothing_else(running):
    async with running.http.get("/") as response:
        headers, text = response.headers, await response.text()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    digests = {}
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        [content] = re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", text, re.DOTALL)
        digests[name] = f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert policy == digests | {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_no_text_is_ever_parsed_as_html_or_kept_by_the_browser():
    script = read_page().body.decode().partition("<script")[2]
    for name in (
        *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment"),
        *("eval(", "new Function", "localStorage", "sessionStorage", "indexedDB", "document.cookie", "srcdoc"),
    ):
        assert name not in script


def test_it_names_no_other_host():
    assert set(re.findall(r"https?://[^/\s'\"]+", read_page().body.decode())) == {"http://www.w3.org"}


async def test_no_page_turns_it_off_and_leaves_the_rest(start):
    running = await start(page=False)
    async with running.http.get("/") as response:
        assert response.status == 404
    async with running.http.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert "/" not in paths
    assert "/stats/stream" in paths
