"""Portable Triton kernels: forward, D, one fused KV-outer backward, rounding; NVIDIA sm_80+ and AMD."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, delta_buffer, dq_acc_buffer, dsink_rows_buffer
from ..spec import Built, Config, Kernel, Limit, Tensors
from .configs import (
    LADDER,
    SMALLEST,
    STAGES,
    entries,
    executed_dims,
    feasible,
    fused,
    programs,
    shared_bytes,
    stage_config,
)

ARCHS = frozenset({"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "cpu"})

OWNS = (("dkdv", "k"), ("dq", "q"))
ROW_PAD = 128
"""Rows of the largest query tile of the backward; chunks_device has it too, as a test holds."""
DESCRIPTOR_BYTES = 512
"""TMA descriptors of one program: two tensors of at most two chunks, 128 bytes each."""


def _smallest_fits(problem: Problem, target: Target) -> bool:
    return all(feasible(problem, SMALLEST, target, stage) for stage in STAGES)


LIMITS = (
    Limit(
        "arch is cpu, where Triton only interprets, for tests",
        lambda p, t: t.arch != "cpu" or t.interpreter,
        fix="set TRITON_INTERPRET=1 before the process starts",
    ),
    Limit(
        "dtype fp32 at head dims {p.head_dim_qk}/{p.head_dim_v} needs more than {t.lds_bytes} bytes of shared memory",
        _smallest_fits,
        fix="use bf16 or fp16",
    ),
)


def config(problem: Problem, target: Target, which: str) -> Config:
    """The tiles of every stage and the plan, as switches of one Config."""
    stages = {stage: stage_config(problem, target, stage) for stage in STAGES}
    if stages["dq"].block_m % stages["dkdv"].block_m:  # dkdv reads row values by whole tiles that dq wrote
        stages["dkdv"] = SMALLEST
    return Config(switches=(*stages.items(), ("fused", fused(problem, target))))


def plan_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """delta; LSE and D by whole tiles, or in the fused plan the packed fp32 dq_acc; a sink also its rows.

    The two-kernel plan owns its dq rows, and keeps delta only to be verified.
    """
    one = config.switch("fused")
    buffers = [delta_buffer(problem, written_by="delta" if one else "dq", read_by="dkdv" if one else "verify")]
    if one:
        buffers.append(dq_acc_buffer(problem, zeroed=True, written_by="dkdv", read_by="round_dq"))
    else:
        buffers.append(_row_values(problem))
    for name, side in OWNS:
        count = entries(problem, config.switch(name), side)
        if count and (side == "k" or not one):
            users = {"written_by": "list_tiles", "read_by": name}
            buffers.append(Buffer(f"tiles_{side}", "ct", (2, count), "i32", zeroed=False, **users))
    if problem.has_sink:
        buffers.append(dsink_rows_buffer(problem, written_by="delta" if one else "dq", read_by="sum"))
    counts = [programs(problem, s, side) for name, side in OWNS if (s := config.switch(name)).switch("tma")]
    if counts:
        shape = (max(counts), DESCRIPTOR_BYTES // 4)
        users = {"written_by": "dkdv, dq", "read_by": "dkdv, dq"}
        buffers.append(Buffer("descriptors", "pd", shape, "i32", zeroed=False, **users))
    return WorkspacePlan(tuple(buffers))


def _row_values(problem: Problem) -> Buffer:
    """LSE in log2 units and D, two planes in LSE's layout with room for whole tiles of every segment."""
    users = {"written_by": "dq", "read_by": "dkdv"}
    if problem.is_packed:
        shape = (2, problem.nheads_q, -(-problem.total_q // ROW_PAD) * ROW_PAD + problem.batch * ROW_PAD)
        return Buffer("row_values", "rhs", shape, "fp32", zeroed=False, **users)
    shape = (2, problem.batch, problem.nheads_q, -(-problem.max_seqlen_q // ROW_PAD) * ROW_PAD)
    return Buffer("row_values", "rbhs", shape, "fp32", zeroed=False, **users)


def _forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    from .host import forward

    forward(problem, config, tensors)


def _backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    from .host import backward

    backward(problem, config, tensors, scratch)


def _built(problem: Problem, config: Config, launches: list[tuple[str, Any]]) -> Built:
    from .geometry import built

    return built(problem, config, launches)


def _gemms(problem: Problem, target: Target) -> tuple[int, int]:
    """Products over qk and over v dims: S again in every kernel and pass, dP in all but that of dv apart."""
    if fused(problem, target):
        return 3, 2
    return (5, 3) if config(problem, target, "backward").switch("dkdv").switch("apart") else (4, 3)


KERNEL = Kernel(
    name="triton",
    about="portable Triton: two kernels of 7 GEMMs or 8 (deterministic), or one fused of five with fp32 atomics",
    archs=ARCHS,
    limits=LIMITS,
    config=config,
    plan_workspace=plan_workspace,
    forward=_forward,
    backward=_backward,
    executed_dims=executed_dims,
    gemms=_gemms,
    built=_built,
)

__all__ = ["KERNEL", "LADDER", "config", "plan_workspace", "shared_bytes"]
