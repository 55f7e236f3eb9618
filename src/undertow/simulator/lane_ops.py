"""What lane-wise vector instructions compute: one row an opcode, `result <- sources` types and a numpy function.

Types: u32 i32 f32, u16 i16 f16 (low half unless op_sel says otherwise), u64 i64 f64 (register pairs). Shift counts are
taken modulo the width, as the hardware does. Transcendentals are numpy's: right to about 1 ulp, not bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .state import f16, f32, f64, flush_denormals, i16, i32, i64, u16, u32, u64


@dataclass(frozen=True, slots=True)
class LaneOp:
    """One row: types, function, and whether the destination is also the last source."""

    result: str
    sources: tuple[str, ...]
    function: Callable[..., np.ndarray]
    accumulates: bool = False
    keeps_high: bool = False  # a 16-bit result that leaves the other half of the register alone


def shift_left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """32-bit shift, count modulo 32."""
    return a << (n & u32(31))


def shift_right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """32-bit shift, logical or arithmetic by the type of `a`, count modulo 32."""
    return a >> (n & u32(31)).astype(a.dtype)


def field(a: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Unsigned bit field; start and width modulo 32."""
    return (a >> (start & u32(31))) & ((u32(1) << (width & u32(31))) - u32(1))


def signed_field(a: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Signed bit field of a u32; start and width modulo 32, width 0 gives 0."""
    width = width & u32(31)
    raw = (a.view(i32) >> (start & u32(31)).astype(i32)).view(u32) & ((u32(1) << width) - u32(1))
    sign = (u32(1) << width) >> u32(1)
    return (raw ^ sign) - sign


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 fused multiply-add: the product is exact in f64; the sum is rounded to f64, then to f32."""
    wide = np.multiply(a, b, dtype=f64)
    return (wide + c).astype(f32)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f16 fused multiply-add through f64."""
    return (np.multiply(a, b, dtype=f64) + c).astype(f16)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f64 multiply-add in extended precision where the platform has it."""
    wide = np.multiply(a, b, dtype=np.longdouble)
    return (wide + c).astype(f64)


def legacy_multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiplication where 0 times anything is 0."""
    return np.where((a == 0) | (b == 0), f32(0), a * b)


def permute_bytes(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """v_perm_b32: each result byte picks one of the 8 bytes of {a, b}, a sign fill, 0 or 0xff."""
    source = (a.astype(u64) << u64(32)) | b.astype(u64)
    out = u32(0)
    for position in range(4):
        code = (select >> u32(8 * position)) & u32(0xFF)
        byte = (source >> (np.minimum(code, u32(7)).astype(u64) * u64(8))).astype(u32) & u32(0xFF)
        if (code > u32(7)).any():
            signs = np.clip(code, 8, 11).astype(u64) * u64(16) - u64(113)  # bit 7 of bytes 1, 3, 5, 7
            sign = ((source >> signs) & u64(1)).astype(u32) * u32(0xFF)
            byte = np.where(code > u32(7), sign, byte)
            byte = np.where(code == u32(12), u32(0), np.where(code > u32(12), u32(0xFF), byte))
        out = out | (byte << u32(8 * position))
    return out


def align_bits(a: np.ndarray, b: np.ndarray, n: np.ndarray) -> np.ndarray:
    """v_alignbit_b32: 32 bits of {a, b} from bit n."""
    return (((a.astype(u64) << u64(32)) | b) >> (n & u32(31)).astype(u64)).astype(u32)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    """v_bfrev_b32."""
    for step, keep in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = ((a >> u32(step)) & u32(keep)) | ((a & u32(keep)) << u32(step))
    return a


def count_ones(a: np.ndarray) -> np.ndarray:
    """Population count of a u32."""
    a = a - ((a >> u32(1)) & u32(0x55555555))
    a = (a & u32(0x33333333)) + ((a >> u32(2)) & u32(0x33333333))
    return (((a + (a >> u32(4))) & u32(0x0F0F0F0F)) * u32(0x01010101)) >> u32(24)


def first_high(a: np.ndarray) -> np.ndarray:
    """Zeros above the highest set bit, all ones for 0 (v_ffbh_u32)."""
    exponent = np.frexp(a.astype(f64))[1]
    return np.where(a == 0, i32(-1), i32(32) - exponent.astype(i32)).astype(i32).view(u32)


def first_low(a: np.ndarray) -> np.ndarray:
    """Position of the lowest set bit, all ones for 0 (v_ffbl_b32)."""
    lowest = a & (~a + u32(1))
    return np.where(a == 0, u32(0xFFFFFFFF), u32(31) - first_high(lowest)).astype(u32)


def to_integer(value: np.ndarray, dtype: type) -> np.ndarray:
    """Float to integer: toward zero, saturating, NaN to 0."""
    limits = np.iinfo(dtype)
    wide = np.nan_to_num(np.trunc(value.astype(f64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.clip(wide, limits.min, limits.max).astype(i64).astype(dtype)


def bf16_bits(a: np.ndarray) -> np.ndarray:
    """f32 to bf16 bits in a u32, nearest even, NaN kept quiet."""
    bits = a.view(u32)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return np.where(np.isnan(a), (bits >> u32(16)) | u32(0x40), rounded)


def f16_toward_zero(a: np.ndarray) -> np.ndarray:
    """f32 to f16, rounded toward zero."""
    near = a.astype(f16)
    past = np.abs(near.astype(f32)) > np.abs(a)
    past &= ~np.isinf(a)
    return (near.view(u16) - past.astype(u16)).view(f16)


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit values into a u32."""
    return low.view(u16).astype(u32) | (high.view(u16).astype(u32) << u32(16))


def _reciprocal(a: np.ndarray) -> np.ndarray:
    return flush_denormals(f32(1) / flush_denormals(np.asarray(a)))


def _exp2(a: np.ndarray) -> np.ndarray:
    return flush_denormals(np.exp2(a))


def _log2(a: np.ndarray) -> np.ndarray:
    return np.log2(flush_denormals(np.asarray(a)))


def _reciprocal_root(a: np.ndarray) -> np.ndarray:
    return f32(1) / np.sqrt(flush_denormals(np.asarray(a)))


def _turns(function: Callable) -> Callable:
    return lambda a: function(np.multiply(a, 2 * np.pi, dtype=f64)).astype(f32)


def _mantissa(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def _exponent(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32)


def _ldexp(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    return np.ldexp(a, np.clip(n, -2200, 2200)).astype(a.dtype)


def _median(low: Callable, high: Callable) -> Callable:
    return lambda a, b, c: high(low(a, b), low(high(a, b), c))


def _median_float(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """v_med3_f32: with a NaN among the sources, their minimum."""
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some_nan, np.fmin(np.fmin(a, b), c), _median(np.fmin, np.fmax)(a, b, c))


def _u24(a: np.ndarray) -> np.ndarray:
    return a & u32(0xFFFFFF)


def _i24(a: np.ndarray) -> np.ndarray:
    return (a << i32(8)) >> i32(8)


def _divide_fixup(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> np.ndarray:
    """v_div_fixup_f32: the special cases of numerator / denominator around the computed quotient.

    A NaN quotient of finite numbers is an overflow of the refinement steps, and becomes infinity.
    """
    sign = np.signbit(denominator) ^ np.signbit(numerator)
    signed = lambda magnitude: np.where(sign, -magnitude, magnitude).astype(f32)
    zero_d, zero_n = denominator == 0, numerator == 0
    inf_d, inf_n = np.isinf(denominator), np.isinf(numerator)
    out = signed(np.where(np.isnan(quotient), f32(np.inf), np.abs(quotient)))
    out = np.where(inf_d | zero_n, signed(np.broadcast_to(f32(0), out.shape)), out)
    out = np.where(zero_d | inf_n, signed(np.broadcast_to(f32(np.inf), out.shape)), out)
    out = np.where((zero_d & zero_n) | (inf_d & inf_n), f32(np.nan), out)
    return np.where(np.isnan(numerator), numerator, np.where(np.isnan(denominator), denominator, out)).astype(f32)


def _dot2(a_low: np.ndarray, a_high: np.ndarray, b_low: np.ndarray, b_high: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (np.multiply(a_low, b_low, dtype=f32) + np.multiply(a_high, b_high, dtype=f32) + c).astype(f32)


def _op(signature: str, function: Callable, **flags: bool) -> LaneOp:
    result, _, sources = signature.partition(" <- ")
    return LaneOp(result, tuple(sources.split()), function, **flags)


def _three(name: Callable) -> Callable:
    return lambda a, b, c: name(name(a, b), c)


def _mask_of(width: np.ndarray, start: np.ndarray) -> np.ndarray:
    return ((u32(1) << (width & u32(31))) - u32(1)) << (start & u32(31))


def _high32(product: np.ndarray) -> np.ndarray:
    return (product >> product.dtype.type(32)).astype(u32)


F2, F3, U1, U2, U3, I2 = (
    "f32 <- f32 f32",
    "f32 <- f32 f32 f32",
    "u32 <- u32",
    "u32 <- u32 u32",
    "u32 <- u32 u32 u32",
    "i32 <- i32 i32",
)
H1, H2, H3, W2 = "f16 <- f16", "f16 <- f16 f16", "f16 <- f16 f16 f16", "u16 <- u16 u16"

OPS: dict[str, LaneOp] = {
    # f32
    "v_add_f32": _op(F2, np.add),
    "v_sub_f32": _op(F2, np.subtract),
    "v_subrev_f32": _op(F2, lambda a, b: b - a),
    "v_mul_f32": _op(F2, np.multiply),
    "v_mul_legacy_f32": _op(F2, legacy_multiply),
    "v_max_f32": _op(F2, np.fmax),
    "v_min_f32": _op(F2, np.fmin),
    "v_max3_f32": _op(F3, _three(np.fmax)),
    "v_min3_f32": _op(F3, _three(np.fmin)),
    "v_med3_f32": _op(F3, _median_float),
    "v_maximum3_f32": _op(F3, _three(np.maximum)),
    "v_minimum3_f32": _op(F3, _three(np.minimum)),
    "v_fma_f32": _op(F3, fma),
    "v_fmac_f32": _op(F3, fma, accumulates=True),
    "v_fmaak_f32": _op(F3, fma),
    "v_fmamk_f32": _op(F3, lambda a, k, b: fma(a, k, b)),
    "v_mac_f32": _op(F3, lambda a, b, c: a * b + c, accumulates=True),
    "v_mad_f32": _op(F3, lambda a, b, c: a * b + c),
    "v_div_fixup_f32": _op(F3, _divide_fixup),
    "v_exp_f32": _op("f32 <- f32", _exp2),
    "v_log_f32": _op("f32 <- f32", _log2),
    "v_rcp_f32": _op("f32 <- f32", _reciprocal),
    "v_rcp_iflag_f32": _op("f32 <- f32", _reciprocal),
    "v_rsq_f32": _op("f32 <- f32", _reciprocal_root),
    "v_sqrt_f32": _op("f32 <- f32", np.sqrt),
    "v_sin_f32": _op("f32 <- f32", _turns(np.sin)),
    "v_cos_f32": _op("f32 <- f32", _turns(np.cos)),
    "v_floor_f32": _op("f32 <- f32", np.floor),
    "v_ceil_f32": _op("f32 <- f32", np.ceil),
    "v_trunc_f32": _op("f32 <- f32", np.trunc),
    "v_rndne_f32": _op("f32 <- f32", np.rint),
    "v_fract_f32": _op("f32 <- f32", lambda a: np.minimum(a - np.floor(a), f32(0.99999994))),
    "v_frexp_mant_f32": _op("f32 <- f32", _mantissa),
    "v_frexp_exp_i32_f32": _op("i32 <- f32", _exponent),
    "v_ldexp_f32": _op("f32 <- f32 i32", _ldexp),
    # f64
    "v_add_f64": _op("f64 <- f64 f64", np.add),
    "v_mul_f64": _op("f64 <- f64 f64", np.multiply),
    "v_fma_f64": _op("f64 <- f64 f64 f64", fma64),
    "v_fmac_f64": _op("f64 <- f64 f64 f64", fma64, accumulates=True),
    "v_max_f64": _op("f64 <- f64 f64", np.fmax),
    "v_min_f64": _op("f64 <- f64 f64", np.fmin),
    "v_ldexp_f64": _op("f64 <- f64 i32", _ldexp),
    "v_rcp_f64": _op("f64 <- f64", lambda a: 1 / a),
    "v_rndne_f64": _op("f64 <- f64", np.rint),
    "v_floor_f64": _op("f64 <- f64", np.floor),
    # f16
    "v_add_f16": _op(H2, np.add),
    "v_sub_f16": _op(H2, np.subtract),
    "v_subrev_f16": _op(H2, lambda a, b: b - a),
    "v_mul_f16": _op(H2, np.multiply),
    "v_max_f16": _op(H2, np.fmax),
    "v_min_f16": _op(H2, np.fmin),
    "v_fma_f16": _op(H3, fma16, keeps_high=True),
    "v_fmac_f16": _op(H3, fma16, accumulates=True),
    "v_max3_f16": _op(H3, _three(np.fmax), keeps_high=True),
    "v_min3_f16": _op(H3, _three(np.fmin), keeps_high=True),
    "v_rcp_f16": _op(H1, lambda a: (f32(1) / a.astype(f32)).astype(f16)),
    "v_sqrt_f16": _op(H1, np.sqrt),
    "v_exp_f16": _op(H1, np.exp2),
    # conversions
    "v_pack_b32_f16": _op("u32 <- f16 f16", pack),
    "v_floor_f16": _op(H1, np.floor),
    "v_ceil_f16": _op(H1, np.ceil),
    "v_trunc_f16": _op(H1, np.trunc),
    "v_rndne_f16": _op(H1, np.rint),
    "v_log_f16": _op(H1, lambda a: np.log2(a.astype(f32)).astype(f16)),
    "v_rsq_f16": _op(H1, lambda a: (f32(1) / np.sqrt(a.astype(f32))).astype(f16)),
    "v_med3_f16": _op(H3, _median_float, keeps_high=True),
    "v_cvt_u16_f16": _op("u16 <- f16", lambda a: to_integer(a, u16)),
    "v_cvt_i16_f16": _op("i16 <- f16", lambda a: to_integer(a, i16)),
    "v_ceil_f64": _op("f64 <- f64", np.ceil),
    "v_trunc_f64": _op("f64 <- f64", np.trunc),
    "v_sqrt_f64": _op("f64 <- f64", np.sqrt),
    "v_rsq_f64": _op("f64 <- f64", lambda a: 1 / np.sqrt(a)),
    "v_frexp_mant_f64": _op("f64 <- f64", _mantissa),
    "v_frexp_exp_i32_f64": _op("i32 <- f64", _exponent),
    "v_cvt_pk_i16_i32": _op(
        "u32 <- i32 i32",
        lambda a, b: pack(np.clip(a, -32768, 32767).astype(i16), np.clip(b, -32768, 32767).astype(i16)),
    ),
    "v_cvt_pk_u16_u32": _op(
        "u32 <- u32 u32",
        lambda a, b: pack(np.minimum(a, u32(65535)).astype(u16), np.minimum(b, u32(65535)).astype(u16)),
    ),
    "v_prng_b32": _op(U1, lambda a: (a << u32(1)) ^ ((a >> u32(31)) * u32(197))),
    "v_cvt_f32_u32": _op("f32 <- u32", lambda a: a.astype(f32)),
    "v_cvt_f32_i32": _op("f32 <- i32", lambda a: a.astype(f32)),
    "v_cvt_u32_f32": _op("u32 <- f32", lambda a: to_integer(a, u32)),
    "v_cvt_i32_f32": _op("i32 <- f32", lambda a: to_integer(a, i32)),
    "v_cvt_f16_f32": _op("f16 <- f32", lambda a: a.astype(f16)),
    "v_cvt_f32_f16": _op("f32 <- f16", lambda a: a.astype(f32)),
    "v_cvt_f64_f32": _op("f64 <- f32", lambda a: a.astype(f64)),
    "v_cvt_f32_f64": _op("f32 <- f64", lambda a: a.astype(f32)),
    "v_cvt_f64_i32": _op("f64 <- i32", lambda a: a.astype(f64)),
    "v_cvt_f64_u32": _op("f64 <- u32", lambda a: a.astype(f64)),
    "v_cvt_i32_f64": _op("i32 <- f64", lambda a: to_integer(a, i32)),
    "v_cvt_u32_f64": _op("u32 <- f64", lambda a: to_integer(a, u32)),
    "v_cvt_f16_u16": _op("f16 <- u16", lambda a: a.astype(f16)),
    "v_cvt_f16_i16": _op("f16 <- i16", lambda a: a.astype(f16)),
    "v_cvt_pk_bf16_f32": _op("u32 <- f32 f32", lambda a, b: bf16_bits(a) | (bf16_bits(b) << u32(16))),
    "v_cvt_pk_f16_f32": _op("u32 <- f32 f32", lambda a, b: pack(a.astype(f16), b.astype(f16))),
    "v_cvt_pkrtz_f16_f32": _op("u32 <- f32 f32", lambda a, b: pack(f16_toward_zero(a), f16_toward_zero(b))),
    "v_cvt_f32_bf16": _op("f32 <- bf16", lambda a: a),
    # bits
    "v_mov_b32": _op(U1, lambda a: a),
    "v_accvgpr_read_b32": _op(U1, lambda a: a),
    "v_accvgpr_write_b32": _op(U1, lambda a: a),
    "v_accvgpr_mov_b32": _op(U1, lambda a: a),
    "v_mov_b64": _op("u64 <- u64", lambda a: a),
    "v_not_b32": _op(U1, np.invert),
    "v_bfrev_b32": _op(U1, reverse_bits),
    "v_ffbh_u32": _op(U1, first_high),
    "v_ffbl_b32": _op(U1, first_low),
    "v_and_b32": _op(U2, np.bitwise_and),
    "v_or_b32": _op(U2, np.bitwise_or),
    "v_xor_b32": _op(U2, np.bitwise_xor),
    "v_xnor_b32": _op(U2, lambda a, b: ~(a ^ b)),
    "v_bfm_b32": _op(U2, _mask_of),
    "v_bcnt_u32_b32": _op(U2, lambda a, b: count_ones(a) + b),
    "v_lshlrev_b32": _op(U2, lambda n, a: shift_left(a, n)),
    "v_lshrrev_b32": _op(U2, lambda n, a: shift_right(a, n)),
    "v_ashrrev_i32": _op("i32 <- u32 i32", lambda n, a: shift_right(a, n)),
    "v_lshlrev_b64": _op("u64 <- u32 u64", lambda n, a: a << (n & u32(63)).astype(u64)),
    "v_lshrrev_b64": _op("u64 <- u32 u64", lambda n, a: a >> (n & u32(63)).astype(u64)),
    "v_ashrrev_i64": _op("i64 <- u32 i64", lambda n, a: a >> (n & u32(63)).astype(i64)),
    "v_and_or_b32": _op(U3, lambda a, b, c: (a & b) | c),
    "v_or3_b32": _op(U3, lambda a, b, c: a | b | c),
    "v_lshl_or_b32": _op(U3, lambda a, n, c: shift_left(a, n) | c),
    "v_bfi_b32": _op(U3, lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": _op(U3, field),
    "v_bfe_i32": _op(U3, signed_field),
    "v_perm_b32": _op(U3, permute_bytes),
    "v_alignbit_b32": _op(U3, align_bits),
    "v_alignbyte_b32": _op(U3, lambda a, b, n: align_bits(a, b, (n & u32(3)) * u32(8))),
    # integers
    "v_add_u32": _op(U2, np.add),
    "v_sub_u32": _op(U2, np.subtract),
    "v_subrev_u32": _op(U2, lambda a, b: b - a),
    "v_add_i32": _op(U2, np.add),
    "v_sub_i32": _op(U2, np.subtract),
    "v_add3_u32": _op(U3, lambda a, b, c: a + b + c),
    "v_xad_u32": _op(U3, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": _op(U3, lambda a, n, c: shift_left(a, n) + c),
    "v_add_lshl_u32": _op(U3, lambda a, b, n: shift_left(a + b, n)),
    "v_lshl_add_u64": _op("u64 <- u64 u32 u64", lambda a, n, c: (a << (n & u32(7)).astype(u64)) + c),
    "v_mul_lo_u32": _op(U2, np.multiply),
    "v_mul_hi_u32": _op(U2, lambda a, b: _high32(a.astype(u64) * b.astype(u64))),
    "v_mul_hi_i32": _op("u32 <- i32 i32", lambda a, b: _high32(a.astype(i64) * b.astype(i64))),
    "v_mul_u32_u24": _op(U2, lambda a, b: _u24(a) * _u24(b)),
    "v_mul_hi_u32_u24": _op(U2, lambda a, b: _high32(_u24(a).astype(u64) * _u24(b))),
    "v_mul_i32_i24": _op(I2, lambda a, b: _i24(a) * _i24(b)),
    "v_mad_u32_u24": _op(U3, lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_i32_i24": _op("i32 <- i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_max_i32": _op(I2, np.maximum),
    "v_min_i32": _op(I2, np.minimum),
    "v_max_u32": _op(U2, np.maximum),
    "v_min_u32": _op(U2, np.minimum),
    "v_max3_i32": _op("i32 <- i32 i32 i32", _three(np.maximum)),
    "v_min3_i32": _op("i32 <- i32 i32 i32", _three(np.minimum)),
    "v_max3_u32": _op(U3, _three(np.maximum)),
    "v_min3_u32": _op(U3, _three(np.minimum)),
    "v_med3_i32": _op("i32 <- i32 i32 i32", _median(np.minimum, np.maximum)),
    "v_med3_u32": _op(U3, _median(np.minimum, np.maximum)),
    # 16-bit integers: gfx9 zeroes the high half of the destination
    "v_add_u16": _op(W2, np.add),
    "v_sub_u16": _op(W2, np.subtract),
    "v_subrev_u16": _op(W2, lambda a, b: b - a),
    "v_mul_lo_u16": _op(W2, np.multiply),
    "v_lshlrev_b16": _op(W2, lambda n, a: a << (n & u16(15))),
    "v_lshrrev_b16": _op(W2, lambda n, a: a >> (n & u16(15))),
    "v_ashrrev_i16": _op("i16 <- i16 i16", lambda n, a: a >> (n & i16(15))),
    "v_max_u16": _op(W2, np.maximum),
    "v_min_u16": _op(W2, np.minimum),
    "v_max_i16": _op("i16 <- i16 i16", np.maximum),
    "v_min_i16": _op("i16 <- i16 i16", np.minimum),
    "v_mad_u16": _op("u16 <- u16 u16 u16", lambda a, b, c: a * b + c, keeps_high=True),
    # four bytes of a register as numbers
    **{
        f"v_cvt_f32_ubyte{n}": _op("f32 <- u32", lambda a, n=n: ((a >> u32(8 * n)) & u32(255)).astype(f32))
        for n in range(4)
    },
}

# Packed f32: both words at once, as arrays [2, waves, lanes].
PACKED_F32 = {"v_pk_add_f32": (2, np.add), "v_pk_mul_f32": (2, np.multiply), "v_pk_fma_f32": (3, fma)}

# Packed 16-bit: the function sees one half at a time.
PACKED_16 = {
    "v_pk_add_f16": ("f16", 2, np.add),
    "v_pk_mul_f16": ("f16", 2, np.multiply),
    "v_pk_fma_f16": ("f16", 3, fma16),
    "v_pk_max_f16": ("f16", 2, np.fmax),
    "v_pk_min_f16": ("f16", 2, np.fmin),
    "v_pk_add_u16": ("u16", 2, np.add),
    "v_pk_sub_u16": ("u16", 2, np.subtract),
    "v_pk_add_i16": ("u16", 2, np.add),
    "v_pk_sub_i16": ("u16", 2, np.subtract),
    "v_pk_mul_lo_u16": ("u16", 2, np.multiply),
    "v_pk_mad_u16": ("u16", 3, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("u16", 3, lambda a, b, c: a * b + c),
    "v_pk_lshlrev_b16": ("u16", 2, lambda n, a: a << (n & u16(15))),
    "v_pk_lshrrev_b16": ("u16", 2, lambda n, a: a >> (n & u16(15))),
    "v_pk_ashrrev_i16": ("i16", 2, lambda n, a: a >> (n & i16(15))),
    "v_pk_max_u16": ("u16", 2, np.maximum),
    "v_pk_min_u16": ("u16", 2, np.minimum),
    "v_pk_max_i16": ("i16", 2, np.maximum),
    "v_pk_min_i16": ("i16", 2, np.minimum),
}

COMPARE = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
}
FLOAT_ONLY = frozenset(["lg", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt"])

DOT2 = {
    "v_dot2_f32_bf16": ("bf16", False),
    "v_dot2_f32_f16": ("f16", False),
    "v_dot2c_f32_bf16": ("bf16", True),
    "v_dot2c_f32_f16": ("f16", True),
}
dot2 = _dot2
