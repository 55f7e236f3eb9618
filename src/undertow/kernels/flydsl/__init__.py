"""FlyDSL kernels for gfx942 and gfx950: compiled offline, executed in simulation, never timed on AMD hardware."""

from __future__ import annotations

from dataclasses import replace

from ...problem import Problem
from ...target import Target
from ..spec import Config, Kernel, Limit, Tensors
from .plan import config, low_memory_config, plan_workspace

MULTIPLE = 32
MAX_GRID = 65535
SMALLEST_KEY_BLOCK = 64


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv and dsink; see `launch.backward`."""
    from . import launch

    launch.backward(problem, config, tensors, scratch)


def _dim_limit(name: str) -> Limit:
    def holds(problem: Problem, target: Target) -> bool:
        return getattr(problem, name) % MULTIPLE == 0

    return Limit(
        f"{name}={{p.{name}}} is no multiple of {MULTIPLE}",
        holds,
        f"pad {name} to the next multiple of {MULTIPLE}, or name kernel='triton'",
    )


KERNEL = Kernel(
    name="flydsl",
    about="fused KV-outer backward, five products, dQ by fp32 atomics; deterministic: dQ by one that owns its rows",
    archs=frozenset({"gfx942", "gfx950"}),
    limits=(
        Limit("dtype is {p.dtype}, the matrix instructions used take bf16 and fp16", lambda p, t: p.dtype != "fp32",
              "cast to bf16 or fp16"),
        _dim_limit("head_dim_qk"),
        _dim_limit("head_dim_v"),
        Limit("batch={p.batch}, nheads_q={p.nheads_q}, max_seqlen_k={p.max_seqlen_k}: a grid axis holds 65535 blocks",
              lambda p, t: max(p.batch, p.nheads_q, p.max_seqlen_k // SMALLEST_KEY_BLOCK + 1) <= MAX_GRID),
    ),
    config=config,
    plan_workspace=plan_workspace,
    backward=backward,
)  # fmt: skip

LOW_MEMORY = replace(
    KERNEL,
    name="flydsl_bf16_dq",
    about="flydsl with dQ summed in bf16 by segment: half the scratch, less accurate the more keys there are",
    limits=(
        *KERNEL.limits,
        Limit("dtype is {p.dtype}, dQ is summed in bf16 for bf16 calls only", lambda p, t: p.dtype == "bf16",
              "cast to bf16, or name kernel='flydsl'"),
        Limit("deterministic, and atomics have no order", lambda p, t: not p.deterministic, "name kernel='flydsl'"),
    ),
    config=low_memory_config,
)  # fmt: skip
"""The named low-memory mode: runs where it is asked for by name, and is never chosen."""
