"""The kernels compile for a GPU that is not there: tools/compile_kernels.py, where Triton does not interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

PLANTED = """
import json, sys, torch, triton, triton.language as tl
from compile_kernels import Report, all_kernels
from kernel_calls import empty

@triton.jit
def helper(x, i):
    return tl.load(x + i)

@triton.jit(do_not_specialize=["size"])
def right(x, size, width: tl.constexpr):
    i = tl.arange(0, width)
    tl.store(x + i, helper(x, i) + 1, mask=i < size)

@triton.jit
def by_value(x, size, width: tl.constexpr):
    i = tl.arange(0, width)
    tl.store(x + i, 0, mask=i < size)

@triton.jit
def odd_width(x, width: tl.constexpr):
    tl.store(x + tl.arange(0, width), 0)

@triton.jit
def greedy(x, wide: tl.constexpr, deep: tl.constexpr):
    i, k = tl.arange(0, wide), tl.arange(0, deep)
    product = tl.dot(tl.load(x + i[:, None] * deep + k[None, :]), tl.load(x + i[None, :] * deep + k[:, None]))
    tl.store(x + i[:, None] * wide + i[None, :], product)

@triton.jit
def spilling(x, width: tl.constexpr):
    i = tl.arange(0, width)
    values = tl.load(x + i)
    tl.debug_barrier()
    tl.store(x + width - 1 - i, values)

@triton.jit
def forgotten(x):
    tl.store(x, 0)

x = empty(1, dtype=torch.float32)
report = Report()
report.compile(
    [("right", lambda size=size: right[(1,)](x, size, 32)) for size in (1, 16, 17)]
    + [("by_value", lambda size=size: by_value[(1,)](x, size, 32)) for size in (16, 17)]
    + [("odd_width", lambda: odd_width[(1,)](x, 33))]
    + [("greedy", lambda: greedy[(1,)](x, 64, 512, num_warps=8))]
    + [("spilling", lambda: spilling[(1,)](x, 16384, num_warps=1))]
)
left = all_kernels([sys.modules["__main__"]]) - report.reached
print(json.dumps([report.num_compiled, sorted(left), report.failures]))
"""


def run(*command):
    """(exit status, lines of output) of Python with this command line, with the worktree's modules and its tools'."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(ROOT), str(ROOT / "tools"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_every_kernel_compiles_and_products_are_made_by_tensor_cores():
    status, lines = run("tools/compile_kernels.py", "--quick")
    assert status == 0, [line for line in lines if line.startswith("FAILED")] or lines
    words = {line.split()[0]: line.split() for line in lines if "warps=" in line}
    assert "mma" in words["decode_attention._attend"]
    assert "wgmma" in words["linear._dot_kernel"]
    _, _, _, spilled_bytes, *_ = words["decode_attention._attend"]
    assert spilled_bytes == "0"


def test_what_is_wrong_with_a_kernel_is_found(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    status, lines = run(str(tmp_path / "planted.py"))
    assert status == 0, lines
    num_compiled, left, failures = json.loads(lines[-1])
    assert num_compiled == 5, "two of by_value, and one of right, greedy and spilling"
    assert left == ["__main__.forgotten"]
    by_value, odd_width, greedy, spilling = failures
    assert by_value.startswith("__main__.by_value")
    assert "compiled twice" in by_value
    assert odd_width.startswith("odd_width: CompilationError")
    assert greedy.startswith("greedy: OutOfResources")
    assert spilling.startswith("__main__.spilling")
    assert "bytes of a thread are spilled" in spilling
