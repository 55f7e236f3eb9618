"""Layout names, the axes they stand for, and the one way a kernel is told about a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

from .problem import Problem

AXES = {"bshd": "bshd", "sbhd": "sbhd", "bhsd": "bhsd", "thd": "shd"}


class View(NamedTuple):
    """A tensor as a kernel sees it: base pointer and the element strides of batch, token and head; last stride 1."""

    ptr: Any
    stride_b: int
    stride_s: int
    stride_h: int


def view(tensor: Any, axes: str) -> View:
    """The View of a tensor whose dimensions are named by `axes`, e.g. "bshd"; an absent axis has stride 0."""
    stride = dict(zip(axes, tensor.stride(), strict=True))
    return View(tensor, stride.get("b", 0), stride["s"], stride["h"])


def lse_axes(problem: Problem) -> str:
    """The axes of LSE, delta and dLSE: dense (batch, nheads_q, seqlen_q), packed (nheads_q, total_q)."""
    return "hs" if problem.is_packed else "bhs"


def shape_of(problem: Problem, axes: str, side: str, head_dim: int | None = None) -> tuple[int, ...]:
    """The shape of a tensor with these axes: side "q" has nheads_q and query rows, "k" has nheads_kv and key rows."""
    rows, longest, heads = (
        (problem.total_q, problem.max_seqlen_q, problem.nheads_q)
        if side == "q"
        else (problem.total_k, problem.max_seqlen_k, problem.nheads_kv)
    )
    sizes = {"b": problem.batch, "s": rows if "b" not in axes else longest, "h": heads, "d": head_dim}
    return tuple(sizes[axis] for axis in axes)


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The expected shape of every input and output tensor of a call, by argument name."""
    axes, qk, v = AXES[problem.layout], problem.head_dim_qk, problem.head_dim_v
    q, k = shape_of(problem, axes, "q", qk), shape_of(problem, axes, "k", qk)
    out, value = shape_of(problem, axes, "q", v), shape_of(problem, axes, "k", v)
    side = shape_of(problem, lse_axes(problem), "q")
    segments = (problem.batch,)
    return {
        "q": q, "k": k, "v": value, "out": out, "dout": out, "dq": q, "dk": k, "dv": value,
        "lse": side, "dlse": side, "delta": side, "sink": (problem.nheads_q,), "dsink": (problem.nheads_q,),
        "cu_seqlens_q": (problem.batch + 1,), "cu_seqlens_k": (problem.batch + 1,),
        "seqused_q": segments, "seqused_k": segments,
    }  # fmt: skip
