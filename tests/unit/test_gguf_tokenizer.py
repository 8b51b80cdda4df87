"""A GGUF file's tokenizer gives the tokens that the original gives."""

import json

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from minserve.weights.gguf import convert_gguf
from tests.unit.gguf_files import tiny_model, tiny_vocabulary, tokenizer_metadata, write_gguf

TEXTS = [
    "The cat's on the mat; it's 12345 days, WE'LL see.",
    "def f(x):\n\treturn x ** 2  # ok\r\n\n   print( f(10) )\n",
    "你好，世界。日本語 テキスト 한국어 naïve café Ωß",
    "cafe\u0301 decomposed",
    "🌶️👩‍👩‍👧‍👦🏳️‍🌈 x\u2028y\u00a0z",
    " \n  leading and trailing  \t",
    "\x00\x01\x04\x7f",
    "½ ١٢٣ ３４５",
    "",
]


@pytest.fixture
def convert(tmp_path):
    """The folder converted from a file with this tokenizer."""

    def convert(**changes):
        path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), metadata=tokenizer_metadata(**changes))
        convert_gguf(path, tmp_path, progress=False)
        return tmp_path

    return convert


def load(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def vocab_and_merges():
    tokens, merges = tiny_vocabulary()
    return {token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]


def smollm_reference():
    tokenizer = GPT2Tokenizer(*vocab_and_merges()).backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return tokenizer


def qwen2_reference():
    return Qwen2Tokenizer(*vocab_and_merges()).backend_tokenizer


def llama3_reference():
    vocab, merges = vocab_and_merges()
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    # What transformers makes of Meta's own tokenizer file, but for the vocabulary.
    converter = TikTokenConverter(vocab_file="unused")
    converter.tokenizer = lambda: tokenizer
    return converter.converted()


REFERENCES = {"smollm": smollm_reference, "qwen2": qwen2_reference, "llama-bpe": llama3_reference}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", REFERENCES)
def test_ids_equal_those_of_transformers(convert, pre, text):
    converted = load(convert(pre=pre))
    assert converted.encode(text).ids == REFERENCES[pre]().encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_text_survives_encoding_and_decoding(convert, pre, text):
    tokenizer = load(convert(pre=pre))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_byte_without_a_token_is_dropped_as_transformers_does(convert):
    byte = "Ą"  # how byte-level BPE spells the byte 0x04
    tokens, merges = tiny_vocabulary()
    without = [token for token in tokens if token != byte]
    folder = convert(tokens=without, token_type=[3] * 3 + [1] * (len(without) - 3))
    reference = GPT2Tokenizer({token: i for i, token in enumerate(without)}, [tuple(m.split(" ")) for m in merges])
    tokenizer = load(folder)
    ids = tokenizer.encode("a\x04b").ids
    assert ids == reference.backend_tokenizer.encode("a\x04b").ids
    assert tokenizer.decode(ids) == "ab"


def test_a_word_that_is_a_token_stays_whole_in_llama3_whatever_the_merges(convert):
    tokens, _ = tiny_vocabulary()
    folder = convert(pre="llama-bpe", tokens=[*tokens, "zq"], token_type=[3] * 3 + [1] * (len(tokens) - 2))
    assert load(folder).encode("zq").ids == [len(tokens)]


class TestAddedTokens:
    def test_control_tokens_are_single_ids_and_special(self, convert):
        tokenizer = load(convert())
        ids = tokenizer.encode("<|im_start|>user<|im_end|>").ids
        assert (ids[0], ids[-1]) == (1, 2)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user"

    def test_user_defined_tokens_are_single_ids_and_stay_in_the_text(self, convert):
        tokens, _ = tiny_vocabulary()
        types = [3] * 3 + [1] * (len(tokens) - 3) + [int(gguf.TokenType.USER_DEFINED)]
        tokenizer = load(convert(tokens=[*tokens, "<think>"], token_type=types))
        ids = tokenizer.encode("a<think>").ids
        assert ids[-1] == len(tokens)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>"

    def test_unused_tokens_are_no_tokens(self, convert):
        tokens, _ = tiny_vocabulary()
        types = [3] * 3 + [1] * (len(tokens) - 3) + [int(gguf.TokenType.UNUSED)]
        tokenizer = load(convert(tokens=[*tokens, "[PAD320]"], token_type=types))
        assert tokenizer.token_to_id("[PAD320]") is None
        assert tokenizer.get_added_tokens_decoder().keys() == {0, 1, 2}


class TestBeginningOfSequence:
    @pytest.mark.parametrize(
        ("pre", "add_bos_token", "expected"),
        [
            ("smollm", None, []),
            ("qwen2", None, []),
            ("llama-bpe", None, [1]),
            ("llama-bpe", False, []),
            ("smollm", True, [1]),
        ],
    )
    def test_it_is_added_if_the_file_says_so_or_by_the_schemes_default(self, convert, pre, add_bos_token, expected):
        folder = convert(pre=pre, add_bos_token=add_bos_token)
        assert load(folder).encode("").ids == expected
        assert AutoTokenizer.from_pretrained(folder)("").input_ids == expected

    def test_an_end_of_sequence_token_is_added_if_the_file_says_so(self, convert):
        assert load(convert(add_bos_token=True, add_eos_token=True)).encode("").ids == [1, 2]

    @pytest.mark.parametrize("text", ["$A", "x:1", "$B:y", " "])
    def test_its_text_may_be_anything(self, convert, text):
        tokens, _ = tiny_vocabulary()
        folder = convert(tokens=[tokens[0], text, *tokens[2:]], add_bos_token=True)
        assert load(folder).encode("").ids == [1]

    def test_there_is_none_without_such_a_token(self, convert):
        assert load(convert(bos_token_id=None, add_bos_token=True)).encode("").ids == []


class TestConfiguration:
    def test_a_generation_ends_at_every_token_that_ends_one(self, convert):
        folder = convert(eos_token_id=2)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == [2, 0]

    def test_end_of_turn_and_end_of_message_count_too(self, convert):
        folder = convert(eos_token_id=2, eot_token_id=7, eom_token_id=8)
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 7, 8, 0]

    def test_the_chat_template_and_special_tokens_are_transformers_to_use(self, tmp_path):
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        metadata = {"tokenizer.chat_template": template}
        convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata), tmp_path, progress=False)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert text == "<|im_start|>hi<|im_end|>"
