"""Bodies that are no plain JSON objects, or too deep, or hostile in their keys and text."""

import asyncio
import json
import logging
import re
import threading

import pytest

from minserve.text.tokenizer import Tokenizer
from tests.api.checks import CHAT, COMPLETIONS, refused
from tests.api.conftest import chat_body

NO_OBJECTS = [
    b"",
    b"{",
    b'{"messages":',
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","temperature":Infinity}',
    b'{"prompt":"a","temperature":1e999}',
    b'{"prompt":"a","prompt":"b"}',
    b'{"prompt":"a","logit_bias":{"1":2,"1":3}}',
    b'{"prompt":"\xff"}',
    b'\xef\xbb\xbf{"prompt":"a"}',
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt":"a","chat":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    b'{"prompt":"a"} trailing',
]


@pytest.mark.parametrize("body", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
async def test_a_body_that_is_no_plain_json_object_is_refused(running, body):
    status, answer = await running.post(COMPLETIONS, body)
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert not running.engine.submits


async def test_a_connection_goes_on_after_bodies_that_are_refused(running):
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    for body in [*NO_OBJECTS, b'{"prompt":"a"}']:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", answer)[1])
        answer += await reader.readexactly(length)
        assert b" 400 " in answer.splitlines()[0] or body == b'{"prompt":"a"}'
        assert b"Traceback" not in answer
        assert b" at 0x" not in answer
    assert b" 200 " in answer.splitlines()[0]
    writer.close()


@pytest.mark.parametrize("text", ["a" * 2**21, "\u4e16" * 2**19, "\U0001f336" * 2**18], ids=["a", "CJK", "emoji"])
@pytest.mark.parametrize("max_model_len", [4096, 2**20])
async def test_a_text_of_megabytes_is_refused_or_tokenized_off_the_loop(start, monkeypatch, text, max_model_len):
    running = await start(engine_options={"max_model_len": max_model_len})
    threads = []
    encode = Tokenizer.encode

    def seen(self, *args, **kwargs):
        threads.append(threading.current_thread())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", seen)
    await refused(running, COMPLETIONS, {"prompt": text}, "prompt", "maximum context length")
    assert threading.main_thread() not in threads
    assert bool(threads) == (max_model_len > 4096)


HALF = b'"\\ud83d"'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":' + HALF + b"}", "prompt"),
        (b'{"prompt":"a","metadata":{"k":[1,{"x":' + HALF + b"}]}}", "metadata.k[1].x"),
        (b'{"prompt":"a","metadata":{' + HALF + b":1}}", "metadata"),
        (b"{" + HALF + b":1}", None),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_its_place(running, body, param):
    await refused(running, COMPLETIONS, body, param, "surrogate")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","' + b"x" * 10**6 + b'":1}',
        b'{"prompt":"a","' + b"x" * 400_000 + b'":1,"' + b"x" * 400_000 + b'":1}',
        b'{"prompt":"a","metadata":' + b'{"%s":' % (b"x" * 2000) * 400 + HALF + b"}" * 400 + b"}",
        b'{"prompt":"a","model":"' + b"x" * 10**6 + b'"}',
        b'{"prompt":"a","suffix":"' + b"x" * 10**6 + b'"}',
        b'{"prompt":"a","stream_options":{"' + b"x" * 10**6 + b'":1}}',
    ],
    ids=range(6),
)
async def test_an_error_quotes_little_of_what_was_sent(running, body):
    status, answer = await running.post(COMPLETIONS, body)
    assert status in (400, 404)
    assert len(json.dumps(answer)) < 2000


async def test_a_key_given_twice_is_found_among_many(running):
    keys = ",".join(f'"k{number}":1' for number in range(60_000))
    # Quadratic time would be minutes.
    await refused(running, COMPLETIONS, f'{{{keys},"k59999":1}}'.encode(), None, '"k59999" is given twice')


async def test_deeply_nested_values_in_free_fields_are_answered_not_crashed_on(running):
    deep = json.loads('{"a":' * 400 + "1" + "}" * 400)
    for fields in (
        {"chat_template_kwargs": deep},
        {"metadata": deep},
        {"messages": [{"role": "user", "content": [deep]}]},
    ):
        status, _ = await running.post(CHAT, chat_body(**fields))
        assert status in (200, 400)


@pytest.mark.parametrize("depth", [300, 900, 2000, 100_000])
@pytest.mark.parametrize("leaf", ["1", '"\\ud83c\\udf36"'])
@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs", "tools", "response_format", "logit_bias"])
async def test_a_body_nested_at_any_depth_is_answered_or_a_400(running, caplog, depth, leaf, field):
    deep = '{"a":' * depth + leaf + "}" * depth
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{field}":{f"[{deep}]" if field == "tools" else deep}}}'
    status, _ = await running.post(CHAT, body.encode())
    assert status in (200, 400)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
