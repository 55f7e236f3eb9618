"""Host side of the Triton kernels: views, grids, launches on the tensors' device and the current stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

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


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """Fill out and lse."""
    stage = config.switch("forward")
    main = _views(problem, tensors, ("q", "k", "v"))
    outs = _views(problem, tensors, ("out", "lse"))
    with _on(tensors["q"]):
        grid, blocks = _grid(problem.max_seqlen_q, stage.block_m, problem.nheads_q, problem.batch)
        forward_kernel[grid](*main, tensors["sink"], *outs, *_mask_args(problem, tensors), problem.scale,
                             problem.softcap or None, blocks, **_meta(problem, stage))  # fmt: skip


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv (and dsink): D, then the fused kernel and a rounding of dq_acc, or dk/dv and dq as two kernels."""
    mask = _mask_args(problem, tensors)
    inputs = _views(problem, tensors, ("q", "k", "v", "dout", "lse"))
    delta = view(scratch["delta"], lse_axes(problem))
    dq_acc = view(scratch["dq_acc"], "hsd" if problem.is_packed else "hbsd") if "dq_acc" in scratch else None
    math = (problem.scale, problem.softcap or None)
    with _on(tensors["q"]):
        _delta(problem, tensors, scratch, mask)
        stage = config.switch("dkdv")
        grid, blocks = _grid(problem.max_seqlen_k, stage.block_n, problem.nheads_kv, problem.batch)
        dkdv_kernel[grid](*inputs, delta, dq_acc, *_views(problem, tensors, ("dk", "dv")), *mask, *math, blocks,
                          **_meta(problem, stage))  # fmt: skip
        if dq_acc is not None:
            _round_dq(problem, tensors, dq_acc)
        else:
            stage = config.switch("dq")
            grid, blocks = _grid(problem.max_seqlen_q, stage.block_m, problem.nheads_q, problem.batch)
            dq_kernel[grid](*inputs, delta, *_views(problem, tensors, ("dq",)), *mask, *math, blocks,
                            **_meta(problem, stage))  # fmt: skip
        if problem.has_sink:
            tensors["dsink"].copy_(scratch["dsink_rows"].flatten(1).sum(-1))


def _delta(problem: Problem, tensors: Tensors, scratch: Tensors, mask: tuple[Any, ...]) -> None:
    rows = scratch.get("dsink_rows")
    grid, blocks = _grid(problem.max_seqlen_q, DELTA_ROWS, problem.nheads_q, problem.batch)
    lo, hi = split_dim(problem.head_dim_v)
    delta_kernel[grid](
        *_views(problem, tensors, ("out", "dout", "lse", "dlse", "delta")), tensors["sink"],
        view(scratch["delta"], lse_axes(problem)),
        None if rows is None else view(rows, "hs" if problem.is_packed else "hbs"), *mask, blocks,
        BLOCK_M=DELTA_ROWS, HEAD_DIM_V=problem.head_dim_v, V_LO=lo, V_HI=hi,
        TOP_LEFT=problem.band.align == "top_left",
    )  # fmt: skip


def _round_dq(problem: Problem, tensors: Tensors, dq_acc: View) -> None:
    rows, batch = (problem.total_q, 1) if problem.is_packed else (problem.max_seqlen_q, problem.batch)
    grid, blocks = _grid(rows, DELTA_ROWS, problem.nheads_q, batch)
    lo, hi = split_dim(problem.head_dim_qk)
    round_dq_kernel[grid](dq_acc, *_views(problem, tensors, ("dq",)), rows, problem.scale, blocks, BLOCK_M=DELTA_ROWS,
                          HEAD_DIM_QK=problem.head_dim_qk, QK_LO=lo, QK_HI=hi)  # fmt: skip


def _views(problem: Problem, tensors: Tensors, names: tuple[str, ...]) -> list[View | None]:
    side = lse_axes(problem)
    axes = dict.fromkeys(("lse", "dlse", "delta"), side)
    return [None if tensors[n] is None else view(tensors[n], axes.get(n, AXES[problem.layout])) for n in names]


def _mask_args(problem: Problem, tensors: Tensors) -> tuple[Seqs, Seqs, Window]:
    if problem.is_packed:
        seqs = [
            Seqs(tensors[f"cu_seqlens_{side}"], tensors[f"seqused_{side}"], None, total)
            for side, total in (("q", problem.total_q), ("k", problem.total_k))
        ]
    else:
        seqs = [Seqs(None, None, length, None) for length in (problem.max_seqlen_q, problem.max_seqlen_k)]
    return *seqs, Window(problem.band.left, problem.band.right)


def _grid(rows: int, block: int, nheads: int, batch: int) -> tuple[tuple[int], Blocks]:
    """A one-dimensional grid (y and z end at 65535), at least one tile a segment so that gaps are zeroed."""
    return (max(1, triton.cdiv(rows, block)) * nheads * batch,), Blocks(nheads, batch)


def _meta(problem: Problem, stage: Config) -> dict[str, Any]:
    qk, v = split_dim(problem.head_dim_qk), split_dim(problem.head_dim_v)
    return {
        "GROUP": problem.group, "BLOCK_M": stage.block_m, "BLOCK_N": stage.block_n,
        "HEAD_DIM_QK": problem.head_dim_qk, "QK_LO": qk[0], "QK_HI": qk[1],
        "HEAD_DIM_V": problem.head_dim_v, "V_LO": v[0], "V_HI": v[1],
        "TOP_LEFT": problem.band.align == "top_left", "PRECISION": "ieee" if problem.dtype == "fp32" else "tf32",
        "num_warps": stage.num_warps, "num_stages": stage.num_stages,
    }  # fmt: skip


def _on(tensor: torch.Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
