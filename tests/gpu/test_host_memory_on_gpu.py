"""Host memory that the GPU addresses, and copies in the background of launched work."""

import json

import pytest
import torch

from minserve.errors import ConfigError
from minserve.kernels.fetch_blocks import fetch_blocks
from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from minserve.kernels.select_blocks import FetchPlan, SlotMaps
from minserve.memory import pinned
from minserve.memory.copies import Copy, StreamCopies
from minserve.memory.host_pool import HostPool
from minserve.memory.pages import KVPages
from minserve.memory.streams import CudaStream
from minserve.models.config import ModelConfig
from tests.engine.tiny import CONFIG

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    pages = KVPages(ModelConfig.from_folder(tmp_path, None), 64, torch.bfloat16, CUDA)
    pages.kv.normal_()
    return pages


@pytest.fixture(params=[torch.bfloat16, FP8], ids=str)
def host(request, pages, monkeypatch):
    monkeypatch.setattr(pinned, "PIECE_BYTES", 2**16)  # several pieces
    monkeypatch.setattr(pinned, "SLICE_BYTES", 2**14)
    told = []
    host = HostPool(64, pages, request.param, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    yield host
    host.close()


def wait(copies, count):
    ended = copies.poll()
    torch.cuda.synchronize()
    assert len(ended + copies.poll()) == count


def test_blocks_go_there_and_back_while_the_device_is_busy(pages, host):
    copies = StreamCopies(host.move_all, CudaStream(CUDA))
    before = pages.kv.clone()
    copies.submit([Copy(n, "store", n, 63 - n) for n in range(40)])
    torch.cuda._sleep(200_000_000)
    wait(copies, 40)
    expected = before[:, :40].transpose(0, 1).contiguous()
    stored = host.kv[24:].flip(0)
    if host.scales is not None:
        expected, scales = quantize_blocks(expected)
        assert torch.equal(host.scales[24:].flip(0), scales)
        stored, expected, before = stored.view(torch.uint8), expected.view(torch.uint8), before.clone()
        back = dequantize_blocks(expected.view(FP8), scales, before.dtype)
        before[:, :40] = back.transpose(0, 1)
    assert torch.equal(stored, expected.cpu())
    pages.kv.zero_()
    torch.cuda.synchronize()
    copies.submit([Copy(100 + n, "load", n, 63 - n) for n in range(40)])
    wait(copies, 40)
    assert torch.equal(pages.kv[:, :40], before[:, :40])
    assert not pages.kv[:, 40:].any()


def test_copies_do_not_wait_for_launched_steps(pages, host):
    copies = StreamCopies(host.move_all, CudaStream(CUDA))
    copies.submit([Copy(0, "store", 0, 0)])
    wait(copies, 1)
    busy = torch.cuda.Event()
    torch.cuda._sleep(10**9)
    busy.record()
    copies.submit([Copy(1, "store", 1, 1)])
    ended = copies.poll()
    while not ended:
        ended = copies.poll()
    assert not busy.query(), "the copy waited for the step"


def test_blocks_that_pieces_of_a_fixed_size_would_cut_are_copied_too(tmp_path, monkeypatch):
    monkeypatch.setattr(pinned, "PIECE_BYTES", 2**16)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    pages = KVPages(ModelConfig.from_folder(tmp_path, None), 64, torch.bfloat16, CUDA)
    pages.kv.normal_()
    host = HostPool(64, pages, torch.bfloat16)
    assert (2**16) % host.kv[0].nbytes
    copies = StreamCopies(host.move_all, CudaStream(CUDA))
    copies.submit([Copy(n, "store", n, n) for n in range(64)])
    wait(copies, 64)
    assert torch.equal(host.kv.transpose(0, 1), pages.kv.cpu())
    host.close()


def test_a_kernel_reads_the_memory_by_its_address(pages, host):
    host.kv.normal_()
    places = torch.full((1, 1), 63, dtype=torch.int32, device=CUDA)
    num_layers, _, kv_heads, *_ = pages.kv.shape
    blocks = torch.zeros(1, kv_heads, 1, dtype=torch.int32, device=CUDA)
    counters = torch.zeros(1, kv_heads, 5, dtype=torch.int32, device=CUDA)
    tables = (torch.full((1, kv_heads, 1), fill, dtype=torch.int32, device=CUDA) for fill in (-1, 0, -1))
    fetch_blocks(
        FetchPlan(blocks, torch.zeros_like(blocks), counters),
        SlotMaps(*tables),
        torch.zeros(1, dtype=torch.int64, device=CUDA),
        torch.ones(1, dtype=torch.int32, device=CUDA),
        host.kv,
        num_layers - 1,
        places,
        pages.kv[num_layers - 1],
        torch.full((1, 4), 5, dtype=torch.int32, device=CUDA),
    )
    assert torch.equal(pages.kv[-1, 5].cpu(), host.kv[63, -1])


def test_memory_that_cannot_be_registered_is_refused_with_figures(pages, monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.raises(ConfigError, match=r"--host-kv: CUDA refused .* 0 of"):
        HostPool(64, pages, torch.bfloat16)
