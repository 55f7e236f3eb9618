"""Vector instructions whose operands need more than the pseudocode gives: modifiers, DPP, SDWA, masks, lane moves."""

import math

import numpy as np
import pytest
from bench import FULL, LANES, PARTIAL, Bench, bits_of

from undertow.simulator import UnsupportedError
from undertow.simulator.lane_ops import COMPARE, FLOAT_ONLY

rng = np.random.default_rng(0)
LANE = np.arange(LANES, dtype=np.uint32)
U = rng.integers(0, 1 << 32, (4, LANES), dtype=np.uint64).astype(np.uint32)
F = (rng.standard_normal((4, LANES)) * 3).astype(np.float32)
ON = bits_of(PARTIAL)


def run(text, *, exec_mask=PARTIAL, **registers):
    return Bench(exec_mask=exec_mask, **registers).run(text)


def floats(state, n):
    return state.v[n, 0].view(np.float32)


# ---------------------------------------------------------------- modifiers
@pytest.mark.parametrize(
    "text, want",
    (
        ("v_add_f32_e64 v0, -v1, |v2|", lambda a, b: -a + abs(b)),
        ("v_mul_f32_e64 v0, v1, -|v2|", lambda a, b: a * -abs(b)),
        ("v_add_f32_e64 v0, v1, v2 clamp", lambda a, b: min(max(a + b, 0), 1)),
        ("v_mul_f32_e64 v0, v1, v2 mul:2", lambda a, b: a * b * 2),
        ("v_mul_f32_e64 v0, v1, v2 mul:4", lambda a, b: a * b * 4),
        ("v_mul_f32_e64 v0, v1, v2 div:2", lambda a, b: a * b / 2),
        ("v_mov_b32_e64 v0, -v1", lambda a, b: -a),
        ("v_cndmask_b32_e64 v0, -v1, |v2|, s[10:11]", lambda a, b: None),
    ),
)
def test_source_and_output_modifiers(text, want):
    choose = 0x00FF_F0F0_1234_5678
    state = run(text, v={0: F[3], 1: F[0], 2: F[1]}, s={10: choose, 11: choose >> 32})
    for lane in range(LANES):
        a, b = F[0][lane], F[1][lane]
        value = (abs(b) if choose >> lane & 1 else -a) if "cndmask" in text else want(a, b)
        assert floats(state, 0)[lane] == (np.float32(value) if ON[lane] else F[3][lane])


@pytest.mark.parametrize(
    "text",
    (
        "v_add_u32_e64 v0, v1, v2 clamp",
        "v_and_b32_e64 v0, -v1, v2 mul:2",
        "v_add_f32_e64 v0, v1, v2 op_sel:[1,0,0]",
        "v_add_f32_e32 v0, v1, v2 gds",
        "v_add_u32_e32 v0, -v1, v2",
        "v_frobnicate_b32 v0, v1",
        "v_add_f32 v[0:1], v2, v3",
        "v_lshlrev_b64 v0, v1, v[2:3]",
        "s_setreg_b32 hwreg(HW_REG_TRAPSTS), s0",
        "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,4] row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v0, v1 row_bcast:14 row_mask:0xf bank_mask:0xf",
        "s_mov_b64 s[0:1], 0xdeadbeef",
        "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 blgp:1",
        "v_pk_add_f16 v0, v1, 1.0",
    ),
)
def test_what_is_not_modelled_stops_with_its_line(text):
    with pytest.raises(UnsupportedError, match=r"^line 2: "):
        run("s_nop 0\n" + text)


def test_an_unsupported_instruction_that_is_never_reached_does_not_stop():
    run("s_branch .Lend\nv_frobnicate_b32 v0, v1\n.Lend:\ns_nop 0")


def test_fma_constants_and_literals():
    state = run(
        (
            "v_fmaak_f32 v0, v1, v2, 0x40490fdb\nv_fmamk_f32 v3, v1, 0x40490fdb, v2\n"
            "v_add_f32_e32 v4, 2.0, v1\nv_add_u32_e32 v5, -16, v1"
        ),
        exec_mask=FULL,
        v={1: F[0], 2: F[1]},
    )
    pi = np.float32(np.pi)
    np.testing.assert_allclose(floats(state, 0), F[0] * F[1] + pi, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(floats(state, 3), F[0] * pi + F[1], rtol=1e-6, atol=1e-6)
    assert (floats(state, 4) == F[0] + np.float32(2)).all()
    assert (state.v[5, 0] == F[0].view(np.uint32) - np.uint32(16)).all()


def test_half_operands_by_op_sel_and_the_half_that_is_kept():
    halves = rng.standard_normal((3, LANES, 2)).astype(np.float16)
    registers = {n: halves[n].view(np.uint32)[:, 0] for n in range(3)}
    state = run("v_fma_f16 v0, v1, v2, v1 op_sel:[1,0,0,1]", v=registers)
    got = state.v[0, 0].view(np.float16).reshape(LANES, 2)
    for lane in range(LANES):
        want = np.float16(np.float64(halves[1][lane, 1]) * halves[2][lane, 0] + halves[1][lane, 0])
        assert got[lane, 0] == halves[0][lane, 0] and got[lane, 1] == (want if ON[lane] else halves[0][lane, 1])


def test_denormals_are_flushed_or_kept_by_the_mode():
    tiny = np.full(LANES, 1e-40, np.float32)
    for flush in (False, True):
        state = run(
            "v_add_f32_e32 v0, v1, v2\nv_mul_f32_e32 v3, 1.0, v1\nv_pk_add_f32 v[6:7], v[4:5], v[4:5]",
            exec_mask=FULL,
            v={1: tiny, 2: tiny * 0, 4: tiny, 5: tiny},
            flush32=flush,
        )
        for register in (0, 3, 6, 7):
            assert (floats(state, register) == 0).all() == flush


def test_setreg_switches_denormals_for_the_waves_that_execute_it():
    tiny = np.full(LANES, 1e-40, np.float32)
    text = (
        "s_cmp_eq_u32 s0, 1\ns_cbranch_scc0 .L\n"
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n.L:\nv_mul_f32_e32 v0, 1.0, v1"
    )
    bench = Bench(v={1: np.stack([tiny, tiny])}, waves=2)
    machine_state = bench.run("v_readfirstlane_b32 s0, v2\n" + text) if False else None
    assert machine_state is None
    one = Bench(v={1: tiny}, s={0: 1}).run(text)
    zero = Bench(v={1: tiny}, s={0: 0}).run(text)
    assert (floats(one, 0) == 0).all() and (floats(zero, 0) == tiny).all()


# ---------------------------------------------------------------- DPP and SDWA
def dpp_source(pattern, lane):
    """Source lane of `lane`, None when there is none: written out pattern by pattern."""
    row, place = lane // 16, lane % 16
    name, _, value = pattern.partition(":")
    if name == "quad_perm":
        return lane - lane % 4 + eval(value)[lane % 4]  # noqa: S307
    if name == "row_mirror":
        return row * 16 + 15 - place
    if name == "row_half_mirror":
        return lane - lane % 8 + 7 - lane % 8
    n = int(value)
    return {
        "row_shl": row * 16 + place + n if place + n < 16 else None,
        "row_shr": row * 16 + place - n if place >= n else None,
        "row_ror": row * 16 + (place - n) % 16,
        "row_newbcast": row * 16 + n,
        "wave_shl": lane + 1 if lane < 63 else None,
        "wave_shr": lane - 1 if lane else None,
        "wave_rol": (lane + 1) % 64,
        "wave_ror": (lane - 1) % 64,
        "row_bcast": (row * 16 - 1 if row else None) if n == 15 else (31 if lane > 31 else None),
    }[name]


PATTERNS = (
    "quad_perm:[1,0,3,2]",
    "quad_perm:[3,3,0,1]",
    "row_shl:1",
    "row_shl:15",
    "row_shr:4",
    "row_shr:8",
    "row_ror:12",
    "row_newbcast:5",
    "row_bcast:15",
    "row_bcast:31",
    "wave_shl:1",
    "wave_shr:1",
    "wave_rol:1",
    "wave_ror:1",
    "row_mirror",
    "row_half_mirror",
)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("bound", ("", " bound_ctrl:0"))
@pytest.mark.parametrize("masks", ((15, 15), (0xA, 0xF), (0xF, 0x5)))
def test_dpp(pattern, bound, masks):
    rows, banks = masks
    state = run(
        f"v_add_u32_dpp v0, v1, v2 {pattern} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}",
        v={0: U[3], 1: U[0], 2: U[1]},
    )
    for lane in range(LANES):
        source = dpp_source(pattern, lane)
        valid = source is not None and ON[source]
        writes = ON[lane] and rows >> (lane // 16) & 1 and banks >> (lane % 16 // 4) & 1 and (valid or bound)
        value = int(U[0][source]) if valid else 0
        want = (value + int(U[1][lane])) & 0xFFFFFFFF if writes else int(U[3][lane])
        assert int(state.v[0, 0, lane]) == want, lane


@pytest.mark.parametrize("select", ("DWORD", "WORD_0", "WORD_1", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3"))
@pytest.mark.parametrize("extend", (False, True))
def test_sdwa_sources(select, extend):
    operand = "sext(v1)" if extend else "v1"
    state = run(
        f"v_add_u32_sdwa v0, {operand}, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{select} src1_sel:DWORD",
        v={0: U[3], 1: U[0], 2: U[1]},
    )
    kind, _, number = select.partition("_")
    width = {"DWORD": 32, "WORD": 16, "BYTE": 8}[kind]
    for lane in np.flatnonzero(ON):
        part = int(U[0][lane]) >> (width * int(number or 0)) & ((1 << width) - 1)
        if extend and part >> (width - 1):
            part -= 1 << width
        assert int(state.v[0, 0, lane]) == (part + int(U[1][lane])) & 0xFFFFFFFF


@pytest.mark.parametrize("select", ("WORD_0", "WORD_1", "BYTE_0", "BYTE_2", "BYTE_3"))
@pytest.mark.parametrize("unused", ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"))
def test_sdwa_destinations(select, unused):
    state = run(
        f"v_xor_b32_sdwa v0, v1, v2 dst_sel:{select} dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD",
        v={0: U[3], 1: U[0], 2: U[1]},
    )
    kind, _, number = select.partition("_")
    width = {"WORD": 16, "BYTE": 8}[kind]
    start, keep = width * int(number), (1 << width) - 1
    for lane in range(LANES):
        value = int(U[0][lane] ^ U[1][lane]) & keep
        if unused == "UNUSED_PRESERVE":
            want = int(U[3][lane]) & ~(keep << start) & 0xFFFFFFFF | value << start
        elif unused == "UNUSED_SEXT" and value >> (width - 1):
            want = ((value - (1 << width)) << start) & 0xFFFFFFFF
        else:
            want = value << start
        assert int(state.v[0, 0, lane]) == (want if ON[lane] else int(U[3][lane]))


def test_sdwa_select_by_mask_and_half_arithmetic():
    state = run(
        (
            "v_cndmask_b32_sdwa v0, v1, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1\n"
            "v_mul_lo_u16_sdwa v3, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_0"
        ),
        exec_mask=FULL,
        v={1: U[0], 2: U[1]},
        s={106: 0x0F0F0F0F, 107: 0x33333333},
    )
    for lane in range(LANES):
        chosen = 0x33333333_0F0F0F0F >> lane & 1
        assert int(state.v[0, 0, lane]) == (int(U[1][lane]) >> 16 if chosen else int(U[0][lane]))
        assert int(state.v[3, 0, lane]) == (int(U[0][lane]) >> 16) * (int(U[1][lane]) & 255) & 0xFFFF


# ---------------------------------------------------------------- comparisons and masks
PYTHON = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: not (a == b),  # noqa: SIM201
    "nlt": lambda a, b: not a < b,
}
CASES = [
    (c, k)
    for c in COMPARE
    for k in (("f16", "f32", "f64") if c != "ne" else ())
    + (() if c in FLOAT_ONLY else ("i16", "u16", "i32", "u32", "i64", "u64"))
]


@pytest.mark.parametrize("condition, kind", CASES)
def test_comparisons(condition, kind):
    dtype = np.dtype({"f": "float", "i": "int", "u": "uint"}[kind[0]] + kind[1:])
    small = rng.integers(-2, 3, (2, LANES))
    values = small.astype(dtype) if kind[0] != "f" else np.where(small == 2, np.nan, small).astype(dtype)
    wide = np.zeros((2, LANES, max(4, dtype.itemsize)), np.uint8)
    wide[:, :, : dtype.itemsize] = values[..., None].view(np.uint8)
    if dtype.itemsize == 2:
        wide[:, :, 2:] = 0xEE  # the other half must not matter
    words = wide.view(np.uint32)
    pair = dtype.itemsize == 8
    registers = {2 + 2 * n + w: words[n, :, w] for n in range(2) for w in range(1 + pair)}
    names = ["v[2:3]", "v[4:5]"] if pair else ["v2", "v4"]
    want = [bool(ON[i] and PYTHON[condition](values[0][i], values[1][i])) for i in range(LANES)]
    for stem in ("v_cmp", "v_cmpx"):
        state = run(f"{stem}_{condition}_{kind}_e64 s[20:21], {names[0]}, {names[1]}", v=registers)
        assert bits_of(int(state.pair(20)[0])).tolist() == want
        assert bits_of(int(state.exec[0])).tolist() == (want if stem == "v_cmpx" else ON.tolist())


def test_cmpx_narrows_exec():
    state = run("v_cmpx_lt_u32_e32 vcc, v1, v2\nv_mov_b32_e32 v0, 7", v={0: U[3], 1: U[0], 2: U[1]})
    want = ON & (U[0] < U[1])
    assert (bits_of(int(state.exec[0])) == want).all() and (state.v[0, 0] == np.where(want, 7, U[3])).all()


def test_compare_class():
    values = np.resize(np.array([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf], np.float32), LANES)
    names = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for position, bit in enumerate(names):
        state = run(
            f"v_cmp_class_f32_e64 s[20:21], v1, {1 << bit}"
            if 1 << bit <= 64
            else "v_cmp_class_f32_e64 s[20:21], v1, v2",
            v={1: values, 2: np.full(LANES, 1 << bit, np.uint32)},
        )
        got = int(state.s[0, 20]) | int(state.s[0, 21]) << 32
        assert all(got >> lane & 1 == (ON[lane] and lane % 9 == position) for lane in range(LANES))


@pytest.mark.parametrize("name", ("add", "sub", "subrev"))
def test_carry_chains_compute_64_bits(name):
    low, high = f"v_{name}_co_u32_e32", {"add": "v_addc", "sub": "v_subb", "subrev": "v_subbrev"}[name] + "_co_u32_e32"
    state = run(
        f"{low} v0, vcc, v2, v4\n{high} v1, vcc, v3, v5, vcc", v={0: U[0], 1: U[0], 2: U[0], 3: U[1], 4: U[2], 5: U[3]}
    )
    for lane in np.flatnonzero(ON):
        a, b = int(U[0][lane]) | int(U[1][lane]) << 32, int(U[2][lane]) | int(U[3][lane]) << 32
        want = {"add": a + b, "sub": a - b, "subrev": b - a}[name]
        assert int(state.v[0, 0, lane]) | int(state.v[1, 0, lane]) << 32 == want & FULL
        assert int(state.pair(106)[0]) >> lane & 1 == (want < 0 or want > FULL)
    assert int(state.pair(106)[0]) & ~PARTIAL == 0


@pytest.mark.parametrize("kind", ("u64_u32", "i64_i32"))
def test_multiply_add_64(kind):
    state = run(
        f"v_mad_{kind} v[0:1], s[20:21], v2, v3, v[4:5]", v={0: U[3], 1: U[3], 2: U[0], 3: U[1], 4: U[2], 5: U[3]}
    )
    view = (lambda x: int(x)) if kind[0] == "u" else (lambda x: int(np.int32(np.uint32(x).view(np.int32))))
    for lane in np.flatnonzero(ON):
        addend = int(U[2][lane]) | int(U[3][lane]) << 32
        total = view(U[0][lane]) * view(U[1][lane]) + addend
        assert int(state.v[0, 0, lane]) | int(state.v[1, 0, lane]) << 32 == total & FULL
        if kind[0] == "u":
            assert int(state.pair(20)[0]) >> lane & 1 == (total > FULL)


def test_lane_reads_and_writes_ignore_exec():
    state = run(
        (
            "v_readlane_b32 s3, v1, 5\nv_readlane_b32 s4, v1, s8\n"
            "v_writelane_b32 v0, s9, 0\nv_writelane_b32 v0, 7, s8\nv_readfirstlane_b32 s5, v1"
        ),
        v={0: U[3], 1: U[0]},
        s={8: 70, 9: 0xABCD},
    )
    assert [int(state.s[0, n]) for n in (3, 4, 5)] == [int(U[0][5]), int(U[0][6]), int(U[0][1])]
    want = U[3].copy()
    want[0], want[6] = 0xABCD, 7
    assert (state.v[0, 0] == want).all()
    empty = run("v_readfirstlane_b32 s5, v1", exec_mask=0, v={1: U[0]})
    assert int(empty.s[0, 5]) == int(U[0][0])


def test_mbcnt_counts_lanes_below():
    state = run(
        "v_mbcnt_lo_u32_b32 v0, s0, 0\nv_mbcnt_hi_u32_b32 v0, s1, v0", exec_mask=FULL, s={0: 0xF0F0F0F1, 1: 0x12345678}
    )
    mask = 0x12345678_F0F0F0F1
    assert [int(x) for x in state.v[0, 0]] == [bin(mask & ((1 << lane) - 1)).count("1") for lane in range(LANES)]


@pytest.mark.parametrize("table", (0x00, 0xFF, 0x36, 0xDE, 0xCA, 0x96, 0x01))
def test_bitop3_is_its_truth_table(table):
    state = run(f"v_bitop3_b32 v0, v1, s4, v3 bitop3:{table:#x}", v={0: U[3], 1: U[0], 3: U[2]}, s={4: 0x9E3779B9})
    for lane in np.flatnonzero(ON)[:8]:
        for bit in range(32):
            index = (int(U[0][lane]) >> bit & 1) << 2 | (0x9E3779B9 >> bit & 1) << 1 | int(U[2][lane]) >> bit & 1
            assert int(state.v[0, 0, lane]) >> bit & 1 == table >> index & 1


@pytest.mark.parametrize("rows", (16, 32))
def test_permlane_swaps(rows):
    state = run(f"v_permlane{rows}_swap_b32_e32 v0, v1", exec_mask=FULL, v={0: U[0], 1: U[1]})
    want0, want1 = U[0].copy(), U[1].copy()
    for lane in range(LANES):
        if lane // rows % 2 == 0:
            want0[lane + rows], want1[lane] = U[1][lane], U[0][lane + rows]
    assert (state.v[0, 0] == want0).all() and (state.v[1, 0] == want1).all()


def test_swap_and_accumulator_moves():
    state = run(
        "v_swap_b32 v0, v1\nv_accvgpr_write_b32 a0, v2\nv_accvgpr_mov_b32 a1, a2\nv_accvgpr_read_b32 v3, a2",
        v={0: U[0], 1: U[1], 2: U[2], 3: U[3]},
        a={0: U[3], 1: U[3], 2: U[0]},
    )
    assert (state.v[0, 0] == np.where(ON, U[1], U[0])).all() and (state.v[1, 0] == np.where(ON, U[0], U[1])).all()
    assert (state.a[0, 0] == np.where(ON, U[2], U[3])).all() and (state.a[1, 0] == np.where(ON, U[0], U[3])).all()
    assert (state.v[3, 0] == np.where(ON, U[0], U[3])).all()


# ---------------------------------------------------------------- packed
@pytest.mark.parametrize("op_sel", ((0, 0), (1, 0), (0, 1), (1, 1)))
@pytest.mark.parametrize("op_sel_hi", ((1, 1), (0, 1), (1, 0), (0, 0)))
@pytest.mark.parametrize("negate", ("", " neg_lo:[1,0] neg_hi:[0,1]"))
def test_packed_f32_words(op_sel, op_sel_hi, negate):
    low, high = (",".join(map(str, bits)) for bits in (op_sel, op_sel_hi))
    text = f"v_pk_mul_f32 v[0:1], v[2:3], s[4:5] op_sel:[{low}] op_sel_hi:[{high}]{negate}"
    scalars = np.array([1.25, -3.5], np.float32)
    state = run(
        text,
        v={0: F[3], 1: F[2], 2: F[0], 3: F[1]},
        s={4: int(scalars.view(np.uint32)[0]), 5: int(scalars.view(np.uint32)[1])},
    )
    for lane in range(LANES):
        a, b = (F[0][lane], F[1][lane]), scalars
        low = (-1 if negate else 1) * a[op_sel[0]] * b[op_sel[1]]
        high = a[op_sel_hi[0]] * b[op_sel_hi[1]] * (-1 if negate else 1)
        want = (low, high) if ON[lane] else (F[3][lane], F[2][lane])
        assert (floats(state, 0)[lane], floats(state, 1)[lane]) == want


def test_packed_f32_in_place_with_swapped_words():
    state = run(
        "v_pk_add_f32 v[0:1], v[0:1], v[0:1] op_sel:[0,1] op_sel_hi:[1,0]", exec_mask=FULL, v={0: F[0], 1: F[1]}
    )
    assert (floats(state, 0) == F[0] + F[1]).all() and (floats(state, 1) == F[1] + F[0]).all()


def test_packed_move_and_packed_shift():
    state = run(
        (
            "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]\nv_pk_lshlrev_b16 v6, 4, v7 op_sel_hi:[0,1]\n"
            "v_pk_mul_lo_u16 v8, v7, v2 op_sel:[1,0] op_sel_hi:[0,1]"
        ),
        v={0: U[0], 1: U[0], 2: U[1], 3: U[2], 4: U[3], 5: U[0], 6: U[0], 7: U[1], 8: U[0]},
    )
    for lane in np.flatnonzero(ON):
        assert (int(state.v[0, 0, lane]), int(state.v[1, 0, lane])) == (int(U[2][lane]), int(U[3][lane]))
        x, y = int(U[1][lane]), int(U[1][lane])
        assert int(state.v[6, 0, lane]) == (x << 4 & 0xFFFF) | ((x >> 16) << 4 & 0xFFFF) << 16
        assert (
            int(state.v[8, 0, lane]) == ((x >> 16) * (y & 0xFFFF) & 0xFFFF) | ((x & 0xFFFF) * (y >> 16) & 0xFFFF) << 16
        )


def test_mixed_precision_fma():
    halves = rng.standard_normal((LANES, 2)).astype(np.float16)
    registers = {0: F[3], 1: halves.view(np.uint32)[:, 0], 2: F[0], 3: F[1], 4: U[0]}
    state = run(
        (
            "v_fma_mix_f32 v0, -v1, |v2|, v3 op_sel:[1,0,0] op_sel_hi:[1,0,0]\n"
            "v_fma_mixlo_f16 v4, v2, v3, v2\nv_fma_mixhi_f16 v4, v2, v2, v3"
        ),
        v=registers,
    )
    for lane in np.flatnonzero(ON):
        want = np.float32(-np.float64(halves[lane, 1]) * abs(F[0][lane]) + F[1][lane])
        np.testing.assert_allclose(floats(state, 0)[lane], want, rtol=1e-6)
        low, high = state.v[4, 0].view(np.float16).reshape(LANES, 2)[lane]
        np.testing.assert_allclose(low, F[0][lane] * F[1][lane] + F[0][lane], rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(high, F[0][lane] * F[0][lane] + F[1][lane], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ("f16", "bf16"))
def test_dot2(kind):
    parts = rng.standard_normal((2, LANES, 2)).astype(np.float32)
    if kind == "f16":
        words = parts.astype(np.float16).view(np.uint32)[..., 0]
        parts = parts.astype(np.float16).astype(np.float64)
    else:
        high = (parts.view(np.uint32) >> 16).astype(np.uint32)
        words, parts = high[..., 0] | high[..., 1] << 16, (high << 16).view(np.float32).astype(np.float64)
    state = run(
        f"v_dot2_f32_{kind} v0, v1, v2, v3\nv_dot2c_f32_{kind}_e32 v4, v1, v2",
        exec_mask=FULL,
        v={1: words[0], 2: words[1], 3: F[0], 4: F[1]},
    )
    np.testing.assert_allclose(floats(state, 0), (parts[0] * parts[1]).sum(-1) + F[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(floats(state, 4), (parts[0] * parts[1]).sum(-1) + F[1], rtol=1e-5, atol=1e-5)


def test_byte_permute_against_bytes():
    select = np.array([int(x) for x in rng.integers(0, 14, (LANES, 4)) @ (256 ** np.arange(4))], np.uint64).astype(
        np.uint32
    )
    state = run("v_perm_b32 v0, v1, v2, v3", v={0: U[3], 1: U[0], 2: U[1], 3: select})
    for lane in np.flatnonzero(ON):
        source = int(U[1][lane]).to_bytes(4, "little") + int(U[0][lane]).to_bytes(4, "little")
        out = []
        for code in int(select[lane]).to_bytes(4, "little"):
            out.append(
                source[code]
                if code < 8
                else 255 * (source[2 * code - 15] >> 7)
                if code < 12
                else 0
                if code == 12
                else 255
            )
        assert int(state.v[0, 0, lane]) == int.from_bytes(bytes(out), "little")


def test_round_toward_zero_pack():
    values = np.array(
        [1.0009765625 + 2**-12, -1.0009765625 - 2**-12, 65519.0, 1e9, -1e9, np.inf, 2.0**-25, 0.0] * 8, np.float32
    )
    state = run("v_cvt_pkrtz_f16_f32 v0, v1, v1", exec_mask=FULL, v={1: values})
    got = state.v[0, 0].view(np.float16).reshape(LANES, 2)
    assert (got[:, 0] == got[:, 1]).all()
    for value, half in zip(values[:8], got[:8, 0], strict=True):
        assert abs(float(half)) <= abs(float(value)) and (np.isinf(value) or np.isfinite(half))


def test_division_sequence_is_right_over_the_whole_range():
    """div_scale, rcp, fma steps, div_fmas, div_fixup as LLVM emits them: within one unit of numpy's quotient."""
    text = """
    v_div_scale_f32 v10, s[0:1], v2, v2, v1
    v_rcp_f32_e32 v11, v10
    v_div_scale_f32 v12, vcc, v1, v2, v1
    v_fma_f32 v13, -v10, v11, 1.0
    v_fmac_f32_e32 v11, v13, v11
    v_mul_f32_e32 v13, v12, v11
    v_fma_f32 v14, -v10, v13, v12
    v_fmac_f32_e32 v13, v14, v11
    v_fma_f32 v10, -v10, v13, v12
    v_div_fmas_f32 v10, v10, v11, v13
    v_div_fixup_f32 v0, v10, v2, v1"""
    special = np.array([0.0, -0.0, 1, -1, 3, np.inf, -np.inf, np.nan, 3e38, 1e-38, 2.0**-126, 2.0**127], np.float32)
    values = np.array([(a, b) for a in special for b in special], np.float32)
    random = (rng.standard_normal((176, 2)) * 10.0 ** rng.integers(-30, 30, (176, 2))).astype(np.float32)
    for chunk in np.concatenate([values, random])[:320].reshape(-1, LANES, 2):
        a, b = np.ascontiguousarray(chunk[:, 0]), np.ascontiguousarray(chunk[:, 1])
        got = floats(run(text, exec_mask=FULL, v={1: a, 2: b}), 0)
        with np.errstate(all="ignore"):
            want = a / b
        normal = np.isfinite(want) & (np.abs(want) > 1e-37)
        np.testing.assert_allclose(got[normal], want[normal], rtol=1.2e-7)
        odd = ~normal & ~(np.abs(want) < 1e-37)
        np.testing.assert_array_equal(got[odd], want[odd])


def test_unfused_multiply_add_and_half_fmac():
    halves = rng.standard_normal((3, LANES)).astype(np.float16)
    registers = {
        0: F[0],
        1: F[1],
        2: F[2],
        3: F[3],
        **{4 + n: halves[n].view(np.uint16).astype(np.uint32) for n in range(3)},
    }
    state = run(
        "v_mac_f32_e32 v0, v1, v2\nv_mad_f32 v3, v1, v2, v1\nv_fmac_f16_e32 v4, v5, v6", exec_mask=FULL, v=registers
    )
    assert (floats(state, 0) == F[1] * F[2] + F[0]).all() and (floats(state, 3) == F[1] * F[2] + F[1]).all()
    want = (halves[1].astype(np.float64) * halves[2] + halves[0]).astype(np.float16)
    assert (state.v[4, 0].astype(np.uint16).view(np.float16) == want).all()


@pytest.mark.parametrize("kind", ("i32", "u32"))
def test_median_of_three(kind):
    state = run(f"v_med3_{kind} v0, v1, v2, v3", exec_mask=FULL, v={1: U[0], 2: U[1], 3: U[2]})
    view = U[:3].view(np.int32) if kind == "i32" else U[:3]
    assert (state.v[0, 0].view(view.dtype) == np.sort(view, axis=0)[1]).all()


def test_float_parts_and_half_root():
    values = np.resize(np.array([0.0, 1.0, -6.5, 1e-40, np.inf, np.nan, 3e38], np.float32), LANES)
    wide = values.astype(np.float64)
    words = wide.view(np.uint32).reshape(LANES, 2)
    halves = np.abs(values).astype(np.float16).view(np.uint16).astype(np.uint32)
    text = "v_frexp_exp_i32_f32_e32 v0, v1\nv_frexp_exp_i32_f64_e32 v2, v[4:5]\nv_sqrt_f16_e32 v6, v7\nv_nop"
    with np.errstate(over="ignore"):
        state = run(text, exec_mask=FULL, v={1: values, 4: words[:, 0], 5: words[:, 1], 7: halves})
    for lane in range(LANES):
        exponent = math.frexp(float(values[lane]))[1] if math.isfinite(values[lane]) else 0
        assert int(state.v[0, 0].view(np.int32)[lane]) == int(state.v[2, 0].view(np.int32)[lane]) == exponent
    want = np.sqrt(halves.astype(np.uint16).view(np.float16))
    np.testing.assert_array_equal(state.v[6, 0].astype(np.uint16).view(np.float16), want)
