"""/openapi.json says what the code does."""

import pytest

from minserve.api.routes import ROUTES
from minserve.api.schemas import INERT, NOT_SUPPORTED
from tests.api.conftest import chat_body


@pytest.fixture
async def document(running):
    async with running.http.get("/openapi.json") as response:
        return await response.json()


def schema_of(document, path):
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return document["components"]["schemas"][body["$ref"].rpartition("/")[2]]


async def test_it_has_every_route_and_no_other(running, document):
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    served = {(route.method, route.resource.canonical) for route in running.server.app.router.routes()}
    assert served - {("HEAD", path) for _, path in described} == described


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_its_bounds_are_those_that_requests_are_held_to(running, document, path):
    num_tried = 0
    for name, schema in schema_of(document, path)["properties"].items():
        [bounded] = [kind for kind in schema.get("anyOf", []) if "maximum" in kind] or [None]
        if bounded is None:
            continue
        num_tried += 1
        for value in (bounded["maximum"] + 1, bounded.get("minimum", bounded.get("exclusiveMinimum")) - 1):
            base = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, chat_body())
            status, answer = await running.post(path, base | {name: value})
            assert (status, answer["error"]["param"]) == (400, name)
            assert "must be" in answer["error"]["message"]
    assert num_tried >= 8


async def test_its_fields_are_all_that_is_taken(document):
    for path, required in (
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
    ):
        schema = schema_of(document, path)
        assert schema["additionalProperties"] is False
        assert INERT | set(NOT_SUPPORTED) < set(schema["properties"])
        assert schema["required"] == [required]
        assert schema["properties"]["best_of"] == {"enum": [1, None]}
        assert {"type": "null"} in schema["properties"]["temperature"]["anyOf"]


async def test_it_has_reasoning_and_what_templates_are_told(document):
    chat, tokenize = (schema_of(document, path)["properties"] for path in ("/v1/chat/completions", "/tokenize"))
    for name in ("include_reasoning", "separate_reasoning"):
        assert chat[name] == {"default": True, "anyOf": [{"type": "boolean"}, {"type": "null"}]}
        assert schema_of(document, "/v1/completions")["properties"][name] == {"enum": [True, None]}
    for fields in (chat, tokenize):
        assert fields["chat_template_kwargs"]["anyOf"][0]["maxProperties"] == 64
        assert fields["tools"]["anyOf"][0]["maxItems"] == 1024
    schemas = document["components"]["schemas"]
    assert {"reasoning", "reasoning_content"} < set(schemas["ChatMessage"]["properties"])
    assert {"reasoning", "reasoning_content"} < set(schemas["ChatDelta"]["properties"])
    assert "completion_tokens_details" in schemas["Usage"]["properties"]


async def test_every_reference_leads_to_a_schema(document):
    def references(value):
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            value = list(value.values())
        for item in value if isinstance(value, list) else []:
            yield from references(item)

    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert names <= set(document["components"]["schemas"])


async def test_with_keys_it_needs_one_and_says_where_they_are_needed(start):
    running = await start(api_keys=("k",), key="k")
    async with running.http.get("/openapi.json") as response:
        document = await response.json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["security"] == ([] if route.open else [{"key": []}])
        assert ("401" in operation["responses"]) == (not route.open)
