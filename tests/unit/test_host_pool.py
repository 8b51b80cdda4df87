"""Blocks that move between pages and host memory, as they are or in 8 bits."""

import json

import pytest
import torch

from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from minserve.memory.copies import Copy
from minserve.memory.host_pool import AT_ONCE, HostPool
from minserve.memory.pages import KVPages
from minserve.models.config import ModelConfig
from tests.engine.tiny import CONFIG

NUM = AT_ONCE + 3


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ModelConfig.from_folder(tmp_path, None)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pages(request, config):
    pages = KVPages(config, NUM + 2, request.param, torch.device("cpu"))
    pages.kv.normal_()
    return pages


def one_by_one(host, copies):
    for copy in copies:
        host.move(copy)


def together(host, copies):
    host.move_all(copies)


@pytest.mark.parametrize("move", [one_by_one, together])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_comes_back_is_what_host_blocks_stand_for_and_other_pages_stay(pages, move, is_fp8):
    before = pages.kv.clone()
    host = HostPool(NUM, pages, FP8 if is_fp8 else pages.kv.dtype)
    move(host, [Copy(n, "store", n, NUM - 1 - n) for n in range(NUM)])
    expected = before[:, :NUM].transpose(0, 1).flip(0).contiguous()
    if is_fp8:
        blocks8, scales = quantize_blocks(expected)
        assert torch.equal(host.kv.view(torch.uint8), blocks8.view(torch.uint8))
        assert torch.equal(host.scales, scales)
        expected = dequantize_blocks(blocks8, scales, pages.kv.dtype)
    else:
        assert host.scales is None
        assert torch.equal(host.kv, expected)
    pages.kv[:, 2:].zero_()
    move(host, [Copy(100 + n, "load", 2 + n, n) for n in range(NUM)])
    assert torch.equal(pages.kv[:, 2:].transpose(0, 1), expected)
    assert torch.equal(pages.kv[:, :2], before[:, :2])


def test_blocks_in_8_bits_take_a_byte_a_number_and_their_scales_the_device_s_memory(pages, config):
    host = HostPool(NUM, pages, FP8)
    assert host.kv.nbytes == NUM * KVPages.bytes_per_page(config, FP8) == host.kv.numel()
    assert host.scales.nbytes == NUM * HostPool.device_bytes_per_block(config, FP8)
    assert host.scales.device == pages.kv.device
    assert HostPool.device_bytes_per_block(config, pages.kv.dtype) == 0
