"""Speed of kernels and peers beside one another, for those alone that are proven right and proven to be themselves.

All variants of a shape are built first; each is poisoned, run, compared with the fp32 reference, watched by the
profiler and repeated for its bits; then those that passed are timed in turn in one process (`clock.round_robin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from .. import cost
from ..dispatch import KERNELS, select
from ..kernels import alloc
from ..kernels.alloc import DTYPE
from ..kernels.spec import Config, Kernel
from ..kernels.vendor import aiter, cudnn_frontend, flash_attn, flex
from ..layout import shapes
from ..problem import Problem
from ..target import Target, detect
from . import clock, inputs, proof
from .clock import Pace, Participant, Samples
from .proof import Oracle, Seen
from .shapes import base_name, pick
from .verify import Parity
from .workloads import Workload

PASSES = ("forward", "backward", "both")
OUTPUTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv"), "both": ("out", "lse", "dq", "dk", "dv")}
PEERS: tuple[Kernel, ...] = (flex.KERNEL, cudnn_frontend.KERNEL, *flash_attn.KERNELS, aiter.KERNEL)
"""Peers that only the bench calls: optional packages, and what dispatch must not choose."""

OTHER_TWINS = ("hopper",)
"""Kernels that compile something else for a deterministic call."""

REPEATS = 3
DRIFT = 1e-2
NAME = 120
"""How much of a launch's name a record keeps."""
YARDSTICK = "yardstick"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel under a label, with its own config for the problem or a given one.

    `forward` is another kernel that a pass of both begins with, where the kernel has no forward of its own. `left_out`
    says why the variant is not to run; empty when it is.
    """

    label: str
    kernel: Kernel
    config: Config | None = None
    forward: Kernel | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one shape: a speed with its proofs, or why there is none.

    `status` is "timed", "refused" (ran, but a proof failed) or "cannot" (a limit, or it raised). `ms`, `ms_min` are as
    timed; `adapter_ms` of them are copies and masks that our adapter adds around a peer, left out of `tflops`.
    `workspace` is the plan's bytes, `extra_bytes` what one call allocated beyond its arguments. `launches` is what the
    profiler saw.
    """

    shape: str
    problem: Problem
    which: str
    label: str
    vendor: bool
    config: str
    status: str
    reason: str = ""
    ms: float = 0.0
    ms_min: float = 0.0
    adapter_ms: float = 0.0
    tflops: float = 0.0
    of_yardstick: float = 0.0
    sustained_tflops: float | None = None
    workspace: int = 0
    extra_bytes: int | None = None
    bitwise: bool | None = None
    parity: tuple[Parity, ...] = ()
    launches: tuple[tuple[str, float], ...] = ()
    spin_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything one run measured. `yardsticks` is (shape, pass, TFLOP/s of the matmul in that loop)."""

    target: Target
    yardstick: str
    yardsticks: tuple[tuple[str, str, float], ...]
    pace: Pace
    rows: tuple[Row, ...]


def all_kernels() -> tuple[Kernel, ...]:
    """Dispatch's kernels and the bench's own peers."""
    known = {k.name for k in KERNELS}
    return (*KERNELS, *(k for k in PEERS if k.name not in known))


def named_kernels(names: Iterable[str]) -> tuple[Kernel, ...]:
    """Kernels by name; ValueError lists those there are."""
    known = {k.name: k for k in all_kernels()}
    wrong = [n for n in names if n not in known]
    if wrong:
        raise ValueError(f"kernel is {wrong[0]!r}, wanted one of {', '.join(known)}")
    return tuple(known[n] for n in names)


def bench(
    workloads: Iterable[Workload],
    kernels: Iterable[Kernel] | None = None,
    *,
    device: torch.device | str | None = None,
    passes: tuple[str, ...] = ("backward",),
    pace: Pace | None = None,
    seed: int = 0,
    left_out: Callable[[str, str], str] = lambda kernel, shape: "",
    progress: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Time kernels (None: all there are) on workloads; the module's docstring says what precedes a speed.

    A workload that differs from the one before it in determinism alone shares its inputs, reference and forward.
    `left_out(kernel, shape)` says why a kernel is not to run a shape; empty when it is. In the pass "both", a kernel
    that has no forward begins with the fastest one timed for that shape, or the one that dispatch takes.

    Raises:
        DeviceLost: a kernel left the device unusable. What was measured before is in no result; call shape by shape.
    """
    device, pace = torch_device(device), pace or Pace()
    variants = tuple(Variant(k.name, k) for k in (all_kernels() if kernels is None else kernels))
    name, matmul, flops = clock.yardstick(device)
    rows: list[Row] = []
    yards: list[tuple[str, str, float]] = []
    shape = None
    for workload in workloads:
        twin = shape is not None and shape.serves(workload)
        if not twin:
            _forget(device)
        shape = shape.renamed(workload) if twin else Shape(workload, device, seed)
        here = tuple(replace(v, left_out=left_out(v.kernel.name, workload.name)) for v in variants)
        for which in _passes(passes, twin=twin):
            ready = _paired(shape, here, rows) if which == "both" else here
            found, yard = measure(shape, ready, which, (pace, matmul, flops))
            rows += found
            yards.append((workload.name, which, yard))
            progress(_line(workload.name, which, found))
    _forget(device)
    return Bench(detect(device), name, tuple(yards), pace, tuple(rows))


def merged(first: Bench, second: Bench) -> Bench:
    """Two runs of one process as one; ValueError where they were made on unlike terms."""
    for name in ("target", "yardstick", "pace"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(f"{name} is {getattr(first, name)} and {getattr(second, name)}")
    both = {name: getattr(first, name) + getattr(second, name) for name in ("yardsticks", "rows")}
    return replace(first, **both)


def precompile(
    passes: Mapping[str, tuple[str, ...]], kernels: tuple[str, ...], jobs: int,
    left_out: Callable[[str, str], str] = lambda kernel, shape: "",
) -> tuple[str, ...]:  # fmt: skip
    """Run every kernel once in the passes of every named shape, in `jobs` processes: a bench finds it compiled on disk.

    A deterministic twin whose shape is there too is left to it, but for kernels that have another plan for it. Returns
    what could not run, as lines; the bench says so again, with its reason.
    """
    twins = {name for name in passes if base_name(name) != name and base_name(name) in passes}
    tasks = [
        (name, kernel, which) for kernel in kernels for name, which in passes.items()
        if (name not in twins or kernel in OTHER_TWINS) and not left_out(kernel, name)
    ]  # fmt: skip
    with get_context("spawn").Pool(jobs) as pool:
        return tuple(line for line in pool.imap_unordered(_compile_one, tasks) if line)


# ---- one shape


class DeviceLost(RuntimeError):
    """A kernel made an error that stays with the process: nothing can be run on the device any more."""


class Shape:
    """A workload's inputs and its reference, made once for all passes."""

    def __init__(self, workload: Workload, device: torch.device, seed: int, *, judged: bool = True) -> None:
        self.name, self.problem, self.outliers = workload.name, workload.problem, workload.outliers
        self.device = device
        self.target = detect(device)
        tensors = inputs.make(self.problem, device, seed=seed, outliers=workload.outliers)
        expected, dtype = shapes(self.problem), DTYPE[self.problem.dtype]
        for name in ("out", "dq", "dk", "dv"):
            tensors[name] = alloc.output(expected[name], dtype, device)
        tensors["lse"] = alloc.output(expected["lse"], torch.float32, device)
        self.tensors = tensors
        self.truth: Oracle | None = proof.oracle(self.problem, self.inputs()) if judged else None

    def serves(self, other: Workload) -> bool:
        """Whether another workload is this one but for determinism, so that inputs and reference hold for it."""
        same = replace(other.problem, deterministic=self.problem.deterministic) == self.problem
        return same and other.outliers == self.outliers

    def renamed(self, workload: Workload) -> Shape:
        """The same tensors and reference under another workload that they serve."""
        twin = copy(self)
        twin.name, twin.problem = workload.name, workload.problem
        return twin

    def inputs(self) -> dict[str, Tensor | None]:
        """The tensors of a call without its outputs."""
        return {n: t for n, t in self.tensors.items() if n not in OUTPUTS["both"]}

    def ready(self, which: str) -> None:
        """Poison what the pass writes; give a backward the reference's out and lse."""
        proof.poison(self.tensors, OUTPUTS[which])
        if which == "backward":
            for name in ("out", "lse"):
                self.tensors[name].copy_(self.truth.given[name])


@dataclass(frozen=True)
class _Built:
    """A variant on a shape, ready to be called, and everything proven of it."""

    call: Callable[[], None]
    config: Config
    workspace: int
    parity: tuple[Parity, ...] = ()
    seen: Seen = Seen((), 0.0)
    bitwise: bool | None = None
    extra_bytes: int | None = None
    verified: dict[str, Tensor] | None = None


def measure(
    shape: Shape, variants: tuple[Variant, ...], which: str, timing: tuple[Pace, Callable[[], None], int]
) -> tuple[list[Row], float]:
    """(a row a variant, the yardstick's TFLOP/s) of one pass."""
    pace, matmul, matmul_flops = timing
    built: dict[str, _Built] = {}
    rows: dict[str, Row] = {}
    for variant in variants:
        result = _build(shape, variant, which)
        if isinstance(result, str):
            rows[variant.label] = _row(shape, variant, which, ("cannot", result))
            continue
        fault = _fault(shape, variant, which, result)
        if fault:
            rows[variant.label] = _row(shape, variant, which, ("refused", fault), result)
        else:
            built[variant.label] = result
    loop = {label: _participant(shape, which, b) for label, b in built.items()}
    samples = clock.round_robin(loop | {YARDSTICK: Participant(matmul)}, shape.device, pace) if loop else {}
    yard = matmul_flops / samples[YARDSTICK].median / 1e9 if samples else 0.0
    for variant in variants:
        if variant.label in built:
            b, s = built[variant.label], samples[variant.label]
            rows[variant.label] = _timed(_row(shape, variant, which, ("timed", ""), b), s, yard, b)
    return [rows[v.label] for v in variants], yard


def _build(shape: Shape, variant: Variant, which: str) -> _Built | str:
    """The variant run, compared, watched and repeated; or why it cannot run."""
    reasons = _reasons(shape, variant, which)
    if reasons:
        return "; ".join(reasons)
    try:
        return _prove(shape, variant, which)
    except _failures() as error:
        said = f"raised {type(error).__name__}: {' '.join(str(error).split())}"[:300]
        _check_device(shape, variant, said)
        return said


def _check_device(shape: Shape, variant: Variant, said: str) -> None:
    try:
        clock.synchronize(shape.device)
    except RuntimeError as error:
        raise DeviceLost(f"{shape.name}: {variant.label} {said}, and the device is lost") from error


def _reasons(shape: Shape, variant: Variant, which: str) -> tuple[str, ...]:
    if variant.left_out:
        return (variant.left_out,)
    if shape.target.interpreter and variant.kernel.name == "triton":
        return ("interpreted: a time would mean nothing",)
    kernels = {one: _kernel_of(variant, one) for one in (("forward", "backward") if which == "both" else (which,))}
    said = (r for one, kernel in kernels.items() for r in kernel.unsupported(shape.problem, shape.target, one))
    return tuple(dict.fromkeys(said))


def _kernel_of(variant: Variant, which: str) -> Kernel:
    return variant.forward if which == "forward" and variant.forward else variant.kernel


def _paired(shape: Shape, variants: tuple[Variant, ...], rows: list[Row]) -> tuple[Variant, ...]:
    """The variants, those without a forward with the fastest that was timed here, or dispatch's."""
    timed = [r for r in rows if (r.shape, r.which, r.status) == (shape.name, "forward", "timed")]
    known = {v.label: v.kernel for v in variants}
    if timed:
        best = known[min(timed, key=lambda r: r.ms).label]
    else:
        try:
            best = select(shape.problem, shape.target, "forward")
        except NotImplementedError:
            return variants
    return tuple(v if v.kernel.forward else replace(v, label=f"{v.label}+{best.name}", forward=best) for v in variants)


def _prove(shape: Shape, variant: Variant, which: str) -> _Built:
    call, config, workspace = call_of(shape, variant, which)
    names = OUTPUTS[which]
    shape.ready(which)
    call()
    clock.synchronize(shape.device)
    parity = proof.parity(shape.problem, shape.tensors, shape.truth, which)
    verified = {name: shape.tensors[name].clone() for name in names}
    bitwise, extra = True, None
    for _ in range(REPEATS):
        shape.ready(which)
        base = _reset_peak(shape.device)
        call()
        clock.synchronize(shape.device)
        extra = torch.cuda.max_memory_allocated(shape.device) - base if base is not None else None
        bitwise &= all(torch.equal(shape.tensors[name], verified[name]) for name in names)
    shape.ready(which)
    seen = proof.watch(call, shape.device)
    return _Built(call, config, workspace, parity, seen, bitwise, extra, verified)


def call_of(shape: Shape, variant: Variant, which: str) -> tuple[Callable[[], None], Config, int]:
    """(the pass as one call, its config, its workspace bytes); scratch is zeroed inside the call, as ops does it."""
    kernel, problem, tensors = variant.kernel, shape.problem, shape.tensors
    config = variant.config or kernel.config(problem, shape.target, "forward" if which == "forward" else "backward")
    forward = partial(kernel.forward, problem, config, tensors) if kernel.forward else None
    if variant.forward and not kernel.forward:
        own = variant.forward.config(problem, shape.target, "forward")
        forward = partial(variant.forward.forward, problem, own, tensors)
    if which == "forward":
        return forward, config, 0
    plan = kernel.plan_workspace(problem, config)
    memory = alloc.output((plan.nbytes,), torch.uint8, shape.device)

    def backward() -> None:
        kernel.backward(problem, config, tensors, alloc.scratch(plan, shape.device, memory))

    def both() -> None:
        forward()
        backward()

    return backward if which == "backward" else both, config, plan.nbytes


def _fault(shape: Shape, variant: Variant, which: str, built: _Built) -> str:
    """The first proof that fails, in words; empty when all hold."""
    red = [p for p in built.parity if not p.ok]
    if red:
        worst = red[0]
        return f"wrong {worst.tensor}: relative error {worst.rms:.2g}, {worst.rows} bad rows, {worst.where}"
    for one in ("forward", "backward") if which == "both" else (which,):
        name = _kernel_of(variant, one).name
        told = proof.disproof(name, built.seen, one, shares=shape.device.type == "cuda", in_both=which == "both")
        if told:
            return told
    if shape.problem.deterministic and which != "forward" and not built.bitwise:
        return f"asked to be deterministic, but {REPEATS} repeats differ in bits"
    return ""


def _participant(shape: Shape, which: str, built: _Built) -> Participant:
    def check() -> str:
        apart = {name: proof.drift(shape.tensors[name], kept) for name, kept in _finite(built.verified).items()}
        bad = [f"{name} of the last timed call is {by:.2g} from the verified one" for name, by in apart.items()
               if not by <= DRIFT]  # fmt: skip
        return "; ".join(bad)

    return Participant(built.call, partial(shape.ready, which), check)


def _finite(verified: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in verified.items() if name != "lse"}


def _row(
    shape: Shape, variant: Variant, which: str, verdict: tuple[str, str], built: _Built | None = None
) -> Row:  # fmt: skip
    kernel = variant.kernel
    about = {"shape": shape.name, "problem": shape.problem, "which": which, "label": variant.label}
    about |= {"vendor": kernel.vendor, "status": verdict[0], "reason": verdict[1]}
    if built is None:
        return Row(**about, config="")
    return Row(
        **about, config=built.config.echo(), workspace=built.workspace, extra_bytes=built.extra_bytes,
        bitwise=built.bitwise, parity=built.parity,
        launches=tuple((name[:NAME], us) for name, us in built.seen.launches[:8]),
        adapter_ms=built.seen.adapter_us / 1e3 if kernel.vendor else 0.0,
    )  # fmt: skip


def _timed(row: Row, samples: Samples, yard: float, built: _Built) -> Row:
    """The row with its speed; none when the timed calls left other results than the verified ones."""
    fields = {name: getattr(row, name) for name in Row.__slots__}
    if samples.fault:
        return Row(**fields | {"status": "refused", "reason": samples.fault})
    flops = useful_flops(row.problem, row.which)
    own = max(samples.median - row.adapter_ms, 1e-9)
    tflops = flops / own / 1e9
    sustained = None if samples.sustained_ms is None else flops / max(samples.sustained_ms - row.adapter_ms, 1e-9) / 1e9
    return Row(**fields | {
        "ms": samples.median, "ms_min": samples.minimum, "tflops": tflops, "sustained_tflops": sustained,
        "of_yardstick": tflops / yard if yard else 0.0, "spin_ms": samples.spin_ms,
    })  # fmt: skip


def useful_flops(problem: Problem, which: str) -> int:
    """FLOPs that the mathematics needs, whatever a kernel executes."""
    forward, backward = cost.forward_flops(problem), cost.backward_flops(problem)
    return {"forward": forward, "backward": backward, "both": forward + backward}[which]


# ---- helpers


def _passes(passes: tuple[str, ...], *, twin: bool) -> tuple[str, ...]:
    """The passes of a workload; forwards have one plan, so a twin's is the one just timed."""
    return tuple(which for which in passes if which != "forward" or not twin)


def torch_device(device: torch.device | str | None) -> torch.device:
    """The device asked for; the GPU where there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _reset_peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _forget(device: torch.device) -> None:
    """Drop what peers compiled and kept for a shape."""
    flex.forget()
    cudnn_frontend.forget()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _failures() -> tuple[type[Exception], ...]:
    """What a kernel may raise when it cannot run after all; anything else is a bug of ours and goes through."""
    common = (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError, AttributeError, AssertionError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return common
    return (*common, TritonError)


def _compile_one(task: tuple[str, str, tuple[str, ...]]) -> str:
    name, kernel_name, passes = task
    (workload,), (kernel,) = pick((name,)), named_kernels((kernel_name,))
    if kernel is flex.KERNEL:
        flex.compile_alone()
    shape = Shape(workload, torch_device(None), 0, judged=False)
    try:
        for which in passes:
            variant = Variant(kernel.name, kernel)
            if not _reasons(shape, variant, which):
                call, _, _ = call_of(shape, variant, which)
                call()
                clock.synchronize(shape.device)
    except _failures() as error:
        return f"{name} {kernel_name}: {type(error).__name__}: {str(error)[:200]}"
    _forget(shape.device)
    return ""


def _line(shape: str, which: str, rows: list[Row]) -> str:
    told = (f"{r.label} {r.tflops:.3g}" if r.status == "timed" else f"{r.label} {r.status}" for r in rows)
    return f"{shape} {which}: {', '.join(told)}"
