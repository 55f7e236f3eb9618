"""The README's support table, generated from the kernels' own limits. Usage: support_table.py [README.md]

Without a file it prints the table; with one it replaces what stands between the markers. A test fails when it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from undertow.dispatch import KERNELS
from undertow.problem import Band, Problem
from undertow.target import TARGETS

BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
CAUSAL = Band(None, 0)
ROWS = {
    "128/128 causal": {"head_dim_qk": 128, "head_dim_v": 128},
    "MLA 192/128": {"head_dim_qk": 192, "head_dim_v": 128},
    "GQA 8:2": {"head_dim_qk": 128, "head_dim_v": 128, "nheads_kv": 2},
    "packed (thd)": {"head_dim_qk": 128, "head_dim_v": 128, "packed": True},
    "packed MLA + GQA": {"head_dim_qk": 192, "head_dim_v": 128, "nheads_kv": 2, "packed": True},
    "queries != keys": {"head_dim_qk": 128, "head_dim_v": 128, "seqlen_k": 512},
    "window": {"head_dim_qk": 128, "head_dim_v": 128, "band": Band(64, 0)},
    "softcap": {"head_dim_qk": 128, "head_dim_v": 128, "softcap": 30.0},
    "sink": {"head_dim_qk": 64, "head_dim_v": 64, "has_sink": True},
    "gradient of LSE": {"head_dim_qk": 128, "head_dim_v": 128, "has_dlse": True},
    "deterministic": {"head_dim_qk": 128, "head_dim_v": 128, "deterministic": True},
    "d 72": {"head_dim_qk": 72, "head_dim_v": 72},
    "256/256": {"head_dim_qk": 256, "head_dim_v": 256},
    "fp32": {"head_dim_qk": 128, "head_dim_v": 128, "dtype": "fp32"},
}
SHOWN = ("sm_90", "gfx942", "gfx950", "cpu")


def problem(row: dict) -> Problem:
    """The problem a row stands for: batch 2, 256 tokens, 8 heads."""
    fields = {"nheads_q": 8, "nheads_kv": 8, "band": CAUSAL} | row
    packed, seqlen_k = fields.pop("packed", False), fields.pop("seqlen_k", 256)
    return Problem.packed((256, 100), **fields) if packed else Problem.dense(2, 256, seqlen_k, **fields)


def table() -> str:
    """Markdown: a row a feature, a column a kernel; the targets where its backward runs, by number."""
    kernels = [k for k in KERNELS if k.backward is not None]
    lines = ["| backward | " + " | ".join(k.name for k in kernels) + " |", "|---" * (len(kernels) + 1) + "|"]
    for name, row in ROWS.items():
        case = problem(row)
        cells = []
        for kernel in kernels:
            runs = [t for t in SHOWN if not kernel.unsupported(case, TARGETS[t])]
            cells.append("all" if len(runs) == len(SHOWN) else " ".join(runs) or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replaced(text: str) -> str:
    """`text` with the table between its markers made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(table())
    else:
        readme = Path(sys.argv[1])
        readme.write_text(replaced(readme.read_text()))
