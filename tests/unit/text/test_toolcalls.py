import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ConfigError
from minserve.text.detokenizer import Detokenizer
from minserve.text.tokenizer import Tokenizer
from minserve.text.toolcalls import HermesParser, ToolCall, tool_parser_class

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'
ADD = ToolCall(name="add", arguments='{"a": 1, "b": [2, "ü"]}')


def parse(text, splits=()):
    """Events of text pushed in pieces, neighbouring prose joined."""
    parser = HermesParser()
    edges = [0, *sorted(splits), len(text)]
    events = [event for a, b in itertools.pairwise(edges) for event in parser.push(text[a:b])]
    joined = []
    for event in [*events, *parser.finish()]:
        if joined and isinstance(event, str) and isinstance(joined[-1], str):
            joined[-1] += event
        else:
            joined.append(event)
    return joined


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
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall(name="now", arguments="{}")]),
    ],
)
def test_calls_are_found_and_prose_around_them_is_delivered_in_full(text, events):
    assert parse(text) == letter_by_letter(text) == events


@pytest.mark.parametrize(
    "text",
    [
        "a < b, <tool, <tool_cal and <tool_call",
        "<tool_call>not json</tool_call> after",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> after',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "unfinished',
        '<tool_call>{"name": "add", "arguments": {"a": "x</tool_call> and so on',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
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
    text = '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> and </tool_call>"}}</tool_call>'
    call = ToolCall(name="say", arguments='{"text": "</tool_call> and </tool_call>"}')
    assert parse(text) == letter_by_letter(text) == [call]


def test_a_call_that_lacks_only_its_closing_tag_counts():
    assert parse(CALL.removesuffix("</tool_call>")) == [ADD]
    assert parse('<tool_call>{"name": "x' + CALL.removesuffix("</tool_call>")) == ['<tool_call>{"name": "x', ADD]


def test_arguments_are_passed_on_as_the_model_wrote_them():
    arguments = '{"big": 123456789012345678901234567890, "s": "\\u00fc", "b":1.50}'
    text = f'<tool_call>{{"arguments": {arguments} , "name": "f"}}</tool_call>'
    assert parse(text) == [ToolCall(name="f", arguments=arguments)]


def test_only_what_may_become_an_opening_tag_is_held_back():
    parser = HermesParser()
    assert parser.push("see <tool_ca") == ["see "]
    assert parser.push("ke") == ["<tool_cake"]
    assert parser.push(" <") == [" "]
    assert parser.finish() == ["<"]


def test_what_cannot_be_a_call_is_not_held_back():
    parser = HermesParser()
    assert parser.push("<tool_call>\n") == []
    assert "".join(parser.push("no")) == "<tool_call>\nno"


def test_a_call_comes_as_soon_as_it_is_complete():
    parser = HermesParser()
    assert parser.push(CALL[:-1]) == []
    assert parser.push(">") == [ADD]


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


def test_prose_before_a_stop_string_is_delivered_in_full(byte_level):
    ids = byte_level.encode("Paris is the capital <tool. Next", add_special_tokens=False)
    detokenizer, parser = Detokenizer(byte_level, stop=["."]), HermesParser()
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
    with pytest.raises(ConfigError, match="'xml'; there are hermes"):
        tool_parser_class("xml")
