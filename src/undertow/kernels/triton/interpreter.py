"""Make Triton's CPU interpreter multiply bf16 rightly (3.6 and 3.9 take the product of the raw 16-bit storage)."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_create_dot = interpreter.InterpreterBuilder.create_dot


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


def install() -> None:
    """Patch the interpreter of this process; harmless when done twice."""
    interpreter.InterpreterBuilder.create_dot = _dot
