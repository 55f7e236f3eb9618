"""Matrix instructions against sums written out element by element from the documented lane maps."""

import numpy as np
import pytest
from bench import LANES, PARTIAL, Bench

from undertow.simulator.matrix import SHAPES

rng = np.random.default_rng(1)


def element(kind, registers, lane, e):
    """Element `e` of a lane's operand as a float, low half first."""
    if kind in ("f32", "xf32"):
        return float(registers[e].view(np.float32)[lane])
    if kind == "i8":
        return int(registers[e // 4].view(np.int8).reshape(LANES, 4)[lane, e % 4])
    half = int(registers[e // 2][lane]) >> (16 * (e % 2)) & 0xFFFF
    if kind == "bf16":
        return float(np.array(half << 16, np.uint32).view(np.float32))
    return float(np.array(half, np.uint16).view(np.float16))


def operand(kind, elements):
    count = {"f32": elements, "xf32": elements, "i8": elements // 4}.get(kind, elements // 2)
    if kind == "i8":
        return rng.integers(-8, 8, (count, LANES, 4), dtype=np.int8).view(np.uint32)[..., 0]
    values = rng.integers(-4, 5, (count, LANES, 2)).astype(np.float32) / 2  # exact in every type
    if kind in ("f32", "xf32"):
        return np.ascontiguousarray(values[..., 0]).view(np.uint32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint32)[..., 0]
    words = values.view(np.uint32) >> np.uint32(16)
    return words[..., 0] | words[..., 1] << np.uint32(16)


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("banks", ("vv", "av"))
def test_product(name, banks):
    rows, depth, kind = SHAPES[name]
    elements, results = depth * rows // 64, rows * rows // 64
    a, b = operand(kind, elements), operand(kind, elements)
    dtype = np.int32 if kind == "i8" else np.float32
    c = rng.integers(-9, 9, (results, LANES)).astype(dtype)
    width = len(a)
    span = lambda bank, start, n: f"{bank}{start}" if n == 1 else f"{bank}[{start}:{start + n - 1}]"
    text = (
        f"{name} {span('v', 32, results)}, {span(banks[0], 0, width)}, {span('v', 8, width)}, {span('v', 32, results)}"
    )
    registers = {8 + i: b[i] for i in range(width)} | {32 + i: c[i].view(np.uint32) for i in range(results)}
    left = {i: a[i] for i in range(width)}
    # EXEC is ignored, whatever it holds
    state = Bench(
        v=registers | (left if banks[0] == "v" else {}), a=left if banks[0] == "a" else {}, exec_mask=PARTIAL
    ).run(text)
    matrix = np.zeros((2, rows, depth))
    for n, registers_of in enumerate((a, b)):
        for lane in range(LANES):
            for e in range(elements):
                matrix[n, lane % rows, elements * (lane // rows) + e] = element(kind, registers_of, lane, e)
    want = matrix[0] @ matrix[1].T
    for r in range(results):
        for lane in range(LANES):
            row = 8 * (r // 4) + 4 * (lane // 32) + r % 4 if rows == 32 else 4 * (lane // 16) + r
            assert state.v[32 + r, 0].view(dtype)[lane] == want[row, lane % rows] + c[r, lane], (r, lane)


def test_constant_addend_and_accumulator_result():
    a = operand("bf16", 4)
    state = Bench(v={0: a[0], 1: a[1]}).run(
        "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[0:1], 1.0\nv_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[0:1], 0"
    )
    assert (state.a[:4, 0].view(np.float32) == state.v[4:8, 0].view(np.float32) + 1).all()


def test_only_the_waves_of_the_group_are_written():
    a = operand("f16", 4)
    text = (
        "v_mov_b32_e32 v8, 0\nv_readfirstlane_b32 s0, v9\ns_cmp_eq_u32 s0, 1\n"
        "s_cbranch_scc0 .L\nv_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[0:1], 0\n.L:\ns_nop 0"
    )
    wave = np.arange(3, dtype=np.uint32)[:, None] * np.ones((1, LANES), np.uint32)
    state = Bench(v={0: a[0], 1: a[1], 9: wave, **{n: np.zeros(LANES, np.uint32) for n in range(4, 8)}}, waves=3).run(
        text
    )
    assert state.v[4:8, 1].any() and not state.v[4:8, 0].any() and not state.v[4:8, 2].any()
