"""Hopper (sm_90a) in CuTe DSL: the fused backward, built where nvidia-cutlass-dsl is or loaded from objects."""

from __future__ import annotations

from typing import Any

from ...mask import k_range
from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, dsink_rows_buffer
from ..spec import Built, Config, Kernel, Limit, Tensors
from .geometry import Geometry, choose, launches, query_tiles

ROUNDS = 2
"""Tiles a block takes of the heads in flight together: in causal order the second completes what the first began."""
FEW_KEYS = 1536
"""Keys a query sees, below which dQ gets a kernel of its own."""


def _geometry(problem: Problem) -> Geometry | None:
    fused = choose(problem.head_dim_qk, problem.head_dim_v, problem.dtype)
    apart = choose(problem.head_dim_qk, problem.head_dim_v, problem.dtype, dq=False)
    return fused if fused and not problem.deterministic and not _better_apart(problem) else apart


def _missing(problem: Problem) -> str:
    """Why a kernel of the plan cannot be had; empty when all can."""
    from .build import available

    geometry = _geometry(problem)
    return next((why for kind, g in launches(geometry) if (why := available(g, kind))), "") if geometry else ""


def _better_apart(problem: Problem) -> bool:
    """Whether a query sees so few keys that two kernels of seven GEMMs beat one of five with an fp32 dQ.

    Zeroing and rounding dQ then weigh most. Milliseconds fused : apart on an H200, 2026-11-30, torch 2.11.0+cu130,
    median of 9 single calls: S2 1.162 : 1.125, S6 0.741 : 0.712. For the other shapes the bench's record has both, as
    a shape and its deterministic twin.
    """
    sq, sk = problem.total_q // problem.batch, problem.total_k // problem.batch
    lo, hi = k_range((sq // 2, sq // 2 + 1), sq, sk, problem.band)  # the middle query of a segment of mean lengths
    return hi - lo < FEW_KEYS


LIMITS = (
    Limit("dtype is {p.dtype}, wanted bf16 or fp16", lambda p, t: p.dtype != "fp32", fix="use bf16 or fp16"),
    Limit(
        "head dims {p.head_dim_qk}/{p.head_dim_v} need more registers or shared memory than a block has",
        lambda p, t: _geometry(p) is not None,
    ),
    Limit("softcap is {p.softcap}, built without", lambda p, t: p.softcap == 0.0, fix="use softcap 0"),
    Limit(
        "the kernel is neither compiled ahead of time nor compilable here",
        lambda p, t: not _missing(p),
        fix="pip install 'undertow[hopper]', or set UNDERTOW_HOPPER_OBJECTS to a folder made by `undertow build`",
    ),
)


def config(problem: Problem, target: Target, which: str) -> Config:
    """The geometry of the head dims, persistent blocks, and how many heads are in flight together.

    As few heads as keep all blocks busy: what they share, and dQ where it is summed in memory, stays in the L2 cache.
    """
    geometry = _geometry(problem)
    together, together_q = (
        max(1, round(ROUNDS * target.num_cus * geometry.tile_kv / max(1, rows)))
        for rows in (problem.max_seqlen_k, problem.max_seqlen_q)
    )
    switches = (
        ("geometry", geometry), ("together", together), ("together_q", together_q), ("blocks", target.num_cus)
    )  # fmt: skip
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
        Buffer("counters", "c", (4,), "i32", **prepared),
    ]
    if geometry.dq:
        shape = (heads, tiles, geometry.tile_q * geometry.d_qk)
        users = {"written_by": "prepare, main", "read_by": "finish"}
        buffers.append(Buffer("dq_acc", "hte", shape, "fp32", zeroed=False, **users))
    if problem.has_sink:
        buffers.append(dsink_rows_buffer(problem, written_by="prepare", read_by="sum"))
    return WorkspacePlan(tuple(buffers))


def _backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    from .host import backward

    backward(problem, config, tensors, scratch)


def _built(problem: Problem, config: Config, seen: list[tuple[str, Any]]) -> Built:
    from .echo import built

    return built(problem, config, seen)


def _executed_dims(problem: Problem) -> tuple[int, int]:
    geometry = _geometry(problem)
    return (geometry.d_qk, geometry.d_v) if geometry else (problem.head_dim_qk, problem.head_dim_v)


def _gemms(geometry: Geometry | None) -> tuple[int, int]:
    """Products over qk and over v dims: S again in every kernel, dP in all but that of dV alone."""
    if geometry is None or geometry.dq:
        return 3, 2
    return (4, 3) if geometry.dv else (5, 3)


KERNEL = Kernel(
    name="hopper",
    about="CuTe DSL for sm_90a: one fused kernel, dQ summed by the copy engine, or dQ in a second one (deterministic)",
    archs=frozenset({"sm_90"}),
    limits=LIMITS,
    config=config,
    plan_workspace=plan_workspace,
    backward=_backward,
    executed_dims=_executed_dims,
    built=_built,
    gemms=lambda p, t: _gemms(_geometry(p)),
)

__all__ = ["KERNEL", "config", "plan_workspace"]
