import json
import sys
import threading
import time

import pytest
import tokenizers
from conftest import byte_level_backend, sentencepiece_backend
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from minserve.errors import ConfigError, RequestError
from minserve.text.pieces import read_pieces
from minserve.text.tokenizer import Tokenizer

TEXTS = ["", " ", "Paris", " Paris is  big\n", "한국어로 자기소개", "🌶 café 世界", "a<|end|>b", "1 + 1 = 2"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("build", [byte_level_backend, sentencepiece_backend])
def test_decode_equals_the_tokenizers_library(build, text, skip):
    backend = build()
    ids = backend.encode(text).ids
    assert Tokenizer(backend).decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def backend():
    return byte_level_backend()


@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_decode_of_any_byte_level_ids_equals_the_tokenizers_library(byte_level, backend, ids):
    assert byte_level.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


def test_a_broken_byte_of_byte_fallback_costs_only_itself(sentencepiece):
    ids = [sentencepiece.token_id(f"<0x{byte:02X}>") for byte in "世".encode() + b"\xff"]
    assert sentencepiece.decode(ids) == "世\ufffd"


def test_metaspace_decoder_drops_the_space_before_the_text_only():
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁▁c": 2}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    for ids in ([0, 1, 2], [1, 0]):
        assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode([0, 2, 0]) == "a  c a"


def test_words_without_a_decoder_have_spaces_between_them():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(backend).decode([0, 1]) == backend.decode([0, 1]) == "a b"


def test_an_unknown_decoder_is_refused_by_name():
    with pytest.raises(ConfigError, match="CTC"):
        read_pieces({"type": "CTC"}, {})


def test_plain_text_gets_exactly_one_bos(tokenizer):
    bos = tokenizer.bos_token_id
    assert tokenizer.adds_bos
    assert tokenizer.encode("Paris", add_special_tokens=True).count(bos) == 1
    assert tokenizer.encode(f"{tokenizer.token_text(bos)}Paris", add_special_tokens=True).count(bos) == 1
    assert tokenizer.encode("", add_special_tokens=True) == [bos]


def test_a_rendered_chat_keeps_the_bos_of_its_template_and_gets_no_other(tokenizer):
    bos = tokenizer.bos_token_id
    assert tokenizer.encode(f"{tokenizer.token_text(bos)}Paris", add_special_tokens=False).count(bos) == 1
    assert tokenizer.encode("Paris", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok", "\ud83d\u4e16"])
def test_a_lone_surrogate_is_a_bad_request(tokenizer, text):
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode(text, add_special_tokens=True, param="prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_token_bytes_join_to_the_utf8_of_the_text(byte_level, sentencepiece):
    text = "naïve 世界 🌶 Paris"
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == b" " + text.encode()


def test_a_byte_token_is_its_byte_and_part_of_a_character_has_no_text(sentencepiece):
    token_id = sentencepiece.token_id("<0xE4>")
    assert sentencepiece.token_bytes(token_id) == b"\xe4"
    assert sentencepiece.token_text(token_id) == "\ufffd"


def test_ids_that_are_no_tokens_have_no_text(byte_level):
    assert byte_level.decode([-1, 10**9]) == ""


def test_ranges_leave_out_the_holes_of_a_vocabulary():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 4, "d": 7}, unk_token="a")))
    assert tokenizer.token_id_ranges == ((0, 2), (4, 5), (7, 8))


@given(text=st.text(max_size=60) | st.text("▁ a世", max_size=60) | st.integers(1, 500).map(lambda n: "▁" * n))
def test_no_text_has_fewer_tokens_than_its_lower_bound(byte_level, sentencepiece, text):
    for tokenizer in (byte_level, sentencepiece):
        assert tokenizer.min_tokens_lower_bound(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_the_lower_bound_grows_with_the_text(tokenizer):
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.token_id_ranges[-1][1]))
    assert tokenizer.min_tokens_lower_bound("a" * longest * 1000) == 1000
    assert tokenizer.min_tokens_lower_bound("é" * longest * 1000) >= 250


def test_the_lower_bound_counts_bytes_where_no_text_loses_any(byte_level):
    longest = max(len(byte_level.token_bytes(token_id)) for token_id in range(byte_level.token_id_ranges[-1][1]))
    assert byte_level.min_tokens_lower_bound("世" * longest * 1000) >= 2000


@pytest.fixture
def no_forced_switches():
    """A thread keeps the GIL until it gives it up by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_other_threads_run_while_a_text_is_tokenized(byte_level, no_forced_switches):
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    other = threading.Thread(target=tick)
    other.start()
    before = ticks[0]
    byte_level.encode("a" * 200_000, add_special_tokens=False)
    during = ticks[0] - before
    stop.set()
    other.join()
    assert during > 0


@given(text=st.text("\x04\x06a é\U000f0000", max_size=40))
def test_characters_without_a_token_do_not_count_for_the_lower_bound(lacking, text):
    assert lacking.min_tokens_lower_bound(text) <= len(lacking.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def lacking():
    """A tokenizer without tokens for some control characters and for a byte of rare characters."""
    spec = json.loads(byte_level_backend().to_str())
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    names = [pre_tokenizers.ByteLevel().pre_tokenize_str(char)[0][0] for char in "\x04\x06"]
    for name in (name[-1] for name in names):
        del alphabet[name]
    del alphabet["ó"]  # The byte F3.
    spec["model"] |= {"vocab": alphabet, "merges": []}
    spec |= {"added_tokens": [], "post_processor": None}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert tokenizer.encode("\x04\x06", add_special_tokens=False) == []
    assert tokenizer.min_tokens_lower_bound("a" * 1000) == 1000
    return tokenizer


def test_there_is_no_lower_bound_where_the_tokenizer_may_drop_text():
    backend = byte_level_backend()
    backend.add_special_tokens([tokenizers.AddedToken("<|eats|>", rstrip=True)])
    assert Tokenizer(backend).min_tokens_lower_bound("a" * 10**6) == 0


def test_end_tokens_are_the_union_of_all_that_name_one(folder, write):
    write("tokenizer_config.json", {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>"})
    write("generation_config.json", {"eos_token_id": [7, 5]})
    write("config.json", {"eos_token_id": 3})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (3, 5, 7, tokenizer.token_id("<|end|>"))
    assert tokenizer.bos_token_id == tokenizer.token_id("<|begin|>")


def test_a_tokenizer_folder_may_be_another_than_the_models(folder, tmp_path_factory):
    model_folder = tmp_path_factory.mktemp("model")
    (model_folder / "generation_config.json").write_text('{"eos_token_id": 9, "top_k": 20}')
    tokenizer = Tokenizer.from_folder(folder, model_folder=model_folder)
    assert tokenizer.eos_token_ids == (9,)
    assert tokenizer.sampling_defaults.top_k == 20


def test_sampling_defaults_are_what_generation_config_says_and_nothing_else(folder, write):
    write(
        "generation_config.json",
        {"temperature": 0.6, "top_p": None, "top_k": 20, "do_sample": False, "pad_token_id": 1},
    )
    defaults = Tokenizer.from_folder(folder).sampling_defaults
    assert (defaults.temperature, defaults.top_k) == (0.6, 20)
    assert (defaults.top_p, defaults.min_p, defaults.repetition_penalty) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature"),
        ("generation_config.json", {"temperature": -1}, "temperature"),
        ("generation_config.json", {"top_p": 7}, "top_p"),
        ("generation_config.json", {"top_k": 2**40}, "top_k"),
        ("generation_config.json", {"repetition_penalty": 0}, "repetition_penalty"),
        ("generation_config.json", {"eos_token_id": "two"}, "eos_token_id"),
        ("config.json", {"eos_token_id": [1, -1]}, "eos_token_id"),
        ("config.json", {"eos_token_id": 2**70}, "eos_token_id"),
        ("tokenizer_config.json", ["not an object"], "tokenizer_config.json"),
    ],
)
def test_malformed_files_are_named(folder, write, name, value, message):
    write(name, value)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(folder)


DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_file_that_is_nested_too_deeply_or_leads_out_of_the_folder_is_refused(folder, tmp_path_factory, name):
    (folder / name).write_text(DEEP)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_folder(folder)
    (folder / name).unlink()
    outside = tmp_path_factory.mktemp("outside") / name
    outside.write_text("{}")
    (folder / name).symlink_to(outside)
    with pytest.raises(ConfigError, match="outside the model folder"):
        Tokenizer.from_folder(folder)


def test_a_token_id_beyond_any_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="4000000000"):
        read_pieces(None, {"a": 4_000_000_000})


def test_a_missing_or_broken_tokenizer_json_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("flag", "num_bos"), [(True, 1), (False, 0)])
def test_an_explicit_add_bos_token_overrides_tokenizer_json(folder, write, flag, num_bos):
    write("tokenizer_config.json", {"bos_token": "<|begin|>", "add_bos_token": flag})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.adds_bos is flag
    assert tokenizer.encode("Paris", add_special_tokens=True).count(tokenizer.bos_token_id) == num_bos


def test_a_named_special_token_is_special_even_if_tokenizer_json_does_not_say_so(folder, write):
    write("tokenizer_config.json", {"eos_token": "</tool_call>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.token_id("</tool_call>") in tokenizer.special_token_ids


def test_truncation_and_padding_of_the_training_do_not_touch_prompts(folder):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    text = "one two three, one two three"
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text
