"""Parity of a kernel with the reference: one verdict a tensor, by segment, head and row."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, reference
from ..env import checked
from ..kernels import watch
from ..kernels.alloc import DTYPE
from ..ops import attention, attention_backward, attention_varlen, attention_varlen_backward
from ..problem import Problem
from ..target import detect
from . import inputs
from .workloads import Workload

COSINE, RMS, MAX_ERR = 0.999, 2e-2, 3e-2
ROW, ROW_OF_LARGEST, EMULATION = 0.1, 1e-3, 2.0
ROUNDING = {"bf16": 2**-10, "fp16": 2**-13}
"""The relative rms of one rounding, which a kernel may have beyond twice the error of the emulation."""
FP32_ERR = 1e-5
NOISE = 1e-6
"""fp32 rounding of terms that cancel, relative to the largest product they could form (see `_noise`)."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How one tensor compares with the reference.

    `cosine`, `rms`, `max_err` are the worst over (segment, head), the errors relative to the reference's rms and
    largest value there; `rows` counts rows over their bound or not exactly 0 where the mask makes them 0; `where` names
    the worst place.
    """

    tensor: str
    cosine: float
    rms: float
    max_err: float
    rows: int
    ok: bool
    where: str = ""


@dataclass(frozen=True, slots=True)
class Verified:
    """A workload's verdict: its backward's kernel and resolved geometry, parity, seconds with the reference.

    `compiled` holds, by stage, the figures of what was compiled and launched on a GPU.
    """

    workload: str
    about: str
    kernel: str
    geometry: str
    parity: tuple[Parity, ...]
    seconds: float
    compiled: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every gate is green."""
        return all(p.ok for p in self.parity)

    def line(self) -> str:
        """One line for a log."""
        red = "; ".join(f"{p.tensor} {p.where or f'{p.rows} rows'}" for p in self.parity if not p.ok)
        return f"{'green' if self.ok else 'RED  '} {self.workload} ({self.seconds:.1f} s){': ' + red if red else ''}"

    @staticmethod
    def table(results: list[Verified], device: torch.device) -> object:
        """A rich table: the worst figure of each workload's gradients."""
        from rich.table import Table

        green = sum(r.ok for r in results)
        table = Table(title=f"{green} of {len(results)} workloads green on {device}", title_justify="left")
        for name in ("workload", "kernel", "worst cosine", "worst rms", "worst max", "red rows", "verdict", ""):
            table.add_column(name, justify="right" if name.startswith(("worst", "red")) else "left")
        for r in results:
            compared = [p for p in r.parity if p.tensor in ("out", "dq", "dk", "dv")]
            figures = (
                f"{min(p.cosine for p in compared):.6f}", f"{max(p.rms for p in compared):.1e}",
                f"{max(p.max_err for p in compared):.1e}", str(sum(p.rows for p in r.parity)),
            )  # fmt: skip
            table.add_row(r.workload, r.kernel, *figures, "green" if r.ok else "RED", r.about)
        return table


def verify(
    workload: Workload, device: torch.device | str = "cpu", kernel: str | None = None, seed: int = 0
) -> list[Parity]:
    """The gates of `prove`."""
    return list(prove(workload, device, kernel, seed).parity)


def prove(
    workload: Workload, device: torch.device | str = "cpu", kernel: str | None = None, seed: int = 0
) -> Verified:
    """Run forward and backward in checked mode (poisoned, fenced) and compare out, lse, delta, dq, dk, dv (dsink).

    D is compared where the kernel has it in its scratch; on a GPU, what was compiled with the resolved config, where
    the kernel can say. A deterministic problem is run `workload.runs` times and must give the same bits.
    """
    start, problem, target = time.perf_counter(), workload.problem, detect(device)
    chosen = dispatch.select(problem, target, "backward", kernel)
    tensors = inputs.make(problem, device, seed=seed, outliers=workload.outliers)
    if workload.gap:
        tensors = inputs.with_gaps(problem, tensors, workload.gap, fill=float("nan"))
    with watch.watch() as seen:
        got = run(problem, tensors, chosen.name)
    results = compare(problem, tensors, got | {n: seen.scratch[n] for n in ("delta",) if n in seen.scratch})
    config, compiled = chosen.config(problem, target, "backward"), {}
    if chosen.built is not None and target.arch != "cpu":
        built = chosen.built(problem, config, seen.launches)
        compiled, wrong = built.stages, built.differences
        results.append(Parity("geometry", 1.0, 0.0, 0.0, 0, not wrong, "; ".join(wrong)))
    if problem.deterministic:
        again = (run(problem, tensors, chosen.name) for _ in range(workload.runs - 1))
        same = all(torch.equal(got[n], other[n]) for other in again for n in ("dq", "dk", "dv"))
        results.append(Parity("bits", 1.0, 0.0, 0.0, 0, same, "" if same else "gradients differ between runs"))
    took = time.perf_counter() - start
    return Verified(workload.name, workload.about, chosen.name, config.echo(), tuple(results), took, compiled)


def run(problem: Problem, tensors: dict[str, Tensor | None], kernel: str | None = None) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv (dsink) of one call through the public functions, in checked mode."""
    positional, keywords = inputs.arguments(problem, tensors)
    forward, backward = (attention, attention_backward) if not problem.is_packed else (
        attention_varlen, attention_varlen_backward
    )  # fmt: skip
    with checked():
        out, lse = forward(*positional, **keywords, kernel=kernel, return_lse=True)
        q, k, v, *segments = positional
        side = {"dlse": tensors["dlse"], "lse_layout": "ht" if problem.is_packed else "bhs"}
        grads = backward(tensors["dout"], q, k, v, out, lse, *segments, **keywords, **side, kernel=kernel)
    got = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return got if grads.dsink is None else got | {"dsink": grads.dsink}


def compare(problem: Problem, tensors: dict[str, Tensor | None], got: dict[str, Tensor]) -> list[Parity]:
    """Parity of every tensor in `got`, against the reference that uses the kernel's own `out`."""
    real = dict(tensors)
    for name in ("q", "k", "v", "dout"):
        real[name] = torch.nan_to_num(tensors[name])  # padding may hold NaN; the reference never reads it
    with_out = real | {"out": got["out"]}
    exact = reference.attention(problem, with_out)
    plain = exact
    if problem.dtype != "fp32":
        plain = reference.attention(problem, with_out, torch.float32, round_to=DTYPE[problem.dtype])
    live = _live_rows(problem, tensors, got)
    noise = _noise(problem, real)
    results = [_lse(problem, exact.lse, reference.to_ht(got["lse"]), live["lse"])]
    if "delta" in got:
        results.append(_delta(problem, real, exact, got, live["lse"]))
    for name in ("out", "dq", "dk", "dv"):
        mine = reference.to_thd(got[name], problem.layout).to(exact.dq.dtype)
        case = _Case(name, problem, getattr(exact, name), getattr(plain, name).to(mine.dtype), noise[name])
        results.append(_tensor(case, mine, live[name], _groups(problem, tensors, name)))
    if "dsink" in got:
        results.append(_vector("dsink", exact.dsink, got["dsink"]))
    return results


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    problem: Problem
    exact: Tensor
    plain: Tensor
    noise: float


def _tensor(case: _Case, mine: Tensor, live: Tensor, groups: list[tuple[str, slice]]) -> Parity:
    exact, error = case.exact, (mine - case.exact)
    row_error, row_norm = error.norm(dim=-1), exact.norm(dim=-1)  # [tokens, heads]
    largest = float(row_norm.max()) if row_norm.numel() else 0.0
    emulated = (case.plain - exact).norm(dim=-1)
    floor = max(ROW_OF_LARGEST * largest, case.noise)
    if case.problem.dtype == "fp32":
        bound = (FP32_ERR * largest + case.noise) * torch.ones_like(row_norm)
    else:
        bound = torch.maximum(ROW * row_norm, EMULATION * emulated).clamp_min(floor)
    bad = ~(row_error <= bound) & live
    bad |= ~live & (mine != 0).any(-1)
    worst = Parity(case.name, 1.0, 0.0, 0.0, int(bad.sum()), not bool(bad.any()))
    if bad.any():
        token, head = (int(x) for x in bad.nonzero()[0])
        worst = replace(worst, where=f"row {token}, head {head}")
    for label, rows in groups:
        for head in range(exact.shape[1]):
            part = (x[rows, head] for x in (mine, exact, case.plain))
            worst = _worse(worst, _group(case, *part, floor), f"{label}, head {head}")
    return worst


def _group(case: _Case, mine: Tensor, exact: Tensor, plain: Tensor, floor: float) -> tuple[float, float, float, bool]:
    """(cosine, rms, max_err, ok) of one head of one segment; a group of nothing but rounding noise passes."""
    if not exact.numel():
        return 1.0, 0.0, 0.0, True
    error = mine - exact
    scale, largest = exact.square().mean().sqrt(), exact.abs().max()
    if float(error.norm(dim=-1).max()) <= floor and float(exact.norm(dim=-1).max()) <= floor:
        return 1.0, 0.0, 0.0, True
    spread = error.square().mean().sqrt()
    rms, max_err = float(spread / scale), float(error.abs().max() / largest)
    cosine = float(torch.nn.functional.cosine_similarity(mine.flatten(), exact.flatten(), dim=0, eps=0.0))
    noise = case.noise * exact.shape[-1] ** -0.5  # an element's share of a row's
    if case.problem.dtype == "fp32":
        limits = FP32_ERR * scale + noise, FP32_ERR * largest + case.noise
    else:
        emulated = (plain - exact).square().mean().sqrt()
        budget = EMULATION * emulated + noise + ROUNDING[case.problem.dtype] * scale
        limits = torch.minimum(RMS * scale, budget), MAX_ERR * largest
    ok = cosine >= COSINE and bool(spread <= limits[0]) and bool(error.abs().max() <= limits[1])
    return cosine, rms, max_err, ok


def _worse(worst: Parity, found: tuple[float, float, float, bool], where: str) -> Parity:
    cosine, rms, max_err, ok = found
    return replace(
        worst,
        cosine=min(worst.cosine, cosine) if cosine == cosine else cosine,
        rms=max(worst.rms, rms) if rms == rms else rms,
        max_err=max(worst.max_err, max_err) if max_err == max_err else max_err,
        ok=worst.ok and ok,
        where=worst.where or ("" if ok else where),
    )


def _lse(problem: Problem, exact: Tensor, mine: Tensor, live: Tensor) -> Parity:
    """LSE is fp32 whatever the inputs: absolute error, relative for large values; infinite exactly where it must be."""
    error = torch.where(live, (mine - exact).abs(), 0.0)
    bad = ~(error <= 1e-4 + 1e-5 * exact.abs()) & live
    if not problem.has_sink:
        bad |= ~live & (mine != -torch.inf)
    largest = float(error.max()) if error.numel() else 0.0
    return Parity("lse", 1.0, 0.0, largest, int(bad.sum()), not bool(bad.any()))


def _delta(
    problem: Problem, tensors: dict[str, Tensor | None], exact: reference.Stages, got: dict[str, Tensor], live: Tensor
) -> Parity:
    """D is fp32 whatever the inputs: within the rounding of its terms, in every row that sees a key."""
    dout, out = (reference.to_thd(x, problem.layout).double() for x in (tensors["dout"], got["out"]))
    terms = (dout * out).abs().sum(-1).t()
    if tensors["dlse"] is not None:
        terms = terms + reference.to_ht(tensors["dlse"]).abs()
    error = torch.where(live, (reference.to_ht(got["delta"]) - exact.delta).abs(), 0.0)
    bad = ~(error <= FP32_ERR * terms) & live
    where = "head {}, row {}".format(*bad.nonzero()[0].tolist()) if bad.any() else ""
    return Parity("delta", 1.0, 0.0, float(error.max()) if error.numel() else 0.0, int(bad.sum()), not where, where)


def _vector(name: str, exact: Tensor, mine: Tensor) -> Parity:
    error = float((mine - exact).norm() / exact.norm().clamp_min(1e-30))
    return Parity(name, 1.0, error, error, 0, error <= 1e-3)


def _live_rows(problem: Problem, tensors: dict[str, Tensor | None], got: dict[str, Tensor]) -> dict[str, Tensor]:
    """Which rows [tokens, heads] may be non-zero: queries that see a key, keys that some query sees."""
    side = {}
    for name, rows in (("q", got["dq"]), ("k", got["dk"])):
        thd = reference.to_thd(rows, problem.layout)
        side[name] = thd.new_zeros(thd.shape[:2], dtype=torch.bool)
    for b, (sq, sk) in enumerate(problem.segments):
        visible = reference.keep(sq, sk, problem.band, side["q"].device)
        at_q, at_k = (reference.start(tensors, problem, s, b) for s in "qk")
        side["q"][at_q : at_q + sq] = visible.any(1)[:, None]
        side["k"][at_k : at_k + sk] = visible.any(0)[:, None]
    return {"out": side["q"], "dq": side["q"], "dk": side["k"], "dv": side["k"], "lse": side["q"].t()}


def _groups(problem: Problem, tensors: dict[str, Tensor | None], name: str) -> list[tuple[str, slice]]:
    side = "k" if name in ("dk", "dv") else "q"
    lengths = [segment["qk".index(side)] for segment in problem.segments]
    starts = [reference.start(tensors, problem, side, b) for b in range(len(lengths))]
    return [(f"segment {b}", slice(at, at + n)) for b, (at, n) in enumerate(zip(starts, lengths, strict=True))]


def _noise(problem: Problem, tensors: dict[str, Tensor | None]) -> dict[str, float]:
    """The row error fp32 rounding alone may leave where terms cancel: |dS| <= P (|dP| + |D|), rows of P sum to 1."""
    norm = {n: float(tensors[n].float().norm(dim=-1).max()) if tensors[n].numel() else 0.0 for n in "qkv"}
    dout = float(tensors["dout"].float().norm(dim=-1).max()) if tensors["dout"].numel() else 0.0
    ds = 2 * dout * norm["v"] * abs(problem.scale)
    return {"out": NOISE * norm["v"], "dv": NOISE * dout, "dq": NOISE * ds * norm["k"], "dk": NOISE * ds * norm["q"]}
