"""Every lane and scalar instruction for which the tinygrad wheel has AMD's pseudocode, against an interpreter of it."""

import re

import numpy as np
import pytest
from bench import FULL, LANES, PARTIAL, Bench, bits_of
from pcode import FLOATS, Lane, Unknown, Value, make

from undertow.simulator.lane_ops import OPS, PACKED_16, PACKED_F32
from undertow.simulator.salu import ARITHMETIC
from undertow.simulator.state import WIDTH

pseudocode = pytest.importorskip(
    "tinygrad.runtime.autogen.amd.cdna.str_pcode", reason="needs the simulator extra (tinygrad)"
).PCODE

PROGRAMS = {}
for _key, _text in pseudocode.items():
    PROGRAMS.setdefault(re.sub(r"_(e32|e64)$", "", _key.name.lower()), _text)
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos|rcp_iflag|div_fixup|fma|fmac|pk_fma)")
SPECIAL = {
    "f32": [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40, 65520.0, 0.1],
    "f16": [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, np.inf, -np.inf, np.nan, 65504.0, 6e-8],
    "f64": [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e300, 4294967296.0],
}
INTEGERS = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF8000, 0x00FF00FF, 0xFFFFFF80]


def operands(kind, seed):
    """64 values of a type as u64 bit patterns, specials first."""
    rng = np.random.default_rng(seed)
    if kind in SPECIAL:
        width = int(kind[1:])
        values = np.concatenate([SPECIAL[kind], rng.standard_normal(LANES) * 10.0 ** rng.integers(-3, 4, LANES)])[
            :LANES
        ]
        with np.errstate(over="ignore"):
            return rng.permutation(values.astype(FLOATS[width]).view(f"u{width // 8}").astype(np.uint64))
    values = np.concatenate([np.array(INTEGERS, np.uint64), rng.integers(0, 1 << 32, LANES, dtype=np.uint64)])[:LANES]
    values = rng.permutation(values)
    if WIDTH[kind] == 2:
        values |= rng.permutation(values) << np.uint64(32)
    return values


def lane_case(name):
    """(result type, source types, accumulates) of a vector instruction."""
    if name in OPS:
        op = OPS[name]
        return op.result, op.sources, op.accumulates
    if name in PACKED_F32:
        return "u64", ("u64",) * PACKED_F32[name][0], False
    return "u32", ("u32",) * PACKED_16[name][1], False


def run_lanes(name, kinds, values, result, accumulates, mask):
    registers, text, at = {}, [], 8
    destination = "v[0:1]" if WIDTH[result] == 2 else "v0"
    for kind, value in zip(kinds, values, strict=True):
        for word in range(WIDTH[kind]):
            registers[at + word] = (value >> np.uint64(32 * word)).astype(np.uint32)
        text.append(f"v[{at}:{at + 1}]" if WIDTH[kind] == 2 else f"v{at}")
        at += 2
    if accumulates:
        last = values[-1]
        for word in range(WIDTH[kinds[-1]]):
            registers[word] = (last >> np.uint64(32 * word)).astype(np.uint32)
        text = text[:-1]
    else:
        registers[0], registers[1] = np.full(LANES, 0xAAAA5555, np.uint32), np.full(LANES, 0x12345678, np.uint32)
    state = Bench(v=registers, exec_mask=mask).run(f"{name} {destination}, {', '.join(text)}")
    out = state.v[0, 0].astype(np.uint64)
    return out | state.v[1, 0].astype(np.uint64) << np.uint64(32) if WIDTH[result] == 2 else out


def expected(name, kinds, values, lane, accumulates, initial):
    program = PROGRAMS[name]
    names = {
        "laneId": make(lane, "u", 32),
        "D0": Value(initial, 64, "b"),
        "ROUND_NEAREST_EVEN": make(0, "u", 1),
        "ROUND_MODE": make(0, "u", 1),
    }
    for n, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        slot = (
            "SIMM32" if name in ("v_fmaak_f32", "v_fmamk_f32") and n == (2 if name == "v_fmaak_f32" else 1) else f"S{n}"
        )
        slot = "S1" if name == "v_fmamk_f32" and n == 2 else slot
        names["D0" if accumulates and n == len(kinds) - 1 else slot] = Value(int(value[lane]), 32 * WIDTH[kind], "b")
    lane_machine = Lane(names)
    lane_machine.run(program.replace("WAVE_MODE.IEEE", "1'1U"))
    return lane_machine.names["D0"].bits


def same(name, result, got, want):
    """Equal bits; floats: both NaN, or within rounding for what is rounded twice or approximated."""
    kind = "f32" if name in PACKED_F32 else "f16" if name.startswith("v_pk_") and name.endswith("f16") else result
    if kind not in SPECIAL:
        return got == want
    width, total = int(kind[1:]), 64 if name in PACKED_F32 else 32 if name in PACKED_16 else int(kind[1:])
    for at in range(0, total, width):
        x, y = (np.array(v >> at & ((1 << width) - 1), f"u{width // 8}").view(FLOATS[width])[()] for v in (got, want))
        if np.isnan(x) and np.isnan(y) or x == y:
            continue
        tiny = np.finfo(np.float32).tiny
        if TRANSCENDENTAL.match(name) and (
            np.isclose(x, y, rtol=4e-7 if width > 16 else 2e-3, atol=2e-6 if "sin" in name or "cos" in name else 0)
        ):
            continue
        if TRANSCENDENTAL.match(name) and (
            abs(x) <= tiny and abs(y) <= tiny or not np.isfinite(x) and np.abs(y) > 1e38
        ):
            continue  # denormals that the transcendental unit flushes
        return False
    return True


NOT_COMPARED = {
    "v_perm_b32": "a lambda",
    "v_fma_mix_f32": "op_sel",
    "v_cvt_pkrtz_f16_f32": "the pseudocode's rounding mode is a variable",
    "v_sqrt_f16": "numpy's half sqrt",
    "v_frexp_exp_i32_f32": "the pseudocode leaves zero and denormals out",
    "v_frexp_exp_i32_f64": "the same",
    "v_div_fixup_f32": "named limits",
    "v_med3_i32": "",
    "v_med3_u32": "",
}
LANE_NAMES = sorted(n for n in [*OPS, *PACKED_F32, *PACKED_16] if n in PROGRAMS and n not in NOT_COMPARED)


@pytest.mark.parametrize("name", LANE_NAMES)
def test_lane_instruction(name):
    result, kinds, accumulates = lane_case(name)
    mask = PARTIAL
    values = [operands(k, n) for n, k in enumerate(kinds)]
    if name in ("v_sin_f32", "v_cos_f32"):  # large angles lose their bits in the pseudocode's own f32 product
        values = [np.linspace(-1, 1, LANES, dtype=np.float32).view(np.uint32).astype(np.uint64)]
    got = run_lanes(name, kinds, values, result, accumulates, mask)
    active = bits_of(mask)
    wrong = []
    for lane in range(LANES):
        initial = int(values[-1][lane]) if accumulates else 0x12345678_AAAA5555
        kept = initial & (FULL if WIDTH[result] == 2 else 0xFFFFFFFF)
        if not active[lane]:
            assert int(got[lane]) == kept, f"lane {lane} is off and changed"
            continue
        want = expected(
            name, kinds, values, lane, accumulates, 0 if not OPS.get(name, OPS["v_add_f32"]).keeps_high else initial
        )
        want &= FULL if WIDTH[result] == 2 else 0xFFFFFFFF
        if not same(name, result, int(got[lane]), want):
            wrong.append((lane, [hex(int(v[lane])) for v in values], hex(int(got[lane])), hex(want)))
    assert not wrong, wrong[:3]


SCALAR_NAMES = sorted(n for n in ARITHMETIC if n in PROGRAMS)


@pytest.mark.parametrize("name", SCALAR_NAMES)
@pytest.mark.parametrize("scc", (0, 1))
def test_scalar_instruction(name, scc):
    result, kinds, _ = ARITHMETIC[name]
    kinds = kinds.split()
    values = [operands(k, 10 + n) for n, k in enumerate(kinds)]
    if name.startswith("s_bfe"):
        values[1] &= np.uint64(0x1F0000 | (63 if "64" in name else 31))  # widths that the pseudocode's shift defines
    lines = [
        f"{name} {'s[0:1]' if WIDTH[result] == 2 else 's0'}, "
        + ", ".join(f"s[{8 + 2 * n}:{9 + 2 * n}]" if WIDTH[k] == 2 else f"s{8 + 2 * n}" for n, k in enumerate(kinds))
    ]
    for case in range(0, LANES, 3):
        registers = {8 + 2 * n + w: int(v[case]) >> 32 * w for n, v in enumerate(values) for w in (0, 1)}
        state = Bench(s=registers, scc=scc).run("\n".join(lines))
        names = {
            f"S{n}": Value(int(v[case]) & (FULL if WIDTH[k] == 2 else 0xFFFFFFFF), 32 * WIDTH[k], "b")
            for n, (k, v) in enumerate(zip(kinds, values, strict=True))
        }
        oracle = Lane(names | {"SCC": Value(scc, 1, "u"), "D0": Value(0, 32 * WIDTH[result], "b")})
        oracle.run(PROGRAMS[name])
        got = int(state.s[0, 0]) | (int(state.s[0, 1]) << 32 if WIDTH[result] == 2 else 0)
        want = oracle.names["D0"].bits & (FULL if WIDTH[result] == 2 else 0xFFFFFFFF)
        where = [hex(int(v[case])) for v in values]
        assert got == want, (where, hex(got), hex(want))
        assert int(state.scc[0]) == oracle.names["SCC"].bits & 1, (where, "SCC")


def test_most_instructions_have_an_oracle():
    """The interpreter runs nearly every program it is given; a silent skip would show here."""
    assert len(LANE_NAMES) > 130 and len(SCALAR_NAMES) > 60
    with pytest.raises(Unknown):
        Lane({}).run("D0.u32 = unknown_function(1U)")
