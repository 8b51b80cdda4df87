"""A model folder without weights: a byte-level tokenizer of 256 bytes, a few words and ChatML's special tokens."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minserve.text.chat import ChatTemplate
from minserve.text.tokenizer import Tokenizer

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools ' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

THINKING_TEMPLATE = TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
"""As Qwen3's: the model opens its reasoning, and the template closes it where none is wanted."""

OPENING_TEMPLATE = TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}") + "{# until </think> #}"
"""As Qwen3-Thinking's: the template opens the reasoning."""


def write_model_folder(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    generation_config: dict | None = None,
    more_special_tokens: tuple[str, ...] = (),
) -> Path:
    """A folder that Tokenizer and ChatTemplate read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL_TOKENS, *more_special_tokens])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(generation_config or {}))
    return folder


def write_random_model(folder: Path) -> None:
    """Make the folder one that `--load-format dummy` serves: two layers, random weights."""
    vocab_size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
