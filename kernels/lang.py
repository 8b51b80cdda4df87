"""Triton, where it exists: `from minserve.kernels.lang import tl, triton`.

On a system without Triton there is no CUDA device either: kernels are defined but never launched there, and the torch
references serve.
"""

import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any


def _triton() -> tuple[Any, Any]:
    try:
        return import_module("triton"), import_module("triton.language")
    except ImportError:
        # What is looked at when a kernel is defined: its decorator, and the annotations of its parameters.
        return SimpleNamespace(jit=_undecorated), SimpleNamespace(constexpr=Any)


def _undecorated(function: Any = None, **options: Any) -> Any:
    """`@jit` and `@jit(...)` of a function that stays as it is."""
    return _undecorated if function is None else function


triton, tl = _triton()


# log2(x), off by 2^-22 or 2 of the last bits: one instruction on a GPU, as is `tl.exp2`, where `tl.log2` takes 29, and
# `tl.exp` 5.
if hasattr(triton, "knobs") and not triton.knobs.runtime.interpret:
    fast_log2: Any = import_module("triton.language.extra.libdevice").fast_log2f
else:

    @triton.jit
    def fast_log2(x) -> Any:
        """The interpreter's."""
        return tl.log2(x)


BITS = 1 / math.log(2)
"""Of a nat."""
