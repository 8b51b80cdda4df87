"""How an FP8 checkpoint stores its projections, read from its config.json. Imports no torch.

Owns: which quantization_config is understood and which is refused. Does not know: the tensors themselves, nor which of
them are in 8 bits: the files' headers say that, so lists of modules that were left out need not be read.

Understood are the two forms that most FP8 models on the Hugging Face hub have:

    quant_method "fp8"                  weight_block_size [rows, columns], with weight_scale_inv (DeepSeek, Qwen);
                                        without it one weight_scale a tensor (AutoFP8)
    quant_method "compressed-tensors"   format float-quantized, with a weight_scale for each row, tensor or block

Either way a number stands for itself times its scale, "inv" or not. Inputs are always quantized when they come, each
row by its own largest number. So activation_scheme and input_activations do not matter, and static scales go unused.
"""

from typing import Any

import msgspec

from minserve.models.fields import Fields

METHODS = ("fp8", "compressed-tensors")


class Fp8Checkpoint(msgspec.Struct, frozen=True):
    """scale_name: what stands in the place of "weight" in the name of a weight's scale.

    block: (rows, columns) that share a scale; None: each row has its own, or all share one.
    """

    scale_name: str
    block: tuple[int, int] | None = None


def read_quantization(fields: Fields) -> Fp8Checkpoint | None:
    """What config.json says of quantized weights; None: they are plain. Raises ConfigError, naming the field."""
    if not fields.has("quantization_config"):
        return None
    written = _inner(fields, "quantization_config")
    if written.choice("quant_method", METHODS) == "fp8":
        written.choice("fmt", ("e4m3",), "e4m3")
        if not written.has("weight_block_size"):
            return Fp8Checkpoint("weight_scale")
        return Fp8Checkpoint("weight_scale_inv", _block(written, "weight_block_size"))
    return Fp8Checkpoint("weight_scale", _compressed_tensors_block(written))


def _compressed_tensors_block(written: Fields) -> tuple[int, int] | None:
    """The block that all groups of modules agree on, once each of them has been found to be in E4M3."""
    written.choice("format", ("float-quantized", "naive-quantized"))
    if written.any("transform_config"):
        raise written.error("transform_config", "absent: rotated weights are not supported")
    groups = _inner(written, "config_groups")
    blocks = {_group_block(_inner(_inner(groups, name), "weights")) for name in groups.names()}
    if len(blocks) != 1:
        raise written.error("config_groups", "groups whose weights are scaled alike: by blocks of one size, or by none")
    return blocks.pop()


def _group_block(weights: Fields) -> tuple[int, int] | None:
    weights.choice("type", ("float",))
    if weights.integer("num_bits") != 8:
        raise weights.error("num_bits", "8")
    if weights.choice("strategy", ("tensor", "channel", "block")) == "block":
        return _block(weights, "block_structure")
    return None


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value: Any = fields.any(name)
    if not isinstance(value, list) or len(value) != 2:
        raise fields.error(name, "a list of two whole numbers")
    sides = Fields(dict(zip(("rows", "columns"), value)), f"{fields.source}: {name}")
    return sides.integer("rows"), sides.integer("columns")


def _inner(fields: Fields, name: str) -> Fields:
    value = fields.any(name)
    if not isinstance(value, dict):
        raise fields.error(name, "an object")
    return Fields(value, f"{fields.source}: {name}")
