"""What a kernel must show before it gets a speed: the right gradients, and that the kernel it claims computed them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import cost, reference
from ..kernels.alloc import DTYPE
from ..problem import Problem
from . import verify
from .clock import synchronize
from .verify import Parity

FROBENIUS = {"bf16": 1e-2, "fp16": 5e-3, "fp32": 1e-4}
"""Relative Frobenius error of every head against fp32. bf16 kernels that are right lie between 2e-3 and 4e-3."""

ROW, ROW_OF_LARGEST = 0.25, 2e-3
LSE = 1e-3
SMALL = 1 << 22
"""Score elements up to which the fp64 gates of `verify` are asked as well."""

ADAPTER = r"(?i)memcpy|copy_?kernel|where_kernel|CompareFunctor|index_elementwise"
"""What our adapters run around a peer: copies into the call's tensors and masks of rows, in torch's own kernels."""

GEMM = r"gemm|nvjet|cutlass|cijk|xmma|aten::(mm|bmm|addmm|baddbmm)$"
FLASH = (r"(?i)flash_?(attn_?)?fwd|FlashAttentionForward", r"(?i)flash_?(attn_?)?bwd|FlashAttentionBackward")
CUDNN = (r"cudnn.*(fprop|fwd)", r"cudnn.*(bprop|bwd)")


IN_BOTH = 0.2
"""A forward is a fifth of both passes: 20 to 25 % on an H200, two of the seven products at the higher rate."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Patterns of what a kernel launches, forward and backward, and the least share of the time they must take."""

    forward: str
    backward: str
    share: float = 0.25


CLAIMS = {
    "triton": Claim(r"forward_kernel", r"dkdv|backward_kernel"),
    "hopper": Claim(r"hopper", r"kernel_cutlass.*hopper"),
    "torch_tiled": Claim(GEMM, GEMM, 0.0),
    "sdpa_math": Claim(r"softmax|soft_max", r"softmax|soft_max", 0.0),
    "sdpa_flash": Claim(*FLASH),
    "sdpa_cudnn": Claim(*CUDNN),
    "sdpa_efficient": Claim(r"fmha_cutlassF", r"fmha_cutlassB"),
    "sdpa_cpu_flash": Claim(
        r"_scaled_dot_product_flash_attention_for_cpu$", r"_scaled_dot_product_flash_attention_for_cpu_backward$"
    ),
    "aten_flash_varlen": Claim(*FLASH),
    "flex": Claim(r"flex_attention|triton_tem", r"flex_attention|triton_tem"),
    "cudnn_frontend": Claim(*CUDNN),
    "flash_attn_2": Claim(*FLASH),
    "flash_attn_3": Claim(*FLASH),
    "flash_attn_4": Claim(*FLASH),
    "aiter": Claim(r"(?i)fmha.*fwd|FmhaFwd", r"(?i)fmha.*bwd|FmhaBwd|flydsl"),
}
"""By kernel name. A kernel without an entry must launch something that has its own name in it."""


@dataclass(frozen=True)
class Oracle:
    """The fp32 reference of a call: `given` are the out (rounded to the call's dtype) and lse that backwards get."""

    given: dict[str, Tensor]
    exact: reference.Stages


@dataclass(frozen=True, slots=True)
class Seen:
    """What the profiler saw of one call: (name, microseconds) by time, and how long adapters' kernels took."""

    launches: tuple[tuple[str, float], ...]
    adapter_us: float


def oracle(problem: Problem, tensors: dict[str, Tensor | None]) -> Oracle:
    """The reference in true fp32 on the tensors' own device, some heads at a time.

    The first pass gives out and lse; the second the gradients that follow from `out` as the kernels get it, rounded.
    """
    with _true_fp32():
        first = reference.attention(problem, tensors, torch.float32)
        dtype = DTYPE[problem.dtype]
        out = reference.from_thd(first.out.to(dtype), problem.layout, problem.batch).contiguous()
        lse = first.lse if problem.is_packed else first.lse.unflatten(1, (problem.batch, -1)).transpose(0, 1)
        given = {"out": out, "lse": lse.contiguous()}
        return Oracle(given, reference.attention(problem, tensors | given, torch.float32))


def parity(problem: Problem, tensors: dict[str, Tensor | None], truth: Oracle, which: str) -> tuple[Parity, ...]:
    """Parity of the outputs that the pass `which` left in `tensors`.

    Every size: relative Frobenius error of each head, every row, every element finite. Up to SMALL score elements the
    gradients pass `verify.compare` too, which knows segments and an emulation in the call's dtype.
    """
    found = []
    if which in ("forward", "both"):
        found.append(_lse(reference.to_ht(tensors["lse"]), truth.exact.lse))
        found.append(_tensor("out", reference.to_thd(tensors["out"], problem.layout), truth.exact.out, problem))
    if which in ("backward", "both"):
        for name in ("dq", "dk", "dv"):
            exact = getattr(truth.exact, name)
            found.append(_tensor(name, reference.to_thd(tensors[name], problem.layout), exact, problem))
        if cost.live_pairs(problem) * problem.nheads_q <= SMALL:
            got = truth.given | {name: tensors[name] for name in ("dq", "dk", "dv")}
            strict = {p.tensor: p for p in verify.compare(problem, tensors, got)}
            found = [_both(p, strict[p.tensor]) if p.tensor.startswith("d") else p for p in found]
    return tuple(found)


def drift(mine: Tensor, verified: Tensor) -> float:
    """Relative Frobenius distance of two runs of one kernel."""
    return float((mine.float() - verified.float()).norm() / verified.float().norm().clamp_min(1e-30))


def watch(call: Callable[[], None], device: torch.device) -> Seen:
    """Run a call once under the profiler: device kernels on a GPU, operators on a CPU."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    total: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == wanted:
            total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us()
    launches = tuple(sorted(total.items(), key=lambda item: -item[1]))
    return Seen(launches, sum(us for name, us in launches if on_gpu and re.search(ADAPTER, name)))


def disproof(name: str, seen: Seen, which: str, *, shares: bool, in_both: bool = False) -> str:
    """Why the launches seen are not those of the kernel `name` in a pass; empty when they are.

    With `shares` they must take their share of the time, of that of both passes where `in_both`.
    """
    if not seen.launches:
        return "the profiler saw nothing run"
    claim = CLAIMS.get(name, Claim(re.escape(name), re.escape(name)))
    pattern = getattr(claim, which)
    mine = sum(us for launch, us in seen.launches if re.search(pattern, launch))
    ran = ", ".join(launch[:60] for launch, _ in seen.launches[:3])
    if not any(re.search(pattern, launch) for launch, _ in seen.launches):
        return f"not the kernel it claims: nothing that ran matches {pattern!r}; ran {ran}"
    total = sum(us for _, us in seen.launches) - seen.adapter_us
    wanted = claim.share * (IN_BOTH if in_both and which == "forward" else 1)
    if shares and mine < wanted * total:
        return f"{pattern!r} took {mine / total:.0%} of its time, wanted {wanted:.0%}; ran {ran}"
    return ""


def claimed(name: str, launches: tuple[tuple[str, float], ...], which: str) -> float:
    """The share of the profiled time that the launches took which the kernel `name` claims in this pass."""
    pattern = getattr(CLAIMS.get(name, Claim(re.escape(name), re.escape(name))), which)
    total = sum(us for _, us in launches)
    return sum(us for launch, us in launches if re.search(pattern, launch)) / total if total else 0.0


def poison(tensors: dict[str, Tensor | None], names: tuple[str, ...]) -> None:
    """Fill outputs with NaN, so that an element nobody writes shows."""
    for name in names:
        tensors[name].fill_(float("nan"))


@contextmanager
def _true_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _tensor(name: str, mine: Tensor, exact: Tensor, problem: Problem) -> Parity:
    mine = mine.float()
    error, size = (mine - exact), exact.norm(dim=(0, 2)).clamp_min(1e-30)
    by_head = error.norm(dim=(0, 2)) / size
    row_error, row_size = error.norm(dim=-1), exact.norm(dim=-1)
    bad = ~(row_error <= ROW * row_size + ROW_OF_LARGEST * row_size.max())
    worst, head = float(by_head.max()), int(by_head.argmax())
    ok = bool((by_head <= FROBENIUS[problem.dtype]).all()) and not bool(bad.any())
    largest = float(error.abs().max() / exact.abs().max().clamp_min(1e-30))
    cosine = float((mine * exact).sum() / (mine.norm() * exact.norm()).clamp_min(1e-30))
    where = "" if ok else f"row {int(bad.nonzero()[0, 0])}" if bad.any() else f"head {head}"
    return Parity(name, cosine, worst, largest, int(bad.sum()), ok, where)


def _lse(mine: Tensor, exact: Tensor) -> Parity:
    seen = exact != -torch.inf
    error = torch.where(seen, (mine - exact).abs(), 0.0)
    bad = torch.where(seen, ~(error <= LSE + 1e-5 * exact.abs()), mine != -torch.inf)
    return Parity("lse", 1.0, 0.0, float(error.max()), int(bad.sum()), not bool(bad.any()))


def _both(loose: Parity, strict: Parity) -> Parity:
    return replace(loose, ok=loose.ok and strict.ok, where=loose.where or strict.where)
