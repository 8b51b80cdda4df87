"""What quantization_config in config.json may say, and what is refused by name."""

import json

import pytest

from minserve.errors import ConfigError
from minserve.models.config import ModelConfig
from minserve.models.quantization import Fp8Checkpoint
from tests.unit.fp8_checkpoints import BLOCKWISE, CONFIG, ROW_WISE


def group(**weights):
    return {"weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True} | weights}


def compressed(*groups, **changes):
    return ROW_WISE | {"config_groups": {f"group_{i}": one for i, one in enumerate(groups)}} | changes


@pytest.fixture
def read(tmp_path):
    def read(quantization):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
        return ModelConfig.from_folder(tmp_path).quantization

    return read


BY_BLOCK = group(strategy="block", block_structure=[128, 128])


@pytest.mark.parametrize(
    ("written", "meaning"),
    [
        (None, None),
        (BLOCKWISE | {"weight_block_size": [128, 64]}, Fp8Checkpoint("weight_scale_inv", (128, 64))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8Checkpoint("weight_scale")),
        (ROW_WISE, Fp8Checkpoint("weight_scale")),
        (ROW_WISE | {"format": "naive-quantized", "transform_config": {}}, Fp8Checkpoint("weight_scale")),
        (compressed(group(strategy="tensor"), group()), Fp8Checkpoint("weight_scale")),
        (compressed(BY_BLOCK), Fp8Checkpoint("weight_scale", (128, 128))),
    ],
    ids=["plain", "Qwen's", "AutoFP8's", "rows", "naive", "tensors and rows", "blocks"],
)
def test_fp8_checkpoints_are_understood(read, written, meaning):
    assert read(written) == meaning


@pytest.mark.parametrize(
    ("written", "named"),
    [
        *(({"quant_method": name}, f'quant_method is "{name}"; .*one of fp8, compressed-tensors$')
          for name in ("awq", "gptq", "bitsandbytes", "mxfp4", "modelopt")),
        ({"load_in_4bit": True}, "quant_method is missing"),
        (BLOCKWISE | {"fmt": "e5m2"}, "fmt is .*e4m3"),
        (BLOCKWISE | {"weight_block_size": 128}, "weight_block_size is 128"),
        (BLOCKWISE | {"weight_block_size": [128, 0]}, "weight_block_size: columns is 0"),
        (ROW_WISE | {"format": "nvfp4-pack-quantized"}, "format is .*float-quantized"),
        (ROW_WISE | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (compressed(group(type="int")), "config_groups: group_0: weights: type is .*float"),
        (compressed(group(num_bits=4)), "config_groups: group_0: weights: num_bits is 4; it must be 8"),
        (compressed(group(strategy="group")), "config_groups: group_0: weights: strategy is .*tensor, channel, block"),
        (compressed(group(strategy="block")), "config_groups: group_0: weights: block_structure is missing"),
        (compressed(group(), BY_BLOCK), "config_groups is .*scaled alike"),
        (compressed({"weights": None}), "config_groups: group_0: weights is missing"),
        (compressed(), "config_groups"),
        ("fp8", "an object"),
    ],
)  # fmt: skip
def test_others_are_refused_by_name(read, written, named):
    with pytest.raises(ConfigError, match=f"config.json: quantization_config.*{named}") as caught:
        read(written)
    assert "\n" not in str(caught.value)
