"""Pages are in their host blocks, all layers and heads of them, and other host blocks stay."""

import pytest
import torch

from minserve.kernels.store_blocks import store_blocks, store_blocks_reference, store_blocks_triton

from .working_sets import blocks_of_text

BOTH = pytest.mark.parametrize("store", [store_blocks_reference, store_blocks_triton])
LAYERS, PAGES, HOST_BLOCKS = 3, 6, 9


def random_pools(device, dtype, kv_heads=2, head_dim=4):
    """The cache, and a host pool that holds nothing but NaN."""
    kv = blocks_of_text(LAYERS, PAGES, kv_heads, device=device, dtype=dtype, head_dim=head_dim)
    return kv, torch.full_like(kv[0, 0], torch.nan).expand(HOST_BLOCKS, LAYERS, *kv.shape[2:]).clone()


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def check(kv, host, pages, hosts):
    stored = dict(zip(hosts, pages))
    for block in range(HOST_BLOCKS):
        if block in stored and stored[block] >= 0:
            assert torch.equal(host[block], kv[:, stored[block]].to(host.device))
        else:
            assert host[block].isnan().all(), "written, and nobody asked for it"


@BOTH
@pytest.mark.parametrize(
    ("pages", "hosts"),
    [
        ([3], [8]),
        ([5, 0, 2], [0, 7, 3]),
        ([2, 2], [1, 0]),
        ([-1, 4, 1, -1, 0], [-1, 0, -1, 2, 8]),
        ([-1, -1], [-1, 3]),
        ([], []),
    ],
)
def test_a_page_goes_to_its_host_block_and_padding_nowhere(store, pages, hosts, device, dtype):
    kv, host = random_pools(device, dtype)
    store(kv, host, ids(pages, device), ids(hosts, device))
    check(kv, host, pages, hosts)


@BOTH
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 64), (2, 96), (8, 128)])
def test_blocks_of_any_shape_are_whole(store, kv_heads, head_dim, device, dtype):
    kv, host = random_pools(device, dtype, kv_heads, head_dim)
    store(kv, host, ids([4, -1, 1], device), ids([2, -1, 5], device))
    check(kv, host, [4, 1], [2, 5])


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    kv, host = random_pools(device, torch.float32)
    one = ids([1], device)
    for wrong in (
        (kv[:2], host, one, one),
        (kv, host.half(), one, one),
        (kv, host.transpose(4, 5), one, one),
        (kv, host, one.int(), one),
        (kv, host, one, ids([1, 2], device)),
    ):
        with pytest.raises(AssertionError):
            store_blocks(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_go_to_pinned_memory(device, dtype):
    kv, host = random_pools(device, dtype, kv_heads=8, head_dim=128)
    host = host.cpu().pin_memory()
    store_blocks(kv, host, ids([3, -1, 0], device), ids([1, 4, 8], device))
    torch.cuda.synchronize()
    check(kv, host, [3, 0], [1, 8])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_and_host_blocks_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num = 2**31 // (kv_heads * 2 * 16 * head_dim) + 2
    kv, host = (
        torch.empty(*shape, kv_heads, 2, 16, head_dim, dtype=torch.bfloat16, device=device)
        for shape in ((1, num), (num, 1))
    )
    kv[0, -1] = torch.randn(kv[0, -1].shape, device=device)
    store_blocks(kv, host, ids([num - 1], device), ids([num - 1], device))
    assert torch.equal(host[-1, 0], kv[0, -1])
