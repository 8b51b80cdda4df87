"""Host memory that the GPU addresses, and copies in the background of launched work."""

import json

import pytest
import torch

from minserve.errors import ConfigError
from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
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
    torch.cuda.synchronize()
    assert len(copies.poll()) == count


def test_blocks_go_there_and_back_while_the_device_is_busy(pages, host):
    copies = StreamCopies(host.move_all, CudaStream(CUDA))
    before = pages.kv.clone()
    copies.submit([Copy(n, "store", n, 63 - n) for n in range(40)])
    torch.cuda._sleep(200_000_000)
    assert copies.poll() == []
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
    copies.submit([Copy(100 + n, "load", n, 63 - n) for n in range(40)])
    copies.poll()
    wait(copies, 40)
    assert torch.equal(pages.kv[:, :40], before[:, :40])
    assert not pages.kv[:, 40:].any()


def test_copies_do_not_wait_for_launched_steps(pages, host):
    copies = StreamCopies(host.move_all, CudaStream(CUDA))
    copies.submit([Copy(0, "store", 0, 0)])
    copies.poll()
    wait(copies, 1)
    busy = torch.cuda.Event()
    torch.cuda._sleep(10**9)
    busy.record()
    copies.submit([Copy(1, "store", 1, 1)])
    ended = copies.poll()
    while not ended:
        ended = copies.poll()
    assert not busy.query(), "the copy waited for the step"


def test_a_kernel_reads_the_memory_by_its_address(host):
    host.kv.view(torch.uint8).fill_(3)
    assert host.kv.is_pinned()


def test_memory_that_cannot_be_registered_is_refused_with_figures(pages, monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.raises(ConfigError, match=r"--host-kv: CUDA refused .* 0 of"):
        HostPool(64, pages, torch.bfloat16)
