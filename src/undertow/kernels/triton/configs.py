"""Tile sizes of the Triton kernels: one table a stage, and the shared memory a row of it needs."""

from __future__ import annotations

from ...cost import split_dim
from ...problem import DTYPES, Problem
from ...target import Target
from ..spec import Config

STAGES = ("forward", "dkdv", "dq")

# width is head_dim_qk + head_dim_v as executed (the sum of the chunks); the first row at least as wide is taken.
TABLE: dict[str, dict[str, tuple[tuple[int, Config], ...]]] = {
    "sm_90": {
        "forward": ((256, Config(128, 64, 8, 2)), (512, Config(64, 32, 4, 2))),
        "dkdv": ((128, Config(64, 128, 8, 2)), (256, Config(64, 128, 8, 1)), (512, Config(32, 64, 8, 1))),
        "dq": ((256, Config(128, 64, 8, 2)), (512, Config(64, 32, 4, 2))),
    },
    "gfx942": {
        "forward": ((256, Config(64, 32, 4, 1)), (512, Config(32, 32, 4, 1))),
        "dkdv": ((512, Config(32, 32, 4, 1)),),
        "dq": ((512, Config(32, 32, 4, 1)),),
    },
    "fp32": {
        "forward": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
        "dkdv": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
        "dq": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
    },
}
SMALLEST = Config(16, 16, 4, 1)


def programs(problem: Problem, stage: Config, owner: str) -> int:
    """Programs of a kernel that owns query tiles ("q") or key tiles ("k"), at least one a segment to zero gaps."""
    rows, block, heads = (
        (problem.max_seqlen_q, stage.block_m, problem.nheads_q)
        if owner == "q"
        else (problem.max_seqlen_k, stage.block_n, problem.nheads_kv)
    )
    return max(1, -(-rows // block)) * heads * problem.batch


def executed_dims(problem: Problem) -> tuple[int, int]:
    """The head dims the kernels multiply: the sum of the chunks."""
    return sum(split_dim(problem.head_dim_qk)), sum(split_dim(problem.head_dim_v))


def shared_bytes(problem: Problem, config: Config, stage: str) -> int:
    """An estimate, from above, of the shared memory of one program, in bytes."""
    qk, v = executed_dims(problem)
    item, m, n = DTYPES[problem.dtype], config.block_m, config.block_n
    own, streamed = (n, m) if stage == "dkdv" else (m, n)
    scores = m * n * (item if stage != "forward" else 0)
    return (own + streamed * config.num_stages) * (qk + v) * item + scores


def feasible(problem: Problem, config: Config, target: Target, stage: str) -> bool:
    """Whether the tile fits the target's shared memory."""
    return target.arch == "cpu" or shared_bytes(problem, config, stage) <= target.lds_bytes


def stage_config(problem: Problem, target: Target, stage: str) -> Config:
    """The table's row for this problem, or the smallest tile where no row is feasible."""
    family = "fp32" if problem.dtype == "fp32" else "gfx942" if target.vendor == "amd" else "sm_90"
    if target.arch == "cpu":
        return Config(32, 32, 4, 1, (("tma", True),))
    width = sum(executed_dims(problem))
    rows = [config for limit, config in TABLE[family][stage] if width <= limit]
    return next((c for c in rows if feasible(problem, c, target, stage)), SMALLEST)
