"""The tensors of a GGUF file, under their Hugging Face names, in their order of rows, as numbers.

Owns: which tensors a model must have, what each is called on both sides, the rows of Llama's q and k, and the precision
that is kept. Does not know: the file format; quantization formats (the gguf library); how files are written.

Precision: what is stored as F32, F16 or BF16 stays so, bit for bit. Quantized tensors become float32, which holds their
values exactly, or bfloat16 in models of more than a billion parameters, where float32 would fill the disk.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize, quantize

from minserve.errors import ConfigError, WeightsError
from minserve.folder import list_names
from minserve.weights.gguf_reader import GGUFFile, GGUFTensor
from minserve.weights.safetensors_writer import PendingTensor, StoredDtype

BFLOAT16_ABOVE_PARAMETERS = 10**9

_CHUNK_ELEMENTS = 1 << 22
_STORED: dict[Any, StoredDtype] = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_EMBEDDING = ("token_embd", "model.embed_tokens")
_FINAL_NORM = ("output_norm", "model.norm")
_LM_HEAD = ("output", "lm_head")
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
# Not a weight: the factors of llama3 RoPE, which the configuration carries.
_NOT_WEIGHTS = frozenset(["rope_freqs.weight"])


def pending_tensors(file: GGUFFile, config: dict[str, Any]) -> list[PendingTensor]:
    """The weights that `config`, a config.json, calls for; WeightsError names what is missing or left over."""
    if config["num_hidden_layers"] > len(file.tensors):
        # Checked first: a list of the names that a hostile file calls for could fill the memory.
        raise WeightsError(f"{file.path}: {config['num_hidden_layers']} layers, but {len(file.tensors)} tensors")
    names = _names(config)
    missing = names.keys() - file.tensors.keys()
    left_over = file.tensors.keys() - names.keys() - _NOT_WEIGHTS
    if missing:
        raise WeightsError(f"{file.path} lacks {len(missing)} tensors: {list_names(missing)}")
    if left_over:
        raise WeightsError(f"{file.path} holds {len(left_over)} tensors of no known use: {list_names(left_over)}")
    num_parameters = sum(math.prod(file.tensors[name].shape) for name in names)
    dequantized: StoredDtype = "BF16" if num_parameters > BFLOAT16_ABOVE_PARAMETERS else "F32"
    pending = []
    for name, hf_name in names.items():
        tensor = file.tensors[name]
        _check(file, tensor)
        dtype = _STORED.get(tensor.quantization, dequantized)
        order = _row_order(file, tensor, config)
        pending.append(PendingTensor(hf_name, dtype, tensor.shape, partial(_chunks, tensor, dtype, order)))
    return pending


def _names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> Hugging Face name."""
    stems = {**_NORMS, **_ATTENTION, **_MLP}
    if config["model_type"] == "qwen3":
        stems |= _QK_NORMS
    biased = _ATTENTION if config["attention_bias"] else {}
    if config.get("mlp_bias"):
        biased = {**biased, **_MLP}
    outer = [_EMBEDDING, _FINAL_NORM] + ([] if config["tie_word_embeddings"] else [_LM_HEAD])
    names = {f"{stem}.weight": f"{hf_stem}.weight" for stem, hf_stem in outer}
    for layer in range(config["num_hidden_layers"]):
        gguf, hf = f"blk.{layer}", f"model.layers.{layer}"
        names |= {f"{gguf}.{stem}.weight": f"{hf}.{hf_stem}.weight" for stem, hf_stem in stems.items()}
        names |= {f"{gguf}.{stem}.bias": f"{hf}.{hf_stem}.bias" for stem, hf_stem in biased.items()}
    return names


def _row_order(file: GGUFFile, tensor: GGUFTensor, config: dict[str, Any]) -> npt.NDArray[np.intp] | None:
    """Where each output row lies in the file; None: in place.

    Llama's q and k are stored for interleaved RoPE, rows (0, 1), (2, 3) .. of a head being the pairs that rotate
    together; Hugging Face pairs row i with row i + head_dim / 2. Qwen3 is stored as Hugging Face has it.
    """
    if config["model_type"] != "llama":
        return None
    if ".attn_q." in tensor.name:
        num_heads = config["num_attention_heads"]
    elif ".attn_k." in tensor.name:
        num_heads = config["num_key_value_heads"]
    else:
        return None
    head_dim = config["head_dim"]
    if tensor.shape[0] != num_heads * head_dim:
        raise WeightsError(
            f"{file.path}: {tensor.name} has {tensor.shape[0]} rows, not {num_heads} heads x {head_dim} dimensions"
        )
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _chunks(tensor: GGUFTensor, dtype: StoredDtype, order: npt.NDArray[np.intp] | None) -> Iterator[bytes]:
    rows = tensor.rows
    if order is not None:
        # A bias has one row, of which the elements are to be moved.
        rows = rows.reshape(len(order), -1)
    row_elements = math.prod(tensor.shape) // len(rows)
    step = max(1, _CHUNK_ELEMENTS // row_elements)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step] if order is None else rows[order[start : start + step]]
        yield _converted(np.ascontiguousarray(chunk), tensor.quantization, dtype)


def _converted(chunk: npt.NDArray[np.uint8], quantization: Any, dtype: StoredDtype) -> bytes:
    if quantization in _STORED:
        return chunk.tobytes()
    values = dequantize(chunk, quantization)
    if dtype == "BF16":
        values = quantize(values, GGMLQuantizationType.BF16)
    return bytes(values.tobytes())


def _check(file: GGUFFile, tensor: GGUFTensor) -> None:
    """Refuse, before anything is written, what cannot be a weight or cannot be turned into numbers."""
    is_vector = tensor.name.endswith(("_norm.weight", ".bias"))
    if len(tensor.shape) != (1 if is_vector else 2):
        raise WeightsError(f"{file.path}: {tensor.name} has the shape {tensor.shape}")
    if tensor.quantization in _STORED:
        return
    if is_vector:
        raise WeightsError(f"{file.path}: {tensor.name} is a vector, but stored as {tensor.quantization.name}")
    try:
        dequantize(np.array(tensor.rows[:1]), tensor.quantization)
    except NotImplementedError as error:
        raise ConfigError(f"{file.path}: {tensor.name} is stored as {tensor.quantization.name}: {error}") from error
