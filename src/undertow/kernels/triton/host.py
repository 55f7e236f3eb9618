"""Host side of the Triton kernels: the launches of a pass, as data, and the one loop that runs them.

`offline.py` compiles the same launches without a GPU, so what is inspected is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton

from ...cost import split_dim
from ...env import settings
from ...layout import AXES, View, lse_axes, view
from ...problem import Problem
from ..spec import Config, Tensors
from .backward_device import dkdv_kernel, dq_kernel
from .chunks_device import Blocks, Seqs, Window
from .forward_device import forward_kernel
from .preprocess_device import delta_kernel, round_dq_kernel

if settings().triton_interpret:
    from . import interpreter

    interpreter.install()

DELTA_ROWS = 64


class Launch(NamedTuple):
    """One kernel launch: `kernel[(programs,)](*args, **meta)`."""

    stage: str
    kernel: Any
    programs: int
    args: tuple[Any, ...]
    meta: dict[str, Any]


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """Fill out and lse."""
    _run(forward_launches(problem, config, tensors), tensors["q"])


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv (and dsink)."""
    _run(backward_launches(problem, config, tensors, scratch), tensors["q"])
    if problem.has_sink:
        torch.sum(scratch["dsink_rows"].flatten(1), -1, out=tensors["dsink"])


def forward_launches(problem: Problem, config: Config, tensors: Tensors) -> Iterator[Launch]:
    """The forward kernel."""
    stage = config.switch("forward")
    programs, blocks = _stage_grid(problem, stage, "q")
    args = (*_views(problem, tensors, "q k v"), tensors["sink"], *_views(problem, tensors, "out lse"))
    yield Launch("forward", forward_kernel, programs, (*args, *_math(problem, tensors), blocks), _meta(problem, stage))


def backward_launches(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> Iterator[Launch]:
    """D, then the fused kernel and a rounding of dq_acc, or dk/dv and dq as two kernels."""
    yield _delta(problem, tensors, scratch)
    inputs = (*_views(problem, tensors, "q k v dout lse"), view(scratch["delta"], lse_axes(problem)))
    dq_acc = view(scratch["dq_acc"], "hsd" if problem.is_packed else "hbsd") if "dq_acc" in scratch else None
    stage = config.switch("dkdv")
    programs, blocks = _stage_grid(problem, stage, "k")
    args = (*inputs, dq_acc, *_views(problem, tensors, "dk dv"), *_math(problem, tensors), blocks)
    yield Launch("dkdv", dkdv_kernel, programs, args, _meta(problem, stage))
    if dq_acc is not None:
        yield _round_dq(problem, tensors, dq_acc)
        return
    stage = config.switch("dq")
    programs, blocks = _stage_grid(problem, stage, "q")
    args = (*inputs, *_views(problem, tensors, "dq"), *_math(problem, tensors), blocks)
    yield Launch("dq", dq_kernel, programs, args, _meta(problem, stage))


def _delta(problem: Problem, tensors: Tensors, scratch: Tensors) -> Launch:
    rows = scratch.get("dsink_rows")
    programs, blocks = _grid(problem.max_seqlen_q, DELTA_ROWS, problem.nheads_q, problem.batch)
    lo, hi = split_dim(problem.head_dim_v)
    args = (
        *_views(problem, tensors, "out dout lse dlse delta"), tensors["sink"],
        view(scratch["delta"], lse_axes(problem)),
        None if rows is None else view(rows, "hs" if problem.is_packed else "hbs"), *_mask(problem, tensors), blocks,
    )  # fmt: skip
    meta = {"BLOCK_M": DELTA_ROWS, "HEAD_DIM_V": problem.head_dim_v, "V_LO": lo, "V_HI": hi}
    meta["TOP_LEFT"] = _top_left(problem)
    return Launch("delta", delta_kernel, programs, args, meta)


def _round_dq(problem: Problem, tensors: Tensors, dq_acc: View) -> Launch:
    rows, batch = (problem.total_q, 1) if problem.is_packed else (problem.max_seqlen_q, problem.batch)
    programs, blocks = _grid(rows, DELTA_ROWS, problem.nheads_q, batch)
    lo, hi = split_dim(problem.head_dim_qk)
    meta = {"BLOCK_M": DELTA_ROWS, "HEAD_DIM_QK": problem.head_dim_qk, "QK_LO": lo, "QK_HI": hi}
    args = (dq_acc, *_views(problem, tensors, "dq"), rows, problem.scale, blocks)
    return Launch("round_dq", round_dq_kernel, programs, args, meta)


def _views(problem: Problem, tensors: Tensors, names: str) -> list[View | None]:
    side = dict.fromkeys(("lse", "dlse", "delta"), lse_axes(problem))
    axes = {name: side.get(name, AXES[problem.layout]) for name in names.split()}
    return [None if tensors[name] is None else view(tensors[name], axes[name]) for name in axes]


def _mask(problem: Problem, tensors: Tensors) -> tuple[Seqs, Seqs, Window]:
    if problem.is_packed:
        seqs = [
            Seqs(tensors[f"cu_seqlens_{side}"], tensors[f"seqused_{side}"], None, total)
            for side, total in (("q", problem.total_q), ("k", problem.total_k))
        ]
    else:
        seqs = [Seqs(None, None, length, None) for length in (problem.max_seqlen_q, problem.max_seqlen_k)]
    return *seqs, Window(problem.band.left, problem.band.right)


def _math(problem: Problem, tensors: Tensors) -> tuple[Any, ...]:
    return *_mask(problem, tensors), problem.scale, problem.softcap or None


def _grid(rows: int, block: int, nheads: int, batch: int, columns: int = 0) -> tuple[int, Blocks]:
    """Programs of a one-dimensional grid (y and z end at 65535), at least one a segment so that gaps are zeroed.

    `columns` heads run together (see Blocks); 0 is all of them.
    """
    return max(1, triton.cdiv(rows, block)) * nheads * batch, Blocks(nheads, batch, columns or max(1, nheads * batch))


def _stage_grid(problem: Problem, stage: Config, owner: str) -> tuple[int, Blocks]:
    """The grid of a kernel whose programs own query tiles ("q") or key tiles ("k")."""
    if owner == "q":
        rows, block, nheads = problem.max_seqlen_q, stage.block_m, problem.nheads_q
    else:
        rows, block, nheads = problem.max_seqlen_k, stage.block_n, problem.nheads_kv
    return _grid(rows, block, nheads, problem.batch, stage.switch("columns", 0))


def _top_left(problem: Problem) -> bool:
    return problem.band.align == "top_left"


def _meta(problem: Problem, stage: Config) -> dict[str, Any]:
    qk, v = split_dim(problem.head_dim_qk), split_dim(problem.head_dim_v)
    return {
        "GROUP": problem.group, "BLOCK_M": stage.block_m, "BLOCK_N": stage.block_n,
        "HEAD_DIM_QK": problem.head_dim_qk, "QK_LO": qk[0], "QK_HI": qk[1],
        "HEAD_DIM_V": problem.head_dim_v, "V_LO": v[0], "V_HI": v[1],
        "TOP_LEFT": _top_left(problem), "PRECISION": "ieee",
        "num_warps": stage.num_warps, "num_stages": stage.num_stages,
    }  # fmt: skip


def _run(launches: Iterator[Launch], tensor: torch.Tensor) -> None:
    """Triton launches on the current device and stream: make the device the tensors'."""
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        for launch in launches:
            if launch.programs:
                launch.kernel[(launch.programs,)](*launch.args, **launch.meta)
