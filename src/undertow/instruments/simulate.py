"""Run AMD kernels as machine code on a CPU: ours over a problem, through the gates of verify, or anyone's file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .. import reference, simulator
from ..kernels import alloc
from ..layout import shapes
from ..problem import Problem
from ..simulator import Options, Report
from ..target import TARGETS
from . import inputs
from .verify import Parity, compare

DEFAULT = Options()
FP32 = ("lse", "dlse", "delta", "dsink")
GRADIENTS = ("dq", "dk", "dv")
OUTPUTS = {
    "forward": ("out", "lse"), "dkdv": ("dk", "dv"), "dq": ("dq", "deltas.delta"), "round_dq": ("dq",),
    "delta": ("delta",),
}  # fmt: skip
Tensors = dict[str, "torch.Tensor | None"]
Reports = list[tuple[str, Report]]
BUFFER_TYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "f64": np.float64,
    "i32": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u8": np.uint8,
    "u16": np.uint16,
}
FILLS = ("zeros", "ones", "randn", "arange", "nan")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the launches of a pass gave: parity of every tensor, and one report a launch, by stage."""

    problem: Problem
    target: str
    kernel: str
    parity: tuple[Parity, ...]
    reports: tuple[tuple[str, Report], ...]

    @property
    def ok(self) -> bool:
        """All gates green and no finding."""
        return all(p.ok for p in self.parity) and all(r.ok for _, r in self.reports)

    def to_json(self) -> str:
        """Parity and reports as JSON text."""
        parity = [asdict(p) for p in self.parity]
        reports = {stage: json.loads(report.to_json()) for stage, report in self.reports}
        return json.dumps(
            {"ok": self.ok, "target": self.target, "kernel": self.kernel, "parity": parity, "launches": reports}
        )

    def table(self) -> object:
        """A rich renderable: parity, findings, counters of every launch."""
        from rich.console import Group
        from rich.table import Table

        parity = Table(title=f"{self.kernel} on {self.target}, simulated: {'all gates green' if self.ok else 'NOT OK'}")
        for column in ("tensor", "cosine", "rms", "max err", "bad rows", "ok", "where"):
            parity.add_column(column)
        for p in self.parity:
            values = (
                f"{p.cosine:.6f}",
                f"{p.rms:.1e}",
                f"{p.max_err:.1e}",
                str(p.rows),
                "yes" if p.ok else "NO",
                p.where,
            )
            parity.add_row(p.tensor, *values)
        counters = Table(title="wave-instructions")
        groups = list(self.reports[0][1].groups) if self.reports else []
        for column in ("stage", "findings", "total", *groups):
            counters.add_column(column, justify="right")
        for stage, r in self.reports:
            counters.add_row(
                stage, str(len(r.errors)), f"{r.wave_instructions:,}", *(f"{r.groups[g]:,}" for g in groups)
            )
        findings = [f"{stage}: {finding}" for stage, r in self.reports for finding in r.findings]
        return Group(parity, counters, *findings)


def simulate(
    problem: Problem, arch: str = "gfx942", kernel: str = "triton", *, seed: int = 0, options: Options = DEFAULT
) -> Simulation:
    """Run our kernels of a problem under the simulator, every tensor through the gates of `verify`.

    arch: gfx942 or gfx950. kernel: triton (forward and backward) or flydsl (backward, after the reference's forward).
    Outputs start as NaN, scratch is fenced. Raises NotImplementedError with the failing limits when the kernel cannot
    run the problem on that target, ValueError for a kernel that is not simulated.
    """
    runners = {"triton": run_triton, "flydsl": run_flydsl}
    if kernel not in runners:
        raise ValueError(f"kernel={kernel!r}: the simulator runs {', '.join(runners)}")
    if arch not in ("gfx942", "gfx950"):
        raise ValueError(f"arch={arch!r}: the simulator models gfx942 and gfx950")
    tensors = inputs.make(problem, seed=seed)
    got, reports = runners[kernel](problem, arch, tensors, options)
    parity = [p for p in compare(problem, tensors, got) if kernel == "triton" or p.tensor not in ("out", "lse")]
    return Simulation(problem, arch, kernel, tuple(parity), tuple(reports))


def run_triton(problem: Problem, arch: str, tensors: Tensors, options: Options) -> tuple[Tensors, Reports]:
    """out, lse, dq, dk, dv (dsink) from the Triton kernels' machine code, and the report of every launch by stage."""
    from ..kernels import triton as family
    from ..kernels.triton import host

    target = TARGETS[arch]
    _refuse(family.KERNEL, problem, target, ("forward", "backward"))
    tensors = _with_outputs(problem, tensors, ("out", "lse", *GRADIENTS))
    config = family.config(problem, target, "backward")
    scratch = alloc.Fence(family.plan_workspace(problem, config), torch.device("cpu"))
    forward = host.forward_launches(problem, family.config(problem, target, "forward"), tensors)
    reports = _run(forward, arch, options)
    reports += _run(host.backward_launches(problem, config, tensors, scratch.tensors), arch, options)
    scratch.check()
    if problem.has_sink:
        torch.sum(scratch.tensors["dsink_rows"].flatten(1), -1, out=tensors["dsink"])
    return {n: tensors[n] for n in _results(problem, ("out", "lse", *GRADIENTS))}, reports


def run_flydsl(problem: Problem, arch: str, tensors: Tensors, options: Options) -> tuple[Tensors, Reports]:
    """dq, dk, dv (dsink) from the FlyDSL kernels' machine code, after the reference's forward."""
    from ..kernels import flydsl as family
    from ..kernels.flydsl import compiler, launch

    target = TARGETS[arch]
    _refuse(family.KERNEL, problem, target, ("backward",))
    exact = reference.attention(problem, tensors)
    lse = exact.lse.float()
    if not problem.is_packed:
        lse = lse.unflatten(1, (problem.batch, -1)).transpose(0, 1).contiguous()
    out = reference.from_thd(exact.out, problem.layout, problem.batch).to(alloc.DTYPE[problem.dtype])
    tensors = _with_outputs(problem, tensors | {"out": out, "lse": lse}, GRADIENTS)
    config = family.config(problem, target, "backward")
    scratch = alloc.Fence(family.plan_workspace(problem, config), torch.device("cpu"))
    reports: Reports = []

    def on_simulator(step: object) -> None:
        text = compiler.isa(step.key)
        report = simulator.isa(text, None, step.grid, step.block, step.flat(), target=arch, options=options)
        reports.append((step.builder, report))

    launch.backward(problem, config, tensors, scratch.tensors, run=on_simulator)
    scratch.check()
    return {n: tensors[n] for n in _results(problem, ("out", "lse", *GRADIENTS))}, reports


def _refuse(kernel: object, problem: Problem, target: object, passes: Sequence[str]) -> None:
    reasons = [reason for which in passes for reason in kernel.unsupported(problem, target, which)]
    if reasons:
        raise NotImplementedError("; ".join(dict.fromkeys(reasons)))


def _results(problem: Problem, names: Sequence[str]) -> tuple[str, ...]:
    return (*names, "dsink") if problem.has_sink else tuple(names)


def _with_outputs(problem: Problem, tensors: Tensors, names: Sequence[str]) -> Tensors:
    """The tensors of a call with NaN-filled outputs."""
    expected, out = shapes(problem), dict(tensors)
    for name in _results(problem, names):
        dtype = torch.float32 if name in FP32 else alloc.DTYPE[problem.dtype]
        out[name] = alloc.output(expected[name], dtype, torch.device("cpu"), poison=True)
    out.setdefault("dsink", None)
    return out


def _run(launches: Iterable, arch: str, options: Options) -> Reports:
    """Every launch under the simulator; each must write its outputs whole."""
    reports = []
    for x in launches:
        if x.programs:
            outputs = tuple(f"{name}.ptr" for name in OUTPUTS.get(x.stage, ()))
            strict = replace(options, outputs=(*options.outputs, *outputs))
            reports.append((x.stage, simulator.triton(x.kernel, (x.programs,), x.args, arch, options=strict, **x.meta)))
    return reports


# ---------------------------------------------------------------------- foreign kernels with raw buffers
def simulate_file(
    path: str | Path,
    args: Sequence[str],
    *,
    grid: Sequence[int],
    block: Sequence[int],
    kernel: str | None = None,
    dynamic_lds: int = 0,
    options: Options = DEFAULT,
) -> tuple[Report, list[np.ndarray | int | float | None]]:
    """Run a kernel of an assembly file (.s) or code object (.co, .hsaco) on raw buffers.

    args: one text a kernel argument: "f32:4096" or "bf16:64x128:randn" is a buffer (types f32 f16 bf16 f64 i32 i64 u32
    u16 u8; fills zeros ones randn arange nan; bf16 buffers are uint16 words), "data.npy" a buffer from a file, "null" a
    null pointer, anything else a number. Returns the report and the argument values after the launch. Raises ValueError
    naming the argument that is wrong.
    """
    values = [parse_argument(text) for text in args]
    path = Path(path)
    if path.suffix in (".co", ".hsaco", ".o", ".elf"):
        return simulator.code_object(
            path, kernel, grid, block, values, dynamic_lds=dynamic_lds, options=options
        ), values
    text = path.read_text()
    return simulator.isa(text, kernel, grid, block, values, dynamic_lds=dynamic_lds, options=options), values


def parse_argument(text: str) -> np.ndarray | int | float | None:
    """One command-line argument of `simulate_file` as a value."""
    if text == "null":
        return None
    if text.endswith(".npy"):
        return np.ascontiguousarray(np.load(text, allow_pickle=False))
    kind, _, rest = text.partition(":")
    if kind in BUFFER_TYPES and rest:
        return _buffer(text, kind, *rest.split(":"))
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        wanted = "a number, null, file.npy, or type:shape[:fill] such as bf16:64x128:randn"
        raise ValueError(f"argument {text!r}: {wanted} is wanted") from None


def _buffer(text: str, kind: str, shape: str, fill: str = "zeros") -> np.ndarray:
    if fill not in FILLS or not all(part.isdigit() for part in shape.split("x")):
        raise ValueError(f"argument {text!r}: a shape such as 64x128 and a fill of {', '.join(FILLS)} are wanted")
    sizes = tuple(int(part) for part in shape.split("x"))
    count = math.prod(sizes)
    rng = np.random.default_rng(sum(text.encode()))
    makers = {
        "zeros": lambda: np.zeros(count),
        "ones": lambda: np.ones(count),
        "randn": lambda: rng.standard_normal(count),
        "arange": lambda: np.arange(count),
        "nan": lambda: np.full(count, np.nan),
    }
    values = makers[fill]()
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).reshape(sizes)
    return values.astype(BUFFER_TYPES[kind]).reshape(sizes)
