"""A whole bench in one process: compile ahead in parallel, time, record, draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..kernels import flydsl, hopper, triton
from ..kernels.flydsl.plan import ladder as flydsl_ladder
from ..kernels.hopper.ladder import ladder as hopper_ladder
from ..kernels.hopper.ladder import predicted_clocks
from ..kernels.spec import Config
from ..problem import Problem
from ..target import Target, detect
from . import plot, record
from .bench import PASSES, Bench, all_kernels, bench, merged, named_kernels, precompile
from .clock import Pace
from .ladder import Step, ladder
from .shapes import base_name, bench_shapes, pick, tiny_shapes
from .workloads import Workload

COMPILED = ("hopper", "triton", "flex")
SLOW_ON_GPU = ("torch_tiled", "sdpa_math", "sdpa_cpu_flash")
LEFT_OUT = "left out of this run"


@dataclass(frozen=True, slots=True)
class Run:
    """What to bench: names of shapes and kernels (empty: the default), passes, pace, and where records go.

    A pass may name its shapes, "forward@S1+S2". `without` holds patterns of "kernel:shape" that are not to run. After
    `budget_s` seconds no further shape is begun. `resume` keeps the shapes of the record in `out`, and takes the one
    that was running when it was cut off last. `ladder` is a shape, `ladder_kernel` names of LADDERS by comma
    (empty: what fits).
    """

    shapes: tuple[str, ...]
    kernels: tuple[str, ...]
    passes: tuple[str, ...]
    rounds: int = 15
    sustained_s: float = 0.0
    jobs: int = 0
    ladder: str = ""
    commit: str | None = None
    out: Path | None = None
    without: tuple[str, ...] = ()
    budget_s: float = 0.0
    resume: bool = False
    ladder_kernel: str = ""


def run(given: Run, say: Callable[[str], None]) -> Iterator[Any]:
    """Bench; yields tables. On a CPU the default shapes are tiny ones.

    With `out`, record.json is rewritten after every shape, so that a run that is cut off keeps what it finished. The
    ladder comes first: it is short.
    """
    start = time.perf_counter()

    def timed(line: str) -> None:
        say(f"[{time.perf_counter() - start:6.1f} s] {line}")

    pace = Pace(rounds=given.rounds, sustained_s=given.sustained_s)
    parts, steps = _resumed(given)
    groups = _groups(given, {row.shape for part in parts for row in part.rows})
    _compile(given, groups, timed)
    if given.ladder and not steps:
        steps = _ladder(given, pace)
        timed(f"ladder of {given.ladder}: {len(steps)} steps")
    for group in groups:
        if given.budget_s and time.perf_counter() - start > given.budget_s:
            timed(f"out of time, not run: {group[0].name} and its like")
            continue
        _running(given, group[0].name)
        parts += _bench(given, group, pace, timed)
        _save(given, parts, steps)
    _running(given, "")
    yield from _shown(given, parts, steps)


def _compile(given: Run, groups: list[tuple[Workload, ...]], say: Callable[[str], None]) -> None:
    if given.jobs:
        passes = {w.name: _passes_of(given, w.name) for group in groups for w in group}
        kernels = tuple(k for k in _kernels(given) if k in COMPILED)
        for line in precompile(passes, kernels, given.jobs, _left_out(given)):
            say(f"could not compile ahead: {line}")
        say(f"compiled ahead in {given.jobs} processes")


def _bench(given: Run, group: tuple[Workload, ...], pace: Pace, say: Callable[[str], None]) -> list[Bench]:
    """A shape and its twin: in one go where their passes are the same, so that they share a reference."""
    runs = [(passes, tuple(alike)) for passes, alike in groupby(group, lambda w: _passes_of(given, w.name)) if passes]
    kernels, left_out = named_kernels(_kernels(given)), _left_out(given)
    return [
        bench(alike, kernels, passes=passes, pace=pace, left_out=left_out, progress=say) for passes, alike in runs
    ]  # fmt: skip


def _shown(given: Run, parts: list[Bench], steps: tuple[Step, ...]) -> Iterator[Any]:
    if parts:
        found = reduce(merged, parts)
        yield plot.table(found)
        if given.out:
            _draw(given, found)
    if steps:
        yield plot.ladder_table(steps)


def _groups(given: Run, done: set[str]) -> list[tuple[Workload, ...]]:
    """Shapes with their twins that are not done; the one that was running when the run was cut off comes last."""
    groups = [tuple(group) for _, group in groupby(_workloads(given), lambda w: base_name(w.name))]
    wanted = [group for group in groups if not done >= {w.name for w in group}]
    return sorted(wanted, key=lambda group: group[0].name == _running(given))


def _passes_of(given: Run, shape: str) -> tuple[str, ...]:
    """The passes asked for of a shape: those without a list of shapes, and those whose list has it."""
    named = [item.partition("@") for item in given.passes]
    wrong = [which for which, _, _ in named if which not in PASSES]
    if wrong:
        raise ValueError(f"pass is {wrong[0]!r}, wanted some of {', '.join(PASSES)}")
    return tuple(which for which, _, shapes in named if not shapes or shape in shapes.split("+"))


def _left_out(given: Run) -> Callable[[str, str], str]:
    def why(kernel: str, shape: str) -> str:
        return LEFT_OUT if any(fnmatchcase(f"{kernel}:{shape}", p) for p in given.without) else ""

    return why


def _resumed(given: Run) -> tuple[list[Bench], tuple[Step, ...]]:
    path = given.out and given.out / "record.json"
    if not (given.resume and path and path.is_file()):
        return [], ()
    return [record.load(path)[0]], record.load_ladder(path)


def _running(given: Run, shape: str | None = None) -> str:
    """The shape that a run into `out` is at, kept in a file beside the record; a name sets it."""
    path = given.out and given.out / "running"
    if not path:
        return ""
    if shape is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path.write_text(shape)
    return path.read_text() if path.is_file() else ""


def _workloads(given: Run) -> tuple[Workload, ...]:
    if given.shapes == ("all",):
        return bench_shapes(deterministic=None)
    if given.shapes:
        return pick(given.shapes)
    return bench_shapes() if torch.cuda.is_available() else tiny_shapes()


def _kernels(given: Run) -> tuple[str, ...]:
    skipped = SLOW_ON_GPU if torch.cuda.is_available() else ()
    return given.kernels or tuple(k.name for k in all_kernels() if k.name not in skipped)


def _ladder(given: Run, pace: Pace) -> tuple[Step, ...]:
    (workload,), target = pick((given.ladder,)), detect()
    names = (given.ladder_kernel or _fitting(workload, target)).split(",")
    if wrong := [name for name in names if name not in LADDERS]:
        raise ValueError(f"ladder kernel is {wrong[0]!r}, wanted one of {', '.join(LADDERS)}")
    steps: tuple[Step, ...] = ()
    for kernel in named_kernels(tuple(names)):
        walls = predicted_clocks if kernel is hopper.KERNEL else None
        steps += ladder(workload, kernel, LADDERS[kernel.name](workload.problem, target), pace=pace, walls=walls)
    return steps


def _fitting(workload: Workload, target: Target) -> str:
    """FlyDSL's ladder on AMD; the Hopper kernels' where they run; else Triton's."""
    if target.arch in flydsl.KERNEL.archs:
        return "flydsl"
    return "triton" if hopper.KERNEL.unsupported(workload.problem, target) else "hopper"


LADDERS: dict[str, Callable[[Problem, Target], tuple[tuple[str, str, Config], ...]]] = {
    "flydsl": lambda problem, target: flydsl_ladder(target.arch),
    "hopper": hopper_ladder,
    "triton": lambda problem, target: triton.LADDER,
}


def _save(given: Run, parts: list[Bench], steps: tuple[Step, ...]) -> None:
    if given.out and parts:
        found = reduce(merged, parts)
        record.save(found, record.provenance(found, commit=given.commit), given.out / "record.json", steps)


def _draw(given: Run, found: Bench) -> None:
    for which in dict.fromkeys(row.which for row in found.rows):
        (given.out / f"{which}.md").write_text(plot.markdown(found, which))
        title = f"{record.provenance(found, commit=given.commit).device}, {which}"
        plot.plot(found, given.out / f"{which}.png", which=which, title=title)
        plot.plot(found, given.out / f"{which}_quoted.png", which=which, title=title, quote=which != "both")
