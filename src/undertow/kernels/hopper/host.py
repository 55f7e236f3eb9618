"""Host side of the Hopper kernels: statistics, the main kernel, the rounding of dQ, on the current stream."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from ...layout import AXES, View, lse_axes, view
from ...problem import Problem
from .. import watch
from ..spec import Config, Tensors
from . import build
from .geometry import Geometry, dq_tiles, key_tiles, launches, query_tiles
from .side_device import Segments, finish_kernel, prepare_kernel

UNBOUNDED = 1 << 28
LOG2E = 1.4426950408889634
CHUNK = 32


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv (and dsink)."""
    geometry, device = config.switch("geometry"), tensors["q"].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        segments = _segments(problem, tensors)
        _prepare(problem, geometry, tensors, scratch, segments)
        if problem.total_q and problem.total_k:
            _main(problem, config, tensors, scratch)
        else:
            for name in ("dq", "dk", "dv"):
                tensors[name].zero_()
        if geometry.dq:
            _finish(problem, geometry, tensors, scratch, segments)
    if problem.has_sink:
        torch.sum(scratch["dsink_rows"].flatten(1), -1, out=tensors["dsink"])


def _main(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """The kernels of the plan, each with a counter of its own."""
    geometry, sms = config.switch("geometry"), config.switch("blocks")
    inputs = [_tma(tensors[n], problem.layout) for n in ("q", "k", "v", "dout")]
    outputs = {n: _tma(tensors[n], problem.layout) for n in (("dk", "dv") if geometry.dq else ("dk", "dv", "dq"))}
    dq_acc = scratch["dq_acc"] if geometry.dq else scratch["stats"][:, :, 0]  # of which only the shape is read
    segments = 1 if problem.is_packed else problem.batch
    for i, (kind, built) in enumerate(launches(geometry)):
        of_keys = kind == "main"
        heads = problem.nheads_kv if of_keys else problem.nheads_q
        items = (key_tiles if of_keys else dq_tiles)(problem, built) * heads
        own = (dq_acc, outputs["dk"], outputs["dv"]) if of_keys else (outputs["dq"],)
        together = config.switch("together" if of_keys else "together_q")
        lists = scratch["tables"][0 if of_keys else 1], scratch["counters"][i : i + 1]
        build.entry(built, kind)(
            *inputs, scratch["stats"], *own, *lists, heads * segments, min(heads * segments, together),
            problem.scale * LOG2E, *_band(problem), min(items, sms),
        )  # fmt: skip
    for name, written in outputs.items():
        if written.data_ptr() != tensors[name].data_ptr():
            _bshd(tensors[name], problem.layout).copy_(written)


def _band(problem: Problem) -> tuple[int, int]:
    """Both sides as the kernels take them; 32 bits hold their sum, and one with a length."""
    sides = (UNBOUNDED if side is None else side for side in (problem.band.left, problem.band.right))
    return tuple(max(-UNBOUNDED, min(side, UNBOUNDED)) for side in sides)


def _segments(problem: Problem, tensors: Tensors) -> Segments:
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    lists = [tensors[n] if problem.is_packed else None for n in names]
    lengths = (problem.max_seqlen_q, problem.max_seqlen_k, problem.total_q, problem.total_k)
    return Segments(*lists, *lengths, problem.batch)


def _prepare(problem: Problem, geometry: Geometry, tensors: Tensors, scratch: Tensors, segments: Segments) -> None:
    tiles, blocks = query_tiles(problem, geometry), -(-(problem.batch + 1) // CHUNK)
    side = lse_axes(problem)
    rows = None if (r := scratch.get("dsink_rows")) is None else view(r, "hs" if problem.is_packed else "hbs")
    views, unit = _in_units(problem, tensors["out"], tensors["dout"])
    scalars = [None if tensors[n] is None else view(tensors[n], side) for n in ("lse", "dlse", "delta")]
    compiled = prepare_kernel[(blocks + tiles * problem.nheads_q,)](
        *views, *scalars, tensors["sink"], scratch["stats"], scratch.get("dq_acc"), rows, scratch["tables"],
        scratch["counters"], segments, *_band(problem), tiles, blocks, HEAD_DIM_V=problem.head_dim_v,
        BLOCK_V=1 << math.ceil(math.log2(problem.head_dim_v)), TILE_Q=geometry.tile_q, TILE_KV=geometry.tile_kv,
        TILE_ELEMENTS=geometry.tile_q * geometry.d_qk, TOP_LEFT=problem.band.align == "top_left", CHUNK=CHUNK,
        UNIT=unit,
    )  # fmt: skip
    watch.launched("prepare", compiled)


def _finish(problem: Problem, geometry: Geometry, tensors: Tensors, scratch: Tensors, segments: Segments) -> None:
    tiles = query_tiles(problem, geometry)
    columns = geometry.d_qk * geometry.tile_q // 128
    lanes = next(n for n in (8, 4, 2, 1) if columns % (8 * n) == 0)
    (dq,), unit = _in_units(problem, tensors["dq"])
    compiled = finish_kernel[(tiles * problem.nheads_q,)](
        scratch["dq_acc"], dq, segments, problem.scale, tiles,
        HEAD_DIM_QK=problem.head_dim_qk, D_QK=geometry.d_qk, TILE_Q=geometry.tile_q, LANES=lanes, UNIT=unit,
    )  # fmt: skip
    watch.launched("finish", compiled)


def _in_units(problem: Problem, *tensors: Tensor) -> tuple[list[View], int]:
    """Views with strides in units of up to 8 elements (16 bytes), and how many elements a unit is.

    Of a stride in elements Triton learns only whether it is a multiple of 16: rows of 72 would go 2 bytes at a time.
    A base off 16 bytes it sees itself. A dimension of size 1 may have any stride: nothing lies along it.
    """
    unit = math.gcd(8, *(s for x in tensors for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1))
    views = (view(x, AXES[problem.layout]) for x in tensors)
    return [View(ptr, *(stride // unit for stride in strides)) for ptr, *strides in views], unit


def _bshd(tensor: Tensor, layout: str) -> Tensor:
    """The same memory as (batch, seqlen, nheads, head_dim)."""
    return tensor.unsqueeze(0) if layout == "thd" else tensor.permute([layout.index(axis) for axis in "bshd"])


def _tma(tensor: Tensor, layout: str) -> Tensor:
    """As (b, s, h, d) for the copy engine: base and strides multiples of 16 bytes, none 0; copied where they are not.

    A dimension of size 1 may have any stride in torch; it gets an admissible one. `contiguous` would not do to copy: a
    tensor that begins off a multiple of 16 bytes may be contiguous.
    """
    x = _bshd(tensor, layout)
    unit = 16 // x.element_size()
    strides = [s if n > 1 else x.shape[-1] * unit for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    if x.data_ptr() % 16 or any(s % unit or s == 0 for s in strides):
        return x.clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, (*strides, 1))
