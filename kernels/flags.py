"""Order between streams of one GPU, by numbers in its memory.

    record(flag, number):  flag = number[0], when all is done that came before on the stream
    wait(flag, number):    what comes behind on the stream begins when flag >= number[0]

CUDA's events lie in host memory, so telling and asking go over the link, and take long while fetches fill it. These are
kernels of one warp. A recorded graph has fixed arguments, so both find their number in memory.

Before a record begins, the kernels before it have ended; it releases and the wait acquires at the scope of the GPU; and
the kernels behind the wait begin when that has ended, with caches that hold nothing older. So neither is ever launched
early (`launch_pdl`), nor lets others begin early. While it waits it is relaxed: an acquire empties its SM's L1.

A waiting warp sleeps in between, but its SM is lost to programs that need all of an SM's registers or shared memory.
"""

import torch

from minserve.kernels.lang import tl, triton


@triton.jit(debug=True)
def _record_kernel(flag, number):
    own = tl.load(number)
    before = tl.atomic_xchg(flag, own, sem="release", scope="gpu")
    tl.device_assert(before < own, "a number is recorded twice, so that a wait for it may have ended too early")


@triton.jit
def _sleep():
    tl.inline_asm_elementwise("mov.u32 $0, 0; nanosleep.u32 100;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_kernel(flag, number, sleeps: tl.constexpr):
    wanted = tl.load(number)
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < wanted:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="gpu") < wanted:
            if sleeps:
                _sleep()


def record_flag(flag: torch.Tensor, number: torch.Tensor) -> None:
    """flag, number: [1] int64 on a GPU. A flag begins with 0, and each of its records has a larger number."""
    _record_kernel[(1,)](flag, number, num_warps=1)


def wait_for_flag(flag: torch.Tensor, number: torch.Tensor) -> None:
    """The same. A record with such a number, or a larger one, has been launched before, or this never ends."""
    _wait_kernel[(1,)](flag, number, flag.device.type != "cpu", num_warps=1)
