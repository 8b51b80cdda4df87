"""Tiny GGUF files for tests: random transformers models, written by the gguf library as llama.cpp's converter would."""

import functools
import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quantization
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

NUM_EMBEDDINGS = 352
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TRAINING_TEXT = [
    "the cat sat on the mat, and it's 12345 days since",
    "def f(x):\n    return x + 100",
    "naïve café 世界",
]

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@functools.cache
def tiny_model(architecture, **changes):
    """A random model in float32 whose rows fit the blocks of 32 of the simple quantizations."""
    shape = {
        "vocab_size": NUM_EMBEDDINGS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape | changes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape | changes))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            # Norms and biases of a new model are all ones or zeros, which would hide that one is another's.
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


@functools.cache
def tiny_vocabulary():
    """(tokens, merges) of a byte-level BPE: the special tokens come first, all 256 bytes are there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.get), [" ".join(pair) for pair in merges]


def hf_tensors(model):
    """name -> numpy array; tied embeddings once."""
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def tokenizer_metadata(pre="smollm", **changes):
    """The tokenizer.ggml.* metadata; a change to None leaves the key out."""
    tokens, merges = tiny_vocabulary()
    types = [int(gguf.TokenType.CONTROL)] * len(SPECIAL_TOKENS)
    types += [int(gguf.TokenType.NORMAL)] * (len(tokens) - len(types))
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def model_metadata(model):
    config, arch = model.config, model.config.model_type
    return {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }


def write_gguf(path, model, *, quantization=Quantization.F32, metadata=None, tensors=None):
    """Write `model`: matrices quantized, vectors F32. metadata and tensors are added; None takes one away.

    A tensor may also be a pair of bytes, already quantized, and their type.
    """
    arch = model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (model_metadata(model) | tokenizer_metadata() | (metadata or {})).items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    by_name = {gguf_name(name): gguf_order(model.config, name, array) for name, array in hf_tensors(model).items()}
    for name, array in (by_name | (tensors or {})).items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        elif array is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        elif array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(hf_name):
    stem, _, kind = hf_name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, stem = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_STEMS[stem]}.{kind}"
    return f"{_STEMS[stem]}.{kind}"


def gguf_order(config, hf_name, array):
    """Llama's q and k with each head's halves interleaved, as llama.cpp's LlamaModel.permute does."""
    if config.model_type != "llama" or not any(part in hf_name for part in ("q_proj", "k_proj")):
        return array
    num_heads = config.num_attention_heads if "q_proj" in hf_name else config.num_key_value_heads
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add(writer, key, value):
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
