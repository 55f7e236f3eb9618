"""Measure torch_tiled against torch's SDPA on this CPU, and its memory; write measured/cpu.json.

Usage: python tools/measure_cpu.py [--rounds N] [--patience SECONDS] [--out FILE]

Time: one process, two threads, the variants in turn, round after round; the median of the runs that count. A run
counts if a matmul of a few ms just before and just after it took at most 1.25 times its best: where another program
holds a core, every parallel step waits for it, and that is not what we measure. Rows for which too few runs count go
under "busy", with the medians of all their runs, and decide nothing. A run allocates what it needs: outputs and
scratch. "sdpa" is scaled_dot_product_attention with autograd; sdpa_cpu_flash and sdpa_math are its kernels as this
library calls them. Memory: one subprocess a case; the most it held, less what it held with its inputs ready.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from undertow.cost import backward_flops, forward_flops
from undertow.kernels.alloc import DTYPE, output, scratch
from undertow.kernels.spec import Kernel
from undertow.kernels.torch_tiled import KERNEL
from undertow.kernels.vendor import KERNELS as VENDOR
from undertow.layout import shapes
from undertow.problem import Band, Problem
from undertow.target import detect

ROOT = Path(__file__).parent.parent
OUT = ROOT / "src" / "undertow" / "measured" / "cpu.json"
CPU = torch.device("cpu")
THREADS = 2
MEMORY_TARGET = 20
MEMORY_SEQLEN = 32768
MATH_SEQLENS = (8192, 16384)  # at 32768 SDPA's math path would need more than 16 GB
QUIET, ENOUGH = 1.25, 3
GRADS, RESULTS = ("dq", "dk", "dv"), ("out", "lse")

Run = Callable[[], dict[str, Tensor]]
Times = dict[str, list[float]]


class Case(NamedTuple):
    """A dense problem, and the ratio of times (SDPA's backward over ours) that we aim at, where there is one."""

    dtype: str
    head_dims: tuple[int, int]
    batch: int = 1
    seqlen: int = 2048
    heads: tuple[int, int] = (4, 4)
    causal: bool = True
    target: float | None = None

    @property
    def problem(self) -> Problem:
        """In (batch, head, row, dim) layout, SDPA's own."""
        return Problem.dense(
            self.batch, self.seqlen, self.seqlen, nheads_q=self.heads[0], nheads_kv=self.heads[1],
            head_dim_qk=self.head_dims[0], head_dim_v=self.head_dims[1], dtype=self.dtype,
            band=Band(None, 0 if self.causal else None), layout="bhsd",
        )  # fmt: skip


CASES = (
    Case("fp32", (128, 128), target=0.8),
    Case("bf16", (128, 128), target=5.0),
    Case("fp32", (192, 128), target=1.2),
    Case("bf16", (192, 128), target=1.2),
    Case("fp32", (64, 64)),
    Case("bf16", (64, 64)),
    Case("fp32", (128, 128), causal=False),
    Case("fp32", (128, 128), heads=(8, 2)),
    Case("fp32", (64, 64), batch=4, seqlen=256, heads=(8, 8)),
)


def inputs(problem: Problem) -> dict[str, Tensor]:
    """Random q, k, v, dout."""
    torch.manual_seed(0)
    shape = shapes(problem)
    return {name: torch.randn(shape[name], dtype=DTYPE[problem.dtype]) for name in ("q", "k", "v", "dout")}


def forward_of(kernel: Kernel, problem: Problem, given: dict[str, Tensor]) -> Run:
    """A kernel's forward as a function that returns out and lse."""
    target, shape = detect(CPU), shapes(problem)

    def forward() -> dict[str, Tensor]:
        tensors = dict(given)
        tensors["out"] = output(shape["out"], DTYPE[problem.dtype], CPU)
        tensors["lse"] = output(shape["lse"], torch.float32, CPU)
        kernel.forward(problem, kernel.config(problem, target, "forward"), tensors)
        return {name: tensors[name] for name in RESULTS}

    return forward


def backward_of(kernel: Kernel, problem: Problem, given: dict[str, Tensor]) -> Run:
    """A kernel's backward, from its own out and lse, as a function that returns the gradients."""
    target, shape = detect(CPU), shapes(problem)
    tensors = given | forward_of(kernel, problem, given)()

    def backward() -> dict[str, Tensor]:
        config = kernel.config(problem, target, "backward")
        grads = {name: output(shape[name], DTYPE[problem.dtype], CPU) for name in GRADS}
        kernel.backward(problem, config, tensors | grads, scratch(kernel.plan_workspace(problem, config), CPU))
        return grads

    return backward


def sdpa(problem: Problem, given: dict[str, Tensor], backend: SDPBackend, which: str) -> Run:
    """SDPA's forward, as a training step runs it, or its backward through autograd."""
    leaves = [given[name].detach().clone().requires_grad_() for name in "qkv"]
    causal = problem.band.right == 0

    def forward() -> dict[str, Tensor]:
        with sdpa_kernel(backend):
            return {"out": scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=problem.group > 1)}

    if which == "forward":
        return forward
    out = forward()["out"]
    return lambda: dict(zip(GRADS, torch.autograd.grad(out, leaves, given["dout"], retain_graph=True), strict=True))


def backend_of(problem: Problem, given: dict[str, Tensor]) -> SDPBackend:
    """The kernel SDPA picks for these tensors."""
    leaves = [given[name].detach().requires_grad_() for name in "qkv"]
    flags = {"is_causal": problem.band.right == 0, "enable_gqa": problem.group > 1}
    return SDPBackend(torch._fused_sdp_choice(*leaves, **flags))


def variants_of(problem: Problem, which: str) -> tuple[dict[str, Run], SDPBackend]:
    """Everything that can run this pass here, by name, and what "sdpa" stands for."""
    given, target = inputs(problem), detect(CPU)
    backend = backend_of(problem, given)
    make = forward_of if which == "forward" else backward_of
    kernels = [kernel for kernel in (KERNEL, *VENDOR) if not kernel.unsupported(problem, target, which)]
    found = {kernel.name: make(kernel, problem, given) for kernel in kernels}
    return found | {"sdpa": sdpa(problem, given, backend, which)}, backend


class Quiet:
    """Whether the machine is ours: a matmul takes about as long as its best."""

    def __init__(self) -> None:
        self._a = torch.randn(640, 640)
        self._best = min(self._time() for _ in range(20))

    def __call__(self) -> bool:
        """Time it once more."""
        now = self._time()
        self._best = min(self._best, now)
        return now <= QUIET * self._best

    def _time(self) -> float:
        start = time.perf_counter()
        self._a @ self._a
        return time.perf_counter() - start


def times_of(variants: dict[str, Run], rounds: int, patience_s: float) -> tuple[Times, Times]:
    """Milliseconds of the runs that count, `rounds` a variant where `patience_s` allows, and of all runs."""
    quiet, kept, tried = Quiet(), {name: [] for name in variants}, {name: [] for name in variants}
    end = time.perf_counter() + patience_s
    while time.perf_counter() < end and (wanted := [n for n in variants if len(kept[n]) < rounds]):
        for name in wanted:
            before = quiet()
            start = time.perf_counter()
            variants[name]()
            took = (time.perf_counter() - start) * 1e3
            tried[name].append(took)
            if before and quiet():
                kept[name].append(took)
    return kept, tried


def measure(case: Case, which: str, rounds: int, patience_s: float) -> dict[str, object]:
    """One row of the record: the pass `which` of a case."""
    problem = case.problem
    variants, backend = variants_of(problem, which)
    results = {name: run() for name, run in variants.items()}
    apart = max(_distance(x, results["sdpa"][n]) for n, x in results["torch_tiled"].items() if n != "lse")
    kept, tried = times_of(variants, rounds, patience_s)
    quiet = min(map(len, kept.values())) >= ENOUGH
    kept = kept if quiet else tried
    flops = (forward_flops if which == "forward" else backward_flops)(problem)
    ms = {name: median(times) for name, times in kept.items()}
    fields = ("batch", "max_seqlen_q", "max_seqlen_k", "nheads_q", "nheads_kv", "group", "head_dim_qk", "head_dim_v")
    return {
        "pass": which,
        "problem": {name: getattr(problem, name) for name in (*fields, "dtype", "layout", "deterministic")}
        | {"left": problem.band.left, "right": problem.band.right},
        "ms": {name: round(x, 2) for name, x in ms.items()},
        "ms_fastest": {name: round(min(times), 2) for name, times in kept.items()},
        "gflops_per_s": {name: round(flops / x / 1e6, 1) for name, x in ms.items()},
        "sdpa_is": backend.name.lower(),
        "sdpa_over_torch_tiled": round(ms["sdpa"] / ms["torch_tiled"], 2),
        "target": case.target if which == "backward" else None,
        "relative_difference": float(f"{apart:.1e}"),
        "runs": {name: f"{len(kept[name])} of {len(tried[name])}" for name in variants},
        "quiet": quiet,
    }


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def peak_memory(variant: str, seqlen: int) -> int:
    """Bytes held at the peak of forward and backward over those held before, one fp32 head of 128; in this process."""
    backends = {"sdpa_math": SDPBackend.MATH, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
    for length in (256, seqlen):  # the first loads the libraries
        problem = Case("fp32", (128, 128), seqlen=length, heads=(1, 1)).problem
        given = inputs(problem)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        if variant == "torch_tiled":
            backward_of(KERNEL, problem, given)()
        else:
            sdpa(problem, given, backends[variant], "backward")()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def memory() -> dict[str, object]:
    """Peak bytes at S = 32768 for what is linear; SDPA's math path where it fits, and from there by its square."""
    found = {name: {MEMORY_SEQLEN: _in_subprocess(name, MEMORY_SEQLEN)} for name in ("torch_tiled", "sdpa_flash")}
    found["sdpa_math"] = {seqlen: _in_subprocess("sdpa_math", seqlen) for seqlen in MATH_SEQLENS}
    short, long = (found["sdpa_math"][seqlen] for seqlen in MATH_SEQLENS)
    extrapolated = long * (MEMORY_SEQLEN // MATH_SEQLENS[-1]) ** 2
    return {
        "problem": {"batch": 1, "heads": 1, "causal": True, "dtype": "fp32", "head_dims": [128, 128]},
        "peak_bytes_over_inputs": found,
        "sdpa_math_extrapolated": {MEMORY_SEQLEN: extrapolated},
        "extrapolation": f"4x the peak at {MATH_SEQLENS[1]}, which is {long / short:.2f}x that at {MATH_SEQLENS[0]}",
        "sdpa_math_over_torch_tiled": round(extrapolated / found["torch_tiled"][MEMORY_SEQLEN], 1),
        "target": MEMORY_TARGET,
    }


def _in_subprocess(variant: str, seqlen: int) -> int:
    command = [sys.executable, __file__, "--peak", variant, str(seqlen)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def machine() -> dict[str, object]:
    """The device and the versions behind the numbers."""
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    git = {"commit": ("rev-parse", "--short", "HEAD"), "dirty": ("status", "--porcelain", "--", *KERNEL_PATHS)}
    said = {n: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True).stdout for n, a in git.items()}
    return {
        "arch": detect(CPU).arch,
        "device": models[0].split(":")[1].strip() if models else platform.processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": len(models),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": said["commit"].strip(),
        "dirty": bool(said["dirty"].strip()),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


KERNEL_PATHS = ("src/undertow/kernels/torch_tiled", "src/undertow/kernels/vendor", "tools/measure_cpu.py")


def main() -> None:
    """Measure, print one line a row, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="runs that count, a variant")
    parser.add_argument("--patience", type=float, default=60, help="seconds a row, on a machine that others use")
    parser.add_argument("--out", type=Path, default=OUT, help="the record to write")
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "SEQLEN"), help="print one memory peak and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.peak else THREADS)
    if arguments.peak:
        print(peak_memory(arguments.peak[0], int(arguments.peak[1])))
        return
    record = machine() | {"method": " ".join(__doc__.split("\n\n")[2].split()), "dispatch": [], "busy": []}
    for case in CASES:
        for which in ("backward", "forward"):
            row = measure(case, which, arguments.rounds, arguments.patience)
            record["dispatch" if row["quiet"] else "busy"].append(row)
            aim = "" if row["target"] is None else f"target {row['target']}"
            notes = ("ratio", row["sdpa_over_torch_tiled"], aim, "" if row["quiet"] else "busy")
            print(which, *case[:6], row["ms"], *notes, flush=True)
    record["memory"] = memory()
    print("memory ratio", record["memory"]["sdpa_math_over_torch_tiled"], "target", MEMORY_TARGET)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
