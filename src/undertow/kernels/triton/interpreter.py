"""Make Triton's CPU interpreter treat bf16 as a GPU does.

Triton 3.6 and 3.9 multiply its raw 16-bit storage, and cut a float off where hardware rounds it to nearest even.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_create_dot = interpreter.InterpreterBuilder.create_dot
_cast_impl = interpreter.InterpreterBuilder.cast_impl
BF16_NAN = 0x7FC0


def _widened(handle: interpreter.TensorHandle) -> np.ndarray:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _dot(
    self: interpreter.InterpreterBuilder,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    acc: interpreter.TensorHandle,
    *options: object,
) -> interpreter.TensorHandle:
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return _create_dot(self, a, b, acc, *options)
    product = np.matmul(_widened(a), _widened(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def _cast(
    self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, dst_type: tl.dtype
) -> interpreter.TensorHandle:
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_widened(src), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        nearest = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half way up to even
        rounded = np.where(np.isnan(src.data), BF16_NAN, nearest).astype(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)
    return _cast_impl(self, src, dst_type)


def install() -> None:
    """Patch the interpreter of this process; harmless when done twice."""
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.InterpreterBuilder.create_dot = _dot
