"""Digests are the extremes of the slow coordinates of a page's keys, half by half, in 8 bits, and stand where they are
to."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import (
    build_digests,
    build_digests_reference,
    build_digests_triton,
    digest_dtype,
    digest_shape,
    slow_coordinates,
)
from minserve.kernels.fp8 import FP8
from minserve.kernels.rope import apply_rope, gather_rope

from .working_sets import E4M3, expected_digest, slow, to_e4m3

BOTH = pytest.mark.parametrize("build", [build_digests_reference, build_digests_triton])
WIDE_OR_NOT = pytest.mark.parametrize("in_8_bits", [False, True], ids=["wide", "fp8"])


def random_pages(device, dtype, in_8_bits=False, *, pages=7, kv_heads=3, head_dim=8):
    kv = torch.randn(pages, kv_heads, 2, BLOCK_SIZE, head_dim, device=device).to(dtype)
    digests = torch.full((9, *digest_shape(kv_heads, head_dim)), torch.nan, device=device)
    return kv, digests.to(FP8 if in_8_bits else dtype)


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


@BOTH
@WIDE_OR_NOT
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
def test_places_hold_the_extremes_of_keys_and_other_places_stay(build, in_8_bits, pages, places, device, dtype):
    kv, digests = random_pages(device, dtype, in_8_bits)
    build(kv, digests, ids(pages, device), ids(places, device))
    source = dict(zip(places, pages))
    for place, found in enumerate(digests.float()):
        if place in source:
            keys = kv[source[place], :, 0].tolist()
            assert found.tolist() == [expected_digest(head) for head in keys]
        else:
            assert bool(found.isnan().all()), "written, and nobody asked for it"


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("head_dim", [4, 64, 96, 128])
def test_every_key_of_a_half_lies_between_its_two_but_for_the_rounding(build, in_8_bits, head_dim, device, dtype):
    kv, digests = random_pages(device, dtype, in_8_bits, head_dim=head_dim)
    build(kv, digests, ids(range(7), device), ids(range(7), device))
    keys = kv[:, :, 0, :, slow(head_dim)].float().unflatten(2, (2, 8))
    least, most = digests[:7].float().unbind(dim=3)
    exact = keys.amin(3), keys.amax(3)
    for found, extreme in zip((least, most), exact):
        assert bool(((found - extreme).abs() <= (extreme.abs() / 16).clamp_min(2**-10)).all())
    assert bool((least <= most).all())


@BOTH
def test_only_keys_and_of_these_only_the_slow_coordinates_count(build, device):
    kv, digests = random_pages(device, torch.float32)
    other = torch.full_like(kv, torch.nan)
    other[:, :, 0, :, slow(8)] = kv[:, :, 0, :, slow(8)]
    for pages, target in ((kv, digests), (other, again := digests.clone())):
        build(pages, target, ids(range(7), device), ids(range(7), device))
    assert torch.equal(digests[:7], again[:7])


@pytest.mark.parametrize("head_dim", [4, 8, 64, 96, 128])
def test_slow_coordinates_are_those_that_a_token_turns_least(head_dim):
    assert slow_coordinates(torch.arange(head_dim)[None])[0].tolist() == slow(head_dim)
    angles = 10000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1)[:-1]
    table = torch.stack((angles.cos(), angles.sin()))[None]
    axes = torch.eye(head_dim)[:, None]
    turned = apply_rope(axes, *gather_rope(table, torch.zeros(head_dim, dtype=torch.int64)))
    assert (turned - axes).norm(dim=2)[:, 0].argsort()[: head_dim // 2].sort().values.tolist() == slow(head_dim)


def interesting_numbers():
    """All numbers of E4M3 and those half way between two, their neighbours in float32, all of bfloat16, and others."""
    exact = torch.tensor(E4M3)
    between = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((exact, between, torch.tensor([456.0, 464.0, 480.0, 1e30, 2.0**-6, 2.0**-10, 2.0**-11])))
    near = torch.cat((near, *(near.nextafter(torch.tensor(to)) for to in (0.0, torch.inf))))
    bfloat16 = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).float()
    torch.manual_seed(0)
    others = torch.randn(2000) * 2.0 ** torch.randint(-14, 10, (2000,))
    numbers = torch.cat((near, bfloat16[~bfloat16.isnan()], others))
    return torch.cat((numbers, -numbers))


@BOTH
@WIDE_OR_NOT
def test_numbers_are_rounded_to_the_nearest_of_8_bits_and_never_beyond_the_largest(build, in_8_bits, device):
    """Each number stands in all tokens of a half, so that it is both extremes. Infinity is there, too."""
    numbers = interesting_numbers()
    heads, slow_of_head = 4, 256
    pages = -(-len(numbers) // (heads * 2 * slow_of_head))
    numbers = torch.cat((numbers, numbers.new_zeros(pages * heads * 2 * slow_of_head - len(numbers))))
    halves = numbers.view(pages, heads, 2, 1, slow_of_head)
    kv = torch.zeros(pages, heads, 2, BLOCK_SIZE, 2 * slow_of_head)
    kv[:, :, 0, :, slow(2 * slow_of_head)] = halves.expand(-1, -1, -1, 8, -1).flatten(2, 3)
    digests = torch.empty(pages, *digest_shape(heads, 2 * slow_of_head)).to(device, FP8 if in_8_bits else torch.float32)
    build(kv.to(device), digests, ids(range(pages), device), ids(range(pages), device))
    least, most = digests.float().cpu().unbind(dim=3)
    expected = halves[:, :, :, 0].clamp(-448, 448).to(FP8).float()
    assert torch.equal(least, expected)
    assert torch.equal(most, expected)


def test_what_rounds_for_the_tests_rounds_as_torch():
    numbers = interesting_numbers()[::5]
    expected = numbers.clamp(-448, 448).to(FP8).float()
    assert [to_e4m3(x) for x in numbers.tolist()] == expected.tolist()


@BOTH
def test_both_extremes_are_taken_before_they_are_rounded_to_even(build, device):
    """1.0625 is half way between 1 and 1.125, 1.1875 between 1.125 and 1.25; so are 1.5 and 2.5 steps of 2^-9."""
    step = 2.0**-9
    kv, digests = random_pages(device, torch.float32, kv_heads=1, head_dim=4)
    kv[0, 0, 0] = 0.0
    kv[0, 0, 0, :8, 1] = torch.tensor([1.0625, 1.1875, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1])
    kv[0, 0, 0, :8, 3] = torch.tensor([2.5 * step, 1.5 * step, 0.5 * step, *[step] * 5])
    kv[0, 0, 0, 8:, 1] = torch.tensor([-1.0625, -1.1875, *[-1.1] * 6])
    kv[0, 0, 0, 8:, 3] = torch.tensor([1000.0, -449.0, *[7.0] * 6])
    build(kv, digests, ids([0], device), ids([0], device))
    expected = [[[1.0, 0.0], [1.25, 2 * step]], [[-1.25, -448.0], [-1.0, 448.0]]]
    assert digests[0, 0].tolist() == expected


@pytest.mark.parametrize(("capability", "on_gpu"), [((9, 0), FP8), ((8, 9), FP8), ((8, 6), torch.bfloat16)])
def test_a_cpu_keeps_what_it_can_multiply_and_a_gpu_8_bits_if_it_knows_them(monkeypatch, capability, on_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert digest_dtype(torch.device("cpu"), torch.bfloat16) == torch.bfloat16
    assert digest_dtype(torch.device("cuda"), torch.bfloat16) == on_gpu


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    kv, digests = random_pages(device, torch.float32)
    one = ids([1], device)
    for wrong in (
        (kv, digests[:, :2], one, one),
        (kv, digests[..., :2].contiguous(), one, one),
        (kv[..., :6].contiguous(), digests[..., :3].contiguous(), one, one),
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
    digests = torch.empty(num_places, *digest_shape(kv_heads, head_dim), dtype=FP8, device=device)
    kv[-1] = torch.randn(kv[-1].shape, device=device)
    build_digests(kv, digests, ids([num_pages - 1], device), ids([num_places - 1], device))
    assert digests[-1].float().tolist() == [expected_digest(keys) for keys in kv[-1, :, 0].tolist()]
