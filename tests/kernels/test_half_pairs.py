"""Pairs of float16 in 32 bits, one by one against torch: on a GPU these are instructions that nothing else looks at."""

import pytest
import torch

from minserve.kernels.half_pairs import multiply_add, one_and_quarters, one_and_sixteenths, pair_of_e4m3
from minserve.kernels.lang import tl, triton

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


@triton.jit
def _all_kernel(x, a, b, out, size: tl.constexpr):
    number = tl.arange(0, size)
    word = tl.load(x + number)
    tl.store(out + number, one_and_quarters(word))
    tl.store(out + size + number, one_and_sixteenths(word))
    tl.store(out + 2 * size + number, pair_of_e4m3(word, 0))
    tl.store(out + 3 * size + number, pair_of_e4m3(word, 1))
    tl.store(out + 4 * size + number, multiply_add(word, tl.load(a + number), tl.load(b + number)))


def of_all(x, a, b):
    """[5, size] int32."""
    out = torch.empty(5, len(x), dtype=torch.int32, device=x.device)
    _all_kernel[(1,)](x, a, b, out, len(x))
    return out


def pairs(numbers):
    """[n] int32 of [n, 2] numbers that float16 has."""
    return numbers.half().contiguous().view(torch.int32)[:, 0]


def floats(words):
    return words[:, None].contiguous().view(torch.float16).float()


def test_levels_become_numbers_whatever_stands_beside_them(device):
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (256,), device=device).int()
    quarters, sixteenths, *_ = of_all(words, words * 0, words * 0)
    for found, shift, part in ((quarters, 8, 4), (sixteenths, 6, 16)):
        levels = torch.stack([words >> shift & 3, words >> shift + 16 & 3], dim=1)
        assert torch.equal(floats(found), 1 + levels / part)


def test_every_number_of_8_bits_is_itself_in_16(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[codes & 127 < 127]  # but for those that are none
    codes = torch.cat((codes, codes[:2]))
    words = torch.stack((codes, codes.flip(0), codes.roll(1), codes.roll(2)), dim=1).view(torch.int32)[:, 0]
    even, odd = of_all(words, words * 0, words * 0)[2:4]
    expected = torch.stack((codes, codes.flip(0), codes.roll(1), codes.roll(2)), dim=1)
    expected = expected.view(torch.float8_e4m3fn).float()
    assert torch.equal(floats(even), expected[:, [0, 2]])
    assert torch.equal(floats(odd), expected[:, [1, 3]])


def test_products_and_sums_are_those_of_both_numbers(device):
    torch.manual_seed(1)
    x, a, b = (torch.randint(-40, 41, (3, 128, 2), device=device) / 8).unbind()
    found = of_all(*map(pairs, (x, a, b)))[4]
    assert torch.equal(floats(found), (x * a + b).half().float())
