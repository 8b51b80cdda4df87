"""How many kernels a decode step launches on a GPU, one after the other: each costs about 2 us, whatever it does.

Tensors have shapes but no memory, and say that they are on a GPU; launches of Triton's kernels do nothing. Of what
torch computes, each operator counts as a kernel, but for views and allocations.
"""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minserve.lookahead.layers import groups_of
from minserve.lookahead.order import Order
from minserve.lookahead.pipeline import Lookahead
from minserve.memory.lanes import Lanes
from minserve.memory.working_sets import Memory, WorkingSets
from minserve.runner.attention import KVContext
from minserve.runner.decode import Decode
from minserve.runner.sampler import Sampler
from minserve.spec.draft import NoDrafter

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are launched there")

META = torch.device("meta")
LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 36, 32, 8, 128, 1000
NO_KERNEL = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute"),
    *("_unsafe_view", "select", "slice", "split", "split_with_sizes", "transpose", "unbind", "unsqueeze", "view"),
}


class Launches(TorchDispatchMode):
    """counts: of kernels by their names; where they go may be changed meanwhile."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] += name not in NO_KERNEL
        return function(*args, **(kwargs or {}))


class Step:
    """A model's decode steps, without its products, of lanes that are all there."""

    def __init__(self):
        lanes = Lanes(16, 200, VOCAB, META)
        kv, host = (torch.empty(*shape, KV_HEADS, 2, 16, HEAD_DIM, device=META) for shape in ((LAYERS, 9), (9, LAYERS)))
        sets = WorkingSets(Memory(kv), Memory(host), lanes, HEADS, 128)
        groups = groups_of(torch.device("cuda"), LAYERS)
        order = replace(Order.of(torch.device("cpu"), len(groups)), on_host=False)
        with patch("minserve.lookahead.pipeline.groups_of", return_value=groups):
            lookahead = Lookahead(sets, recalls=False, order=order)
        context = KVContext(kv, lanes.page_table, torch.empty(99, 2, HEAD_DIM // 2, device=META), 1e-6, HEADS)
        self.decode = Decode(None, context, lanes, Sampler(lanes, VOCAB, ()), NoDrafter(), lookahead)

    @torch.no_grad()  # in inference mode operators are not taken apart
    def launches(self, entries, num_drafts, *, is_sparse):
        """Of the foreground, and of the background."""
        launches, foreground, background = Launches(), Counter(), Counter()
        ids, rows = torch.empty(entries, dtype=torch.int64, device=META), entries * (1 + num_drafts)
        qkv, weight = (torch.empty(*shape, HEAD_DIM, device=META) for shape in ((rows, HEADS + 2 * KV_HEADS), ()))

        def launch(kernel, *args, **kwargs):
            launches.counts[kernel.fn.__name__] += 1

        with (
            patch.object(torch.Tensor, "is_cuda", True),
            patch.object(interpreter.GridExecutor, "__call__", launch),
            launches,
        ):
            launches.counts = foreground
            attend = self.decode.rows(ids, num_drafts, keeps_queries=is_sparse).attend
            for layer in range(LAYERS):
                attend(layer, qkv, (weight, weight))
            if is_sparse:
                launches.counts = background
                self.decode.lookahead.fetch(entries)
            launches.counts = foreground
            self.decode.sample(torch.empty(rows, VOCAB, device=META), ids, adjusted=False, keeps_queries=is_sparse)
        return foreground, background


@pytest.mark.parametrize(("entries", "num_drafts"), [(1, 0), (3, 2), (16, 1)])
def test_a_sparse_step_s_foreground_launches_one_kernel_more_than_a_dense_one_s(entries, num_drafts):
    step = Step()
    dense, nothing = step.launches(entries, num_drafts, is_sparse=False)
    sparse, background = step.launches(entries, num_drafts, is_sparse=True)
    assert sparse - dense == {"_begin_rows_kernel": 1}
    assert not dense - sparse
    assert not nothing
    # Before the first ranking, and behind the last one before it is known who runs again.
    assert (background["_take_given_kernel"], background["_count_fetches_kernel"]) == (1, 1)
    assert background.total() <= 176
