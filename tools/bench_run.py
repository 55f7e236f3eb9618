"""A whole bench in one process: compile everything in parallel, then time, record, plot. For a borrowed GPU.

    PYTHONPATH=src python3 tools/bench_run.py --out out --shapes S1,S2 --kernels triton,flex --jobs 8
"""

from __future__ import annotations

import argparse
import time
from functools import reduce
from itertools import groupby
from pathlib import Path

from rich.console import Console

from undertow.instruments import plot, record
from undertow.instruments.bench import PASSES, all_kernels, bench, merged, named_kernels, precompile
from undertow.instruments.clock import Pace
from undertow.instruments.ladder import ladder
from undertow.instruments.shapes import base_name, bench_shapes, pick
from undertow.kernels import triton

COMPILED = ("triton", "flex")
SLOW = ("torch_tiled", "sdpa_math", "sdpa_cpu_flash")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default=",".join(w.name for w in bench_shapes()), help="by comma, or all")
    parser.add_argument("--kernels", default=",".join(k.name for k in all_kernels() if k.name not in SLOW))
    parser.add_argument("--passes", default="backward", help=f"of {', '.join(PASSES)}, by comma")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sustained", type=float, default=0.0, help="seconds back to back, per kernel and shape")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first; 0 compiles on the way")
    parser.add_argument("--commit", default=None, help="for a tree without git: hash, or hash+dirty")
    parser.add_argument("--ladder", default="", help="a shape on which to time the rungs of triton's ladder")
    given = parser.parse_args()
    if given.shapes == "all":
        given.shapes = ",".join(w.name for w in bench_shapes(deterministic=None))
    names, kernels, passes = (tuple(x.split(",")) for x in (given.shapes, given.kernels, given.passes))
    console, start = Console(width=200), time.perf_counter()

    def say(line: str) -> None:
        console.print(f"[{time.perf_counter() - start:6.1f} s] {line}", markup=False)

    if given.jobs:
        for line in precompile(names, tuple(k for k in kernels if k in COMPILED), passes, given.jobs):
            say(f"could not compile ahead: {line}")
        say("compiled")
    pace = Pace(rounds=given.rounds, sustained_s=given.sustained)
    parts = []
    for _, group in groupby(names, base_name):
        parts.append(bench(pick(tuple(group)), named_kernels(kernels), passes=passes, pace=pace, progress=say))
        found = reduce(merged, parts)
        source = record.provenance(found, commit=given.commit)
        record.save(found, source, given.out / "record.json")  # a run that is cut off keeps its shapes
    steps = ladder(pick((given.ladder,))[0], triton.KERNEL, triton.LADDER, pace=pace) if given.ladder else ()
    record.save(found, source, given.out / "record.json", steps)
    console.print(plot.table(found))
    if steps:
        console.print(plot.ladder_table(steps))
    for which in passes:
        (given.out / f"{which}.md").write_text(plot.markdown(found, which))
        title = f"{source.device}, {which}"
        plot.plot(found, given.out / f"{which}.png", which=which, title=title)
        plot.plot(found, given.out / f"{which}_quoted.png", which=which, title=title, quote=which != "both")
    say("done")


if __name__ == "__main__":
    main()
