import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ConfigError
from minserve.text.reasoning import Reasoning, ReasoningParser, reasoning_format


def split(begin, text, splits=()):
    """(reasoning, answer, characters up to the answer) of a text pushed in pieces."""
    parser = ReasoningParser(begin)
    edges = [0, *sorted(splits), len(text)]
    events = [event for a, b in itertools.pairwise(edges) for event in parser.push(text[a:b])]
    events += parser.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event for event in events if isinstance(event, str)), parser.end


@pytest.mark.parametrize(
    ("begin", "text", "expected"),
    [
        ("tag", "<think>\na\nb\n</think>\n\nc\n", ("a\nb", "c\n", 20)),
        ("tag", " \n<think>a</think>b", ("a", "b", 18)),
        ("tag", "<think>a", ("a", "", None)),
        ("tag", "<think>a\n", ("a\n", "", None)),
        ("tag", "<think>a</thi", ("a</thi", "", None)),
        ("tag", "<think>\n\n</think>\n\n", ("", "", 17)),
        ("tag", "<thing>", ("", "<thing>", 0)),
        ("tag", "a <think>b</think>", ("", "a <think>b</think>", 0)),
        ("tag", " \n", ("", " \n", None)),
        ("tag", "", ("", "", None)),
        ("open", "\na</think>b</think>", ("a", "b</think>", 10)),
        ("open", "<think>a</think>b", ("a", "b", 16)),
        ("open", "  a", ("  a", "", None)),
        ("open", "</think>b", ("", "b", 8)),
        ("closed", "\n<think>a</think>", ("", "\n<think>a</think>", 0)),
    ],
)
def test_what_stands_between_the_tags_is_reasoning_and_line_breaks_at_a_tag_are_its_own(begin, text, expected):
    assert split(begin, text) == split(begin, text, range(len(text))) == expected


@given(
    begin=st.sampled_from(["tag", "open", "closed"]),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a", "</"]), max_size=8),
    data=st.data(),
)
def test_the_parts_do_not_depend_on_how_the_text_is_split(begin, parts, data):
    text = "".join(parts)
    splits = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert split(begin, text, splits) == split(begin, text)


def test_only_what_may_be_a_tag_or_a_line_break_at_one_is_held_back():
    parser = ReasoningParser("tag")
    assert parser.push("<thin") == []
    assert parser.push("k>a\n") == [Reasoning("a")]
    assert parser.push("b </th") == [Reasoning("\nb ")]
    assert parser.push("e</think>c") == [Reasoning("</the"), "c"]
    assert parser.push("\n<think>") == ["\n<think>"]


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("assistant\n<think>\n", "", ("a", "b")),
        ("assistant\n<think>\n\n</think>\n\n", "", ("", "a</think>b")),
        ("user\n<think> is a tag\nassistant\n", "", ("", "a</think>b")),
        ("assistant\n<think>\nSo", "<think>\nSo", ("a", "b")),
        ("assistant\n<think></think>So", "<think></think>So", ("", "a</think>b")),
    ],
)
def test_where_a_text_begins_is_told_by_the_end_of_its_prompt(prompt, continued, expected):
    style = reasoning_format("qwen3", template_closes_tag=False)
    [event, *rest] = style.parser_after(prompt, continued).push("a</think>b")
    assert (event, *rest) == ((Reasoning("a"), "b") if expected[0] else ("a</think>b",))


def test_auto_is_on_where_the_template_knows_the_closing_tag():
    assert reasoning_format("auto", template_closes_tag=False) is None
    assert reasoning_format("none", template_closes_tag=True) is None
    assert reasoning_format("auto", template_closes_tag=True) == reasoning_format("qwen3", template_closes_tag=False)
    with pytest.raises(ConfigError, match="'morse'; there are auto, none, deepseek"):
        reasoning_format("morse", template_closes_tag=True)
