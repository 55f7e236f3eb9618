"""The ladder: one kernel from its naive config to its tuned one, in one loop, beside the schedule model's ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import schedule
from ..kernels.spec import Config, Kernel
from ..problem import Problem
from ..target import Target
from . import clock, proof
from .bench import Row, Shape, Variant, call_of, measure, torch_device
from .clock import Pace
from .workloads import Workload


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of a kernel's ladder: its row, how much faster than the rung before, what the schedule model said of it.

    `clocks` of one SM a tile step: the time of the kernels that the rung claims, times `ghz`, the clock that a spin
    counted right behind a call, times the SMs, over the steps of the grid; `walls` is the kernel's own model of it.
    """

    name: str
    about: str
    row: Row
    ratio: float | None
    predicted: float | None
    ghz: float = 0.0
    clocks: float | None = None
    walls: float | None = None
    kernel: str = ""


def ladder(
    workload: Workload,
    kernel: Kernel,
    steps: Iterable[tuple[str, str, Config]],
    *,
    device: torch.device | str | None = None,
    pace: Pace | None = None,
    which: str = "backward",
    walls: Callable[[Problem, Config, float, int], float] | None = None,
) -> tuple[Step, ...]:
    """Time the steps (name, about, config) of one kernel in one loop, each against the step before.

    Where a step changes the launch order alone (see `launch_columns`), the ratio that `schedule` predicts stands beside
    the measured one. `walls(problem, config, ghz, sms)` is what the kernel's model says a tile step takes, in clocks.
    """
    device, steps = torch_device(device), tuple(steps)
    _, matmul, flops = clock.yardstick(device)
    variants = tuple(Variant(name, kernel, config) for name, _, config in steps)
    shape = Shape(workload, device, 0)
    rows, _ = measure(shape, variants, which, (pace or Pace(), matmul, flops))
    found: list[Step] = []
    for i, ((name, about, config), row) in enumerate(zip(steps, rows, strict=True)):
        before = rows[i - 1] if i else None
        timed = before is not None and before.ms and row.ms
        predicted = predicted_ratio(workload.problem, steps[i - 1][2], config, shape.target) if i else None
        step = Step(name, about, row, before.ms / row.ms if timed else None, predicted, kernel=kernel.name)
        found.append(_counted(step, shape, variants[i], walls) if walls and row.ms else step)
    return tuple(found)


def _counted(
    step: Step, shape: Shape, variant: Variant, walls: Callable[[Problem, Config, float, int], float]
) -> Step:  # fmt: skip
    """The step with its clocks, measured and by the walls."""
    call, config, _ = call_of(shape, variant, step.row.which)
    ghz = clock.sm_ghz(clock.Participant(call, lambda: shape.ready(step.row.which)), shape.device)
    if not ghz:
        return step
    sms, tiles = shape.target.num_cus, sum(launch_order(shape.problem, config))
    ms = step.row.ms * proof.claimed(variant.kernel.name, step.row.launches, step.row.which)
    return replace(
        step, ghz=ghz, clocks=ms * 1e6 * ghz * sms / tiles, walls=walls(shape.problem, config, ghz, sms),
    )  # fmt: skip


def predicted_ratio(problem: Problem, before: Config, after: Config, target: Target) -> float | None:
    """How much faster the schedule model says `after` is, where its launch order differs from `before`'s; else None."""
    orders = [(launch_columns(problem, config), _reversed(config)) for config in (before, after)]
    if orders[0] == orders[1]:
        return None
    spans = [schedule.predict(launch_order(problem, config), target) for config in (before, after)]
    return spans[0] / spans[1]


def launch_columns(problem: Problem, config: Config) -> int:
    """How many (segment, kv head) columns of key tiles run together: all when key tiles vary slowest, 1 when fastest.

    Read from the switch `columns` (0 is all) or `kv_major`, of the config or of its `dkdv` stage, or from `together`,
    which counts the columns of one segment of a packed problem.
    """
    every = max(1, problem.batch * problem.nheads_kv)
    together = _switch(config, "together")
    if together is not None:
        return min(together, problem.nheads_kv if problem.is_packed else every)
    given = _switch(config, "columns")
    if given is not None:
        return min(given or every, every)
    return 1 if _switch(config, "kv_major") is False else every


def launch_order(problem: Problem, config: Config) -> tuple[int, ...]:
    """Tile iterations of every block of the key-owning kernel, in its launch order."""
    tile = config.switch("dkdv", config)
    grid = schedule.block_tiles(problem, tile.block_m, tile.block_n, kv_major=False)
    every, together = max(1, problem.batch * problem.nheads_kv), launch_columns(problem, config)
    tiles = len(grid) // every
    return tuple(
        grid[column * tiles + n]
        for first in range(0, every, together)
        for n in (reversed(range(tiles)) if _reversed(config) else range(tiles))
        for column in range(first, min(first + together, every))
    )


def _reversed(config: Config) -> bool:
    """Whether the last key tiles come first: a field of the config's geometry."""
    return getattr(config.switch("geometry"), "reverse", False)


def _switch(config: Config, name: str) -> Any:
    """A switch of the config, or of its key-owning stage."""
    stage = config.switch("dkdv")
    return config.switch(name, stage.switch(name) if isinstance(stage, Config) else None)
