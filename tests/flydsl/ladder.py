"""The ladder of docs/ladder_amd.md: each build's registers, LDS and simulated opcodes.

`python tests/flydsl/ladder.py` rewrites the tables between the markers.
"""

import re
from pathlib import Path

import isa_facts
import simulated

from undertow import schedule
from undertow.kernels.flydsl import compiler, plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.problem import Band, Problem
from undertow.target import TARGETS

PAGE = Path(__file__).parents[2] / "docs" / "ladder_amd.md"
SEGMENTS = (1471, 3638, 3495, 3624, 774, 3633, 3387, 472, 3127, 3204, 3264, 1846, 833)
SIZES = {"head_dim_qk": 192, "head_dim_v": 128, "band": Band(None, 0)}
MLA = Problem.packed(SEGMENTS, nheads_q=2, nheads_kv=2, **SIZES)
SMALL = Problem.packed((256,), nheads_q=1, nheads_kv=1, **SIZES)
RUNGS = {
    "climb": [
        ("plain: two LDS copies, no prefetch, key tile fastest", "192/128 plain"),
        ("key tile slowest (kv_major)", "192/128 plain, kv_major"),
        ("second orientation out of one LDS copy", "192/128 one copy"),
        ("next tile prefetched into a second buffer: the default", "192/128 default"),
    ],
    "gfx950": [
        ("plain: two LDS copies, no prefetch, key tile fastest", "gfx950 192/128 plain"),
        ("one LDS copy, read transposed", "gfx950 192/128 one copy"),
        ("next tile prefetched: the default", "gfx950 192/128 default"),
        ("4 waves", "gfx950 192/128 4 waves"),
    ],
    "losing": [
        ("4 waves: registers overflow into AGPRs", "192/128 4 waves"),
        ("64 query rows: spills", "192/128 64x128"),
        ("256 keys: spills", "192/128 32x256"),
        ("dq_groups=2: twice the atomics", "192/128 dq_groups=2"),
        ("schedule=interleave, 1 step", "192/128 interleave 1"),
        ("schedule=interleave, 4 steps", "192/128 interleave 4"),
    ],
}
STATIC = ("VGPR + AGPR", "private B", "loop: scratch, accvgpr", "LDS B", "loop: instructions", "loop: MFMA")
DYNAMIC = ("wave-instructions", "MFMA", "LDS reads", "LDS writes", "atomics", "barriers", "spills", "accvgpr")
FAMILIES = {
    "MFMA": ("v_mfma",),
    "LDS reads": ("ds_read",),
    "LDS writes": ("ds_write",),
    "atomics": ("buffer_atomic",),
    "barriers": ("s_barrier",),
    "spills": ("scratch_",),
    "accvgpr": ("v_accvgpr",),
}


def static(name):
    """The columns that need no execution."""
    facts = isa_facts.facts(isa_facts.text_of(name))
    loop = facts["loop"]
    registers, moves = f"{facts['vgpr']} + {facts['agpr']}", f"{loop['spill']}, {loop['accvgpr']}"
    lds, size = f"{facts['lds_bytes']:,}", facts["loop_instructions"]
    return [registers, facts["scratch_bytes"], moves, lds, size, loop["mfma"]]


def tiles(name):
    """Tile iterations until the last compute unit is done, by the schedule model, for mla-varlen-13."""
    g = Geometry(**isa_facts.BUILDS[name])
    blocks = schedule.block_tiles(MLA, g.block_m, g.block_n, kv_major=g.kv_major)
    return round(schedule.predict(blocks, TARGETS[g.arch]))


def dynamic(name):
    """Executed wave-instructions of the main kernel on 256 causal tokens of one head."""
    geometry = Geometry(**isa_facts.BUILDS[name])
    done = simulated.run(SMALL, plan.config_of(geometry), arch=geometry.arch)
    simulated.check(done)
    report = next(r for step, r in done.reports if step.module == "main_device")
    counts = {f: sum(n for op, n in report.opcodes.items() if op.startswith(p)) for f, p in FAMILIES.items()}
    return [f"{x:,}" for x in (report.wave_instructions, *(counts[f] for f in DYNAMIC[1:]))]


def table(rows, execute=True):
    """A markdown table of rungs."""
    compiler.isa_many([isa_facts.key_of(name) for _, name in rows])
    heads = ["build", *STATIC, "mla-varlen-13, tiles", *(DYNAMIC if execute else ())]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for about, name in rows:
        cells = [about, *static(name), tiles(name), *(dynamic(name) if execute else ())]
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def written(section, page=None):
    """The table of a section as the page has it."""
    text = PAGE.read_text() if page is None else page
    return re.search(rf"<!-- {section} -->\n(.*?)\n<!-- end -->", text, re.DOTALL).group(1)


def rewrite():
    text = PAGE.read_text()
    for section, rows in RUNGS.items():
        opening, closing = f"<!-- {section} -->\n", "\n<!-- end -->"
        before, rest = text.split(opening)
        text = before + opening + table(rows) + closing + rest.split(closing, maxsplit=1)[1]
    PAGE.write_text(text)


if __name__ == "__main__":
    rewrite()
