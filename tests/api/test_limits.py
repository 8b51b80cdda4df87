"""What a client may cost before it is known to be worth it: room, connections, time, memory."""

import asyncio
import json
import resource
import socket
import threading

import pytest
import uvloop

from minserve.api import body as body_module
from minserve.api.connections import OTHER_FILES, room_for_connections
from minserve.api.server import NUM_LISTENERS
from minserve.text.renderer import Renderer
from tests.api.conftest import chat_body, servers
from tests.api.test_http import raw

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"


async def metric(running, name):
    async with running.http.get("/metrics") as response:
        return values_of(name, await response.text())


def values_of(name, text):
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]


@pytest.fixture
def rendered(monkeypatch):
    """The chats that were given to a template."""
    chats = []
    render = Renderer.render

    async def noted(self, chat):
        chats.append(chat)
        return await render(self, chat)

    monkeypatch.setattr(Renderer, "render", noted)
    return chats


class TestRoom:
    """The queue."""

    @pytest.fixture
    async def full(self, start):
        running = await start(max_num_waiting=0, engine_options={"max_num_seqs": 1})
        running.engine.hold_at = 2
        held = asyncio.create_task(running.chat())
        await running.engine.until(lambda engine: len(engine.running) == 1)
        yield running
        running.engine.release()
        await held

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
    async def test_a_full_server_refuses_before_it_reads_the_body(self, full, path):
        _, writer, head = await ask(full, f"POST {path} HTTP/1.1\nHost: x\n{JSON}\nContent-Length: 1000000")
        assert b" 503 " in head
        assert b"Retry-After: 2" in head
        writer.close()

    async def test_refusals_are_counted_by_their_reason(self, full):
        await full.post(CHAT, chat_body())
        name = 'minserve:requests_refused_total{model_name="tiny",reason="queue_full"}'
        assert await metric(full, name) == [1.0]

    async def test_what_will_never_have_room_is_a_400_that_names_n_before_rendering(self, start, rendered):
        running = await start(max_num_waiting=1, engine_options={"max_num_seqs": 1})
        status, answer = await running.post(CHAT, chat_body(n=3))
        assert (status, answer["error"]["param"]) == (400, "n")
        assert rendered == []
        status, answer = await running.post("/v1/completions", {"prompt": ["a"] * 3})
        assert (status, answer["error"]["param"]) == (400, "prompt")

    async def test_chats_to_tokenize_wait_in_the_same_queue_and_are_refused_before_rendering(self, start, rendered):
        running = await start(max_num_waiting=0, engine_options={"max_num_seqs": 1})
        answers = await asyncio.gather(*(running.post("/tokenize", chat_body()) for _ in range(20)))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 503}
        assert len(rendered) == statuses.count(200)

    async def test_of_a_burst_every_request_is_refused_before_it_is_parsed_or_ends(self, start, rendered, monkeypatch):
        parsed = []
        decode = body_module.decode_object
        monkeypatch.setattr(body_module, "decode_object", lambda body: parsed.append(body) or decode(body))
        running = await start(max_num_waiting=56)
        running.engine.hold_at = 2
        burst = [asyncio.create_task(running.post(CHAT, chat_body())) for _ in range(400)]
        await running.engine.until(lambda engine: len(engine.running) == 64)
        _, pending = await asyncio.wait(burst, timeout=0)
        while len(pending) > 64:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert len(rendered) == len(parsed) == 64
        running.engine.release()
        statuses = [status for status, _ in await asyncio.gather(*burst)]
        assert (statuses.count(200), statuses.count(503)) == (64, 336)

    async def test_who_has_not_sent_the_whole_body_keeps_no_place_from_others(self, start):
        running = await start(max_num_waiting=0, engine_options={"max_num_seqs": 1})
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(chat_body()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{JSON}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:-1])
        running.engine.hold_at = 2
        held = asyncio.create_task(running.chat())
        await running.engine.until(lambda engine: len(engine.running) == 1)
        writer.write(body[-1:])
        assert b" 503 " in (await reader.read()).splitlines()[0]
        writer.close()
        running.engine.release()
        await held


async def ask(running, head):
    """A connection on which a head has been sent, and the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    return reader, writer, await reader.readuntil(b"\r\n\r\n")


class TestConnections:
    """How many, and how slow."""

    async def test_one_too_many_is_told_so_and_cut_off_until_another_leaves(self, start):
        running = await start(max_connections=2)
        head = "GET /health HTTP/1.1\nHost: x"
        first, second = await ask(running, head), await ask(running, head)
        answer = await raw(running, head)
        assert b" 503 " in answer.splitlines()[0]
        assert b'"code":"too_many_connections"' in answer
        assert b"Retry-After: 1" in answer
        first[1].close()
        await first[1].wait_closed()
        answer = b" 503 "
        async with asyncio.timeout(10):
            while b" 503 " in answer:  # the server hears of it in its own time
                answer = await raw(running, head + "\nConnection: close")
        assert b" 200 " in answer
        second[1].close()

    def test_those_who_come_together_are_taken_in_together(self, model_folder, renderers):
        """By the loop that the command runs, which takes in one a turn for each socket that listens."""

        async def come_together(num_clients):
            async with servers(model_folder, renderers) as start:
                running = await start()
                clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(num_clients)]
                for _ in range(3):
                    await asyncio.sleep(0)
                [num_open] = values_of("minserve:connections", running.service.metrics.render().decode())
                for client in clients:
                    client.close()
                return num_open

        assert uvloop.run(come_together(NUM_LISTENERS)) == NUM_LISTENERS

    @pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
    async def test_one_without_a_whole_head_is_closed(self, start, begun):
        running = await start(idle_s=0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(begun)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    async def test_one_that_idles_after_an_answer_is_closed(self, start):
        running = await start(idle_s=0.05)
        reader, writer, head = await ask(running, "GET /health HTTP/1.1\nHost: x")
        assert b" 200 " in head
        await asyncio.wait_for(reader.read(), 10)
        writer.close()

    async def test_a_body_that_does_not_come_is_a_408(self, start):
        running = await start(body_s=0.05)
        _, writer, head = await ask(running, f"POST {CHAT} HTTP/1.1\nHost: x\n{JSON}\nContent-Length: 10")
        assert b" 408 " in head
        writer.close()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_client_that_does_not_read_its_answer_is_cut_off(self, start, stream):
        running = await start(stall_s=0.2)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock:
            sock.connect(("127.0.0.1", running.port))
            body = {"prompt": "x" * 3900, "echo": True, "n": 128, "stream": stream, "max_tokens": 1}
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: {len(data)}\r\n\r\n"
            await asyncio.to_thread(sock.sendall, head.encode() + data)
            await running.engine.until(lambda engine: len(engine.submits) == 128 and not engine.running)
            await asyncio.wait_for(cut_off(running), 30)
            assert await running.complete()


class TestOpenFiles:
    """Each connection is an open file, and systems bound them."""

    @pytest.fixture
    def limit(self, monkeypatch):
        """limit(soft, hard): the process's limits. They are changed in this list only."""
        limits = [0, 0]
        monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
        monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))

        def begin(soft, hard):
            limits[:] = soft, hard
            return limits

        return begin

    @pytest.mark.parametrize("hard", [100_000, resource.RLIM_INFINITY])
    def test_the_limit_is_raised_to_what_the_connections_need(self, limit, hard):
        limits = limit(1024, hard)
        assert room_for_connections(4096) == 4096
        assert limits == [4096 + OTHER_FILES, hard]

    def test_where_it_cannot_be_raised_there_are_fewer_connections_and_a_warning(self, limit, caplog):
        limit(1024, 1024)
        assert room_for_connections(4096) == 1024 - OTHER_FILES
        assert "1024 files" in caplog.text

    def test_a_limit_that_suffices_is_left_alone(self, limit):
        limits = limit(5000, 6000)
        assert room_for_connections(100) == 100
        assert limits == [5000, 6000]


async def cut_off(running):
    """Returns when the server has no connection but the test's own clients'."""
    while await metric(running, "minserve:connections") != [1.0]:
        await asyncio.sleep(0.01)


class TestBodies:
    """Their size, in bytes and in what Python makes of them."""

    async def test_an_announced_gibibyte_is_a_413_before_it_is_sent(self, running):
        _, writer, head = await ask(running, f"POST {CHAT} HTTP/1.1\nHost: x\n{JSON}\nContent-Length: {2**30}")
        assert b" 413 " in head
        writer.close()

    async def test_the_greatest_body_is_as_the_context_is_long(self, start):
        for max_model_len, most in ((4096, 4 * 2**20), (2**20, 32 * 2**20)):
            running = await start(engine_options={"max_model_len": max_model_len})
            for length, status in ((most, b" 408 "), (most + 1, b" 413 ")):
                running.service.bodies._body_s = 0.01
                head = f"POST {CHAT} HTTP/1.1\nHost: x\n{JSON}\nContent-Length: {length}"
                _, writer, answer = await ask(running, head)
                assert status in answer
                writer.close()

    async def test_a_body_in_a_hundred_thousand_chunks_is_read(self, running):
        data = json.dumps(chat_body() | {"metadata": {"x": "y" * 100_000}}).encode()
        head = f"POST {CHAT} HTTP/1.1\nHost: x\n{JSON}\nTransfer-Encoding: chunked\nConnection: close"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        assert b" 200 " in (await raw(running, head, chunks + b"0\r\n\r\n")).splitlines()[0]

    async def test_ten_thousand_trailers_are_refused(self, running):
        head = f"POST {CHAT} HTTP/1.1\nHost: x\n{JSON}\nTransfer-Encoding: chunked\nConnection: close"
        data = json.dumps(chat_body()).encode()
        trailers = b"".join(b"X-%d: a\r\n" % number for number in range(10_000))
        answer = await raw(running, head, b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(data), data, trailers))
        assert b" 400 " in answer.splitlines()[0]
        assert (await running.chat())["choices"]

    @pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""'])
    async def test_more_values_than_a_prompt_could_need_are_refused_unparsed(self, start, monkeypatch, value):
        running = await start(max_request_bytes=2**18)
        monkeypatch.setattr(body_module, "decode_object", None)
        body = b'{"prompt":[' + b",".join([value] * (2**18 // (len(value) + 1) - 10)) + b"]}"
        status, answer = await running.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "too_many_values")

    @pytest.mark.parametrize(("num_chars", "in_thread"), [(1000, False), (100_000, True)])
    async def test_a_long_body_is_parsed_off_the_loop(self, running, monkeypatch, num_chars, in_thread):
        threads = []
        decode = body_module.decode_object

        def seen(body):
            threads.append(threading.current_thread())
            return decode(body)

        monkeypatch.setattr(body_module, "decode_object", seen)
        await running.chat(metadata={"x": "y" * num_chars})
        assert [thread is not threading.main_thread() for thread in threads] == [in_thread]

    async def test_what_all_clients_are_sending_is_bounded(self, start):
        running = await start(max_request_bytes=1000)
        connections = []
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: 1000\r\n\r\n"
        for _ in range(body_module.BODIES_AT_ONCE + 1):
            connections.append(await asyncio.open_connection("127.0.0.1", running.port))
            connections[-1][1].write(head.encode() + b" " * 999)
        done, _ = await asyncio.wait(
            [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in connections],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert [b" 503 " in (await head) for head in done] == [True]
        for _, writer in connections:
            writer.close()
