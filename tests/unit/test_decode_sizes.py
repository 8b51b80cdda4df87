"""Batch sizes that have a CUDA graph."""

import pytest

from minserve.runner.graphs import SIZES, graph_sizes


@pytest.mark.parametrize("max_rows", [1, 3, 8, 40, 64, 100, 256, 257, 300, 1000, 4096])
def test_every_batch_has_a_size_and_wastes_little(max_rows):
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= max_rows
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 8)
        assert size - rows < 64


def test_no_graph_is_larger_than_the_largest_batch_needs():
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 8]
    assert graph_sizes(256) == list(SIZES)
    assert graph_sizes(257)[-1] == 320
