"""What machine code says of itself: registers, spills, LDS, and the opcodes of the hot loop and outside it.

`python tests/flydsl/isa_facts.py` rewrites golden.json; the reason for every change belongs in the commit.
"""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from undertow.instruments import probe
from undertow.kernels.flydsl import compiler
from undertow.kernels.flydsl.geometry import Geometry
from undertow.simulator import asm

GOLDEN = Path(__file__).parent / "golden.json"
PACKED = frozenset({"packed"})
BUILDS = {
    "192/128 default": {},
    "192/128 plain": {"transposed_tiles": True, "pipeline": False, "kv_major": False},
    "192/128 plain, kv_major": {"transposed_tiles": True, "pipeline": False},
    "192/128 one copy": {"pipeline": False},
    "192/128 4 waves": {"num_waves": 4},
    "192/128 64x128": {"block_m": 64, "pipeline": False},
    "192/128 32x256": {"block_n": 256},
    "192/128 32x64, 4 waves": {"num_waves": 4, "block_n": 64},
    "192/128 dq_groups=2": {"dq_groups": 2},
    "192/128 bf16 dQ": {"dq_groups": 2, "accumulate": "bf16"},
    "192/128 no dQ": {"accumulate": "none"},
    "192/128 owner": {"accumulate": "owner"},
    "192/128 interleave 4": {"schedule": "interleave", "sched_steps": 4},
    "192/128 interleave 1": {"schedule": "interleave", "sched_steps": 1},
    "192/128 fp16": {"dtype": "fp16"},
    "128/128 default": {"qk_head_dim": 128, "v_head_dim": 128},
    "64/64 default": {"qk_head_dim": 64, "v_head_dim": 64},
    "96/96 default": {"qk_head_dim": 96, "v_head_dim": 96, "dq_groups": 2},
    "128/64 default": {"qk_head_dim": 128, "v_head_dim": 64},
    "256/256 default": {"qk_head_dim": 256, "v_head_dim": 256, "block_m": 16, "block_n": 64, "num_waves": 4},
    "gfx950 192/128 default": {"arch": "gfx950"},
    "gfx950 192/128 plain": {"arch": "gfx950", "transposed_tiles": True, "pipeline": False, "kv_major": False},
    "gfx950 192/128 one copy": {"arch": "gfx950", "pipeline": False},
    "gfx950 192/128 4 waves": {"arch": "gfx950", "num_waves": 4},
}
CORE = (
    "192/128 default", "192/128 plain", "192/128 plain, kv_major", "192/128 one copy", "192/128 4 waves",
    "192/128 64x128", "192/128 32x256", "192/128 dq_groups=2", "128/128 default", "256/256 default",
    "gfx950 192/128 default",
)  # fmt: skip
"""Builds that the ordinary test run compiles; the others belong to the slow run."""


def key_of(name):
    geometry = Geometry(**BUILDS[name])
    module = "dq_device" if geometry.accumulate == "owner" else "main_device"
    return (module, "build", geometry, PACKED)


def text_of(name):
    return compiler.isa(key_of(name))


def facts(text):
    """What `undertow probe` says of it, the hot loop's opcodes by group, and what stands outside."""
    report = probe.probe_text(text)
    row = report.row()
    hot = report.hot.counts
    found = {name: row[name] for name in ("vgpr", "agpr", "lds_bytes", "scratch_bytes", "spills", "cas_loops")}
    groups = ("mfma", "accvgpr", "spill", "lds", "vmem", "atomic", "barrier")
    found["loop"] = {name: hot.get(name, 0) for name in groups}
    return found | {"loop_instructions": sum(hot.values()), "all_spill": report.counts.get("spill", 0)}


def hot_opcodes(text):
    """Opcodes of the hot loop."""
    hot = probe.probe_text(text).hot
    inside = (x for x in asm.parse(text).instructions if hot.first_line <= x.line <= hot.last_line)
    return Counter(x.opcode for x in inside)


def histogram(text):
    return Counter(x.opcode for x in asm.parse(text).instructions)


def facts_of(names):
    """Facts by build name, compiled by one child process."""
    compiler.isa_many([key_of(name) for name in names])
    return {name: facts(text_of(name)) for name in names}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"flydsl": version("flydsl"), "builds": facts_of(BUILDS)}, indent=1) + "\n")
