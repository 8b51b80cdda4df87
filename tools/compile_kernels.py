"""Compile every Triton kernel for a Hopper GPU that is not there, so that none reaches one uncompiled.

    python tools/compile_kernels.py             every variant that the calls of kernel_calls.py ask for
    python tools/compile_kernels.py --quick     of each kernel only the first, which is Qwen3-8B's in bfloat16

Triton does all that it does before a launch, through a driver that says sm_90 and drops the launch itself. So what is
compiled is what a GPU will be given; whether it computes the right thing there is for `pytest -m gpu`.

Exit status 1: a kernel does not compile, or needs more shared memory than there is; or it has spilled more registers
to memory than SPILLED_BYTES allows; or no call has reached it; or there are two of it that differ only in whether an
argument is 1 or a multiple of 16, so that a server would compile in the middle of a step (`do_not_specialize`).
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from kernel_calls import Call, production_calls
from triton.backends.compiler import GPUTarget

import minserve.kernels

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
SPILLED_BYTES = {
    "decode_attention._attend fp32": 384,  # for tests: without tensor cores, both factors are in registers
    "filter_logits._cut_kernel": 96,  # 16 warps have 128 registers a thread, and Triton 3.6 wants a few more
    "linear._dot_kernel fp32": 8,
    "merge_attention._merge_attention_kernel bf16": 8,
}
"""How many bytes of a thread are let be, by what a variant's name begins with; none for all others."""


class AbsentGpu:
    """A driver for Triton. It has as much of the interface as a launch uses, in Triton 3.6 to 3.9."""

    @property
    def utils(self) -> "AbsentGpu":
        return self

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, the most threads that they leave room for)."""
        return 0, 0, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def name_of(function: Any) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def all_kernels(modules: Iterable[ModuleType]) -> set[str]:
    """Every function for Triton that no other one names."""
    functions = [each for module in modules for each in vars(module).values() if isinstance(each, triton.JITFunction)]
    helpers = {id(each.__globals__.get(name)) for each in functions for name in each.fn.__code__.co_names}
    return {name_of(each) for each in functions if id(each) not in helpers}


class Report:
    """What is compiled, a line each, and what is wrong."""

    def __init__(self, quick: bool = False) -> None:
        self._quick = quick
        self._keys: dict[tuple[str, ...], set[str]] = defaultdict(set)
        self.reached: set[str] = set()
        self.failures: list[str] = []
        self.num_compiled = 0
        self.seconds = 0.0

    def compile(self, calls: Iterable[tuple[str, Call]]) -> None:
        """Compile whatever the calls launch. Triton's settings are left behind: this is for a process of its own."""
        print(f"{'':40} seconds  registers  spilled   shared bytes")
        triton.runtime.driver.set_active(AbsentGpu())
        triton.knobs.runtime.jit_cache_hook = self._before
        triton.knobs.compilation.listener = self._after
        with tempfile.TemporaryDirectory() as cache:  # an empty one: the times are those of a first start
            triton.knobs.cache.dir = cache
            for title, call in calls:
                try:
                    call()
                except Exception as error:  # the others may yet do
                    self.failures.append(f"{title}: {type(error).__name__}: {error}")

    def _before(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook for a variant that it does not know yet; True: it shall not be compiled."""
        kernel = name_of(fn.jit_function)
        variant = describe(fn.jit_function, compile["signature"], compile["constants"], compile)
        keys = self._keys[kernel, variant, *pointers(compile["signature"])]
        if compile["key"] in keys:
            return True  # left out before, or it failed
        keys.add(compile["key"])
        if len(keys) == 2:
            self.failures.append(f"{kernel} {variant}: compiled twice, for arguments that differ in value alone")
        is_first = kernel not in self.reached
        self.reached.add(kernel)
        return self._quick and not is_first

    def _after(
        self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, **_: Any
    ) -> None:
        """Triton's hook for a variant that is compiled."""
        files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
        kernel, variant = name_of(src.fn), describe(src.fn, src.signature, src.constants, metadata)
        registers, spilled = resources(files[".cubin"])
        ptx, seconds = files[".ptx"].read_text(), times.total / 1e6
        unit = next((unit for unit in ("wgmma", "mma") if f"{unit}." in ptx), "")
        numbers = f"{seconds:7.2f}  {registers:9}  {spilled:7}  {metadata['shared']:7}"
        print(f"{kernel:40} {numbers}  {unit:5}  {variant}", flush=True)
        line = f"{kernel} {variant}"
        if spilled > max((most for begin, most in SPILLED_BYTES.items() if line.startswith(begin)), default=0):
            self.failures.append(f"{line}: {spilled} bytes of a thread are spilled")
        self.num_compiled += 1
        self.seconds += seconds


def pointers(signature: dict[str, str]) -> list[str]:
    """What the kernel's pointers point to, in order."""
    return [kind[1:] for kind in signature.values() if kind.startswith("*")]


def describe(function: Any, signature: dict[str, str], constants: dict[tuple[int, ...], Any], options: Any) -> str:
    """The float types of its tensors, what the kernel declares constant, and options of the launch."""
    types = dict.fromkeys(kind for kind in pointers(signature) if "f" in kind)
    declared = {parameter.name: constants[(parameter.num,)] for parameter in function.params if parameter.is_constexpr}
    constant = [name if value is True else f"{name}={value}" for name, value in declared.items() if value is not False]
    return " ".join([*types, *constant, f"warps={options['num_warps']}", f"stages={options['num_stages']}"])


def resources(cubin: Path) -> tuple[int, int]:
    """(registers, bytes of local memory, which is where spilled registers go) of a thread."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", output)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="compile only the first variant of each kernel")
    args = parser.parse_args()
    if "TRITON_INTERPRET" in os.environ:
        print("compile_kernels: TRITON_INTERPRET is set, and the interpreter compiles nothing")
        return 2
    print(f"Triton {triton.__version__}, torch {torch.__version__}, sm_{TARGET.arch}")
    report = Report(args.quick)
    report.compile(production_calls())
    folder = minserve.kernels.__path__
    kernels = all_kernels(
        importlib.import_module(f"minserve.kernels.{file.name}") for file in pkgutil.iter_modules(folder)
    )
    report.failures += [f"{kernel}: no call reaches it" for kernel in sorted(kernels - report.reached)]
    for failure in report.failures:
        print(f"FAILED {failure}")
    print(f"{report.num_compiled} variants of {len(kernels)} kernels compiled in {report.seconds:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
