"""What machine code says of itself: registers, spills, LDS, and the opcodes of the hot loop and outside it.

`python tests/flydsl/isa_facts.py` rewrites golden.json; the reason for every change belongs in the commit.
"""

import json
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from undertow.kernels.flydsl import compiler
from undertow.kernels.flydsl.geometry import Geometry

GOLDEN = Path(__file__).parent / "golden.json"
PACKED = frozenset({"packed"})
COUNTERS = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
LOOP = {
    "mfma": "v_mfma",
    "accvgpr": "v_accvgpr",
    "scratch": "scratch_",
    "barriers": "s_barrier",
    "atomics": ("buffer_atomic", "global_atomic"),
    "lds_reads": "ds_read",
    "lds_writes": "ds_write",
    "global_loads": ("buffer_load", "global_load"),
}

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


def key_of(name):
    geometry = Geometry(**BUILDS[name])
    module = "dq_device" if geometry.accumulate == "owner" else "main_device"
    return (module, "build", geometry, PACKED)


def text_of(name):
    return compiler.isa(key_of(name))


def facts(text):
    """Counters of the metadata and static opcode counts, of everything and of the innermost loop with every MFMA."""
    found = {name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1)) for name in COUNTERS}
    found["lds"] = int(re.search(r"\.group_segment_fixed_size:\s+(\d+)", text).group(1))
    code, labels = instructions(text)
    loop = hot_loop(code, labels)
    found["loop"] = {name: count(loop, prefix) for name, prefix in LOOP.items()} | {"all": len(loop)}
    found["total_scratch"] = count(code, "scratch_")
    found["compare_and_swap"] = sum("cmpswap" in line for line in code)
    return found


def instructions(text):
    body = re.search(r"^undertow\w+:.*?\n(.*?)^\.Lfunc_end", text, re.MULTILINE | re.DOTALL).group(1)
    code, labels = [], {}
    for raw in body.splitlines():
        line = raw.split(";")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line and not line.startswith("."):
            code.append(line)
    return code, labels


def hot_loop(code, labels):
    """The shortest backward branch's span that holds the most MFMA."""
    spans = []
    for at, line in enumerate(code):
        branch = re.match(r"s_c?branch\w*\s+(\S+)", line)
        if branch and labels.get(branch.group(1), len(code)) <= at:
            spans.append(code[labels[branch.group(1)] : at + 1])
    most = max(count(span, "v_mfma") for span in spans)
    return min((span for span in spans if count(span, "v_mfma") == most), key=len)


def count(code, prefix):
    return sum(line.startswith(prefix) for line in code)


def histogram(text):
    return Counter(line.split()[0] for line in instructions(text)[0])


def all_facts():
    compiler.isa_many([key_of(name) for name in BUILDS])
    return {"flydsl": version("flydsl"), "builds": {name: facts(text_of(name)) for name in BUILDS}}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(all_facts(), indent=1) + "\n")
