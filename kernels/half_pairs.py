"""Pairs of numbers of float16, one in the lower bits of an int32 and one in the upper, for Triton kernels.

Arithmetic on them takes half as many instructions: of Triton's own float16 each is taken for itself. On a GPU these are
single instructions of PTX, which the interpreter has none of, so it has them in words of its own.
"""

from typing import Any

from minserve.kernels.lang import tl, triton


@triton.jit
def halves(x) -> Any:
    """(lower, upper), float16."""
    low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low, (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pair(low, high) -> Any:
    """The other way round."""
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


if hasattr(triton, "knobs") and not triton.knobs.runtime.interpret:

    @triton.jit
    def multiply_add(x, a, b) -> Any:
        """x a + b, rounded once."""
        fma: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(fma, "=r,r,r,r", [x, a, b], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def one_and_quarters(x) -> Any:
        """1 + level / 4, of levels that are in bits 8, 9 and 24, 25, whatever the other bits are."""
        choose: tl.constexpr = "lop3.b32 $0, $1, 0x03000300, 0x3C003C00, 0xEA;"  # a & b | c
        return tl.inline_asm_elementwise(choose, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def one_and_sixteenths(x) -> Any:
        """1 + level / 16, of levels that are in bits 6, 7 and 22, 23."""
        choose: tl.constexpr = "lop3.b32 $0, $1, 0x00C000C0, 0x3C003C00, 0xEA;"
        return tl.inline_asm_elementwise(choose, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def pair_of_e4m3(x, odd: tl.constexpr) -> Any:
        """Bytes 0 and 2 of an int32, or 1 and 3, which are numbers of E4M3."""
        choose: tl.constexpr = "{.reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, " + ("0x31" if odd else "0x20")
        convert: tl.constexpr = "; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l;}"
        return tl.inline_asm_elementwise(choose + convert, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)

else:

    @triton.jit
    def multiply_add(x, a, b) -> Any:
        """The interpreter's, which rounds twice. a and b may be constants."""
        a, c = halves(a + 0 * x)
        b, d = halves(b + 0 * x)
        x, y = halves(x)
        return pair(x * a + b, y * c + d)

    @triton.jit
    def one_and_quarters(x) -> Any:
        """The interpreter's."""
        return (x & 0x03000300) | 0x3C003C00

    @triton.jit
    def one_and_sixteenths(x) -> Any:
        """The interpreter's."""
        return (x & 0x00C000C0) | 0x3C003C00

    @triton.jit
    def pair_of_e4m3(x, odd: tl.constexpr) -> Any:
        """The interpreter's."""
        low = ((x >> 8 * odd) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return pair(low, ((x >> 8 * odd + 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16))
