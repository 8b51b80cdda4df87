"""Small tensors between the host and the device, without anybody waiting.

Owns: how the host's side is kept from being reused too early. On CUDA both ways go through pinned memory of torch's own
host allocator, which hands a buffer out again only when the copies that use it have ended. On a CPU there is nothing to
do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(values: "Sequence[Any] | np.ndarray[Any, Any]", dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these (nested) values on the device; the copy is in the order of the current stream."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Where the tensor's values will be on the host, once what the current stream holds by now has ended."""
    if tensor.device.type == "cpu":
        return tensor.clone()  # as on CUDA: what is written to the tensor later does not show
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
