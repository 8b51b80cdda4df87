"""Pages of other origins: none by default, and those that the command names."""

import pytest

from tests.api.conftest import chat_body

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any-thing"}


def cors_headers(response):
    return {name for name in response.headers if name.startswith("Access-Control-")}


async def test_by_default_no_page_may_ask_nor_read(running):
    async with running.http.options(CHAT, headers=PREFLIGHT) as response:
        assert response.status == 405
        assert not cors_headers(response)
    async with running.http.get("/v1/models", headers={"Origin": PAGE}) as response:
        assert not cors_headers(response)
        assert "Vary" not in response.headers


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_a_page_of_an_allowed_origin_may_ask_and_read_whole_or_streamed(start, allowed):
    running = await start(allowed_origins=("https://other.example.com", allowed))
    async with running.http.options(CHAT, headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert response.headers["Access-Control-Allow-Headers"] == "x-any-thing"
    for stream in (False, True):
        async with running.http.post(CHAT, json=chat_body(stream=stream), headers={"Origin": PAGE}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Vary"] == "Origin"


async def test_another_origin_is_allowed_nothing(start):
    running = await start(allowed_origins=(PAGE,))
    for origin in ("https://evil.example.com", PAGE + ".evil.com", "null", "http://chat.example.com"):
        async with running.http.options(CHAT, headers=PREFLIGHT | {"Origin": origin}) as response:
            assert response.status == 405
            assert not cors_headers(response)


async def test_a_preflight_needs_no_key_and_opens_nothing(start):
    running = await start(allowed_origins=(PAGE,), api_keys=("k",))
    async with running.http.options(CHAT, headers=PREFLIGHT) as response:
        assert (response.status, await response.text()) == (204, "")
    async with running.http.post(CHAT, json=chat_body(), headers={"Origin": PAGE}) as response:
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == PAGE  # so that the page can read why


async def test_a_foreign_page_cannot_ask_without_a_preflight(running):
    # What a browser sends without asking first is never of the type application/json.
    async with running.http.post(CHAT, data=b"{}", headers={"Origin": PAGE, "Content-Type": "text/plain"}) as response:
        assert response.status == 415
