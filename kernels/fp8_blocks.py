"""Blocks of the KV cache in 8-bit floating point, as host memory may hold them: half of bfloat16's bytes on the link.

    blocks8[..., s], scales[..., s] = the E4M3 numbers and the scale of all 16 * head_dim numbers of blocks[..., s]

for each block, layer, KV head and side s (K or V), by fp8.py's formula: a side is a row. So a number moves by at most
1/16 of itself or, if it is small, by 2^-10 of its side's scale. What is quantized again after it has been dequantized
gives the same E4M3 numbers, but for those that float16 is too coarse for.

The scales stay on the device, 8 bytes for the 4 KB that a fetch moves (head_dim 128): reads of 8 bytes here and there
would cost the link more than they carry.
"""

import torch

from minserve.kernels.fp8 import FP8, quantize_rows


def quantize_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks8, scales). blocks: [..., 2 (K, V), 16, head_dim], contiguous, any float dtype; blocks8: the same in
    float8_e4m3fn; scales: [..., 2] float32."""
    rows8, scales = quantize_rows(blocks.view(-1, blocks.shape[-2] * blocks.shape[-1]))
    return rows8.view(blocks.shape), scales.view(blocks.shape[:-2])


def dequantize_blocks(blocks8: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks8 * scales, computed in float32 and rounded to dtype. Both as `quantize_blocks` returns them."""
    # E4M3 numbers are exact in every wider dtype, so that this rounds once, with no float32 copy of the blocks.
    return blocks8.to(dtype).mul_(scales[..., None, None])


def check_scales(host: torch.Tensor, scales: torch.Tensor | None, kv: torch.Tensor) -> None:
    """That host blocks [host_blocks, layers, kv_heads, 2, 16, head_dim] are in E4M3 and have scales, or are in the
    dtype of the pages kv and have none."""
    if scales is None:
        assert host.dtype == kv.dtype, (host.dtype, kv.dtype)
        return
    assert (host.dtype, scales.dtype) == (FP8, torch.float32), (host.dtype, scales.dtype)
    assert scales.shape == host.shape[:4], (scales.shape, host.shape)
    assert scales.is_contiguous()
    assert scales.device == kv.device, (scales.device, kv.device)
