"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    """float32 everywhere; bfloat16 where it is compiled: Triton's interpreter computes it wrongly without saying so."""
    if request.param == "bfloat16" and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter has no right bfloat16")
    return getattr(torch, request.param)
