"""What a request may ask of its working set, and what its usage says of it."""

import msgspec
import pytest

from minserve.api.launch import describe
from minserve.protocol import SparseParams, SparseUsage
from tests.api.checks import CHAT, COMPLETIONS, completion_body, refused
from tests.api.conftest import chat_body

USED = SparseUsage(
    from_token=4097, steps=100, retries=4, hits=900, misses=100, cut_misses=20, surprises=30, asked=800,
    bytes_fetched=80 * 8192,
)  # fmt: skip
DETAILS = {
    "from_token": 4097,
    "steps": 100,
    "retries": 4,
    "hit_rate": 0.9,
    "hits": 900,
    "misses": 100,
    "cut_misses": 20,
    "surprises": 30,
    "asked": 800,
    "bytes_fetched": 655360,
}
EVERYTHING = {
    "mode": "always",
    "lookahead": "draft",
    "verify_drafts": 2,
    "miss_policy": "approximate",
    "fetch": "fixed",
    "cap": 12,
}


@pytest.fixture
async def sparse_server(start):
    """sparse_server(...) -> a server whose engine has working sets, and a draft head unless it is told otherwise."""

    async def begin(*, num_blocks=128, draft="EAGLE-3 head", **options):
        running = await start(**options)
        info = running.engine.info
        running.engine.info = msgspec.structs.replace(info, num_working_set_blocks=num_blocks, draft=draft)
        return running

    return begin


class TestAsked:
    async def test_it_reaches_the_engine_as_it_is_with_every_choice(self, sparse_server):
        running = await sparse_server()
        await running.chat(sparse=EVERYTHING, n=2)
        await running.complete(sparse=EVERYTHING)
        assert [submit.sparse for submit in running.engine.submits] == [SparseParams(**EVERYTHING)] * 3

    async def test_what_is_not_said_or_null_is_as_the_server_does(self, sparse_server):
        running = await sparse_server()
        await running.complete()
        await running.complete(sparse=None)
        await running.complete(sparse={"mode": "always", "cap": None})
        assert [submit.sparse for submit in running.engine.submits] == [None, None, SparseParams(mode="always")]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"mode": "often"}, "sparse.mode", "allowed: always, never, pressure"),
            ({"mode": "above"}, "sparse.mode", "above"),
            ({"lookahead": True}, "sparse.lookahead", "bool"),
            ({"verify_drafts": -1}, "sparse.verify_drafts", "at least 0"),
            ({"verify_drafts": 9}, "sparse.verify_drafts", "at most 8"),
            ({"miss_policy": "recall"}, "sparse.miss_policy", "allowed: approximate, retry"),
            ({"fetch": "all"}, "sparse.fetch", "all"),
            ({"cap": 0}, "sparse.cap", "at least 1"),
            ({"cap": 4097}, "sparse.cap", "at most 4096"),
            ({"cap": 1.5}, "sparse.cap", "float"),
            ({"blocks": 64}, "sparse.blocks", "unknown"),
            ("always", "sparse", "str"),
        ],
    )
    async def test_what_is_wrong_is_refused_by_its_place(self, sparse_server, fields, param, words):
        running = await sparse_server()
        await refused(running, CHAT, chat_body(sparse=fields), param, words)
        await refused(running, COMPLETIONS, completion_body(sparse=fields), param, words)

    @pytest.mark.parametrize(("name", "value"), [*EVERYTHING.items(), ("mode", "pressure"), ("lookahead", "current")])
    async def test_a_server_without_working_sets_refuses_each_field_by_name(self, sparse_server, name, value):
        running = await sparse_server(num_blocks=0)
        for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
            await refused(running, path, body | {"sparse": {name: value}}, f"sparse.{name}", "--host-kv", "never")

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [("lookahead", "draft", 'allowed is "current"'), ("verify_drafts", 1, "allowed is 0")],
    )
    async def test_without_a_head_there_are_no_drafts_to_look_ahead_by_or_to_accept(
        self, sparse_server, name, value, allowed
    ):
        running = await sparse_server(draft="")
        for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
            await refused(running, path, body | {"sparse": {name: value}}, f"sparse.{name}", "--draft", allowed)

    async def test_what_holds_anyway_may_be_asked_of_any_server(self, sparse_server):
        running = await sparse_server(num_blocks=0, draft="")
        await running.chat(sparse={})
        await running.chat(sparse={"mode": "never", "verify_drafts": 0})

    async def test_the_description_has_its_fields_and_bounds(self, running):
        async with running.http.get("/openapi.json") as response:
            schemas = (await response.json())["components"]["schemas"]
        asked = schemas["SparseParams"]
        assert set(asked["properties"]) == set(EVERYTHING)
        assert asked["additionalProperties"] is False
        assert {"type": "integer", "minimum": 1, "maximum": 4096} in asked["properties"]["cap"]["anyOf"]
        assert {"enum": ["always", "never", "pressure"]} in asked["properties"]["mode"]["anyOf"]
        for body in ("ChatRequest", "CompletionRequest"):
            assert {"$ref": "#/components/schemas/SparseParams"} in schemas[body]["properties"]["sparse"]["anyOf"]
        assert set(schemas["SparseDetails"]["properties"]) == set(DETAILS)


class TestUsage:
    async def test_it_says_what_the_working_set_did_whole_and_streamed(self, sparse_server):
        running = await sparse_server()
        running.engine.sparse = USED
        options = {"stream": True, "stream_options": {"include_usage": True}}
        whole = [await running.chat(), await running.complete()]
        streamed = [(await running.chat_events(**options))[-1], (await running.completion_events(**options))[-1]]
        assert [answer["usage"]["sparse_details"] for answer in whole + streamed] == [DETAILS] * 4

    async def test_responses_say_it_too_and_of_drafts(self, sparse_server):
        running = await sparse_server()
        running.engine.sparse, running.engine.share_accepted = USED, 0.5
        _, answer = await running.post("/v1/responses", {"input": "hi", "sparse": EVERYTHING})
        assert running.engine.submits[0].sparse == SparseParams(**EVERYTHING)
        assert answer["usage"]["sparse_details"] == DETAILS
        assert answer["usage"]["draft_tokens_details"] == {"draft_tokens": 8, "accepted_tokens": 4}

    async def test_in_a_stream_that_tells_it_all_along_it_is_there_at_the_end(self, sparse_server):
        running = await sparse_server()
        running.engine.sparse = USED
        options = {"include_usage": True, "continuous_usage_stats": True}
        first, *_, end, last = await running.chat_events(stream=True, stream_options=options)
        assert "sparse_details" not in first["usage"]
        assert end["usage"]["sparse_details"] == last["usage"]["sparse_details"] == DETAILS

    async def test_a_request_that_was_not_sparse_has_none_of_it(self, sparse_server):
        running = await sparse_server()
        assert "sparse_details" not in (await running.chat())["usage"]

    async def test_choices_are_counted_together_from_the_first_token_of_any(self, sparse_server):
        running = await sparse_server()
        running.engine.sparse = USED
        details = (await running.chat(n=2))["usage"]["sparse_details"]
        assert (details["from_token"], details["hit_rate"]) == (4097, 0.9)
        assert (details["steps"], details["bytes_fetched"]) == (200, 2 * 655360)

    async def test_where_nothing_was_wanted_there_is_no_rate(self, sparse_server):
        running = await sparse_server()
        running.engine.sparse = msgspec.structs.replace(USED, hits=0, misses=0)
        assert (await running.complete())["usage"]["sparse_details"]["hit_rate"] is None


async def test_the_start_says_what_a_sparse_request_keeps(sparse_server):
    without, with_sets = await sparse_server(num_blocks=0), await sparse_server(num_blocks=128)
    line = "sparse requests keep 128 blocks (2048 tokens) of each KV head in pages"
    assert line in describe(with_sets.service.config, with_sets.engine.info)
    assert not any("sparse" in line for line in describe(without.service.config, without.engine.info))
