import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ConfigError
from minserve.text.detokenizer import Detokenizer
from minserve.text.jsoncall import MAX_HEAD_CHARS, CallArguments, CallStart
from minserve.text.tokenizer import Tokenizer
from minserve.text.toolcalls import HermesParser, LlamaParser, tool_parser_class

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'
ADD = ("add", '{"a": 1, "b": [2, "ü"]}')
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "b": [2, "ü"]}}'


def joined(events):
    """Neighbouring prose as one text, a call as (name, arguments)."""
    parts = []
    for event in events:
        if isinstance(event, CallStart):
            parts.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, arguments = parts[-1]
            parts[-1] = (name, arguments + event.text)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += event
        else:
            parts.append(event)
    return parts


def parse(text, splits=(), kind=HermesParser):
    """What a text pushed in pieces is taken apart to."""
    parser = kind({"add", "now"})
    edges = [0, *sorted(splits), len(text)]
    events = [event for a, b in itertools.pairwise(edges) for event in parser.push(text[a:b])]
    return joined(events + parser.finish())


def letter_by_letter(text):
    return parse(text, range(len(text)))


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("", []),
        ("Hello.", ["Hello."]),
        ("  \n", ["  \n"]),
        (CALL, [ADD]),
        (f"Let me add.\n{CALL}", ["Let me add.\n", ADD]),
        (f"{CALL}\nDone. ", [ADD, "\nDone. "]),
        (f"\n\n{CALL}\n{CALL}\n", [ADD, ADD]),
        (f"One {CALL} two {CALL} three", ["One ", ADD, " two ", ADD, " three"]),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        ('<tool_call>{"arguments": {"a": {}}, "name": "now"}</tool_call> Done.', [("now", '{"a": {}}'), " Done."]),
        ('<tool_call>{"id": "1", "name": "now", "arguments": {}, "more": [{}]}</tool_call>', [("now", "{}")]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', [("other", "{}")]),
    ],
)
def test_calls_are_found_and_prose_around_them_is_delivered_in_full(text, events):
    assert parse(text) == letter_by_letter(text) == events


@pytest.mark.parametrize(
    "text",
    [
        "a < b, <tool, <tool_cal and <tool_call",
        "<tool_call>not json</tool_call> after",
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": ',
        '<tool_call>{"arguments": {"a": "unfinished',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "add"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"question": "add", "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "</tool_call> alone",
    ],
)
def test_what_is_no_call_is_delivered_as_the_text_that_it_is(text):
    assert parse(text) == [text]
    if len(text) < 1000:
        assert letter_by_letter(text) == [text]


def test_a_malformed_call_does_not_hide_the_next():
    for broken in ("<tool_call>oops</tool_call>", '<tool_call>{"name": "add', '<tool_call>{"name": "x</tool_call>'):
        assert parse(broken + CALL) == letter_by_letter(broken + CALL) == [broken, ADD]


def test_an_argument_may_contain_the_closing_tag():
    arguments = '{"text": "</tool_call> and \\\\\\"</tool_call>\\\\"}'
    text = f'<tool_call>{{"name": "say", "arguments": {arguments}}}</tool_call>'
    assert parse(text) == letter_by_letter(text) == [("say", arguments)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (CALL.removesuffix("</tool_call>"), [ADD]),
        (CALL.removesuffix("l_call>"), [ADD]),
        (CALL.removesuffix("</tool_call>") + "Done.", [ADD, "\nDone."]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> after', [("add", '{"a": 1}'), " after"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}\nI {will} wait.', [("add", '{"a": 1}'), "\nI {will} wait."]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "id": 1', [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": {"b": 1}</tool_call>', [("add", '{"a": {"b": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": "unfinished', [("add", '{"a": "unfinished')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', [("add", '{"a": 1,}')]),
        ('<tool_call>{"name": "x' + CALL.removesuffix("</tool_call>"), ['<tool_call>{"name": "x', ADD]),
    ],
)
def test_from_its_arguments_on_a_call_counts_whatever_it_lacks(text, events):
    assert parse(text) == letter_by_letter(text) == events


def test_arguments_are_passed_on_as_the_model_wrote_them():
    arguments = '{"big": 123456789012345678901234567890, "s": "\\u00fc", "b":1.50}'
    for text in (f'{{"arguments": {arguments} , "name": "f"}}', f'{{"name": "f", "arguments": {arguments} }}'):
        assert parse(f"<tool_call>{text}</tool_call>") == [("f", arguments)]


def test_arguments_come_as_soon_as_they_are_written():
    parser = HermesParser(set())
    assert parser.push('<tool_call>{"name": "add", "arguments": ') == []
    assert parser.push("{") == [CallStart("add"), CallArguments("{")]
    assert parser.push('"a": "x') == [CallArguments('"a": "x')]
    assert parser.is_cut
    assert parser.push('"}}') == [CallArguments('"}')]
    assert not parser.is_cut
    assert parser.push("</tool_call>") == parser.finish() == []


def test_a_beginning_without_end_is_given_up():
    parser = HermesParser(set())
    assert parser.push('<tool_call>{"name": "') == []
    assert "".join(parser.push("x" * MAX_HEAD_CHARS)).endswith("x")


def test_only_what_may_become_an_opening_tag_is_held_back():
    parser = HermesParser(set())
    assert parser.push("see <tool_ca") == ["see "]
    assert parser.push("ke") == ["<tool_cake"]
    assert parser.push(" <") == [" "]
    assert parser.finish() == ["<"]


def test_what_cannot_be_a_call_is_not_held_back():
    parser = HermesParser(set())
    assert parser.push("<tool_call>\n") == []
    assert "".join(parser.push("no")) == "<tool_call>\nno"


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("", []),
        ("  \n", ["  \n"]),
        ("Hello {there}.", ["Hello {there}."]),
        (LLAMA_CALL, [ADD]),
        (f" \n{LLAMA_CALL}\n", [ADD]),
        (f"{LLAMA_CALL}; {LLAMA_CALL}", [ADD, ADD]),
        (f"{LLAMA_CALL}\n{LLAMA_CALL};", [ADD, ADD]),
        (f"{LLAMA_CALL}; and so on", [ADD, "; and so on"]),
        (f"<|python_tag|>{LLAMA_CALL}", [ADD]),
        (f"Let me add. <|python_tag|>{LLAMA_CALL}", ["Let me add. ", ADD]),
        ('{"type": "function", "name": "now", "parameters": {}}', [("now", "{}")]),
        ('{"name": "now", "arguments": {"a": 1}}', [("now", '{"a": 1}')]),
        ('{"name": "now"}', [("now", "{}")]),
        ('{"name": "Ann", "parameters": {"age": 3}}', ['{"name": "Ann", "parameters": {"age": 3}}']),
        ('{"name": "add", "parameters": {"a": [1', [("add", '{"a": [1')]),
        (' {"answer": 42}', [' {"answer": 42}']),
        ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        ("<|python", ["<|python"]),
    ],
)
def test_llamas_calls_stand_where_prose_would_begin_and_have_a_tools_name(text, events):
    for splits in ((), range(len(text))):
        assert parse(text, splits, LlamaParser) == events


def test_an_answer_that_is_json_is_not_held_back():
    assert LlamaParser({"add"}).push('{"answer":') == ['{"answer":']
    assert "".join(LlamaParser({"add"}).push('{"name": "Ann", "parameters": {')) == '{"name": "Ann", "parameters": {'


@given(
    parts=st.lists(
        st.sampled_from([CALL, "<tool_call>", "</tool_call>", '{"name": "', '"}', "prose", "<", " ", "\n"]), max_size=8
    ),
    data=st.data(),
)
def test_events_do_not_depend_on_how_the_text_is_split(parts, data):
    text = "".join(parts)
    splits = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parse(text, splits) == parse(text)


@given(
    parts=st.lists(
        st.sampled_from([LLAMA_CALL, "<|python_tag|>", '{"name": "', '"}', "prose", "<|", ";", " ", "{"]), max_size=8
    ),
    data=st.data(),
)
def test_nor_do_those_of_llamas_format(parts, data):
    text = "".join(parts)
    splits = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parse(text, splits, LlamaParser) == parse(text, (), LlamaParser)


def test_prose_before_a_stop_string_is_delivered_in_full(byte_level):
    ids = byte_level.encode("Paris is the capital <tool. Next", add_special_tokens=False)
    detokenizer, parser = Detokenizer(byte_level, stop=["."]), HermesParser(set())
    events = [event for i in ids for event in parser.push(detokenizer.push([i]).text)]
    events += parser.push(detokenizer.finish()) + parser.finish()
    assert "".join(events) == "Paris is the capital <tool"


def test_markers_that_are_special_tokens_reach_the_parser_and_not_the_user(folder, write):
    # Named tokens are special, so that skipping special tokens would drop the markers.
    write("tokenizer_config.json", {"sep_token": "<tool_call>", "cls_token": "</tool_call>", "eos_token": "<|end|>"})
    tokenizer = Tokenizer.from_folder(folder)
    markers = tokenizer.ids_of(HermesParser.special_markers)
    assert len(markers) == 2
    assert markers <= tokenizer.special_token_ids
    ids = tokenizer.encode(f"So: {CALL}<|end|>", add_special_tokens=False)
    text = Detokenizer(tokenizer, keep_special_ids=markers).push(ids).text
    assert parse(text) == ["So: ", ADD]


def test_parsers_are_chosen_by_name():
    assert tool_parser_class("hermes") is tool_parser_class("qwen3") is HermesParser
    assert tool_parser_class("llama3_json") is LlamaParser
    with pytest.raises(ConfigError, match="'xml'; there are hermes"):
        tool_parser_class("xml")
