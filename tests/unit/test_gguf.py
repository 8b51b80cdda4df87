"""A converted GGUF file is the model that it was made from."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minserve.errors import ConfigError, WeightsError
from minserve.weights import gguf_tensors
from minserve.weights.gguf import convert_gguf
from tests.unit.gguf_files import hf_tensors, tiny_model, tokenizer_metadata, write_gguf

ARCHITECTURES = ["llama", "qwen3"]


@pytest.fixture
def convert(tmp_path):
    """Write a model as GGUF, convert it, and give the folder."""

    def convert(model, max_shard_bytes=10**9, **options):
        folder = tmp_path / "converted"
        folder.mkdir()
        path = write_gguf(tmp_path / "model.gguf", model, **options)
        convert_gguf(path, folder, progress=False, max_shard_bytes=max_shard_bytes)
        return folder

    return convert


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(5, 45)[None]).logits


def assert_same_logits(folder, model):
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=0, atol=1e-5)


class TestWeights:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_logits_equal_those_of_the_original(self, convert, architecture):
        model = tiny_model(architecture)
        assert_same_logits(convert(model), model)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_an_untied_output_is_kept(self, convert, architecture):
        model = tiny_model(architecture, tie_word_embeddings=False)
        assert_same_logits(convert(model), model)

    def test_biases_are_kept_and_those_of_llamas_q_and_k_are_in_hugging_faces_order(self, convert):
        model = tiny_model("llama", attention_bias=True, mlp_bias=True)
        assert_same_logits(convert(model), model)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
    def test_quantized_tensors_become_the_float32_values_they_stand_for(self, convert, architecture, name):
        model, kind = tiny_model(architecture), Quantization[name]
        converted = load_file(convert(model, quantization=kind) / "model.safetensors")
        for hf_name, array in hf_tensors(model).items():
            expected = gguf.dequantize(gguf.quantize(array, kind), kind) if array.ndim == 2 else array
            np.testing.assert_array_equal(converted[hf_name], expected, err_msg=hf_name)

    @pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
    def test_types_that_only_llama_cpp_can_write_are_read(self, convert, name):
        kind = Quantization[name]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        # Bytes under 0x40 everywhere, so that no half-precision scale among them is infinite.
        blocks = np.random.default_rng(0).integers(0, 0x40, (64, block_bytes), dtype=np.uint8)
        folder = convert(tiny_model("llama", intermediate_size=256), tensors={"blk.1.ffn_down.weight": (blocks, kind)})
        converted = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
        assert converted.shape == (64, 256)
        np.testing.assert_array_equal(converted, gguf.dequantize(blocks, kind))

    def test_a_type_that_is_no_weights_format_is_refused(self, convert):
        integers = np.zeros((64, 96), np.int32)
        with pytest.raises(ConfigError, match=r"blk\.1\.ffn_down\.weight is stored as I32"):
            convert(tiny_model("llama"), tensors={"blk.1.ffn_down.weight": (integers, Quantization.I32)})

    @pytest.mark.parametrize(("name", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
    def test_stored_floats_stay_bit_for_bit(self, convert, name, dtype):
        model = tiny_model("llama")
        folder = convert(model, quantization=Quantization[name])
        converted = load_torch_file(folder / "model.safetensors")
        for hf_name, array in hf_tensors(model).items():
            expected = torch.from_numpy(array).to(dtype if array.ndim == 2 else torch.float32)
            assert converted[hf_name].dtype == expected.dtype
            assert torch.equal(converted[hf_name], expected), hf_name
        assert config_of(folder)["dtype"] == str(dtype).removeprefix("torch.")

    def test_a_large_model_is_dequantized_to_bfloat16_rounded_to_nearest(self, convert, monkeypatch):
        monkeypatch.setattr(gguf_tensors, "BFLOAT16_ABOVE_PARAMETERS", 1000)
        model, kind = tiny_model("llama"), Quantization.Q8_0
        folder = convert(model, quantization=kind)
        converted = load_torch_file(folder / "model.safetensors")
        weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind)).to(torch.bfloat16)
        assert torch.equal(converted["model.layers.0.mlp.up_proj.weight"], expected)
        assert config_of(folder)["dtype"] == "bfloat16"

    def test_tensors_are_converted_in_chunks_of_rows(self, convert, monkeypatch):
        monkeypatch.setattr(gguf_tensors, "_CHUNK_ELEMENTS", 200)
        model = tiny_model("llama")
        assert_same_logits(convert(model), model)

    def test_a_model_over_the_shard_size_is_written_in_shards_with_an_index(self, convert):
        model = tiny_model("qwen3")
        folder = convert(model, max_shard_bytes=100_000)
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        assert len(shards) > 2
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == hf_tensors(model).keys()
        assert_same_logits(folder, model)


class TestRope:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_linear_scaling(self, convert, architecture):
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        model = tiny_model(architecture, rope_parameters=FrozenDict(rope))
        prefix = f"{architecture}.rope.scaling"
        folder = convert(model, metadata={f"{prefix}.type": "linear", f"{prefix}.factor": 4.0})
        assert config_of(folder)["rope_parameters"] == rope
        assert_same_logits(folder, model)

    def test_yarn_scaling(self, convert):
        rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
        model = tiny_model("qwen3", rope_parameters=FrozenDict(rope))
        metadata = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
        folder = convert(model, metadata={f"qwen3.rope.scaling.{key}": value for key, value in metadata.items()})
        assert_same_logits(folder, model)

    def test_llama3_scaling_is_recognised_by_its_factors(self, convert):
        model = tiny_model("llama", rope_parameters=FrozenDict(LLAMA3_ROPE))
        folder = convert(model, tensors={"rope_freqs.weight": llama3_factors(model.config)})
        assert config_of(folder)["rope_parameters"] == LLAMA3_ROPE
        assert_same_logits(folder, model)

    def test_factors_of_no_known_scaling_are_refused(self, convert):
        factors = np.linspace(1, 8, 16, dtype=np.float32)
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight holds other factors"):
            convert(tiny_model("llama"), tensors={"rope_freqs.weight": factors})


class FrozenDict(dict):
    """A dict that can be an argument of a cached function."""

    def __hash__(self):
        return hash(tuple(self.items()))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(config):
    """What llama.cpp's converter stores: by how much llama3 scaling divides each frequency. [head_dim / 2] float32."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / scaled).numpy().astype(np.float32)


class TestRefusals:
    """Nothing is converted to a model that it is not."""

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
            ({"llama.logit_scale": 16.0}, "llama.logit_scale is 16.0, which is not supported"),
            ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count is 16; only the head dimension, 32"),
            ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope.*none, linear, yarn"),
            ({"split.count": 3}, "one part of several"),
            (tokenizer_metadata(pre="tekken"), "'tekken'; supported are smollm, qwen2, llama-bpe"),
            (tokenizer_metadata(model="llama"), "'llama'; only byte-level BPE"),
        ],
    )
    def test_what_is_not_supported_is_named(self, convert, metadata, message):
        with pytest.raises(ConfigError, match=message):
            convert(tiny_model("llama"), metadata=metadata)

    def test_another_architecture_is_named(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ConfigError, match="'gemma3'; supported are llama, qwen3"):
            convert_gguf(tmp_path / "model.gguf", tmp_path, progress=False)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"llama.block_count": None}, "lacks 'llama.block_count'"),
            ({"llama.block_count": 0}, "llama.block_count must be positive"),
            ({"llama.block_count": "two"}, "llama.block_count must be of type int, not 'two'"),
            ({"llama.block_count": 3}, "lacks 9 tensors: blk.2"),
            ({"llama.block_count": 1}, "9 tensors of no known use: blk.1"),
            ({"llama.block_count": 4_000_000_000}, "4000000000 layers, but 20 tensors"),
            ({"llama.attention.head_count": 8}, "blk.0.attn_q.weight has 128 rows, not 8 heads x 32"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be positive and finite"),
            ({"llama.rope.freq_base": float("inf")}, "must be positive and finite"),
            ({"llama.embedding_length": 65}, r"token_embd.weight must have the shape \[tokens, 65\]"),
            (tokenizer_metadata(tokens=["a", "b"]), "2 tokenizer.ggml.tokens, but 320 token types"),
            (
                tokenizer_metadata(tokens=["a", "a"], token_type=[1, 1], bos_token_id=0, eos_token_id=0),
                "same token twice",
            ),
            (tokenizer_metadata(merges=["q q q"]), "tokenizer.ggml.merges cannot be used"),
            (tokenizer_metadata(merges=["zz zz"]), "tokenizer.ggml.merges cannot be used"),
            (tokenizer_metadata(merges=[1, 2]), "tokenizer.ggml.merges must be a list of str"),
            (tokenizer_metadata(eos_token_id=320), "eos_token_id is 320, but there are 320 tokens"),
        ],
    )
    def test_broken_metadata_is_named(self, convert, metadata, message):
        with pytest.raises(WeightsError, match=message):
            convert(tiny_model("llama"), metadata=metadata)

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({"blk.1.ffn_up.weight": None}, "lacks 1 tensors: blk.1.ffn_up.weight"),
            ({"output_norm.weight": np.zeros((1, 64), np.float32)}, r"output_norm.weight has the shape \(1, 64\)"),
            ({"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}, "no known use: blk.0.ffn_gate_inp.weight"),
        ],
    )
    def test_missing_left_over_and_misshapen_tensors_are_named(self, convert, tensors, message):
        with pytest.raises(WeightsError, match=message):
            convert(tiny_model("llama"), tensors=tensors)

    def test_fewer_embeddings_than_tokens_are_refused(self, convert):
        with pytest.raises(WeightsError, match="320 tokens, but only 300 embeddings"):
            convert(tiny_model("llama", vocab_size=300))
