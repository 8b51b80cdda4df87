"""The noise on the device has the very bits of the reference."""

import torch

from minserve.kernels.gumbel import gumbel_bits, gumbel_noise, noise, noise_bits, row_keys
from minserve.kernels.lang import tl, triton


@triton.jit
def _noise_kernel(seeds, positions, bits, values, vocab, tile: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, tile)
    first, second = row_keys(tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1), tl.load(positions + row))
    tl.store(bits + row * vocab + ids, noise_bits(ids, first, second).to(tl.int64), mask=ids < vocab)
    tl.store(values + row * vocab + ids, noise(ids, first, second), mask=ids < vocab)


def test_bits_are_equal_and_noise_differs_by_the_rounding_of_logarithms(device):
    vocab = 1000
    seeds = torch.tensor([[0, 0], [1, 2], [2**32 - 1, 2**32 - 1], [0x9E3779B9, 2**31]], device=device)
    positions = torch.tensor([0, 1, 2**31 + 5, 131071], device=device)
    bits = torch.full((4, vocab), -1, device=device)
    values = torch.full((4, vocab), torch.nan, device=device)
    _noise_kernel[(4,)](seeds, positions, bits, values, vocab, tile=1024)
    ids = torch.arange(vocab, device=device)
    assert torch.equal(bits, gumbel_bits(seeds, positions, ids).long() & 0xFFFFFFFF)
    torch.testing.assert_close(values, gumbel_noise(seeds, positions, ids), rtol=1e-5, atol=1e-6)
