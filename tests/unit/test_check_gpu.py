"""What tools/check_gpu.sh names is there: it runs where nobody looks at it often."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"^ +(\w+)\.py::(\w+)$", (ROOT / "tools/check_gpu.sh").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_under_memcheck_exists(file, test):
    assert f"\ndef {test}(" in (ROOT / f"tests/kernels/test_{file}.py").read_text()


def test_every_kernel_of_a_sparse_step_is_under_memcheck():
    named = {file for file, _ in NAMED}
    assert named >= {"build_digests", "score_blocks", "shortlist_blocks", "score_keys", "rank_blocks", "select_blocks"}
    assert named >= {"fetch_blocks", "fetch_accounts", "flags", "sparse_rows", "store_blocks"}
