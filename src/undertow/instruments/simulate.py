"""Run our own AMD kernels, as machine code, on a CPU: parity, findings and counters of a problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .. import simulator
from ..kernels import alloc
from ..layout import shapes
from ..problem import Problem
from ..simulator import Options, Report
from ..target import TARGETS
from . import inputs
from .verify import Parity, compare

DEFAULT = Options()
FP32 = ("lse", "dlse", "delta", "dsink")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the launches of one forward and backward gave: parity of every tensor, one report a launch."""

    problem: Problem
    target: str
    parity: tuple[Parity, ...]
    reports: tuple[tuple[str, Report], ...]

    @property
    def ok(self) -> bool:
        """All gates green and no finding."""
        return all(p.ok for p in self.parity) and all(r.ok for _, r in self.reports)


def simulate(
    problem: Problem, arch: str = "gfx942", kernel: str = "triton", *, seed: int = 0, options: Options = DEFAULT
) -> Simulation:
    """Forward and backward of a problem under the simulator, every tensor through the gates of `verify`.

    arch: gfx942 or gfx950. Outputs start as NaN and must be written whole. Raises NotImplementedError naming every
    failing limit when the kernel cannot run the problem on that target.
    """
    if kernel != "triton":
        raise NotImplementedError(f"kernel={kernel!r}: only 'triton' is compiled offline for the simulator so far")
    tensors = inputs.make(problem, seed=seed)
    got, reports = run_triton(problem, arch, tensors, options)
    return Simulation(problem, arch, tuple(compare(problem, tensors, got)), tuple(reports))


def run_triton(
    problem: Problem, arch: str, tensors: dict[str, torch.Tensor | None], options: Options
) -> tuple[dict[str, torch.Tensor], list[tuple[str, Report]]]:
    """out, lse, dq, dk, dv (dsink) from the Triton kernels' machine code, and the report of every launch by stage."""
    from ..kernels import triton as family
    from ..kernels.triton import host

    target = TARGETS[arch]
    reasons = [r for which in ("forward", "backward") for r in family.KERNEL.unsupported(problem, target, which)]
    if reasons:
        raise NotImplementedError("; ".join(reasons))
    expected = shapes(problem)
    cpu = torch.device("cpu")
    tensors = dict(tensors)
    for name in ("out", "lse", "dq", "dk", "dv", *(("dsink",) if problem.has_sink else ())):
        dtype = torch.float32 if name in FP32 else alloc.DTYPE[problem.dtype]
        tensors[name] = alloc.output(expected[name], dtype, cpu, poison=True)
    tensors.setdefault("dsink", None)
    config = family.config(problem, target, "backward")
    scratch = alloc.Fence(family.plan_workspace(problem, config), cpu)
    reports = _run(host.forward_launches(problem, family.config(problem, target, "forward"), tensors), arch, options)
    reports += _run(host.backward_launches(problem, config, tensors, scratch.tensors), arch, options)
    scratch.check()
    if problem.has_sink:
        torch.sum(scratch.tensors["dsink_rows"].flatten(1), -1, out=tensors["dsink"])
    names = ("out", "lse", "dq", "dk", "dv", *(("dsink",) if problem.has_sink else ()))
    return {n: tensors[n] for n in names}, reports


def _run(launches: Iterable, arch: str, options: Options) -> list[tuple[str, Report]]:
    return [
        (
            launch.stage,
            simulator.triton(launch.kernel, (launch.programs,), launch.args, arch, options=options, **launch.meta),
        )
        for launch in launches
        if launch.programs
    ]
