import copy
from datetime import datetime
from pathlib import Path

import pytest
from conftest import byte_level_backend
from transformers import PreTrainedTokenizerFast

from minserve.errors import ConfigError, RequestError
from minserve.text.chat import ChatTemplate

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

ODD_TEXT = "Quotes \" and ' — a<b & 'c' > d\n\n  世界 🌶\t{{ not jinja }} \\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "a<b & 'c' \"quoted\" – 天気",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}}},
                    "days": {"type": ["integer", "null"], "default": None},
                },
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
USER = {"role": "user", "content": ODD_TEXT}
SYSTEM = {"role": "system", "content": "  Be brief. \n"}
ANSWER = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSure:\n"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"where": {"city": "Zürich"}, "days": 1.0, "note": "a<b & 'c'"},
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "{'t': 21 & rising}"}
CONVERSATIONS = {
    "one question": [USER],
    "system prompt": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER],
    "ends with an answer": [USER, ANSWER],
    "tool result": [USER, CALLS, RESULT],
    "tool turns": [SYSTEM, USER, CALLS, RESULT, RESULT, {"role": "assistant", "content": "21"}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "21", "reasoning_content": "Count.\n"}, USER],
    "reasoning by its other name": [USER, {"role": "assistant", "content": "21", "reasoning": "Count."}],
    "nulls": [{**USER, "name": None, "tool_calls": None}],
}


def transformers_render(source, messages, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=source, **SPECIAL_TOKENS)
    return tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)


def chat(source):
    return ChatTemplate({"default": source}, SPECIAL_TOKENS)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_prompts_equal_those_of_transformers(source, messages, tools):
    for add_generation_prompt in (True, False):
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        expected = transformers_render(source, messages, **options)
        assert chat(source).render(messages, **options) == expected


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_template_kwargs_reach_the_template(enable_thinking):
    expected = transformers_render(
        TEMPLATES["qwen3"], [USER], add_generation_prompt=True, enable_thinking=enable_thinking
    )
    kwargs = {"enable_thinking": enable_thinking}
    assert chat(TEMPLATES["qwen3"]).render([USER], template_kwargs=kwargs) == expected
    assert ("<think>" in expected) is not enable_thinking


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ tools | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "  {% if true %}\n  a\n  {% endif %}\nb\n",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{{ dict(a=1) }}{{ dict.fromkeys(['k']) }}{% set ns = namespace(self=1, b=2) %}{% set ns.b = 3 %}{{ ns.b }}",
        "[{{ pad_token }}][{{ documents }}][{{ documents is defined }}][{{ bos_token }}][{{ nothing is defined }}]",
        "{% for m in messages %}{{ m }}{% endfor %}",
    ],
)
def test_the_dialect_is_that_of_transformers(source):
    options = {"tools": TOOLS, "add_generation_prompt": False}
    expected = transformers_render(source, [USER, ANSWER], **options)
    assert chat(source).render([USER, ANSWER], **options) == expected


def test_strftime_now_is_the_date_of_today():
    before, rendered = datetime.now(), chat("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert rendered in {f"{before:%Y-%m-%d}", f"{datetime.now():%Y-%m-%d}"}


def test_arguments_given_as_a_string_render_as_the_object_they_hold():
    call = CALLS["tool_calls"][0]
    text = '{"where": {"city": "Z\\u00fcrich"}, "days": 1.0, "note": "a<b & \'c\'"}'
    as_string = {**CALLS, "tool_calls": [{**call, "function": {**call["function"], "arguments": text}}]}
    for source in TEMPLATES.values():
        template = chat(source)
        assert template.render([USER, as_string, RESULT]) == template.render([USER, CALLS, RESULT])
    assert as_string["tool_calls"][0]["function"]["arguments"] is text


@pytest.mark.parametrize(
    "source",
    [
        "{{ '```json\n' + call.arguments + '\n```' }}",  # DeepSeek's
        "{{ call.arguments }}",
        "{{ call.name ~ ': ' ~ call.arguments }}",
    ],
)
def test_a_template_that_joins_arguments_to_its_own_text_is_given_them_as_text(source):
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set call = c.function %}"
    template = chat(f"{loop}{source}{{% endfor %}}{{% endfor %}}")
    expected = '{"where": {"city": "Zürich"}, "days": 1.0, "note": "a<b & \'c\'"}'
    assert expected in template.render([USER, CALLS, RESULT])


@pytest.mark.parametrize(
    "source",
    [
        "{{ call.arguments | tojson }}",
        "{% for key, value in call.arguments | items %}{{ key }}={{ value }}{% endfor %}",
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments.note }}{% endif %}",
    ],
)
def test_any_other_template_is_given_arguments_as_the_object_that_they_are(source):
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set call = c.function %}"
    shown = chat(f"{loop}{source}{{% endfor %}}{{% endfor %}}").render([USER, CALLS, RESULT])
    assert "a<b & 'c'" in shown
    assert '\\"' not in shown
    assert ("where" in shown) == ("is string" not in source)


def test_a_prompt_longer_than_any_context_is_refused(monkeypatch):
    monkeypatch.setattr("minserve.text.chat.MAX_PROMPT_CHARS", 10)
    assert chat("{% for i in range(10) %}x{% endfor %}").render([USER]) == "x" * 10
    with pytest.raises(RequestError, match="more than 10 characters"):
        chat("{% for i in range(11) %}x{% endfor %}").render([USER])


def test_nothing_of_a_template_is_computed_before_it_renders():
    chat("{{ 7 ** (10 ** 9) }}{% set x = 7 ** (10 ** 9) %}{{ ('x' * 10 ** 11) | upper }}")


def calls_with(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": "{}"}}, {"function": function}]}


@pytest.mark.parametrize("arguments", ["{bad", "[]", "1", "NaN", '{"a": Infinity}', "[" * 100_000, [], 5])
def test_arguments_that_are_no_json_object_are_refused_by_name(arguments):
    with pytest.raises(RequestError) as caught:
        chat(TEMPLATES["qwen3"]).render([USER, calls_with(arguments)])
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"
    assert caught.value.param in caught.value.message


def test_an_empty_string_of_arguments_is_an_empty_object():
    assert '{"name": "f", "arguments": {}}' in chat(TEMPLATES["qwen3"]).render([USER, calls_with("")])


@pytest.mark.parametrize("call", [{}, {"function": None}, "f"])
def test_a_tool_call_without_a_function_is_refused_by_name(call):
    with pytest.raises(RequestError) as caught:
        chat(TEMPLATES["qwen3"]).render([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[0].tool_calls[0].function"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_text_parts_are_joined(role):
    template = chat("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    assert template.render([{"role": role, "content": [{"type": "text", "text": "42"}]}]) == f"{role}: 42"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": role, "content": parts}]) == f"{role}: a b"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x"}}, "messages[0].content[1].type"),
        ({"text": "no type"}, "messages[0].content[1].type"),
        ("text", "messages[0].content[1].type"),
        ({"type": "text", "text": 5}, "messages[0].content[1].text"),
    ],
)
def test_content_parts_that_are_no_text_are_refused_by_name(part, param):
    with pytest.raises(RequestError) as caught:
        chat("x").render([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert caught.value.param == param


@pytest.mark.parametrize("source", [TEMPLATES["chatml"], TEMPLATES["qwen3"], TEMPLATES["llama3"], TEMPLATES["mistral"]])
@pytest.mark.parametrize("text", ["Sure:\n", "Sure: ", "Sure", "  Sure,\n\n\tand so on \n"])
def test_a_continued_message_ends_the_prompt_with_its_exact_text(source, text):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [USER, {"role": "assistant", "content": text}]
    prompt = chat(source).render(messages, **options)
    assert prompt.endswith(text.lstrip())
    expected = transformers_render(source, messages, **options)
    # Where a template trims, transformers trims the end as well.
    assert prompt == expected or (prompt.rstrip() == expected and "|trim" in source.replace(" ", ""))


@pytest.mark.parametrize(
    ("last", "param"),
    [
        (CALLS | {"content": None}, "messages[1].content"),
        ({"role": "assistant", "content": "<think>a</think>b"}, "continue_final_message"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(last, param):
    with pytest.raises(RequestError) as caught:
        chat(TEMPLATES["qwen3"]).render([USER, last], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == param


def test_a_message_is_either_continued_or_followed_by_a_new_one():
    with pytest.raises(RequestError, match="add_generation_prompt"):
        chat("x").render([USER], add_generation_prompt=True, continue_final_message=True)


def test_no_messages_are_refused():
    with pytest.raises(RequestError, match="at least one"):
        chat("x").render([])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_template_kwargs_may_not_replace_what_the_request_has_fields_for(name):
    with pytest.raises(RequestError) as caught:
        chat("x").render([USER], template_kwargs={name: "y"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_what_the_template_objects_to_is_a_bad_request_in_its_words():
    with pytest.raises(RequestError, match="conversation roles must alternate") as caught:
        chat(TEMPLATES["mistral"]).render([USER, USER])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_that_quotes_a_lone_surrogate_still_gets_an_answer_that_can_be_sent():
    with pytest.raises(RequestError, match="role ") as caught:
        chat("{{ raise_exception('role ' ~ messages[0].role) }}").render([{"role": "\ud83d", "content": ""}])
    caught.value.message.encode()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_function() }}",
    ],
)
def test_an_error_inside_the_template_is_a_bad_request(source):
    with pytest.raises(RequestError, match="chat template cannot render"):
        chat(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ dict.__call__.__func__.__globals__ }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(1) ~ messages[0].__class__.x }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError, match="chat template cannot render"):
        chat(source).render([USER])


def test_rendering_leaves_the_request_as_it_was():
    messages = copy.deepcopy(CONVERSATIONS["tool turns"])
    chat(TEMPLATES["qwen3"]).render(messages, tools=TOOLS)
    assert messages == CONVERSATIONS["tool turns"]


def test_a_template_that_is_not_jinja_is_a_configuration_error_with_its_line():
    with pytest.raises(ConfigError, match="line 2"):
        chat("a\n{% if %}")


def test_what_a_template_says_of_python_objects_has_no_addresses():
    template = ChatTemplate({"default": "{{ raise_exception(messages[0].items | string) }}"})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "a"}])
    assert "0x" not in caught.value.message
