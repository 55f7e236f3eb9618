"""Hopper (sm_90a) in CuTe DSL: the fused backward, built where nvidia-cutlass-dsl is or loaded from objects."""

from __future__ import annotations

from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, dsink_rows_buffer
from ..spec import Config, Kernel, Limit, Tensors
from .build import available
from .geometry import Geometry, choose, query_tiles

L2_BYTES = 24 << 20
"""What the dQ tiles of the heads in flight may take, so that they are added up in the L2 cache (about half of it)."""



def _geometry(problem: Problem) -> Geometry | None:
    return choose(problem.head_dim_qk, problem.head_dim_v, problem.dtype, dq=not problem.deterministic)


LIMITS = (
    Limit("dtype is {p.dtype}, wanted bf16 or fp16", lambda p, t: p.dtype != "fp32", fix="use bf16 or fp16"),
    Limit(
        "head dims {p.head_dim_qk}/{p.head_dim_v} need more registers or shared memory than a block has",
        lambda p, t: _geometry(p) is not None,
    ),
    Limit("softcap is {p.softcap}, built without", lambda p, t: p.softcap == 0.0, fix="use softcap 0"),
    Limit(
        "the kernel is neither compiled ahead of time nor compilable here",
        lambda p, t: not available(_geometry(p)),
        fix="pip install 'undertow[hopper]', or set UNDERTOW_HOPPER_OBJECTS to a folder made by `undertow build`",
    ),
)


def config(problem: Problem, target: Target, which: str) -> Config:
    """The geometry of the head dims, persistent blocks, and how many heads are in flight together."""
    geometry = _geometry(problem)
    live = max(1, problem.max_seqlen_q * geometry.d_qk * 4 * problem.group)
    together = max(1, L2_BYTES // live) if problem.group == 1 else problem.nheads_kv * problem.batch
    switches = (("geometry", geometry), ("together", together), ("blocks", target.num_cus))
    return Config(geometry.tile_q, geometry.tile_kv, 12, geometry.q_stages, switches)


def plan_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """LSE and D by query tile, the scheduling tables and counters; dQ in fp32 in the accumulators' order, or none.

    dq_acc is zeroed by the kernel that writes the statistics, a tile at a time. The deterministic plan has none.
    """
    geometry: Geometry = config.switch("geometry")
    tiles, heads = query_tiles(problem, geometry), problem.nheads_q
    prepared = {"zeroed": False, "written_by": "prepare", "read_by": "main" if geometry.dq else "main, dq"}
    buffers = [
        Buffer("stats", "htps", (heads, tiles, 2, geometry.tile_q), "fp32", **prepared),
        Buffer("tables", "xfb", (1 if geometry.dq else 2, 9, problem.batch + 1), "i32", **prepared),
        Buffer("counters", "c", (2,), "i32", **prepared),
    ]
    if geometry.dq:
        shape = (heads, tiles, geometry.tile_q * geometry.d_qk)
        buffers.append(Buffer("dq_acc", "hte", shape, "fp32", False, "prepare, main", "finish"))
    if problem.has_sink:
        buffers.append(dsink_rows_buffer(problem, written_by="prepare", read_by="sum"))
    return WorkspacePlan(tuple(buffers))


def _backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    from .host import backward

    backward(problem, config, tensors, scratch)


def _executed_dims(problem: Problem) -> tuple[int, int]:
    geometry = _geometry(problem)
    return (geometry.d_qk, geometry.d_v) if geometry else (problem.head_dim_qk, problem.head_dim_v)


KERNEL = Kernel(
    name="hopper",
    about="CuTe DSL for sm_90a: one fused kernel, dQ added up by the copy engine; deterministic: dQ by a second kernel",
    archs=frozenset({"sm_90"}),
    limits=LIMITS,
    config=config,
    plan_workspace=plan_workspace,
    backward=_backward,
    executed_dims=_executed_dims,
    gemms=lambda p, t: (4, 3) if p.deterministic else (3, 2),
)

__all__ = ["KERNEL", "config", "plan_workspace"]
