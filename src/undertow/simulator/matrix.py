"""Matrix instructions (MFMA): D = A B + C for one wave, EXEC ignored.

Layout of v_mfma_f32_MxMxK: A and B hold k-major groups, lane = row + M * (k // n) with n = K * M / 64 elements a lane,
low half first. D: column = lane % M; row = 4 * (lane // 16) + r for M = 16, and 8 * (r // 4) + 4 * (lane // 32) + r % 4
for M = 32. Products and sums are f32; the order of the sum is numpy's, not the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .isa import Builder, Handler
from .state import f16, f32, i32, u16, u32

Run = Callable[[], "int | None"]

# opcode: rows, depth, element type of A and B
SHAPES: dict[str, tuple[int, int, str]] = {
    "v_mfma_f32_16x16x16_f16": (16, 16, "f16"),
    "v_mfma_f32_32x32x8_f16": (32, 8, "f16"),
    "v_mfma_f32_16x16x16_bf16": (16, 16, "bf16"),
    "v_mfma_f32_32x32x8_bf16": (32, 8, "bf16"),
    "v_mfma_f32_16x16x16_bf16_1k": (16, 16, "bf16"),
    "v_mfma_f32_32x32x8_bf16_1k": (32, 8, "bf16"),
    "v_mfma_f32_16x16x16bf16_1k": (16, 16, "bf16"),
    "v_mfma_f32_32x32x8bf16_1k": (32, 8, "bf16"),
    "v_mfma_f32_16x16x16f16": (16, 16, "f16"),
    "v_mfma_f32_32x32x8f16": (32, 8, "f16"),
    "v_mfma_f32_16x16x32_f16": (16, 32, "f16"),
    "v_mfma_f32_32x32x16_f16": (32, 16, "f16"),
    "v_mfma_f32_16x16x32_bf16": (16, 32, "bf16"),
    "v_mfma_f32_32x32x16_bf16": (32, 16, "bf16"),
    "v_mfma_f32_16x16x4_f32": (16, 4, "f32"),
    "v_mfma_f32_32x32x2_f32": (32, 2, "f32"),
    "v_mfma_f32_16x16x4f32": (16, 4, "f32"),
    "v_mfma_f32_32x32x2f32": (32, 2, "f32"),
    "v_mfma_f32_16x16x8_xf32": (16, 8, "xf32"),
    "v_mfma_f32_32x32x4_xf32": (32, 4, "xf32"),
    "v_mfma_i32_16x16x32_i8": (16, 32, "i8"),
    "v_mfma_i32_32x32x16_i8": (32, 16, "i8"),
}
REGISTERS_PER_ELEMENT = {"f16": 0.5, "bf16": 0.5, "f32": 1, "xf32": 1, "i8": 0.25}


def _unpack(kind: str, block: np.ndarray, out: np.ndarray) -> None:
    """Registers [r, waves, 64] to values out [waves, elements, 64]."""
    if kind == "bf16":
        bits = out.view(u32)
        np.left_shift(block, u32(16), out=bits[:, 0::2].transpose(1, 0, 2))
        np.bitwise_and(block, u32(0xFFFF0000), out=bits[:, 1::2].transpose(1, 0, 2))
    elif kind == "f16":
        halves = block.view(u16).reshape(*block.shape, 2).view(f16)
        for half in (0, 1):
            out[:, half::2] = halves[..., half].transpose(1, 0, 2)
    elif kind == "i8":
        octets = block.view(np.int8).reshape(*block.shape, 4)
        for part in range(4):
            out[:, part::4] = octets[..., part].transpose(1, 0, 2)
    elif kind == "xf32":  # 10 explicit mantissa bits, nearest even
        bits = out.view(u32)
        rounded = block + u32(0xFFF) + ((block >> u32(13)) & u32(1))
        bits[...] = (rounded & u32(0xFFFFE000)).transpose(1, 0, 2)
    else:
        out[...] = block.view(f32).transpose(1, 0, 2)


def _result_view(block: np.ndarray, rows: int) -> np.ndarray:
    """D registers as a view indexed like the product split into its register and lane parts."""
    waves = block.shape[1]
    if rows == 32:
        return block.reshape(4, 4, waves, 2, 32)
    return block.reshape(4, waves, 4, 16)


def _product_view(product: np.ndarray, rows: int) -> np.ndarray:
    """[waves, row, column] reordered as `_result_view` orders D."""
    waves = product.shape[0]
    if rows == 32:
        return product.reshape(waves, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4)
    return product.reshape(waves, 4, 4, 16).transpose(2, 0, 1, 3)


def mfma_handler(rows: int, depth: int, kind: str) -> Handler:
    """Handler of one shape."""
    elements = depth * rows // 64
    width = int(elements * REGISTERS_PER_ELEMENT[kind])
    results = rows * rows // 64
    number = i32 if kind == "i8" else f32

    def build(b: Builder) -> Run:
        b.expect(4)
        b.allow()
        state, waves = b.state, b.state.waves
        for operand in b.operands[1:]:
            b.plain(operand)
        a = state.block(b.read(b.operands[1], width), width)
        bb = state.block(b.read(b.operands[2], width), width)
        addend = b.operands[3]
        out = _result_view(state.block(b.write(b.operands[0], results), results).view(number), rows)
        if addend.kind in "va":
            c = _result_view(state.block(b.read(addend, results), results).view(number), rows)
        else:
            c = state.lanes(addend, "i32" if kind == "i8" else "f32")
            if addend.is_register:
                raise b.fail("a scalar register as C")
        left, right = (np.empty((waves, elements, 64), number) for _ in range(2))
        # element (e, group) of a row is one k; any order of k serves, as long as A and B agree
        left_t = left.reshape(waves, elements * (64 // rows), rows).transpose(0, 2, 1)
        right_k = right.reshape(waves, elements * (64 // rows), rows)
        product = np.empty((waves, rows, rows), number)
        ordered = _product_view(product, rows)
        fold = (1, waves, 1, 1) if rows == 16 else (1, 1, waves, 1, 1)

        def run() -> None:
            _unpack(kind, a, left)
            _unpack(kind, bb, right)
            np.matmul(left_t, right_k, out=product)
            if state.group_full:
                np.add(ordered, c, out=out)
            else:
                np.add(ordered, c, out=out, where=state.group.reshape(fold))

        return run

    return build


def handlers() -> dict[str, Handler]:
    """Opcode to handler for every MFMA shape."""
    return {name: mfma_handler(*shape) for name, shape in SHAPES.items()}
