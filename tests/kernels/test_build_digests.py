"""Digests are the extremes of the slow coordinates of a page's keys, in 8 bits, and each key's levels between these, in
2, and stand where they are to."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import (
    Digests,
    build_digests,
    build_digests_reference,
    build_digests_triton,
    digest_dtype,
    digest_shapes,
    pack_levels,
    slow_coordinates,
)
from minserve.kernels.fp8 import FP8
from minserve.kernels.rope import apply_rope, gather_rope

from .working_sets import E4M3, expected_digest, slow, to_e4m3, unpack_levels

BOTH = pytest.mark.parametrize("build", [build_digests_reference, build_digests_triton])
POISON = 0xA5
WIDE_OR_NOT = pytest.mark.parametrize("in_8_bits", [False, True], ids=["wide", "fp8"])


def random_pages(device, dtype, in_8_bits=False, *, pages=7, kv_heads=3, head_dim=8):
    kv = torch.randn(pages, kv_heads, 2, BLOCK_SIZE, head_dim, device=device).to(dtype)
    return kv, unwritten(9, kv_heads, head_dim, device, FP8 if in_8_bits else dtype)


def unwritten(places, kv_heads, head_dim, device, dtype):
    extremes, keys = digest_shapes(kv_heads, head_dim)
    extremes = torch.full((places, *extremes), torch.nan, device=device).to(dtype)
    return Digests(extremes, torch.full((places, *keys), POISON, dtype=torch.uint8, device=device))


def key_pages(keys):
    """Pages [n, heads, 2, 16, 2 * slow] of slow coordinates of keys, [n, heads, 16, slow]; no numbers elsewhere."""
    pages, heads, _, slow_of_head = keys.shape
    kv = torch.full((pages, heads, 2, BLOCK_SIZE, 2 * slow_of_head), torch.nan, device=keys.device)
    kv[:, :, 0, :, slow(2 * slow_of_head)] = keys
    return kv


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("head_dim", [4, 8, 12, 36])
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
def test_places_hold_extremes_and_levels_of_keys_and_other_places_stay(
    build, in_8_bits, head_dim, pages, places, device, dtype
):
    kv, digests = random_pages(device, dtype, in_8_bits, head_dim=head_dim)
    build(kv, digests, ids(pages, device), ids(places, device))
    source = dict(zip(places, pages))
    for place, (extremes, keys) in enumerate(zip(digests.extremes.float(), digests.keys)):
        if place in source:
            expected = [expected_digest(head) for head in kv[source[place], :, 0].tolist()]
            assert extremes.tolist() == [digest.extremes for digest in expected]
            assert unpack_levels(keys, head_dim // 2).tolist() == [digest.levels for digest in expected]
        else:
            assert bool(extremes.isnan().all()), "written, and nobody asked for it"
            assert bool((keys == POISON).all()), "written, and nobody asked for it"


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("head_dim", [4, 64, 96, 128])
def test_every_key_lies_between_the_two_but_for_the_rounding(build, in_8_bits, head_dim, device, dtype):
    kv, digests = random_pages(device, dtype, in_8_bits, head_dim=head_dim)
    build(kv, digests, ids(range(7), device), ids(range(7), device))
    keys = kv[:, :, 0, :, slow(head_dim)].float()
    least, most = digests.extremes[:7].float().unbind(dim=2)
    for found, extreme in zip((least, most), (keys.amin(2), keys.amax(2))):
        assert bool(((found - extreme).abs() <= (extreme.abs() / 16).clamp_min(2**-10)).all())
    assert bool((least <= most).all())


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("head_dim", [4, 64, 96, 128])
def test_a_level_is_within_a_sixth_of_the_span_of_a_key_that_lies_in_it(build, in_8_bits, head_dim, device, dtype):
    kv, digests = random_pages(device, dtype, in_8_bits, head_dim=head_dim)
    build(kv, digests, ids(range(7), device), ids(range(7), device))
    keys = kv[:, :, 0, :, slow(head_dim)].float()
    least, most = digests.extremes[:7].float().unsqueeze(3).unbind(dim=2)
    near = least + (most - least) * unpack_levels(digests.keys[:7], head_dim // 2) / 3
    assert bool(((near - keys.clamp(least, most)).abs() <= (most - least) / 6 + 1e-5).all())


@BOTH
def test_a_key_half_way_between_two_levels_has_the_lower_one(build, device):
    """From 0 to 3 and to 0.75, which E4M3 knows; and where all keys are the same there is one level alone."""
    numbers = torch.tensor([0.0, 3.0, 0.5, 0.5 + 2**-24, 0.5 - 2**-25, 1.5, 1.5 + 2**-23, 2.5, 2.5 + 2**-22, 1.0, 2.0])
    numbers = torch.cat((numbers, numbers.new_zeros(5)))
    keys = torch.stack((numbers, numbers / 4, numbers.new_full((BLOCK_SIZE,), 2.0), -numbers), dim=1)[None, None]
    digests = unwritten(1, 1, 8, device, torch.float32)
    build(key_pages(keys.to(device)), digests, ids([0], device), ids([0], device))
    levels = unpack_levels(digests.keys, 4)[0, 0].T.tolist()
    assert levels[0] == levels[1] == [0, 3, 0, 1, 0, 1, 2, 2, 3, 1, 2, *[0] * 5]
    assert levels[2] == [0] * BLOCK_SIZE
    assert levels[3] == [3, 0, 2, 2, 2, 1, 1, 0, 0, 2, 1, *[3] * 5]  # 2.5 + 2^-25 is 2.5 in float32


@BOTH
@WIDE_OR_NOT
def test_levels_are_those_between_the_rounded_extremes(build, in_8_bits, device):
    """1.06 becomes 1, and 9.6 becomes 10: a third of the way is 4, not 3.9. What is beyond 448 has the last level."""
    keys = torch.zeros(1, 1, BLOCK_SIZE, 3)
    keys[..., 0] = torch.tensor([1.06, 9.6, 2.49, 2.51, 5.49, 5.51, 8.49, 8.51, *[1.06] * 8])
    keys[..., 1] = torch.tensor([torch.inf, -torch.inf, -1e30, 1e30, 300.0, 298.0, -300.0, -298.0, *[448.0] * 8])
    keys[..., 2] = 1.06
    digests = unwritten(1, 1, 12, device, FP8 if in_8_bits else torch.float32)
    kv = torch.zeros(1, 1, 2, BLOCK_SIZE, 12, device=device)
    kv[:, :, 0, :, slow(12)[:3]] = keys.to(device)
    build(kv, digests, ids([0], device), ids([0], device))
    assert digests.extremes[0, 0, :, :3].tolist() == [[1.0, -448.0, 1.0], [10.0, 448.0, 1.0]]
    levels = unpack_levels(digests.keys, 6)[0, 0].T.tolist()
    assert levels[0] == [0, 3, 0, 1, 1, 2, 2, 3, *[0] * 8]
    assert levels[1] == [3, 0, 0, 3, 3, 2, 0, 1, *[3] * 8]
    assert levels[2] == [3] * BLOCK_SIZE, "all keys are above both"


@BOTH
@pytest.mark.parametrize("head_dim", [4, 12, 20, 128])
def test_levels_and_extremes_are_the_reference_s_bit_for_bit(build, head_dim, device, dtype):
    """Among numbers at bounds of levels, too; and what no coordinate needs of a byte is 0."""
    kv, digests = random_pages(device, dtype, head_dim=head_dim)
    kv[::2] = (kv[::2] * 4).round() / 4
    expected = Digests(*(table.clone() for table in digests))
    for run, target in ((build, digests), (build_digests_reference, expected)):
        run(kv, target, ids(range(7), device), ids(range(7), device))
    assert torch.equal(digests.keys, expected.keys)
    assert torch.equal(digests.extremes[:7], expected.extremes[:7])
    assert torch.equal(pack_levels(unpack_levels(digests.keys[:7], head_dim // 2)), digests.keys[:7])


@pytest.mark.parametrize("size", [1, 2, 4, 6, 10, 64])
def test_levels_are_packed_a_quarter_of_the_coordinates_in_the_same_bits(size, device):
    levels = torch.randint(0, 4, (3, 5, size), dtype=torch.uint8, device=device)
    packed = pack_levels(levels)
    assert packed.shape == (3, 5, -(-size // 4))
    assert torch.equal(unpack_levels(packed, size), levels)


@BOTH
def test_only_keys_and_of_these_only_the_slow_coordinates_count(build, device):
    kv, digests = random_pages(device, torch.float32)
    again = unwritten(9, 3, 8, device, torch.float32)
    for pages, target in ((kv, digests), (key_pages(kv[:, :, 0, :, slow(8)]), again)):
        build(pages, target, ids(range(7), device), ids(range(7), device))
    assert torch.equal(digests.extremes[:7], again.extremes[:7])
    assert torch.equal(digests.keys, again.keys)


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


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in the interpreter
@BOTH
@WIDE_OR_NOT
def test_numbers_are_rounded_to_the_nearest_of_8_bits_and_never_beyond_the_largest(build, in_8_bits, device):
    """Each number stands in all tokens of a block, so that it is both extremes. Infinity is there, too."""
    numbers = interesting_numbers()
    heads, slow_of_head = 4, 256
    pages = -(-len(numbers) // (heads * slow_of_head))
    numbers = torch.cat((numbers, numbers.new_zeros(pages * heads * slow_of_head - len(numbers))))
    numbers = numbers.view(pages, heads, slow_of_head)
    kv = key_pages(numbers[:, :, None].expand(-1, -1, BLOCK_SIZE, -1).to(device))
    digests = unwritten(pages, heads, 2 * slow_of_head, device, FP8 if in_8_bits else torch.float32)
    build(kv, digests, ids(range(pages), device), ids(range(pages), device))
    least, most = digests.extremes.float().cpu().unbind(dim=2)
    expected = numbers.clamp(-448, 448).to(FP8).float()
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
    keys = torch.empty(1, 1, BLOCK_SIZE, 4)
    keys[..., 0] = torch.tensor([1.0625, 1.1875, *[1.1] * 14])
    keys[..., 1] = torch.tensor([2.5 * step, 1.5 * step, 0.5 * step, *[step] * 13])
    keys[..., 2] = torch.tensor([-1.0625, -1.1875, *[-1.1] * 14])
    keys[..., 3] = torch.tensor([1000.0, -449.0, *[7.0] * 14])
    digests = unwritten(1, 1, 8, device, torch.float32)
    build(key_pages(keys.to(device)), digests, ids([0], device), ids([0], device))
    assert digests.extremes[0, 0].tolist() == [[1.0, 0.0, -1.25, -448.0], [1.25, 2 * step, -1.0, 448.0]]


@pytest.mark.parametrize(("capability", "on_gpu"), [((9, 0), FP8), ((8, 9), FP8), ((8, 6), torch.bfloat16)])
def test_a_cpu_keeps_what_it_can_multiply_and_a_gpu_8_bits_if_it_knows_them(monkeypatch, capability, on_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert digest_dtype(torch.device("cpu"), torch.bfloat16) == torch.bfloat16
    assert digest_dtype(torch.device("cuda"), torch.bfloat16) == on_gpu


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    kv, digests = random_pages(device, torch.float32)
    extremes, keys = digests
    one = ids([1], device)
    for wrong in (
        (kv, Digests(extremes[:, :2], keys), one, one),
        (kv, Digests(extremes, keys[:, :2]), one, one),
        (kv, Digests(extremes[..., :2].contiguous(), keys), one, one),
        (kv, Digests(extremes, keys.repeat(1, 1, 1, 2)), one, one),
        (kv, Digests(extremes, keys[:8]), one, one),
        (kv, Digests(extremes, keys.view(torch.int8)), one, one),
        (kv[..., :6].contiguous(), Digests(extremes[..., :3].contiguous(), keys), one, one),
        (kv, digests, one.int(), one),
        (kv, digests, one, ids([1, 2], device)),
    ):
        with pytest.raises(AssertionError):
            build_digests(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_and_digests_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num_pages, num_places = (2**31 // (kv_heads * size) + 2 for size in (2 * BLOCK_SIZE * head_dim, head_dim))
    kv = torch.empty(num_pages, kv_heads, 2, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=device)
    digests = Digests(
        *(
            torch.empty(num_places, *shape, dtype=torch.uint8, device=device)
            for shape in digest_shapes(kv_heads, head_dim)
        )
    )
    digests = digests._replace(extremes=digests.extremes.view(FP8))
    kv[-1] = torch.randn(kv[-1].shape, device=device)
    build_digests(kv, digests, ids([num_pages - 1], device), ids([num_places - 1], device))
    expected = [expected_digest(keys) for keys in kv[-1, :, 0].tolist()]
    assert digests.extremes[-1].float().tolist() == [digest.extremes for digest in expected]
    assert unpack_levels(digests.keys[-1], head_dim // 2).tolist() == [digest.levels for digest in expected]
