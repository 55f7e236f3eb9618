"""A whole bench in one process: compile ahead in parallel, time, record, draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..kernels import flydsl, triton
from ..kernels.flydsl.plan import ladder as flydsl_ladder
from ..target import detect
from . import plot, record
from .bench import Bench, all_kernels, bench, merged, named_kernels, precompile
from .clock import Pace
from .ladder import ladder
from .shapes import base_name, bench_shapes, pick, tiny_shapes
from .workloads import Workload

COMPILED = ("triton", "flex")
SLOW_ON_GPU = ("torch_tiled", "sdpa_math", "sdpa_cpu_flash")


@dataclass(frozen=True, slots=True)
class Run:
    """What to bench: names of shapes and kernels (empty: the default), passes, pace, and where records go."""

    shapes: tuple[str, ...]
    kernels: tuple[str, ...]
    passes: tuple[str, ...]
    rounds: int = 15
    sustained_s: float = 0.0
    jobs: int = 0
    ladder: str = ""
    commit: str | None = None
    out: Path | None = None


def run(given: Run, say: Callable[[str], None]) -> Iterator[Any]:
    """Bench; yields tables. On a CPU the default shapes are tiny ones.

    With `out`, record.json is rewritten after every shape, so that a run that is cut off keeps what it finished.
    """
    start = time.perf_counter()

    def timed(line: str) -> None:
        say(f"[{time.perf_counter() - start:6.1f} s] {line}")

    workloads, kernels = _workloads(given), _kernels(given)
    if given.jobs:
        names = tuple(w.name for w in workloads)
        for line in precompile(names, tuple(k for k in kernels if k in COMPILED), given.passes, given.jobs):
            timed(f"could not compile ahead: {line}")
    pace = Pace(rounds=given.rounds, sustained_s=given.sustained_s)
    parts: list[Bench] = []
    for _, group in groupby(workloads, lambda w: base_name(w.name)):
        parts.append(bench(tuple(group), named_kernels(kernels), passes=given.passes, pace=pace, progress=timed))
        found = reduce(merged, parts)
        _save(given, found, ())
    steps = _ladder(given, pace)
    _save(given, found, steps)
    yield plot.table(found)
    if steps:
        yield plot.ladder_table(steps)
    if given.out:
        _draw(given, found)


def _workloads(given: Run) -> tuple[Workload, ...]:
    if given.shapes == ("all",):
        return bench_shapes(deterministic=None)
    if given.shapes:
        return pick(given.shapes)
    return bench_shapes() if torch.cuda.is_available() else tiny_shapes()


def _kernels(given: Run) -> tuple[str, ...]:
    skipped = SLOW_ON_GPU if torch.cuda.is_available() else ()
    return given.kernels or tuple(k.name for k in all_kernels() if k.name not in skipped)


def _ladder(given: Run, pace: Pace) -> tuple:
    if not given.ladder:
        return ()
    workload, arch = pick((given.ladder,))[0], detect().arch
    if arch in flydsl.KERNEL.archs:
        return ladder(workload, flydsl.KERNEL, flydsl_ladder(arch), pace=pace)
    return ladder(workload, triton.KERNEL, triton.LADDER, pace=pace)


def _save(given: Run, found: Bench, steps: tuple) -> None:
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        record.save(found, record.provenance(found, commit=given.commit), given.out / "record.json", steps)


def _draw(given: Run, found: Bench) -> None:
    for which in given.passes:
        (given.out / f"{which}.md").write_text(plot.markdown(found, which))
        title = f"{record.provenance(found, commit=given.commit).device}, {which}"
        plot.plot(found, given.out / f"{which}.png", which=which, title=title)
        plot.plot(found, given.out / f"{which}_quoted.png", which=which, title=title, quote=which != "both")
