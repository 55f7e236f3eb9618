"""Host side of the Triton kernels: the launches of a pass, as data, and the one loop that runs them.

`offline.py` compiles the same launches without a GPU, so what is inspected is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import _allocation

from ...cost import split_dim
from ...env import settings
from ...layout import AXES, View, lse_axes, view
from ...problem import Problem
from .. import alloc, watch
from ..spec import Config, Tensors
from .backward_device import APART, FLAT, ONE_SWEEP, dkdv_kernel, dq_kernel
from .chunks_device import Blocks, Seqs, Window
from .configs import entries, programs
from .forward_device import forward_kernel
from .preprocess_device import delta_kernel, list_tiles_kernel, round_dq_kernel

if settings().triton_interpret:
    from . import interpreter

    interpreter.install()

ROWS = Config(block_m=64)
LIST_CHUNK = 128


class Launch(NamedTuple):
    """One kernel launch: `kernel[(programs,)](*args, **meta)`."""

    stage: str
    kernel: Any
    programs: int
    args: tuple[Any, ...]
    meta: dict[str, Any]


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """Fill out and lse."""
    _run(forward_launches(problem, config, tensors), tensors["q"], None)


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv (and dsink)."""
    _run(backward_launches(problem, config, tensors, scratch), tensors["q"], scratch.get("descriptors"))
    if problem.has_sink:
        torch.sum(scratch["dsink_rows"].flatten(1), -1, out=tensors["dsink"])


def forward_launches(problem: Problem, config: Config, tensors: Tensors) -> Iterator[Launch]:
    """The forward kernel."""
    stage = config.switch("forward")
    tiles = None
    if length := entries(problem, stage, "q"):
        tiles = alloc.output((2, length), torch.int32, tensors["q"].device)
        yield _list_tiles(problem, tensors, (stage, "q", tiles))
    count, blocks = _grid(problem, stage, "q", tiles)
    args = (*_views(problem, tensors, "q k v"), tensors["sink"], *_views(problem, tensors, "out lse"))
    args = (*args, *_math(problem, tensors), blocks)
    yield Launch("forward", forward_kernel, count, args, _meta(problem, stage, tensors))


def backward_launches(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> Iterator[Launch]:
    """D, the fused kernel and a rounding of dq_acc; or dq, which makes D on its way, and dk/dv."""
    dkdv, dq = config.switch("dkdv"), config.switch("dq")
    lists = [(dkdv, "k", scratch.get("tiles_k")), (dq, "q", scratch.get("tiles_q"))]
    lists = [(stage, owner, tiles) for stage, owner, tiles in lists if tiles is not None]
    dq_acc, rows = None, None
    if "dq_acc" in scratch:
        yield _delta(problem, tensors, scratch)
        dq_acc = view(scratch["dq_acc"], "hsd" if problem.is_packed else "hbsd")
    if lists:
        yield _list_tiles(problem, tensors, *lists)
    if dq_acc is None:
        rows = tuple(view(plane, lse_axes(problem)) for plane in scratch["row_values"].unbind(0))
        count, blocks = _grid(problem, dq, "q", scratch.get("tiles_q"))
        out, dout, lse, *deltas = _delta_args(problem, tensors, scratch)
        args = (*_views(problem, tensors, "q k v"), out, dout, lse, tuple(deltas), rows)
        args = (*args, *_views(problem, tensors, "dq"), *_math(problem, tensors), blocks)
        yield Launch("dq", dq_kernel, count, args, _meta(problem, dq, tensors) | {"LOOPS": loops(dq)})
    count, blocks = _grid(problem, dkdv, "k", scratch.get("tiles_k"))
    args = (*_views(problem, tensors, "q k v dout lse"), view(scratch["delta"], lse_axes(problem)), rows, dq_acc)
    args = (*args, *_views(problem, tensors, "dk dv"), *_math(problem, tensors), blocks)
    yield Launch("dkdv", dkdv_kernel, count, args, _meta(problem, dkdv, tensors) | {"LOOPS": loops(dkdv)})
    if dq_acc is not None:
        yield _round_dq(problem, tensors, dq_acc)


def _delta_args(problem: Problem, tensors: Tensors, scratch: Tensors) -> tuple[Any, ...]:
    rows = scratch.get("dsink_rows")
    return (
        *_views(problem, tensors, "out dout lse dlse delta"), tensors["sink"],
        view(scratch["delta"], lse_axes(problem)),
        None if rows is None else view(rows, "hs" if problem.is_packed else "hbs"),
    )  # fmt: skip


def _delta(problem: Problem, tensors: Tensors, scratch: Tensors) -> Launch:
    tiles = max(1, -(-problem.max_seqlen_q // ROWS.block_m))
    count, blocks = tiles * problem.nheads_q * problem.batch, _all_columns(problem.nheads_q, problem.batch)
    lo, hi = split_dim(problem.head_dim_v)
    args = (*_delta_args(problem, tensors, scratch), *_mask(problem, tensors), blocks)
    meta = {"BLOCK_M": ROWS.block_m, "HEAD_DIM_V": problem.head_dim_v, "V_LO": lo, "V_HI": hi}
    meta["TOP_LEFT"] = _top_left(problem)
    return Launch("delta", delta_kernel, count, args, meta)


def _round_dq(problem: Problem, tensors: Tensors, dq_acc: View) -> Launch:
    rows, batch = (problem.total_q, 1) if problem.is_packed else (problem.max_seqlen_q, problem.batch)
    count = max(1, -(-rows // ROWS.block_m)) * problem.nheads_q * batch
    blocks = _all_columns(problem.nheads_q, batch)
    lo, hi = split_dim(problem.head_dim_qk)
    meta = {"BLOCK_M": ROWS.block_m, "HEAD_DIM_QK": problem.head_dim_qk, "QK_LO": lo, "QK_HI": hi}
    args = (dq_acc, *_views(problem, tensors, "dq"), rows, problem.scale, blocks)
    return Launch("round_dq", round_dq_kernel, count, args, meta)


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


def _list_tiles(problem: Problem, tensors: Tensors, *lists: tuple[Config, str, torch.Tensor]) -> Launch:
    """One launch that lists the tiles of one or two owners, each (stage, "q" or "k", tiles)."""
    seqs = _mask(problem, tensors)
    args = [(seqs[owner == "k"], tiles, tiles.shape[1]) for _, owner, tiles in lists]
    rows = [stage.block_m if owner == "q" else stage.block_n for stage, owner, _ in lists]
    meta = {"CHUNK": LIST_CHUNK, "ROWS": rows[0], "OTHER_ROWS": rows[-1]}
    other = args[1] if len(args) > 1 else (args[0][0], None, 0)
    return Launch("list_tiles", list_tiles_kernel, problem.batch, (*args[0], *other, problem.batch), meta)


def _grid(problem: Problem, stage: Config, owner: str, tiles: torch.Tensor | None) -> tuple[int, Blocks]:
    """A one-dimensional grid (y and z end at 65535); `columns` heads run together (see Blocks), 0 is all of them."""
    heads = problem.nheads_q if owner == "q" else problem.nheads_kv
    columns = stage.switch("columns", 0) or max(1, heads * problem.batch)
    return programs(problem, stage, owner), Blocks(heads, problem.batch, columns, tiles)


def _all_columns(nheads: int, batch: int) -> Blocks:
    return Blocks(nheads, batch, max(1, nheads * batch), None)


def loops(stage: Config) -> int:
    """The switches of a backward kernel's loops, as its bits."""
    bits = {"flat": FLAT, "one_sweep": ONE_SWEEP, "apart": APART}
    return sum(bit.value for name, bit in bits.items() if stage.switch(name))


def _top_left(problem: Problem) -> bool:
    return problem.band.align == "top_left"


def _meta(problem: Problem, stage: Config, tensors: Tensors) -> dict[str, Any]:
    qk, v = split_dim(problem.head_dim_qk), split_dim(problem.head_dim_v)
    return {
        "GROUP": problem.group, "BLOCK_M": stage.block_m, "BLOCK_N": stage.block_n,
        "HEAD_DIM_QK": problem.head_dim_qk, "QK_LO": qk[0], "QK_HI": qk[1],
        "HEAD_DIM_V": problem.head_dim_v, "V_LO": v[0], "V_HI": v[1],
        "TOP_LEFT": _top_left(problem),
        "TMA": bool(stage.switch("tma")) and _tma_can_read(tensors),
        "num_warps": stage.num_warps, "num_stages": stage.num_stages,
    } | ({"maxnreg": most} if (most := stage.switch("maxnreg")) else {})  # fmt: skip


def _tma_can_read(tensors: Tensors) -> bool:
    """TMA wants bases and strides in multiples of 16 bytes, none 0; tensors that are not so are read by pointers."""
    inputs = [tensors[n] for n in ("q", "k", "v", "dout") if tensors.get(n) is not None]
    return all(
        (x.data_ptr() % 16 == 0) and all(s and s * x.element_size() % 16 == 0 for s in x.stride()[:-1]) for x in inputs
    )


def _run(launches: Iterator[Launch], tensor: torch.Tensor, descriptors: torch.Tensor | None) -> None:
    """Triton launches on the current device and stream: make the device the tensors'.

    A kernel that builds TMA descriptors asks for memory at launch: it gets the plan's buffer, or new memory.
    """

    def memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        if descriptors is None:
            return alloc.output((size,), torch.uint8, tensor.device)
        if size > descriptors.numel() * descriptors.element_size():
            raise RuntimeError(f"descriptors need {size} bytes, the plan gave {descriptors.numel() * 4}")
        return descriptors

    before = _allocation._allocator.get()
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        triton.set_allocator(memory)
        try:
            for launch in launches:
                if launch.programs:
                    compiled = launch.kernel[(launch.programs,)](*launch.args, **launch.meta)
                    watch.launched(launch.stage, compiled)
        finally:
            triton.set_allocator(before)
