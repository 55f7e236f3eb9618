"""Scalar instructions: arithmetic on one value a wave, branches, waits, and the program's control."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import EXEC
from .isa import Builder, Handler
from .lane_ops import count_ones, field, first_high, first_low, reverse_bits, signed_field
from .state import WIDTH, i32, i64, u32, u64

Run = Callable[[], "int | None"]


def _add(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a + b
    return total, total < a


def _addc(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(u64) + b + scc
    return total.astype(u32), total > u64(0xFFFFFFFF)


def _sub(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return a - b, b > a


def _subb(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(i64) - b - scc
    return (total & 0xFFFFFFFF).astype(u32), total < 0


def _add_signed(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a + b
    return total, ((a ^ total) & (b ^ total)) < 0


def _sub_signed(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a - b
    return total, ((a ^ b) & (a ^ total)) < 0


def _nonzero(function: Callable) -> Callable:
    def both(*sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value = function(*sources[:-1])
        return value, value != 0

    return both


def _chosen(function: Callable, prefers_first: Callable) -> Callable:
    def both(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return function(a, b), prefers_first(a, b)

    return both


def _shift_add(count: int) -> Callable:
    def both(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = (a.astype(u64) << u64(count)) + b
        return total.astype(u32), total > u64(0xFFFFFFFF)

    return both


def _keep(function: Callable) -> Callable:
    """A function that leaves SCC alone."""
    return lambda *sources: (function(*sources[:-1]), None)


def _bitwise(name: str, bits: str) -> Callable:
    functions = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }
    return functions[name]


def _shift(bits: int, right: bool) -> Callable:
    def shift(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & u32(bits - 1)).astype(a.dtype)
        return a >> n if right else a << n

    return shift


def _sign_extend(bits: int) -> Callable:
    return lambda a: (a << i32(32 - bits)) >> i32(32 - bits)


def _field64(a: np.ndarray, control: np.ndarray) -> np.ndarray:
    start, width = (control & u32(63)).astype(u64), ((control >> u32(16)) & u32(127)).astype(u64)
    mask = np.where(width >= 64, ~u64(0), (u64(1) << np.minimum(width, u64(63))) - u64(1))
    return (a >> start) & mask


def _field32(pick: Callable) -> Callable:
    def extract(a: np.ndarray, control: np.ndarray) -> np.ndarray:
        width = (control >> u32(16)) & u32(127)
        start = control & u32(31)
        narrow = pick(a, start, np.minimum(width, u32(31)))
        wide = a.view(i32) >> start.astype(i32) if pick is signed_field else a >> start
        return np.where(width >= 32, wide.view(u32) if pick is signed_field else wide, narrow)

    return extract


def _pack16(low: int, high: int) -> Callable:
    return lambda a, b: ((a >> u32(low)) & u32(0xFFFF)) | (((b >> u32(high)) & u32(0xFFFF)) << u32(16))


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = u64 if a.dtype == u32 else i64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def _bit_mask(bits: int) -> Callable:
    wide = u32 if bits == 32 else u64

    def mask(width: np.ndarray, start: np.ndarray) -> np.ndarray:
        width, start = (width & u32(bits - 1)).astype(wide), (start & u32(bits - 1)).astype(wide)
        return ((wide(1) << width) - wide(1)) << start

    return mask


def _abs(a: np.ndarray) -> np.ndarray:
    return np.abs(a)


def _count64(a: np.ndarray) -> np.ndarray:
    return count_ones(a.astype(u32)) + count_ones((a >> u64(32)).astype(u32))


def _first64(find: Callable, from_low: bool) -> Callable:
    def first(a: np.ndarray) -> np.ndarray:
        low, high = a.astype(u32), (a >> u64(32)).astype(u32)
        near, far = (low, high) if from_low else (high, low)
        return np.where(near != 0, find(near), np.where(far != 0, find(far) + u32(32), u32(0xFFFFFFFF)))

    return first


# opcode: result type, source types, function(*sources, scc) -> (value, new SCC or None)
ARITHMETIC: dict[str, tuple[str, str, Callable]] = {
    "s_add_u32": ("u32", "u32 u32", _add),
    "s_addc_u32": ("u32", "u32 u32", _addc),
    "s_sub_u32": ("u32", "u32 u32", _sub),
    "s_subb_u32": ("u32", "u32 u32", _subb),
    "s_add_i32": ("i32", "i32 i32", _add_signed),
    "s_sub_i32": ("i32", "i32 i32", _sub_signed),
    "s_mul_i32": ("u32", "u32 u32", _keep(np.multiply)),
    "s_mul_hi_u32": ("u32", "u32 u32", _keep(_high)),
    "s_mul_hi_i32": ("i32", "i32 i32", _keep(_high)),
    "s_max_i32": ("i32", "i32 i32", _chosen(np.maximum, np.greater_equal)),
    "s_min_i32": ("i32", "i32 i32", _chosen(np.minimum, np.less)),
    "s_max_u32": ("u32", "u32 u32", _chosen(np.maximum, np.greater_equal)),
    "s_min_u32": ("u32", "u32 u32", _chosen(np.minimum, np.less)),
    "s_mov_b32": ("u32", "u32", _keep(lambda a: a)),
    "s_mov_b64": ("u64", "u64", _keep(lambda a: a)),
    "s_not_b32": ("u32", "u32", _nonzero(np.invert)),
    "s_not_b64": ("u64", "u64", _nonzero(np.invert)),
    "s_abs_i32": ("i32", "i32", _nonzero(_abs)),
    "s_brev_b32": ("u32", "u32", _keep(reverse_bits)),
    "s_bcnt1_i32_b32": ("u32", "u32", _nonzero(count_ones)),
    "s_bcnt1_i32_b64": ("u32", "u64", _nonzero(_count64)),
    "s_ff1_i32_b32": ("u32", "u32", _keep(first_low)),
    "s_ff1_i32_b64": ("u32", "u64", _keep(_first64(first_low, from_low=True))),
    "s_flbit_i32_b32": ("u32", "u32", _keep(first_high)),
    "s_flbit_i32_b64": ("u32", "u64", _keep(_first64(first_high, from_low=False))),
    "s_sext_i32_i8": ("i32", "i32", _keep(_sign_extend(8))),
    "s_sext_i32_i16": ("i32", "i32", _keep(_sign_extend(16))),
    "s_lshl_b32": ("u32", "u32 u32", _nonzero(_shift(32, right=False))),
    "s_lshr_b32": ("u32", "u32 u32", _nonzero(_shift(32, right=True))),
    "s_ashr_i32": ("i32", "i32 u32", _nonzero(_shift(32, right=True))),
    "s_lshl_b64": ("u64", "u64 u32", _nonzero(_shift(64, right=False))),
    "s_lshr_b64": ("u64", "u64 u32", _nonzero(_shift(64, right=True))),
    "s_ashr_i64": ("i64", "i64 u32", _nonzero(_shift(64, right=True))),
    "s_bfe_u32": ("u32", "u32 u32", _nonzero(_field32(field))),
    "s_bfe_i32": ("u32", "u32 u32", _nonzero(_field32(signed_field))),
    "s_bfe_u64": ("u64", "u64 u32", _nonzero(_field64)),
    "s_bfm_b32": ("u32", "u32 u32", _keep(_bit_mask(32))),
    "s_bfm_b64": ("u64", "u32 u32", _keep(_bit_mask(64))),
    "s_pack_ll_b32_b16": ("u32", "u32 u32", _keep(_pack16(0, 0))),
    "s_pack_lh_b32_b16": ("u32", "u32 u32", _keep(_pack16(0, 16))),
    "s_pack_hh_b32_b16": ("u32", "u32 u32", _keep(_pack16(16, 16))),
    **{f"s_lshl{n}_add_u32": ("u32", "u32 u32", _shift_add(n)) for n in (1, 2, 3, 4)},
    **{
        f"s_{op}_b{n}": (f"u{n}", f"u{n} u{n}", _nonzero(_bitwise(op, str(n))))
        for op in ("and", "or", "xor", "andn2", "orn2", "nand", "nor", "xnor")
        for n in (32, 64)
    },
}

COMPARISONS = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
SAVEEXEC = {
    "and": lambda e, s: e & s,
    "or": lambda e, s: e | s,
    "xor": lambda e, s: e ^ s,
    "andn2": lambda e, s: s & ~e,
    "orn2": lambda e, s: s | ~e,
    "nand": lambda e, s: ~(e & s),
    "nor": lambda e, s: ~(e | s),
    "xnor": lambda e, s: ~(e ^ s),
    "andn1": lambda e, s: ~s & e,
    "orn1": lambda e, s: ~s | e,
}


def arithmetic_handler(result: str, sources: str, function: Callable) -> Handler:
    """Handler of one row of ARITHMETIC."""
    kinds = sources.split()

    def build(b: Builder) -> Run:
        b.expect(len(kinds) + 1)
        b.allow()
        state = b.state
        getters = [b.scalar(p + 1, k) for p, k in enumerate(kinds)]
        write, write_scc = b.scalar_out(0, WIDTH[result]), state.write_scc
        if len(getters) == 1:
            (first,) = getters
            call = lambda: function(first(), state.scc)
        else:
            first, second = getters
            call = lambda: function(first(), second(), state.scc)

        def run() -> None:
            value, flag = call()
            write(np.asarray(value))
            if flag is not None:
                write_scc(flag)

        return run

    return build


def compare_handler(condition: str, kind: str, immediate: bool) -> Handler:
    """s_cmp and s_cmpk."""
    function = COMPARISONS[condition]

    def build(b: Builder) -> Run:
        b.expect(2)
        b.allow()
        first, second = b.scalar(0, kind), b.scalar(1, kind)
        if immediate:
            value = _immediate(b, 1, kind)
            second = lambda: value
        return lambda: b.state.write_scc(function(first(), second()))

    return build


def _immediate(b: Builder, position: int, kind: str) -> np.ndarray:
    """A 16-bit immediate, sign-extended (zero-extended for u32)."""
    operand = b.operands[position]
    if operand.kind != "int":
        raise b.fail("expected a 16-bit immediate")
    value = int(operand.value) & 0xFFFF
    value = value - 0x10000 if value & 0x8000 and kind != "u32" else value
    return np.array(value & 0xFFFFFFFF, u32).view(u32 if kind == "u32" else i32)


def _movk(b: Builder) -> Run:
    b.expect(2)
    value, write = _immediate(b, 1, "i32"), b.scalar_out(0)
    return lambda: write(value)


def _cmovk(b: Builder) -> Run:
    b.expect(2)
    value, old, write = _immediate(b, 1, "i32").view(u32), b.scalar(0), b.scalar_out(0)
    return lambda: write(np.where(b.state.scc, value, old()))


def inplace_handler(function: Callable) -> Handler:
    """s_addk_i32, s_mulk_i32: register op= immediate."""

    def build(b: Builder) -> Run:
        b.expect(2)
        value, old, write = _immediate(b, 1, "i32"), b.scalar(0, "i32"), b.scalar_out(0)

        def run() -> None:
            result, flag = function(old(), value, b.state.scc)
            write(np.asarray(result))
            if flag is not None:
                b.state.write_scc(flag)

        return run

    return build


def select_handler(width: int) -> Handler:
    """s_cselect: src0 where SCC, else src1."""
    kind = "u32" if width == 1 else "u64"

    def build(b: Builder) -> Run:
        b.expect(3)
        yes, no, write = b.scalar(1, kind), b.scalar(2, kind), b.scalar_out(0, width)
        return lambda: write(np.where(b.state.scc, yes(), no()))

    return build


def cmov_handler(width: int) -> Handler:
    """s_cmov: move where SCC."""
    kind = "u32" if width == 1 else "u64"

    def build(b: Builder) -> Run:
        b.expect(2)
        yes, no, write = b.scalar(1, kind), b.scalar(0, kind), b.scalar_out(0, width)
        return lambda: write(np.where(b.state.scc, yes(), no()))

    return build


def saveexec_handler(function: Callable) -> Handler:
    """s_*_saveexec_b64: save EXEC, combine it with the source."""

    def build(b: Builder) -> Run:
        b.expect(2)
        state = b.state
        mask, write = b.scalar(1, "u64"), b.scalar_out(0, 2)
        b.reads.update((512 + EXEC, 513 + EXEC))
        b.writes.update((512 + EXEC, 513 + EXEC))

        def run() -> None:
            old = state.exec.copy()
            new = function(old, mask())
            write(old)
            np.copyto(state.exec, new, where=state.group)
            state.exec_changed()
            state.write_scc(new != 0)

        return run

    return build


def bit_handler(clear: bool, width: int) -> Handler:
    """s_bitset0/1: clear or set one bit."""
    wide = u32 if width == 1 else u64

    def build(b: Builder) -> Run:
        b.expect(2)
        index, old, write = b.scalar(1), b.scalar(0, "u32" if width == 1 else "u64"), b.scalar_out(0, width)

        def run() -> None:
            bit = wide(1) << (index() & u32(32 * width - 1)).astype(wide)
            write(old() & ~bit if clear else old() | bit)

        return run

    return build


def bitcmp_handler(wanted: int, kind: str) -> Handler:
    """s_bitcmp: SCC = bit of src0 is `wanted`."""

    def build(b: Builder) -> Run:
        b.expect(2)
        value, index = b.scalar(0, kind), b.scalar(1)

        def run() -> None:
            word = value()
            bit = (word >> (index() & u32(31 if kind == "u32" else 63)).astype(word.dtype)) & word.dtype.type(1)
            b.state.write_scc(bit == wanted)

        return run

    return build


def handlers() -> dict[str, Handler]:
    """Opcode to handler for scalar arithmetic."""
    table: dict[str, Handler] = {name: arithmetic_handler(*row) for name, row in ARITHMETIC.items()}
    for condition in COMPARISONS:
        for kind in ("i32", "u32"):
            table[f"s_cmp_{condition}_{kind}"] = compare_handler(condition, kind, immediate=False)
            table[f"s_cmpk_{condition}_{kind}"] = compare_handler(condition, kind, immediate=True)
    for condition in ("eq", "lg"):
        table[f"s_cmp_{condition}_u64"] = compare_handler(condition, "u64", immediate=False)
    table |= {f"s_{name}_saveexec_b64": saveexec_handler(f) for name, f in SAVEEXEC.items()}
    for bit in (0, 1):
        table |= {f"s_bitset{bit}_b32": bit_handler(bit == 0, 1), f"s_bitset{bit}_b64": bit_handler(bit == 0, 2)}
        table |= {f"s_bitcmp{bit}_b32": bitcmp_handler(bit, "u32"), f"s_bitcmp{bit}_b64": bitcmp_handler(bit, "u64")}
    return table | {
        "s_movk_i32": _movk,
        "s_cmovk_i32": _cmovk,
        "s_addk_i32": inplace_handler(_add_signed),
        "s_mulk_i32": inplace_handler(lambda a, b, s: (a * b, None)),
        "s_cselect_b32": select_handler(1),
        "s_cselect_b64": select_handler(2),
        "s_cmov_b32": cmov_handler(1),
        "s_cmov_b64": cmov_handler(2),
    }
