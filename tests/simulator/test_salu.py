"""Scalar instructions beyond plain arithmetic: comparisons, bits, conditional moves, EXEC, branches, mode registers."""

import operator

import numpy as np
import pytest
from bench import FULL, LANES, PARTIAL, Bench

from undertow.simulator import Options
from undertow.simulator.control import IGNORED

COMPARE = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
PAIRS = (
    (0, 0),
    (1, 2),
    (2, 1),
    (0xFFFFFFFF, 1),
    (0x80000000, 0x7FFFFFFF),
    (5, 0xFFFF8000),
    (0xFFFF8000, 0xFFFF8000),
    (0x8000, 0x8000),
)


def signed(value, bits=32):
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def pair(state, index):
    return int(state.s[0, index]) | int(state.s[0, index + 1]) << 32


@pytest.mark.parametrize("condition", COMPARE)
@pytest.mark.parametrize("kind", ("i32", "u32"))
@pytest.mark.parametrize("a, b", PAIRS)
def test_comparisons_set_scc(condition, kind, a, b):
    number = signed if kind == "i32" else int
    state = Bench(s={0: a, 1: b}).run(f"s_cmp_{condition}_{kind} s0, s1")
    assert bool(state.scc[0]) == COMPARE[condition](number(a), number(b))
    immediate = b & 0xFFFF
    state = Bench(s={0: a}).run(f"s_cmpk_{condition}_{kind} s0, {immediate:#x}")
    want = signed(immediate, 16) if kind == "i32" else immediate
    assert bool(state.scc[0]) == COMPARE[condition](number(a), want)


@pytest.mark.parametrize("a, b", ((0, 0), (1 << 40, 1 << 40), (1 << 40, 1), (1, 1 << 40)))
def test_64_bit_equality(a, b):
    registers = {0: a, 1: a >> 32, 2: b, 3: b >> 32}
    assert bool(Bench(s=registers).run("s_cmp_eq_u64 s[0:1], s[2:3]").scc[0]) == (a == b)
    assert bool(Bench(s=registers).run("s_cmp_lg_u64 s[0:1], s[2:3]").scc[0]) == (a != b)


@pytest.mark.parametrize("bit", (0, 5, 31, 37, 63))
def test_single_bits(bit):
    word = 0x123456789ABCDEF0
    registers = {0: word, 1: word >> 32, 2: bit}
    for value in (0, 1):
        low = Bench(s=registers).run(f"s_bitset{value}_b32 s0, s2")
        wide = Bench(s=registers).run(f"s_bitset{value}_b64 s[0:1], s2")
        mask32, mask64 = 1 << (bit & 31), 1 << bit
        want32 = (word & 0xFFFFFFFF) | mask32 if value else word & 0xFFFFFFFF & ~mask32
        assert int(low.s[0, 0]) == want32 and pair(wide, 0) == (word | mask64 if value else word & ~mask64)
        assert bool(Bench(s=registers).run(f"s_bitcmp{value}_b32 s0, s2").scc[0]) == ((word >> (bit & 31) & 1) == value)
        assert bool(Bench(s=registers).run(f"s_bitcmp{value}_b64 s[0:1], s2").scc[0]) == ((word >> bit & 1) == value)


@pytest.mark.parametrize("scc", (0, 1))
def test_conditional_moves(scc):
    text = (
        "s_cmov_b32 s0, s4\ns_cmov_b64 s[2:3], s[4:5]\ns_cmovk_i32 s8, 0xfffe\n"
        "s_cselect_b32 s9, s4, 7\ns_cselect_b64 s[10:11], s[4:5], -1"
    )
    state = Bench(s={0: 1, 2: 2, 3: 3, 4: 44, 5: 55, 8: 8}, scc=scc).run(text)
    got = [int(state.s[0, n]) for n in (0, 2, 3, 8, 9)] + [pair(state, 10)]
    assert got == ([44, 44, 55, 0xFFFFFFFE, 44, 44 | 55 << 32] if scc else [1, 2, 3, 8, 7, FULL])


@pytest.mark.parametrize("value, by", ((5, 3), (0x7FFFFFFF, 1), (0x80000000, 0xFFFF), (0xFFFFFFFF, 0x8000)))
def test_immediate_arithmetic(value, by):
    state = Bench(s={0: value}).run(f"s_addk_i32 s0, {by:#x}")
    total = signed(value) + signed(by, 16)
    assert int(state.s[0, 0]) == total & 0xFFFFFFFF and bool(state.scc[0]) == (not -(1 << 31) <= total < 1 << 31)
    state = Bench(s={0: value}, scc=1).run(f"s_mulk_i32 s0, {by:#x}\ns_movk_i32 s1, {by:#x}")
    assert int(state.s[0, 0]) == signed(value) * signed(by, 16) & 0xFFFFFFFF and bool(state.scc[0])
    assert int(state.s[0, 1]) == signed(by, 16) & 0xFFFFFFFF


SAVE = {
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


@pytest.mark.parametrize("name", SAVE)
@pytest.mark.parametrize("source", (0, FULL, 0x00FF00FF00FF00FF))
def test_saveexec(name, source):
    """Also with the saved mask going into its own source register."""
    state = Bench(s={0: source, 1: source >> 32}, exec_mask=PARTIAL).run(
        f"s_{name}_saveexec_b64 s[0:1], s[0:1]\nv_mov_b32_e32 v0, 7"
    )
    want = SAVE[name](PARTIAL, source) & FULL
    assert int(state.exec[0]) == want and pair(state, 0) == PARTIAL and bool(state.scc[0]) == (want != 0)
    assert [int(x) == 7 for x in state.v[0, 0]] == [bool(want >> lane & 1) for lane in range(LANES)]


@pytest.mark.parametrize(
    "branch, setup, taken",
    (
        ("scc0", "s_cmp_eq_u32 s0, s0", False),
        ("scc1", "s_cmp_eq_u32 s0, s0", True),
        ("vccz", "s_mov_b64 vcc, 0", True),
        ("vccz", "s_mov_b64 vcc, 4", False),
        ("vccnz", "s_mov_b64 vcc, 0", False),
        ("vccnz", "s_mov_b64 vcc, 4", True),
        ("execz", "s_mov_b64 exec, 0", True),
        ("execz", "s_nop 0", False),
        ("execnz", "s_mov_b64 exec, 0", False),
        ("execnz", "s_mov_b32 exec_lo, 0", True),
    ),
)
def test_branches(branch, setup, taken):
    state = Bench(s={0: 1, 5: 0}).run(f"{setup}\ns_cbranch_{branch} .L\ns_mov_b32 s5, 1\n.L:\ns_nop 0")
    assert int(state.s[0, 5]) == (0 if taken else 1)


def test_waves_that_branch_apart_meet_again():
    """Each wave loops its own number of times; afterwards all are together and have counted right."""
    wave = np.arange(5, dtype=np.uint32)[:, None] * np.ones((1, LANES), np.uint32)
    text = (
        "v_readfirstlane_b32 s0, v1\ns_mov_b32 s1, 0\n.L:\ns_add_i32 s1, s1, 3\n"
        "s_sub_i32 s0, s0, 1\ns_cmp_ge_i32 s0, 0\ns_cbranch_scc1 .L\ns_add_i32 s2, s1, 100"
    )
    for seed in (None, 0):
        bench = Bench(v={1: wave}, waves=5, options=Options(seed=seed))
        assert [int(x) for x in bench.run(text).s[:, 2]] == [100 + 3 * (w + 1) for w in range(5)]
    plain = Bench(v={1: wave}, waves=5)
    plain.run(text)
    assert plain.machine.executed[-1] == 5 and plain.machine.steps < 5 * 4 * 5, "the tail ran once for all"


def test_what_has_no_effect_has_none():
    lines = [
        f"{name} 0" if name.startswith(("s_nop", "s_setprio", "s_sethalt", "s_inc", "s_dec", "s_inst")) else name
        for name in IGNORED
    ]
    bench = Bench(v={0: np.arange(LANES, dtype=np.uint32)})
    state = bench.run("\n".join(lines) + "\ns_sleep 1\nv_mov_b32_e32 v1, v0")
    assert (state.v[1, 0] == state.v[0, 0]).all() and bench.kinds() == []


def test_clock_and_mode_registers():
    text = (
        "s_memtime s[0:1]\ns_memrealtime s[2:3]\ns_waitcnt lgkmcnt(0)\n"
        "s_getreg_b32 s4, hwreg(HW_REG_MODE, 4, 2)\ns_mov_b32 s5, 0\n"
    )
    state = Bench().run(text + "s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s5\ns_getreg_b32 s6, hwreg(HW_REG_MODE, 4, 2)")
    assert pair(state, 2) > pair(state, 0) and [int(state.s[0, n]) for n in (4, 6)] == [3, 0]


def test_m0_and_named_registers():
    state = Bench(s={0: 7}).run(
        "s_mov_b32 m0, s0\ns_mov_b32 s1, m0\ns_mov_b32 vcc_lo, 3\ns_mov_b32 vcc_hi, 4\n"
        "s_mov_b64 s[2:3], vcc\ns_cmp_eq_u32 s0, 7\ns_mov_b32 s4, src_scc"
    )
    assert int(state.s[0, 1]) == 7 and pair(state, 2) == 3 | 4 << 32 and int(state.s[0, 4]) == 1
