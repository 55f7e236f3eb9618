"""What vector memory and LDS instructions share: element sizes, register placement, atomic arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .lane_ops import bf16_bits
from .state import f16, f32, f64, i32, i64, u16, u32, u64


@dataclass(frozen=True, slots=True)
class Element:
    """What one lane moves: bytes in memory, and how a narrow value sits in its register."""

    nbytes: int
    signed: bool = False
    half: int | None = None  # d16: which half of the register, the other is kept

    @property
    def registers(self) -> int:
        """32-bit registers of the data operand."""
        return max(1, self.nbytes // 4)


LOADS = {
    "dword": Element(4),
    "dwordx2": Element(8),
    "dwordx3": Element(12),
    "dwordx4": Element(16),
    "ubyte": Element(1),
    "sbyte": Element(1, signed=True),
    "ushort": Element(2),
    "sshort": Element(2, signed=True),
    "ubyte_d16": Element(1, half=0),
    "ubyte_d16_hi": Element(1, half=1),
    "sbyte_d16": Element(1, signed=True, half=0),
    "sbyte_d16_hi": Element(1, signed=True, half=1),
    "short_d16": Element(2, half=0),
    "short_d16_hi": Element(2, half=1),
}
STORES = {
    "dword": Element(4),
    "dwordx2": Element(8),
    "dwordx3": Element(12),
    "dwordx4": Element(16),
    "byte": Element(1),
    "short": Element(2),
    "byte_d16_hi": Element(1, half=1),
    "short_d16_hi": Element(2, half=1),
}


def place_narrow(element: Element, raw: np.ndarray, old: np.ndarray) -> np.ndarray:
    """A byte or short from memory as the u32 that its register gets."""
    if element.signed:
        small = np.int8 if element.nbytes == 1 else np.int16
        value = raw.view(small).astype(i32).view(u32)
    else:
        value = raw.astype(u32)
    if element.half is None:
        return value
    value = value & u32(0xFFFF)
    return (old & u32(0xFFFF0000)) | value if element.half == 0 else (old & u32(0xFFFF)) | (value << u32(16))


def narrow_source(element: Element, register: np.ndarray) -> np.ndarray:
    """The byte or short that a store takes from a u32 register."""
    value = register >> u32(16) if element.half == 1 else register
    return value.astype(np.uint8 if element.nbytes == 1 else u16)


# ---------------------------------------------------------------------- atomics
@dataclass(frozen=True, slots=True)
class Atomic:
    """A read-modify-write: element type, numpy ufunc where `ufunc.at` does it, else a function(old, operand)."""

    dtype: type
    function: Callable[..., np.ndarray]
    operands: int = 1  # cmpswap carries two


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _exchange(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new


def _packed_bf16_add(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    low = bf16_bits((old << u32(16)).view(f32) + (new << u32(16)).view(f32))
    high = bf16_bits((old & u32(0xFFFF0000)).view(f32) + (new & u32(0xFFFF0000)).view(f32))
    return low | (high << u32(16))


def _packed_f16_add(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    total = np.ascontiguousarray(old).view(f16) + np.ascontiguousarray(new).view(f16)
    return total.view(u32)


def _compare_swap(old: np.ndarray, new: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.where(old == expected, new, old)


ATOMICS = {
    "add": Atomic(u32, np.add),
    "sub": Atomic(u32, np.subtract),
    "smin": Atomic(i32, np.minimum),
    "umin": Atomic(u32, np.minimum),
    "smax": Atomic(i32, np.maximum),
    "umax": Atomic(u32, np.maximum),
    "and": Atomic(u32, np.bitwise_and),
    "or": Atomic(u32, np.bitwise_or),
    "xor": Atomic(u32, np.bitwise_xor),
    "inc": Atomic(u32, _increment),
    "dec": Atomic(u32, _decrement),
    "swap": Atomic(u32, _exchange),
    "cmpswap": Atomic(u32, _compare_swap, 2),
    "add_f32": Atomic(f32, np.add),
    "pk_add_f16": Atomic(u32, _packed_f16_add),
    "pk_add_bf16": Atomic(u32, _packed_bf16_add),
    "add_f64": Atomic(f64, np.add),
    "min_f64": Atomic(f64, np.fmin),
    "max_f64": Atomic(f64, np.fmax),
}
ATOMICS |= {
    f"{name}_x2": Atomic(
        i64 if name[0] == "s" and name != "sub" and name != "swap" else u64, row.function, row.operands
    )
    for name, row in ATOMICS.items()
    if name in ("add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec", "swap", "cmpswap")
}


def apply_atomic(
    atomic: Atomic, memory: np.ndarray, index: np.ndarray, operands: list[np.ndarray], returns: bool
) -> np.ndarray | None:
    """Run the accesses one after another in the given order on a typed view of memory; old values if `returns`."""
    if not returns and isinstance(atomic.function, np.ufunc):
        atomic.function.at(memory, index, operands[0])
        return None
    old = np.empty(index.shape, memory.dtype)
    left = np.arange(index.size)
    while left.size:  # one access an address a round
        _, first = np.unique(index[left], return_index=True)
        now = left[first]
        old[now] = memory[index[now]]
        memory[index[now]] = atomic.function(old[now], *[o[now] for o in operands])
        keep = np.ones(left.size, bool)
        keep[first] = False
        left = left[keep]
    return old


def join_words(block: np.ndarray, dtype: type) -> np.ndarray:
    """Registers [words, n] (u32) as values [n] of a 4- or 8-byte type."""
    return np.ascontiguousarray(block.T).view(dtype)[:, 0]


def split_words(values: np.ndarray) -> np.ndarray:
    """Values [n] of a 4- or 8-byte type as registers [words, n]."""
    return np.ascontiguousarray(values).view(u32).reshape(values.size, -1).T
