"""Digests are the smallest and the largest of each coordinate of a page's keys, and stand where they are to."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import build_digests, build_digests_reference, build_digests_triton

BOTH = pytest.mark.parametrize("build", [build_digests_reference, build_digests_triton])


def random_pages(device, dtype, pages=7, kv_heads=3, head_dim=4):
    kv = torch.randn(pages, kv_heads, 2, BLOCK_SIZE, head_dim, device=device).to(dtype)
    return kv, torch.full((9, kv_heads, 2, head_dim), torch.nan, device=device, dtype=dtype)


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


@BOTH
@pytest.mark.parametrize(
    ("pages", "places"),
    [
        ([3], [8]),
        ([6, 0, 2], [0, 5, 3]),
        ([-1, 4, -1, 1, 9], [-1, 0, -1, 7, -1]),
        ([2, 2], [1, 0]),
        ([0, 5], [-1, -1]),
        ([], []),
    ],
)
def test_places_hold_the_extremes_of_keys_and_other_places_stay(build, pages, places, device, dtype):
    kv, digests = random_pages(device, dtype)
    build(kv, digests, ids(pages, device), ids(places, device))
    source = dict(zip(places, pages))
    for place, heads in enumerate(digests.tolist()):
        for head, (least, most) in enumerate(heads):
            for d in range(4):
                if place in source:
                    keys = [kv[source[place], head, 0, token, d].item() for token in range(BLOCK_SIZE)]
                    assert (least[d], most[d]) == (min(keys), max(keys))
                else:
                    assert least[d] != least[d], "written, and nobody asked for it"


@BOTH
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_key_of_a_page_lies_between_the_two(build, head_dim, device, dtype):
    kv, digests = random_pages(device, dtype, head_dim=head_dim)
    build(kv, digests, ids(range(7), device), ids(range(7), device))
    least, most = digests[:7, :, :1], digests[:7, :, 1:]
    keys = kv[:, :, 0]
    assert bool(((keys >= least) & (keys <= most)).all())


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    kv, digests = random_pages(device, torch.float32)
    one = ids([1], device)
    for wrong in (
        (kv, digests[:, :2], one, one),
        (kv, digests.half(), one, one),
        (kv, digests, one.int(), one),
        (kv, digests, one, ids([1, 2], device)),
    ):
        with pytest.raises(AssertionError):
            build_digests(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_and_digests_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num_pages, num_places = (2**31 // (kv_heads * 2 * size * head_dim) + 2 for size in (BLOCK_SIZE, 1))
    kv = torch.empty(num_pages, kv_heads, 2, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=device)
    digests = torch.empty(num_places, kv_heads, 2, head_dim, dtype=torch.bfloat16, device=device)
    kv[-1] = torch.randn(kv[-1].shape, device=device)
    build_digests(kv, digests, ids([num_pages - 1], device), ids([num_places - 1], device))
    assert torch.equal(digests[-1], torch.stack(torch.aminmax(kv[-1, :, 0], dim=1), dim=1))
