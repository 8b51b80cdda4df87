"""With keys, everything but the probes needs one, however the path is spelled; and keys keep their holders apart."""

import asyncio
import itertools

import pytest

from minserve.api.routes import ROUTES
from tests.api.conftest import chat_body
from tests.api.test_http import CHAT, raw


@pytest.fixture
async def locked(start):
    return await start(api_keys=("first-key", "second-key"))


@pytest.mark.parametrize("key", ["first-key", "second-key"])
async def test_any_of_the_keys_opens(locked, key):
    async with locked.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer first", "Bearer first-key2", "Bearer f\u00ffrst"),
        *("first-key", "Basic first-key", "Bearer first-key, second-key"),
    ],
)
async def test_everything_else_is_a_401(locked, value):
    header = "" if value is None else f"\nAuthorization: {value}"
    answer = await raw(locked, f"GET /v1/models HTTP/1.1\nHost: x\nConnection: close{header}")
    assert b" 401 " in answer.splitlines()[0]
    assert b"WWW-Authenticate: Bearer" in answer
    assert b'"type":"authentication_error"' in answer


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "//v1/models", "/v1//models", "/./v1/models", "/%761/models", "/v1/models?x=/health"),
        *("/v1/models#/health", "/v1/models/%2e%2e/health", "http://evil/v1/models", "/metrics", "/tokenize"),
        *("/health/", "/health/x", "//health", "/health/../v1/models", "/HEALTH/../v1/models"),
        *("/health;/v1/models", "/nothing"),
    ],
)
async def test_no_spelling_of_a_path_passes_without_a_key(locked, path):
    answer = await raw(locked, f"GET {path} HTTP/1.1\nHost: x\nConnection: close")
    assert b" 401 " in answer.splitlines()[0] or b" 400 " in answer.splitlines()[0]
    assert b'"object"' not in answer


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version"])
async def test_the_probes_need_no_key(locked, path):
    async with locked.http.get(path) as response:
        assert response.status == 200


async def test_a_request_without_a_key_is_refused_before_its_body_is_looked_at(locked):
    status, _ = await locked.post(CHAT, b"{")
    assert status == 401
    assert not locked.engine.submits


async def test_the_openai_client_uses_its_key(start):
    running = await start(api_keys=("k",), key="k")
    assert [model.id async for model in running.openai.models.list()] == ["tiny"]


HEADERS = [
    *("", "\nAuthorization: Bearer wrong", "\nAuthorization: Bearer \u00ff\u00fe", "\nOrigin: https://evil.example"),
    *("\nX-Forwarded-For: 127.0.0.1", "\nCookie: key=first-key", "\nX-Api-Key: first-key"),
]


@pytest.mark.parametrize("host", ["x", "x/?", "x/#", "localhost", "x\nHost: y"])
async def test_no_route_but_the_probes_answers_without_a_key(locked, host):
    for route, header in itertools.product(ROUTES, HEADERS):
        path = route.path.replace("{id}", "tiny")
        head = f"{route.method} {path} HTTP/1.1\nHost: {host}\nConnection: close\nContent-Length: 0{header}"
        status = (await raw(locked, head)).split()[1]
        assert status in ((b"200", b"400") if route.open else (b"401", b"400")), head
    assert not locked.engine.submits


def test_few_routes_are_open():
    assert {route.path for route in ROUTES if route.open} == {"/", "/health", "/ready", "/ping", "/version"}


async def salts(running, **fields):
    """The salts that two keys' requests come to the engine with."""
    for key in ("first-key", "second-key"):
        status, _ = await running.post(CHAT, chat_body(**fields), headers={"Authorization": f"Bearer {key}"})
        assert status == 200
    return [submit.cache_salt for submit in running.engine.submits]


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "same"}])
async def test_two_keys_never_share_a_prefix_whatever_salt_they_send(locked, fields):
    first, second = await salts(locked, **fields)
    assert first != second
    assert "key" not in first


async def test_one_key_shares_with_itself_and_can_part_its_own_users(locked):
    first, _ = await salts(locked)
    _, _, again, _ = await salts(locked)
    *_, parted, _ = await salts(locked, cache_salt="user 7")
    assert first == again != parted


async def test_without_keys_a_salt_is_the_clients_own(running):
    await running.chat(cache_salt="mine")
    await running.chat()
    assert [submit.cache_salt for submit in running.engine.submits] == ["mine", ""]


class TestLimit:
    """--max-requests-per-key: what one key has running or waiting."""

    FIRST, SECOND = ({"Authorization": f"Bearer {key}-key"} for key in ("first", "second"))

    @pytest.fixture
    async def limited(self, start):
        running = await start(api_keys=("first-key", "second-key"), max_requests_per_key=2)
        running.engine.hold_at = 2
        return running

    async def test_one_more_is_a_429_with_retry_after_and_the_other_key_is_served(self, limited):
        held = [asyncio.create_task(limited.post(CHAT, chat_body(), headers=self.FIRST)) for _ in range(2)]
        await limited.engine.until(lambda engine: len(engine.running) == 2)
        async with limited.http.post(CHAT, json=chat_body(), headers=self.FIRST) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        other = asyncio.create_task(limited.post(CHAT, chat_body(), headers=self.SECOND))
        await limited.engine.until(lambda engine: len(engine.running) == 3)
        limited.engine.release()
        assert [status for status, _ in await asyncio.gather(*held, other)] == [200] * 3
        assert (await limited.post(CHAT, chat_body(), headers=self.FIRST))[0] == 200

    async def test_every_text_that_a_request_asks_for_counts(self, limited):
        held = asyncio.create_task(limited.post(CHAT, chat_body(n=2), headers=self.FIRST))
        await limited.engine.until(lambda engine: len(engine.running) == 2)
        assert (await limited.post(CHAT, chat_body(), headers=self.FIRST))[0] == 429
        limited.engine.release()
        assert (await held)[0] == 200

    async def test_what_will_never_have_room_is_a_400_that_names_n(self, limited):
        status, answer = await limited.post(CHAT, chat_body(n=3), headers=self.FIRST)
        assert (status, answer["error"]["param"]) == (400, "n")
        assert "at most 2" in answer["error"]["message"]
