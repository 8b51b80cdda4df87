"""What config.json may say, and what is refused by name."""

import json
import math

import pytest

from minserve.errors import ConfigError
from minserve.models.config import ModelConfig, RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_theta": 100000,
    "torch_dtype": "bfloat16",
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "max_position_embeddings": 40960}


@pytest.fixture
def read(tmp_path):
    def read(config, rope_scaling=None):
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        return ModelConfig.from_folder(tmp_path, rope_scaling)

    return read


def test_a_config_is_read_in_full(read):
    assert read(LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig(theta=100000.0),
        dtype="bfloat16",
    )


def test_kv_heads_are_the_heads_when_not_given(read):
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(config).num_kv_heads == 9
    assert read(config | {"num_key_value_heads": None}).num_kv_heads == 9


def test_qwen3_normalizes_q_and_k_and_its_heads_have_128_dimensions_when_not_told(read):
    config = read({k: v for k, v in QWEN3.items() if k != "head_dim"})
    assert (config.qk_norm, config.head_dim) == (True, 128)


@pytest.mark.parametrize(
    ("dtype", "meaning"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_dtype_has_two_names(read, dtype, meaning):
    config = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    assert read(config | dtype).dtype == meaning


@pytest.mark.parametrize(
    ("written", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}}, 100000.0),
        ({"rope_theta": None}, 10000.0),
        ({"rope_scaling": None}, 100000.0),
    ],
)
def test_theta_is_read_from_either_place(read, written, theta):
    assert read(LLAMA | written).rope == RopeConfig(theta=theta)


def test_yarn_stretches_the_original_context_by_its_factor(read):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(QWEN3 | {"rope_scaling": yarn})
    assert config.max_position_embeddings == 131072
    assert config.rope == RopeConfig(
        theta=100000.0, kind="yarn", factor=4.0, original_max_position_embeddings=32768, attention_factor=None
    )


def test_yarns_original_context_is_the_models_when_not_given(read):
    config = read(QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert (config.rope.original_max_position_embeddings, config.max_position_embeddings) == (40960, 81920)


def test_yarns_mscales_become_one_attention_factor(read):
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    config = read(LLAMA | {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 0.707}})
    expected = (0.1 * math.log(40) + 1) / (0.1 * 0.707 * math.log(40) + 1)
    assert config.rope.attention_factor == pytest.approx(expected)


def test_llama3_does_not_lengthen_what_the_file_says(read):
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = read(LLAMA | {"max_position_embeddings": 131072, "rope_scaling": scaling})
    assert config.max_position_embeddings == 131072
    assert (config.rope.low_freq_factor, config.rope.high_freq_factor) == (1.0, 4.0)


def test_the_command_lines_scaling_replaces_the_files(read):
    in_file = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = read(
        LLAMA | {"rope_scaling": in_file},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    )
    assert (config.rope.kind, config.rope.theta, config.max_position_embeddings) == ("yarn", 100000.0, 32768)
    assert read(LLAMA, {"rope_type": "linear", "factor": 2.0}).max_position_embeddings == 16384
    assert read(LLAMA, {"rope_type": "default", "rope_theta": 5e5}).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({}, "rope_type"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "fator": 2.0}, "fator"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0.5}, "original_max"),
    ],
)
def test_a_wrong_scaling_on_the_command_line_is_refused_as_such(read, scaling, field):
    with pytest.raises(ConfigError, match=f"--rope-scaling: {field}"):
        read(LLAMA, scaling)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures.*LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}, "architectures.*never run"),
        ({"hidden_act": "gelu"}, "hidden_act.*silu"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: quant_method.*fp8, compressed-tensors",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_scaling: rope_type.*default, linear, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype.*bfloat16"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "576"}, "hidden_size"),
        ({"hidden_size": 577}, "hidden_size.*multiple of num_attention_heads"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads.*divisor"),
        ({"head_dim": 63}, "head_dim"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-20}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(read, change, named):
    with pytest.raises(ConfigError, match=f"config.json: {named}"):
        read(LLAMA | change)


@pytest.mark.parametrize(
    "unused",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_no_obstacle(read, unused):
    assert read(QWEN3 | unused).num_layers == 30


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"config"', "[" * 100_000, "\ufffe"])
def test_a_malformed_file_is_refused_by_path(read, text):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(text)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no file 'config\.json'"):
        ModelConfig.from_folder(tmp_path)
