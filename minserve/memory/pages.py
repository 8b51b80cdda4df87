"""The KV cache on the device: pages of 16 tokens, for all layers and KV heads.

Owns: the tensor. Does not know which page belongs to whom.
"""

import math

import numpy as np
import torch

from minserve.config import BLOCK_SIZE
from minserve.models.config import ModelConfig


class KVPages:
    """kv: [layers, pages, kv_heads, 2 (K, V), 16, head_dim]."""

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, num_pages, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
        self.kv = zeros(shape, dtype, device.type)
        self.num_pages = num_pages

    @staticmethod
    def bytes_per_page(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one page."""
        return config.num_layers * config.num_kv_heads * 2 * BLOCK_SIZE * config.head_dim * dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, not garbage: masked positions have weight 0, and 0 times a stray NaN would be NaN.

    On a CPU they come from calloc by way of numpy, so that the memory of a page is taken when it is first written.
    torch.zeros would write gigabytes before the first request.
    """
    if device != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
