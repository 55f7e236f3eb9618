"""Which kernel runs a problem, and why the others do not."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .cost import padding_tax
from .kernels.flydsl import KERNEL as FLYDSL
from .kernels.flydsl import LOW_MEMORY as FLYDSL_LOW_MEMORY
from .kernels.hopper import KERNEL as HOPPER
from .kernels.spec import Kernel
from .kernels.torch_tiled import KERNEL as TORCH_TILED
from .kernels.triton import KERNEL as TRITON
from .kernels.vendor import KERNELS as VENDOR
from .kernels.vendor import aiter
from .problem import Problem
from .target import Target

KERNELS: tuple[Kernel, ...] = (aiter.ASM, HOPPER, TRITON, FLYDSL, TORCH_TILED, *VENDOR)
"""What is chosen from, in the order of preference that holds where nothing was measured.

On AMD, where nothing of ours was measured, the vendor's assembly comes first wherever it takes the call natively; then
ours, portable before slow; then torch's.
"""

BY_NAME: tuple[Kernel, ...] = (FLYDSL_LOW_MEMORY, aiter.FLYDSL, aiter.CK)
"""What runs only when named: a mode that trades accuracy, and peers that leave rows outside segments unwritten."""

WIN = {"nvidia": 1.03, "amd": 1.10, "cpu": 1.03}
"""How much faster than the best vendor kernel one of ours must be, in the same measured run, to replace it."""

NEAR = 2.0
"""A record decides for problems up to this distance; see `_distance`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What dispatch says of one kernel: chosen, runnable or not, why, what would lift the limits, FLOPs over native."""

    kernel: str
    status: str
    reasons: tuple[str, ...]
    fixes: tuple[str, ...]
    tax: float


def get(name: str) -> Kernel:
    """The kernel of that name; ValueError lists the names there are."""
    for kernel in KERNELS + BY_NAME:
        if kernel.name == name:
            return kernel
    raise ValueError(f"kernel is {name!r}, wanted one of {', '.join(k.name for k in KERNELS + BY_NAME)}")


@lru_cache(maxsize=4096)
def select(problem: Problem, target: Target, which: str = "backward", kernel: str | None = None) -> Kernel:
    """The kernel that runs the pass `which`: the named one, or the best that can by measured records.

    Raises:
        NotImplementedError: the named kernel cannot run the problem, or none can; the text holds every reason.
    """
    candidates = KERNELS if kernel is None else (get(kernel),)
    runnable = [k for k in candidates if not k.unsupported(problem, target, which)]
    if not runnable:
        lines = (f"  {k.name}: {'; '.join(k.unsupported(problem, target, which))}" for k in candidates)
        asked = "no kernel can run" if kernel is None else f"kernel {kernel!r} cannot run"
        raise NotImplementedError(f"{asked} the {which} of {problem} on {target.arch}\n" + "\n".join(lines))
    return runnable[0] if len(runnable) == 1 else _best(problem, target, which, runnable)


def ours(problem: Problem, target: Target, which: str = "backward") -> Kernel:
    """The best kernel of our own for a problem, by measured records; what `undertow verify` proves by default."""
    runnable = [k for k in KERNELS if not k.vendor and not k.unsupported(problem, target, which)]
    if not runnable:
        raise NotImplementedError(f"no kernel of ours can run the {which} of {problem} on {target.arch}")
    return _best(problem, target, which, runnable)


def explain(problem: Problem, target: Target, which: str = "backward") -> tuple[Verdict, ...]:
    """One verdict a kernel, the chosen first, then the runnable, then the rest with what would lift their limits."""
    try:
        chosen = select(problem, target, which).name
    except NotImplementedError:
        chosen = ""
    verdicts = [_verdict(k, problem, target, which, chosen) for k in KERNELS + BY_NAME]
    return tuple(sorted(verdicts, key=lambda v: ("chosen", "can run", "cannot run").index(v.status)))


def _verdict(kernel: Kernel, problem: Problem, target: Target, which: str, chosen: str) -> Verdict:
    failing = kernel.failing(problem, target, which)
    status = "cannot run" if failing else "chosen" if kernel.name == chosen else "can run"
    reasons = tuple(limit.text(problem, target) for limit in failing)
    if not failing:
        times = _times(problem, target, which)
        reasons = (f"measured near here: {times[kernel.name]:.3f} ms",) if kernel.name in times else ("not measured",)
        if kernel in BY_NAME:
            reasons = (f"only as kernel={kernel.name!r}",)
    fixes = tuple(limit.remedy(problem, target) for limit in failing if limit.fix)
    tax = padding_tax(problem, kernel.executed_dims(problem), kernel.gemms(problem, target))
    return Verdict(kernel.name, status, reasons, fixes, tax)


def _best(problem: Problem, target: Target, which: str, runnable: list[Kernel]) -> Kernel:
    times = _times(problem, target, which)
    measured = sorted((k for k in runnable if k.name in times), key=lambda k: times[k.name])
    ours = next((k for k in measured if not k.vendor), None)
    vendor = next((k for k in measured if k.vendor), None)
    if ours is None:
        return vendor or runnable[0]
    if vendor is None or times[ours.name] * WIN[target.vendor] <= times[vendor.name]:
        return ours
    return vendor


@lru_cache(maxsize=1)
def records() -> tuple[dict[str, Any], ...]:
    """Every measured entry shipped in `measured/*.json`: arch, pass, problem and milliseconds by kernel."""
    folder = files(__package__) / "measured"
    found = []
    for path in sorted(folder.iterdir(), key=lambda p: p.name) if folder.is_dir() else ():
        if path.name.endswith(".json"):
            content = json.loads(path.read_text())
            found += [{"arch": content["arch"], **entry} for entry in content.get("dispatch", ())]
    return tuple(found)


def _times(problem: Problem, target: Target, which: str) -> dict[str, float]:
    """Milliseconds by kernel of the nearest record of this arch and pass, or nothing when none is near."""
    entries = [e for e in records() if e["arch"] == target.arch and e["pass"] == which]
    near = min(entries, key=lambda e: _distance(problem, e["problem"]), default=None)
    return near["ms"] if near is not None and _distance(problem, near["problem"]) <= NEAR else {}


def _distance(p: Problem, other: dict[str, Any]) -> float:
    """How far a problem is from a measured one: doublings of head dims and lengths, and unlike masks; inf if unlike."""
    alike = (p.dtype == "fp32") == (other["dtype"] == "fp32"), p.deterministic == other["deterministic"]
    if not all(alike) or p.is_packed != (other["layout"] == "thd"):
        return math.inf
    doublings = sum(
        weight * abs(math.log2(max(1, getattr(p, name)) / max(1, other[name])))
        for name, weight in (("head_dim_qk", 1), ("head_dim_v", 1), ("max_seqlen_q", 0.25), ("max_seqlen_k", 0.25))
    )
    band = (p.band.left is None) != (other["left"] is None), (p.band.right is None) != (other["right"] is None)
    return doublings + 0.5 * sum(band) + 0.25 * ((p.group > 1) != (other["group"] > 1))
