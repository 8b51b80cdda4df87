"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["float32", "bfloat16"] if torch.cuda.is_available() else ["float32"])
def dtype(request) -> torch.dtype:
    """float32 everywhere; bfloat16 where it is compiled: Triton's interpreter computes it wrongly without saying so."""
    return getattr(torch, request.param)
