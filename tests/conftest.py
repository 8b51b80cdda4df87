"""What all tests share."""

import os
import sys
from pathlib import Path

import torch

# transformers looks for a package named `kernels`. It would find our folder of that name and fail, since that refuses
# to be imported under a second name. None tells the import system that there is no such module.
sys.modules["kernels"] = None  # type: ignore[assignment]

# Without a GPU, Triton's interpreter runs the kernels, on tensors of the CPU. It has to know before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--pictures", type=Path, metavar="FOLDER", help="keep the pictures of the page there")
