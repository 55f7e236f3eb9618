"""The ladder page says what the code does."""

import json
import re

import isa_facts
import ladder
import pytest

from undertow.kernels.flydsl import plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.problem import Problem

MANUAL = (ladder.PAGE.parent / "amd.md").read_text()


def columns(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


@pytest.mark.parametrize("section", ["climb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gfx950", "losing"))])
def test_registers_and_makespan_of_the_page(section):
    page = columns(ladder.written(section))
    now = columns(ladder.table(ladder.RUNGS[section], execute=False))
    for there, here in zip(page, now, strict=True):
        assert there[: len(here)] == here


@pytest.mark.slow
@pytest.mark.parametrize("section", ladder.RUNGS)
def test_simulated_counts_of_the_page(section):
    assert ladder.written(section) == ladder.table(ladder.RUNGS[section])


def test_the_bench_climbs_the_same_rungs():
    for arch, prefix in (("gfx942", ""), ("gfx950", "gfx950 ")):
        configs = [config for _, _, config in plan.ladder(arch)]
        names = [f"{prefix}192/128 {name}" for name in ("plain", "plain, kv_major", "one copy", "default")]
        builds = [isa_facts.BUILDS.get(n, isa_facts.BUILDS["192/128 plain, kv_major"] | {"arch": arch}) for n in names]
        assert configs == [plan.config_of(Geometry(**build)) for build in builds]


def test_each_rung_of_the_climb_changes_one_thing_for_the_better():
    plain, major, one_copy, default = (name for _, name in ladder.RUNGS["climb"])
    assert ladder.tiles(plain) == 144 and ladder.tiles(major) == ladder.tiles(default) == 114
    lds = [int(ladder.static(n)[3].replace(",", "")) for n in (major, one_copy, default)]
    assert lds[1] < lds[0] and lds[2] <= 51_200


def test_the_manual_describes_each_knob_in_the_words_of_the_geometry():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", MANUAL, re.MULTILINE)
    assert len(rows) == 11
    for name, default, meaning in rows:
        assert re.search(rf"^    {name} +{re.escape(meaning)}$", Geometry.__doc__, re.MULTILINE), name
        assert default.strip("`") == str(getattr(Geometry(), name)), name


def test_the_manual_states_the_golden_registers():
    builds = json.loads(isa_facts.GOLDEN.read_text())["builds"]
    old, new = builds["192/128 default"], builds["gfx950 192/128 default"]
    registers = [f"{b['vgpr']} + {b['agpr']}" for b in (old, new)]
    spills = [f"{b['spills']}, {b['scratch_bytes']} B" for b in (old, new)]
    assert f"| VGPR + AGPR | {registers[0]} | {registers[1]} |" in MANUAL
    assert f"| spills, private segment | {spills[0]} | {spills[1]} |" in MANUAL
    assert f"| LDS | {old['lds_bytes']:,} B | {new['lds_bytes']:,} B |" in MANUAL


def test_the_manual_names_the_tiles_that_are_chosen():
    rows = re.findall(r"^\| ((?:\d+/\d+(?:, )?)+) \| ([^|]+) \| ([^|]+) \|$", MANUAL, re.MULTILINE)
    assert len(rows) == 5
    for pairs, old, new in rows:
        for pair in pairs.split(", "):
            qk, v = map(int, pair.split("/"))
            p = Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=qk, head_dim_v=v)
            for arch, text in (("gfx942", old), ("gfx950", old if new == "the same" else new)):
                g = plan.default_geometry(p, arch)
                assert text == f"{g.block_m} x {g.block_n}, {g.num_waves}, {g.dq_groups}", (pair, arch)
