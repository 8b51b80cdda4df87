"""What an answer must look like: which fields say so, what they are turned into, and what is refused."""

import json

import pytest

from minserve.grammar import BYTES, Grammars
from minserve.text.grammar_check import GrammarCheck
from tests.api.checks import refused
from tests.api.conftest import calls_of, chat_body, joined_calls
from tests.api.test_tools import TOOLS
from tests.api.tiny import OPENING_TEMPLATE, THINKING_TEMPLATE, write_model_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop", "strict": True}}


def of_schema(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}}


def accepts(grammar, text):
    """Whether a text is whole under a grammar."""
    matcher = Grammars(lambda: BYTES).matcher(grammar)
    for byte in text.encode():
        matcher.take(byte)
        if matcher.error:
            return False
    return matcher.matcher.is_accepting()


async def grammar_of(running, path, **fields):
    """What the engine was told of the answer to such a request."""
    if path == CHAT:
        await running.chat(**fields)
    else:
        await running.complete(**fields)
    return running.engine.submits[-1].grammar


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"b": [1, "x"]}', "{}"], ["[]", "hello", '{"a": }']),
        (of_schema(SCHEMA, strict=True), ['{"a": 12}', '{ "a" :\n1 }'], ["{}", '{"a": "b"}', '{"a": 1, "b": 2}']),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 12}'], ["{}"]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a": 12}'], ["{}"]),
        ({"structured_outputs": {"json": True}}, ["[]", "1"], ["x"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"regex": r"^\d+/[ab]\n?$"}}, ["12/a", "1/b\n"], ["12/c", "/a", "x12/a"]),
        ({"structured_outputs": {"choice": ['say "hi"', "né", "a\nb"]}}, ['say "hi"', "né", "a\nb"], ["say", "n"]),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, ["a", "aaa"], ["", "b"]),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, ["a", "bba"], ["b", "ab"]),
    ],
)
async def test_the_engine_is_told_what_the_answer_must_look_like(running, path, fields, right, wrong):
    grammar = await grammar_of(running, path, **fields)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


async def test_without_these_fields_anything_may_be_said(running):
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}):
        assert await grammar_of(running, CHAT, **fields) is None


async def test_all_choices_and_prompts_have_the_grammar(running):
    await running.complete(prompt=["a", "b"], n=2, **of_schema(SCHEMA))
    assert len({submit.grammar for submit in running.engine.submits[-4:]}) == 1


def with_parameters(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def deep(levels, form):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = form(schema)
    return schema


CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)} | {"d3000": {"type": "string"}}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (of_schema({"type": "strin"}), "response_format.json_schema.schema", "strin"),
        (of_schema({"$ref": "#"}), "response_format.json_schema.schema", "no text"),
        (of_schema({"$ref": "https://example.com/x"}), "response_format.json_schema.schema", "example.com"),
        (of_schema({"if": {}, "uniqueItems": True}), "response_format.json_schema.schema", '"if", "uniqueItems"'),
        (of_schema({"type": "string", "format": "odd"}), "response_format.json_schema.schema", "odd"),
        (of_schema(False), "response_format.json_schema.schema", ""),
        (
            of_schema(deep(400, lambda inner: {"properties": {"a": inner}})),
            "response_format.json_schema.schema",
            "recursion limit",
        ),
        (of_schema({"$ref": "#/$defs/d0", "$defs": CHAIN}), "response_format.json_schema.schema", "nested too deeply"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-ahead"),
        ({"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}}, "structured_outputs.regex", ""),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"grammar": "root ::= other"}}, "structured_outputs.grammar", "other"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 9000}}, "structured_outputs.grammar", ""),
        (
            {"structured_outputs": {"grammar": "\n".join([f'start: R0\nR{n}: "a" R{n + 1}' for n in range(3000)])}},
            "structured_outputs.grammar",
            "",
        ),
        ({"structured_outputs": {"choice": ["x" * 2**17]}}, "structured_outputs.choice", "too large"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON schema"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", ""),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.type", ""),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude",
        ),
        ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
        (
            {"tools": [ADD, with_parameters({"properties": {"x": {"type": "strin"}}})], "tool_choice": "required"},
            "tools[1].function.parameters",
            "strin",
        ),
        (
            {"tools": [with_parameters({"type": "array"})], "tool_choice": "required"},
            "tools[0].function.parameters.type",
            "object",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_compiled_is_refused_with_its_field_and_the_reason(running, fields, param, reason):
    await refused(running, CHAT, chat_body(**fields), param, reason)
    assert await grammar_of(running, CHAT, structured_outputs={"regex": "ab"})  # whatever it took with it


async def test_a_schema_of_two_thousand_levels_is_refused(running):
    schema = b'{"properties": {"a": ' * 2000 + b"{}" + b"}}" * 2000
    body = json.dumps(chat_body(**of_schema({}))).encode().replace(b'"schema": {}', b'"schema": ' + schema)
    status, answer = await running.post(CHAT, body)
    assert (status, running.engine.submits) == (400, [])
    assert "deep" in answer["error"]["message"]


async def test_a_costly_expression_is_compiled_in_bounded_time_or_refused(running):
    grammar = await grammar_of(running, CHAT, structured_outputs={"regex": "(a+)+$"})
    assert accepts(grammar, "aaa")
    assert not accepts(grammar, "aab")


async def test_a_grammar_that_takes_too_long_ends_its_process_and_not_the_server(running):
    check = GrammarCheck(running.service._vocabulary, max_cpu_s=0.001)
    running.service.grammars.close()
    running.service.grammars = check
    source = {"enum": [f"item {n}" for n in range(5000)]}
    await refused(running, CHAT, chat_body(**of_schema(source)), "response_format.json_schema.schema", "too long")


async def test_a_grammar_is_tried_once(running, monkeypatch):
    asked = []
    ask = GrammarCheck._ask

    async def noted(self, grammar):
        asked.append(grammar)
        return await ask(self, grammar)

    monkeypatch.setattr(GrammarCheck, "_ask", noted)
    for _ in range(2):
        await refused(running, CHAT, chat_body(**of_schema({"if": {}})), "response_format.json_schema.schema")
    for _ in range(2):
        await running.chat(**of_schema(SCHEMA))
    assert len(asked) == 2


ADD_1 = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOP_0 = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_required_is_one_call_or_several_of_any_tool_and_nothing_else(start, parser):
    running = await start(tool_call_parser=parser)
    running.engine.reply = ADD_1
    grammar = await grammar_of(running, CHAT, tools=[ADD, STOP], tool_choice="required")
    for text in (ADD_1, STOP_0, f"{ADD_1}\n{STOP_0}\n{ADD_1}"):
        assert accepts(grammar, text)
    for text in ("", "Sure. " + ADD_1, ADD_1.replace("1", '"x"'), ADD_1.replace("add", "other")):
        assert not accepts(grammar, text)
    single = await grammar_of(running, CHAT, tools=[ADD, STOP], tool_choice="required", parallel_tool_calls=False)
    assert accepts(single, STOP_0)
    assert not accepts(single, f"{ADD_1}\n{STOP_0}")


async def test_a_named_tool_is_called_once_and_no_other_is(running):
    running.engine.reply = ADD_1
    choice = {"type": "function", "function": {"name": "add"}}
    grammar = await grammar_of(running, CHAT, tools=[STOP, ADD], tool_choice=choice)
    assert accepts(grammar, ADD_1)
    for text in (STOP_0, f"{ADD_1}\n{ADD_1}"):
        assert not accepts(grammar, text)


async def test_llama_s_calls_are_forced_in_its_own_format(start):
    running = await start(tool_call_parser="llama3_json")
    running.engine.reply = '{"name": "add", "parameters": {"a": 1}}; {"name": "stop", "parameters": {}}'
    answer = await running.chat(tools=[ADD, STOP], tool_choice="required")
    assert accepts(running.engine.submits[-1].grammar, running.engine.reply)
    assert calls_of(answer["choices"][0]) == [("add", '{"a": 1}'), ("stop", "{}")]


@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_forced_calls_are_read_streamed_and_ended_as_others_are(start, parser):
    running = await start(tool_call_parser=parser)
    running.engine.reply = f"{ADD_1}\n{STOP_0}"
    fields = {"tools": [ADD, STOP], "tool_choice": "required"}
    choice = (await running.chat(**fields))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("add", '{"a": 1}'), ("stop", "{}")]
    assert joined_calls(await running.chat_events(**fields)) == calls_of(choice)


async def test_with_tools_to_choose_from_an_answer_has_the_schema_or_is_a_call(start):
    running = await start(tool_call_parser="hermes")
    grammar = await grammar_of(running, CHAT, tools=[ADD], **of_schema(SCHEMA))
    assert accepts(grammar, '{"a": 5}')
    assert accepts(grammar, ADD_1)
    assert not accepts(grammar, "Sure.")
    assert await grammar_of(running, CHAT, tools=TOOLS) is None
    assert await grammar_of(running, CHAT, tools=TOOLS, tool_choice="none") is None


@pytest.mark.parametrize(
    ("template", "fields", "right", "wrong"),
    [
        (THINKING_TEMPLATE, {}, ['<think>\nHm: {"b"}\n</think>\n\n{"a": 1}', '{"a": 1}'], ["<think>x</think>"]),
        (THINKING_TEMPLATE, {"separate_reasoning": False}, ['<think>\nHm\n</think>\n\n{"a": 1}'], ["Hm"]),
        (
            THINKING_TEMPLATE,
            {"chat_template_kwargs": {"enable_thinking": False}},
            ['{"a": 1}'],
            ['<think>x</think>{"a": 1}'],
        ),
        (OPENING_TEMPLATE, {}, ['Hm.\n</think>\n\n{"a": 1}'], ['{"a": 1}', '<think></think>"a"']),
    ],
)
async def test_the_grammar_begins_where_the_reasoning_ends(start, tmp_path, template, fields, right, wrong):
    running = await start(folder=write_model_folder(tmp_path, template=template))
    grammar = await grammar_of(running, CHAT, **of_schema(SCHEMA), **fields)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text
