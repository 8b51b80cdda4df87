import itertools

import pytest
from conftest import sentencepiece_backend
from hypothesis import given
from hypothesis import strategies as st

from minserve.text.detokenizer import Detokenizer
from minserve.text.tokenizer import Tokenizer


def byte_ids(tokenizer, data):
    """One token for each byte."""
    ids = [token_id for start, end in tokenizer.token_id_ranges for token_id in range(start, end)]
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(ids)}
    return [by_bytes[bytes([byte])] for byte in data]


def generate(tokenizer, ids, splits=(), **options):
    """The text of ids pushed in pieces that end at splits, and the last delta."""
    detokenizer = Detokenizer(tokenizer, **options)
    edges = [0, *sorted(min(split, len(ids)) for split in splits), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join(delta.text for delta in deltas) + detokenizer.finish(), deltas[-1]


def one_by_one(tokenizer, ids, **options):
    return generate(tokenizer, ids, range(len(ids)), **options)


splits = st.lists(st.integers(0, 40), max_size=10)


@given(ids=st.lists(st.integers(0, 400), max_size=40), splits=splits)
def test_any_split_of_any_tokens_joins_to_their_decode(byte_level, ids, splits):
    assert generate(byte_level, ids, splits)[0] == byte_level.decode(ids)


@given(data=st.binary(max_size=30), splits=splits)
def test_any_split_of_any_bytes_joins_to_their_decode(byte_level, sentencepiece, data, splits):
    for tokenizer in (byte_level, sentencepiece):
        ids = byte_ids(tokenizer, data)
        assert generate(tokenizer, ids, splits)[0] == tokenizer.decode(ids)


@given(text=st.text(max_size=30), splits=splits)
def test_any_text_comes_back_from_its_tokens_whatever_the_split(byte_level, sentencepiece, text, splits):
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert generate(tokenizer, ids, splits)[0] == text


@given(
    text=st.text("abc ", max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    splits=splits,
)
def test_stop_strings_cut_the_same_text_and_tokens_whatever_the_split(
    byte_level, text, stop, min_tokens, include, splits
):
    ids = byte_ids(byte_level, text.encode())
    options = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    joined, last = generate(byte_level, ids, splits, **options)
    whole, delta = generate(byte_level, ids, **options)
    assert (joined, last.num_tokens, last.stop) == (whole, delta.num_tokens, delta.stop)
    # One token a character: the first end of a match that is allowed is where the text stops.
    ends = [(end, -len(s), s) for end in range(min_tokens + 1, len(text) + 1) for s in stop if text[:end].endswith(s)]
    if ends:
        end, minus_length, matched = min(ends)
        assert (delta.stop, delta.num_tokens) == (matched, end)
        assert whole == (text[:end] if include else text[: end + minus_length])
    else:
        assert (delta.stop, delta.num_tokens, whole) == (None, len(text), text)


def test_no_character_of_a_stop_string_is_ever_sent(byte_level):
    ids = byte_ids(byte_level, b"ABCDEFGHIJKLM")
    detokenizer = Detokenizer(byte_level, stop=["DEFGHIJ"])
    assert [detokenizer.push([i]).text for i in ids] == ["A", "B", "C", *[""] * 10]
    assert detokenizer.finish() == ""


def test_what_looked_like_a_stop_string_is_sent_as_soon_as_it_is_none(byte_level):
    detokenizer = Detokenizer(byte_level, stop=["DEFG"])
    assert [detokenizer.push([i]).text for i in byte_ids(byte_level, b"CDEDEx")] == ["C", "", "", "DE", "", "DEx"]


def test_text_held_back_at_the_end_is_delivered(byte_level):
    assert one_by_one(byte_level, byte_ids(byte_level, b"ABCDEF"), stop=["DEFG"])[0] == "ABCDEF"


def test_a_stop_string_over_several_tokens_cuts_streamed_and_whole_text_alike(byte_level):
    ids = byte_level.encode("Thought: it amuses\nObservation: there", add_special_tokens=False)
    assert one_by_one(byte_level, ids, stop=["\nObservation"])[0] == "Thought: it amuses"
    assert generate(byte_level, ids, stop=["\nObservation"])[0] == "Thought: it amuses"


@pytest.mark.parametrize(
    ("stop", "text"), [("Pari", "The capital of France is "), ("it am", "The capital of France is Paris, and ")]
)
def test_a_stop_string_may_begin_and_end_inside_tokens(byte_level, stop, text):
    ids = byte_level.encode("The capital of France is Paris, and it amuses everyone", add_special_tokens=False)
    joined, delta = one_by_one(byte_level, ids, stop=[stop])
    assert (joined, delta.stop) == (text, stop)


def test_the_stop_string_is_part_of_the_text_only_if_asked_for(byte_level):
    ids = byte_ids(byte_level, b"5, 6, 7, 8")
    assert one_by_one(byte_level, ids, stop=["7"])[0] == "5, 6, "
    assert one_by_one(byte_level, ids, stop=["7"], include_stop_str_in_output=True)[0] == "5, 6, 7"


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count(byte_level):
    ids = byte_ids(byte_level, b"one ha ha ha ha")
    detokenizer = Detokenizer(byte_level, stop=[" ha ha"])
    delta = detokenizer.push(ids)
    assert (delta.text, delta.num_tokens, delta.stop, len(delta.offsets)) == ("one", 9, " ha ha", 9)
    assert detokenizer.push(ids).num_tokens == 9
    assert detokenizer.push(ids).text == detokenizer.finish() == ""


def test_of_stop_strings_completed_by_one_token_the_leftmost_counts(byte_level):
    token_id = byte_level.encode(" capital", add_special_tokens=False)
    assert len(token_id) == 1
    text, delta = generate(byte_level, token_id, stop=["tal", "pi", "ap"])
    assert (text, delta.stop) == (" c", "ap")


def test_a_stop_string_within_the_first_min_tokens_is_text(byte_level):
    ids = byte_ids(byte_level, b"a.b.c")
    text, delta = one_by_one(byte_level, ids, stop=["."], min_tokens=2)
    assert (text, delta.num_tokens) == ("a.b", 4)


def test_a_token_that_ends_the_text_counts_but_is_no_text(byte_level):
    ids = byte_ids(byte_level, b"ab\n")
    delta = Detokenizer(byte_level).push(ids, ends_with_stop_token=True)
    assert (delta.text, delta.num_tokens) == ("ab", 3)
    kept = Detokenizer(byte_level, include_stop_str_in_output=True).push(ids, ends_with_stop_token=True)
    assert kept.text == "ab\n"


def test_special_tokens_are_text_only_if_asked_for(byte_level):
    special, end = byte_level.token_id("<｜tool▁call｜>"), byte_level.token_id("<|end|>")
    ids = [*byte_ids(byte_level, b"a"), special, end]
    assert generate(byte_level, ids)[0] == "a"
    assert generate(byte_level, ids, skip_special_tokens=False)[0] == "a<｜tool▁call｜><|end|>"
    assert generate(byte_level, ids, keep_special_ids=frozenset([special]))[0] == "a<｜tool▁call｜>"


def test_a_prompt_that_ends_inside_a_character_does_not_come_again(byte_level):
    pepper = "🌶".encode()
    prompt = byte_ids(byte_level, b"Hello world " + pepper[:2])
    detokenizer = Detokenizer(byte_level, prompt)
    assert [detokenizer.push([i]).text for i in byte_ids(byte_level, pepper[2:] + b"!")] == ["", "🌶", "!"]


@given(text=st.text(max_size=12), data=st.data())
def test_text_goes_on_from_any_prompt_as_if_decoded_together(byte_level, text, data):
    ids = byte_ids(byte_level, text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    whole_characters = text.encode()[:cut].decode(errors="ignore")
    joined, _ = one_by_one(byte_level, ids[cut:], prompt_token_ids=ids[:cut])
    assert whole_characters + joined == text


def test_a_character_over_several_tokens_comes_once_and_whole(byte_level):
    ids = byte_ids(byte_level, "A 世界".encode())
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([i]).text for i in ids] == ["A", " ", "", "", "世", "", "", "界"]


def test_korean_text_streams_without_replacement_characters(byte_level, sentencepiece):
    text = "한국어로 자기소개를 해 주세요"
    for tokenizer in (byte_level, sentencepiece):
        assert one_by_one(tokenizer, tokenizer.encode(text, add_special_tokens=False))[0] == text


def test_a_character_cut_by_the_end_is_one_replacement_character_streamed_or_not(tokenizer):
    ids = byte_ids(tokenizer, b"Hello " + "🌶".encode()[:3])
    assert one_by_one(tokenizer, ids)[0] == generate(tokenizer, ids)[0] == tokenizer.decode(ids) == "Hello \ufffd"


def test_broken_bytes_do_not_stop_the_stream(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push([i]).text for i in byte_ids(tokenizer, b"\xff\xff\x80a\xe4b")]
    assert texts == ["\ufffd", "\ufffd", "\ufffd", "a", "", "\ufffdb"]


def test_sentencepiece_keeps_the_space_between_prompt_and_text(sentencepiece):
    prompt = sentencepiece.encode("The capital", add_special_tokens=True)
    ids = sentencepiece.encode("of France", add_special_tokens=False)
    assert one_by_one(sentencepiece, ids, prompt_token_ids=prompt)[0] == " of France"


def test_sentencepiece_drops_the_space_at_the_start_of_a_whole_text(sentencepiece):
    ids = sentencepiece.encode("of France", add_special_tokens=False)
    assert one_by_one(sentencepiece, ids)[0] == "of France"
    assert one_by_one(sentencepiece, ids, prompt_token_ids=[sentencepiece.bos_token_id])[0] == "of France"


def test_sentencepiece_text_goes_on_from_its_prompt_as_the_library_decodes_both():
    backend = sentencepiece_backend()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("Here is  the alphabet:  ABC 世界 end", add_special_tokens=True)
    for cut in range(2, len(ids)):
        before = backend.decode(ids[:cut])
        if "\ufffd" not in before:
            assert before + one_by_one(tokenizer, ids[cut:], prompt_token_ids=ids[:cut])[0] == backend.decode(ids)


def test_offsets_are_where_each_token_begins_in_the_text(byte_level):
    ids = byte_ids(byte_level, "a世b".encode())
    assert Detokenizer(byte_level).push(ids).offsets == [0, 1, 1, 1, 2]
    detokenizer = Detokenizer(byte_level)
    assert [offset for i in ids for offset in detokenizer.push([i]).offsets] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hello \ufffd")])
def test_a_stop_string_that_the_cut_character_completes_ends_the_text(byte_level, include, text):
    ids = byte_ids(byte_level, b"Hello " + "🌶".encode()[:2])
    detokenizer = Detokenizer(byte_level, stop=(" \ufffd",), include_stop_str_in_output=include)
    assert detokenizer.push(ids).text + detokenizer.finish() == text
    assert detokenizer.stop == " \ufffd"
