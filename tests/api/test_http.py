"""HTTP itself: unknown routes, methods, media types, sizes, request ids, keys."""

import asyncio
import gzip
import logging

import pytest

from tests.api.conftest import chat_body

CHAT = "/v1/chat/completions"


async def raw(running, head: str, body: bytes = b"") -> bytes:
    """A request as bytes; all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("path", ["/index.html", "/v1", "/v1/nothing", "//v1/models", "/V1/models", "/v1/models/"])
async def test_an_unknown_route_is_a_404_in_the_error_shape(running, path):
    answer = await raw(running, f"GET {path} HTTP/1.1\nHost: x\nConnection: close")
    assert b" 404 " in answer.splitlines()[0]
    assert b'"type":"not_found_error"' in answer


async def test_a_wrong_method_is_a_405_that_says_which_are_right(running):
    async with running.http.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "POST" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_of_another_media_type_is_a_415(running, media):
    status, answer = await running.post(CHAT, chat_body(), headers={"Content-Type": media})
    assert status == 415
    assert "application/json" in answer["error"]["message"]


async def test_parameters_of_the_media_type_are_fine(running):
    status, _ = await running.post(CHAT, chat_body(), headers={"Content-Type": "application/json; charset=utf-8"})
    assert status == 200


async def test_a_compressed_body_is_a_415_and_is_not_unpacked(running):
    bomb = gzip.compress(b" " * 10_000_000)
    status, _ = await running.post(CHAT, bomb, headers={"Content-Encoding": "gzip"})
    assert status == 415


async def test_a_body_over_the_limit_is_a_413_announced_or_not(start):
    running = await start(max_request_bytes=1000)
    status, answer = await running.post(CHAT, b" " * 1001)
    assert status == 413
    assert "1000" in answer["error"]["message"]

    async def chunks():
        for _ in range(20):
            yield b" " * 100

    async with running.http.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"}) as response:
        assert response.status == 413


@pytest.mark.parametrize("head", ["GARBAGE", "GET / HTTP/9.9", "GET /health HTTP/1.1\nHost: x\nX: " + "a" * 10_000])
async def test_what_is_no_http_is_a_400_that_says_nothing_of_the_inside(running, head):
    answer = await raw(running, head)
    assert b" 400 " in answer.splitlines()[0]
    assert b"Traceback" not in answer
    assert b" at 0x" not in answer
    assert b".py" not in answer


async def test_a_sane_request_id_comes_back_and_another_is_replaced(running):
    for given, comes_back in (("abc-1.2:3", True), ("x" * 129, False), ("a b", False), ("", False)):
        async with running.http.get("/v1/models", headers={"X-Request-Id": given}) as response:
            assert (response.headers["X-Request-Id"] == given) == comes_back
            assert response.headers["X-Request-Id"]


async def test_the_same_request_id_twice_at_once_is_two_requests(running):
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(*(running.post(CHAT, chat_body(), headers=headers) for _ in range(2)))
    assert [status for status, _ in answers] == [200, 200]
    assert len({submit.request_id for submit in running.engine.submits}) == 2


async def test_the_access_log_says_what_was_answered_and_nothing_of_the_prompt(running, caplog):
    with caplog.at_level(logging.INFO, logger="minserve.access"):
        await running.chat(messages=[{"role": "user", "content": "top secret"}])
        await raw(running, "GET /secret%0aline HTTP/1.1\nHost: x\nConnection: close")
    assert "POST /v1/chat/completions 200" in caplog.text
    assert "GET (no route) 404" in caplog.text
    assert "secret" not in caplog.text
