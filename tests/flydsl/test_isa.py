"""Gates on the machine code: golden register tables, the published bounds, and what each knob changes."""

import json
from dataclasses import replace
from importlib.metadata import version

import isa_facts
import pytest

from undertow.kernels.flydsl import compiler
from undertow.kernels.flydsl.geometry import Geometry

slow = pytest.mark.slow
OTHERS = tuple(name for name in isa_facts.BUILDS if name not in isa_facts.CORE)


@pytest.fixture(scope="module")
def built():
    return isa_facts.facts_of(isa_facts.CORE)


@pytest.fixture(scope="module")
def others():
    return isa_facts.facts_of(OTHERS)


def golden():
    found = json.loads(isa_facts.GOLDEN.read_text())
    if found["flydsl"] != version("flydsl"):
        pytest.skip(f"golden tables are of flydsl {found['flydsl']}, here is {version('flydsl')}")
    assert set(found["builds"]) == set(isa_facts.BUILDS)
    return found["builds"]


def test_golden_tables_hold(built):
    table = golden()
    for name, facts in built.items():
        assert facts == table[name], name


@slow
def test_golden_tables_of_the_other_builds_hold(others):
    table = golden()
    for name, facts in others.items():
        assert facts == table[name], name


@pytest.mark.parametrize(("name", "mfma"), [("192/128 default", 104), ("gfx950 192/128 default", 52)])
def test_the_default_build_meets_the_published_gates(built, name, mfma):
    facts = built[name]
    assert facts["scratch_bytes"] <= 16 and facts["spills"] == 0
    assert facts["vgpr"] <= 256 and facts["agpr"] == 0
    assert facts["loop"]["spill"] == facts["loop"]["accvgpr"] == 0
    assert facts["loop"]["mfma"] == mfma and facts["loop"]["barrier"] == 2
    assert facts["lds_bytes"] <= (51_200 if "950" not in name else 53_248)


def test_no_build_spins_on_an_atomic(built):
    assert all(facts["cas_loops"] == 0 for facts in built.values())
    assert all(facts["cas_loops"] == 0 for facts in golden().values())


def test_why_the_other_tiles_lose(built):
    # Four waves: what no longer fits 256 registers moves through the accumulator file, in the loop.
    assert built["192/128 4 waves"]["loop"]["accvgpr"] > 50
    # Twice the rows or twice the keys: spills to memory, in the loop.
    assert built["192/128 64x128"]["loop"]["spill"] > 10
    assert built["192/128 32x256"]["loop"]["spill"] > 100
    for name in ("192/128 default", "192/128 dq_groups=2", "256/256 default", "gfx950 192/128 default"):
        assert built[name]["loop"]["spill"] == built[name]["loop"]["accvgpr"] == 0, name


def matches(builds):
    for name, facts in builds.items():
        geometry = Geometry(**isa_facts.BUILDS[name])
        assert facts["lds_bytes"] == geometry.lds_bytes, name
        assert facts["loop"]["mfma"] == geometry.mfma_per_wave(), name
        assert facts["loop"]["barrier"] == geometry.barriers, name
        compiler.confirm(isa_facts.key_of(name), isa_facts.text_of(name))


def test_code_is_what_its_geometry_says(built):
    matches(built)


@slow
def test_code_of_the_other_builds_is_what_their_geometry_says(others):
    matches(others)


def test_a_probe_that_disagrees_with_the_launch_is_caught():
    module, builder, geometry, features = isa_facts.key_of("192/128 default")
    text = isa_facts.text_of("192/128 default")
    for other in (replace(geometry, pipeline=False), replace(geometry, num_waves=4)):
        with pytest.raises(RuntimeError, match="the resolved geometry"):
            compiler.confirm((module, builder, other, features), text)


KNOBS = {
    "qk_head_dim": ("192/128 default", "128/128 default"),
    "v_head_dim": ("128/128 default", "128/64 default"),
    "block_m": ("192/128 one copy", "192/128 64x128"),
    "block_n": ("192/128 default", "192/128 32x256"),
    "num_waves": ("192/128 default", "192/128 4 waves"),
    "dq_groups": ("192/128 default", "192/128 dq_groups=2"),
    "transposed_tiles": ("192/128 plain, kv_major", "192/128 one copy"),
    "pipeline": ("192/128 one copy", "192/128 default"),
    "schedule": ("192/128 default", "192/128 interleave 1"),
    "sched_steps": ("192/128 interleave 1", "192/128 interleave 4"),
    "accumulate": ("192/128 dq_groups=2", "192/128 bf16 dQ"),
    "dtype": ("192/128 default", "192/128 fp16"),
}


def knobs():
    for knob, pair in KNOBS.items():
        yield pytest.param(knob, marks=[] if set(pair) <= set(isa_facts.CORE) else slow)


@pytest.mark.parametrize("knob", list(knobs()))
def test_each_knob_changes_the_opcode_histogram(knob):
    one, other = KNOBS[knob]
    before, after = (Geometry(**isa_facts.BUILDS[name]) for name in (one, other))
    assert {f for f in before.echo() if f in Geometry.__slots__ and getattr(before, f) != getattr(after, f)} == {knob}
    assert isa_facts.histogram(isa_facts.text_of(one)) != isa_facts.histogram(isa_facts.text_of(other))


def test_kv_major_changes_the_grid():
    assert Geometry().grid(3, 2, 1000) == (2, 3, 8)
    assert replace(Geometry(), kv_major=False).grid(3, 2, 1000) == (8, 2, 3)


def test_gfx950_uses_its_own_instructions(built):
    old, new = (isa_facts.histogram(isa_facts.text_of(f"{a}192/128 default")) for a in ("", "gfx950 "))
    assert old["v_mfma_f32_16x16x16_bf16"] == 104 and new["v_mfma_f32_16x16x32_bf16"] == 52
    assert old["ds_read_b64_tr_b16"] == 0 and new["ds_read_b64_tr_b16"] == 2 * (192 + 128) // 16
    loops = [isa_facts.hot_opcodes(isa_facts.text_of(f"{a}192/128 default")) for a in ("", "gfx950 ")]
    perms, conversions = ([loop[op] for loop in loops] for op in ("v_perm_b32", "v_cvt_pk_bf16_f32"))
    # gfx942 turns tiles and rounds to bf16 with byte permutations, gfx950 with instructions of its own.
    assert perms[0] >= 80 and perms[1] == 0
    assert conversions[0] == 0 and conversions[1] >= 8


def test_an_instruction_the_target_lacks_is_an_error_and_not_an_abort():
    # gfx950's instructions, built for gfx942: LLVM aborts the child, and the parent says so.
    geometry = replace(Geometry(), arch="gfx950")
    keys = {compiler._cache() / "no-such-build.s": ("main_device", "build", geometry, isa_facts.PACKED)}
    with pytest.raises(RuntimeError, match="could not compile"):
        compiler._compile("gfx942", keys)
