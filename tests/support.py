"""What the test files share: the device, gates that say where they failed, and calls by argument name."""

import json
from pathlib import Path

import torch

from undertow.dispatch import get
from undertow.instruments import inputs
from undertow.instruments.verify import compare, run, verify
from undertow.instruments.workloads import Workload
from undertow.kernels.alloc import DTYPE
from undertow.problem import Band, Problem
from undertow.target import detect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUSAL = Band(None, 0)
NAN = float("nan")
CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
OURS = ("torch_tiled", "triton")


def red(results) -> list[str]:
    """The gates that failed, in words."""
    bad = [r for r in results if not r.ok]
    return [f"{r.tensor}: {r.rows} rows, cosine {r.cosine:.6f}, max_err {r.max_err:.2e}, {r.where}" for r in bad]


def prove(problem: Problem, kernel: str, *, gap: int = 0, outliers: bool = False, seed: int = 0) -> None:
    """Forward and backward through the public functions, poisoned and fenced, every gate of verify green."""
    assert get(kernel).unsupported(problem, detect(DEVICE)) == ()
    faults = red(verify(Workload("test", "", problem, outliers, gap), DEVICE, kernel, seed))
    assert not faults, f"{kernel}, {problem}: {faults}"


def call(problem: Problem, tensors: dict, kernel: str | None = None) -> dict:
    """out, lse, dq, dk, dv (dsink) through the public functions in checked mode."""
    return run(problem, tensors, kernel)


def make(problem: Problem, **options) -> dict:
    """Seeded inputs on the test device."""
    return inputs.make(problem, DEVICE, **options)


def gates(problem: Problem, tensors: dict, got: dict, what: str = "") -> None:
    """Every gate of verify green for results in hand."""
    faults = red(compare(problem, tensors, got))
    assert not faults, f"{what} {problem}: {faults}"


def same(got: dict, want: dict, names=("out", "lse", "dq", "dk", "dv")) -> None:
    """Two results agree bit for bit (NaN nowhere)."""
    for name in names:
        assert torch.equal(got[name], want[name]), f"{name} differs in {int((got[name] != want[name]).sum())} values"


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float, name: str = "") -> None:
    """Relative Frobenius error within tolerance, everything finite."""
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"


def randn(*shape: int, dtype: str = "bf16", seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers on the test device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE[dtype]).to(DEVICE)
