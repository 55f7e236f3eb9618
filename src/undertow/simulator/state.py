"""Registers, masks and typed views of all waves of one batch of workgroups.

Every array has the wave as an axis, so that one numpy call serves one instruction of all waves. Vector registers are
`[register, wave, lane]`; scalar registers are `[wave, register]`, so that an aligned pair is a 64-bit view.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import EXEC, SCC, Operand

u16, u32, u64 = np.uint16, np.uint32, np.uint64
i16, i32, i64 = np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

LANES = 64
SGPR_ROW = 132  # 128 encodings, padded so that rows do not share a cache set
UNWRITTEN = 0xDEADBEEF  # what a vector register holds before its first write
DTYPES = {
    "u16": u16,
    "i16": i16,
    "f16": f16,
    "u32": u32,
    "i32": i32,
    "f32": f32,
    "u64": u64,
    "i64": i64,
    "f64": f64,
}
WIDTH = {name: max(1, np.dtype(t).itemsize // 4) for name, t in DTYPES.items()} | {"bf16": 1}

Getter = Callable[[], np.ndarray]
Writer = Callable[[np.ndarray], None]


class UnsupportedError(NotImplementedError):
    """An opcode, operand or modifier that the simulator does not model. It never guesses."""


def flush_denormals(value: np.ndarray) -> np.ndarray:
    """Replace f32 denormals by zero of the same sign."""
    bits = value.view(u32)
    return np.where(bits & u32(0x7F800000), bits, bits & u32(0x80000000)).view(f32)


class State:
    """Architectural state of `waves` waves."""

    def __init__(self, waves: int, vgprs: int, agprs: int, flush32: bool, has_setreg: bool) -> None:
        self.waves = waves
        self.v = np.empty((max(vgprs, 1), waves, LANES), u32)
        self.a = np.empty((max(agprs, 1), waves, LANES), u32)
        self.s = np.empty((waves, SGPR_ROW), u32)
        self.scc = np.empty(waves, bool)
        self.exec = self.pair(EXEC)
        self.flush32_initial = flush32
        self.flush32 = np.empty(waves, bool)
        self.may_flush32 = flush32 or has_setreg
        self.every_lane = np.ones((waves, LANES), bool)
        self.every_wave = np.ones(waves, bool)
        self.reset()

    def reset(self) -> None:
        """Registers as they are before a launch; the launcher fills in what the hardware initialises."""
        self.v.fill(UNWRITTEN)
        self.a.fill(UNWRITTEN)
        self.s.fill(UNWRITTEN)
        self.scc.fill(0)
        self.exec.fill(~u64(0))
        self.flush32.fill(self.flush32_initial)
        self.set_group(self.every_wave)

    # ------------------------------------------------------------------ who executes
    def set_group(self, group: np.ndarray) -> None:
        """Execute for these waves (bool [waves]) from now on."""
        self.group = group
        self.group_full = bool(group.all())
        self.exec_changed()

    def exec_changed(self) -> None:
        """Recompute the lane mask after a write of EXEC or a change of group."""
        if self.group_full and (self.exec == ~u64(0)).all():
            self.full, self.mask = True, self.every_lane
            return
        self.full = False
        mask = bits_to_lanes(self.exec)
        self.mask = mask if self.group_full else mask & self.group[:, None]

    # ------------------------------------------------------------------ views
    def pair(self, index: int) -> np.ndarray:
        """Scalar registers index, index+1 as a u64 view [waves]."""
        if index & 1:
            raise UnsupportedError(f"scalar register pair at odd s{index}")
        return self.s[:, index : index + 2].view(u64)[:, 0]

    def bank(self, kind: str) -> np.ndarray:
        """The vector register file of `kind` (v or a)."""
        return self.a if kind == "a" else self.v

    def block(self, operand: Operand, count: int) -> np.ndarray:
        """`count` consecutive vector registers as a u32 view [count, waves, lanes]."""
        if operand.kind not in "va" or operand.count != count:
            raise UnsupportedError(f"expected {count} vector registers, got {describe(operand)}")
        return self.bank(operand.kind)[operand.index : operand.index + count]

    def lanes(self, operand: Operand, kind: str, half: int = 0) -> np.ndarray | Getter:
        """A vector source: a persistent view where one exists, else a function that computes it."""
        if not operand.is_register:
            return constant(operand, kind, half)
        if kind in ("u64", "i64", "f64"):
            return self._wide_lanes(operand, kind)
        if operand.kind == "s" and operand.index == SCC:
            return lambda: self.scc[:, None].astype(u32)
        if operand.kind == "s" and operand.index >= 128:
            raise UnsupportedError(f"scalar source {describe(operand)}")
        scalar = operand.kind == "s"
        register = self.s[:, operand.index : operand.index + 1] if scalar else self.bank(operand.kind)[operand.index]
        return _typed(register, kind, half)

    def _wide_lanes(self, operand: Operand, kind: str) -> Getter:
        if operand.count != 2:
            raise UnsupportedError(f"expected a register pair, got {describe(operand)}")
        dtype = DTYPES[kind]
        if operand.kind == "s":
            pair = self.pair(operand.index)[:, None].view(dtype)
            return lambda: pair
        low, high = self.bank(operand.kind)[operand.index : operand.index + 2]

        def join() -> np.ndarray:
            value = high.astype(u64)
            value <<= u64(32)
            value |= low
            return value.view(dtype)

        return join

    def lane_writer(self, operand: Operand, kind: str, half: int | None = None) -> Writer:
        """Write a vector result under EXEC. 16-bit results zero the other half unless `half` says which one to keep."""
        if operand.kind not in "va":
            raise UnsupportedError(f"vector destination {describe(operand)}")
        if kind in ("u64", "i64", "f64"):
            return self._wide_writer(operand)
        target = self.bank(operand.kind)[operand.index]
        dtype = DTYPES[kind]
        if dtype().itemsize == 2:
            if half is not None:
                target = target.view(u16).reshape(*target.shape, 2)[..., half]
            bits, final = u16, target.dtype

            def narrow(value: np.ndarray) -> None:
                np.copyto(target, np.asarray(value, dtype).view(bits).astype(final), where=self.mask)

            return narrow

        def write(value: np.ndarray) -> None:
            if value.dtype != u32:
                value = value.view(u32)
            if self.full:
                target[...] = value
            else:
                np.copyto(target, value, where=self.mask)

        return write

    def _wide_writer(self, operand: Operand) -> Writer:
        low, high = self.block(operand, 2)

        def write(value: np.ndarray) -> None:
            value = value.view(u64)
            np.copyto(low, value.astype(u32), where=self.mask)
            np.copyto(high, (value >> u64(32)).astype(u32), where=self.mask)

        return write

    def scalar(self, operand: Operand, kind: str = "u32") -> np.ndarray | Getter:
        """A scalar source as a [waves] view, or a 0-d constant."""
        if operand.kind == "s":
            if operand.index == SCC:
                return lambda: self.scc.astype(DTYPES[kind])
            if operand.index >= 128:
                raise UnsupportedError(f"scalar source {describe(operand)}")
            if WIDTH[kind] == 2:
                if operand.count != 2:
                    raise UnsupportedError(f"expected a register pair, got {describe(operand)}")
                return self.pair(operand.index).view(DTYPES[kind])
            if operand.count != 1:
                raise UnsupportedError(f"expected one register, got {describe(operand)}")
            return self.s[:, operand.index].view(DTYPES[kind])
        return constant(operand, kind, 0)

    def scalar_writer(self, operand: Operand, width: int = 1) -> Writer:
        """Write a scalar result for the waves of the group."""
        if operand.kind != "s" or operand.index >= 128 or operand.count != width:
            raise UnsupportedError(f"scalar destination {describe(operand)}, {width} wanted")
        target = self.s[:, operand.index] if width == 1 else self.pair(operand.index)
        dtype = target.dtype
        moves_exec = operand.index <= EXEC + 1 and operand.index + width > EXEC

        def write(value: np.ndarray) -> None:
            if value.dtype != dtype:
                value = value.view(dtype)
            if self.group_full:
                target[...] = value
            else:
                np.copyto(target, value, where=self.group)
            if moves_exec:
                self.exec_changed()

        return write

    def write_scc(self, value: np.ndarray) -> None:
        """Set SCC of the waves of the group."""
        if self.group_full:
            self.scc[...] = value
        else:
            np.copyto(self.scc, value, where=self.group)

    def lane_bits(self, operand: Operand) -> Getter:
        """A scalar register pair as a lane mask, bool [waves, lanes]."""
        if operand.kind != "s":
            pair = np.broadcast_to(constant(operand, "u64", 0), (self.waves,)).copy()
        else:
            pair = self.pair(operand.index)
        return lambda: bits_to_lanes(pair)

    def pack(self, lanes: np.ndarray) -> np.ndarray:
        """Lane mask to u64 [waves]; inactive lanes give 0."""
        lanes = np.broadcast_to(lanes, (self.waves, LANES))
        if not self.full:
            lanes = lanes & self.mask
        return np.packbits(lanes, axis=1, bitorder="little").view(u64)[:, 0]

    def first_active_lane(self) -> np.ndarray:
        """Lowest lane with EXEC set, 0 where EXEC is 0; int [waves]."""
        return bits_to_lanes(self.exec).argmax(1)


def bits_to_lanes(pair: np.ndarray) -> np.ndarray:
    """Unpack u64 [waves] to bool [waves, lanes]."""
    octets = np.ascontiguousarray(pair).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


def _typed(register: np.ndarray, kind: str, half: int) -> np.ndarray | Getter:
    """A u32 register seen as `kind`; bf16 halves come as f32."""
    if kind in ("u32", "i32", "f32"):
        return register.view(DTYPES[kind])
    if kind == "bf16":
        shift, keep = u32(16), u32(0xFFFF0000)
        return (lambda: (register << shift).view(f32)) if half == 0 else (lambda: (register & keep).view(f32))
    return register.view(u16).reshape(*register.shape, 2)[..., half].view(DTYPES[kind])


def constant(operand: Operand, kind: str, half: int) -> np.ndarray:
    """An inline constant or literal with the bits that an operand of type `kind` sees."""
    if operand.kind == "float":
        return _float_constant(float(operand.value), kind, half)
    if operand.kind != "int":
        raise UnsupportedError(f"{describe(operand)} as a {kind} source")
    value, dtype = int(operand.value), DTYPES.get(kind, f32)
    if WIDTH[kind] == 2:
        return _wide_constant(value, kind)
    value &= 0xFFFFFFFF
    if kind == "bf16":
        return np.array((value << 16) & 0xFFFFFFFF if half == 0 else value & 0xFFFF0000, u32).view(f32)
    if dtype().itemsize == 2:
        return np.array((value >> (16 * half)) & 0xFFFF, u16).view(dtype)
    return np.array(value, u32).view(dtype)


def _float_constant(value: float, kind: str, half: int) -> np.ndarray:
    if kind in ("u64", "i64", "u16", "i16", "bf16"):
        raise UnsupportedError(f"float constant {value} for a {kind} operand")
    if kind == "f16" and half == 1:
        raise UnsupportedError(f"float constant {value} for the high half of a packed operand")
    if kind in ("f16", "f64"):
        return np.array(value, DTYPES[kind])
    return np.array(value, f32).view(DTYPES[kind])


def _wide_constant(value: int, kind: str) -> np.ndarray:
    """64-bit operands: inline integers are sign-extended; a literal is the high word of an f64."""
    inline = -16 <= value <= 64
    if kind == "f64":
        return np.array((value if inline else value << 32) & ((1 << 64) - 1), u64).view(f64)
    if not inline and not 0 <= value < 1 << 31:
        raise UnsupportedError(f"32-bit literal {value:#x} in a 64-bit operand")
    return np.array(value & ((1 << 64) - 1), u64).view(DTYPES[kind])


def describe(operand: Operand) -> str:
    """The operand for a message."""
    if operand.is_register:
        last = operand.index + operand.count - 1
        return f"{operand.kind}[{operand.index}:{last}]" if operand.count > 1 else f"{operand.kind}{operand.index}"
    return f"{operand.kind} {operand.value!r}"
