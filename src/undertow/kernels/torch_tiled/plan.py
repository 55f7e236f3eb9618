"""Tile sizes and scratch of the tiled kernel, in plain numbers."""

from __future__ import annotations

from ...cost import score_flops
from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, delta_buffer
from ..spec import Config

ROWS = 512  # query rows of a tile, the heads of a GQA group folded in
KEYS = 256  # keys of a tile; 256 rows by 512 keys: 3 % slower at fp32 128/128 S2048, two cores (AVX2), 2026-11-29
MAIN = {"zeroed": False, "written_by": "main", "read_by": "main"}
BUSY = 0.75  # share of the cores' time that (segment, kv head) pairs must fill to be one thread's work each
WORTH_THREADS = 1 << 30  # FLOPs, over 5 ms of two cores: starting two threads takes 0.3 ms
FORWARD = {"zeroed": False, "written_by": "forward", "read_by": "forward"}
SCORES = 4 * ROWS * KEYS  # scores a tile holds over all the kv heads it batches: S and dP take 2 MiB each


def config(problem: Problem, target: Target, which: str) -> Config:
    """Tiles, and how the cores share them.

    With enough (segment, kv head) pairs to go round, each is the work of one thread (`workers` of them): threads that
    never wait for one another lose little where another program takes a core. Else one step after another is spread
    over all the cores, `heads` kv heads at a time. A tile has at least ROWS * KEYS scores where the lengths allow:
    few rows are made up by more keys, and short lengths by more heads.
    """
    workers = _workers(problem, target)
    block_m = _clamp(problem.max_seqlen_q, 1, max(16, ROWS // problem.group))
    rows = block_m * problem.group
    block_n = _clamp(problem.max_seqlen_k, 1, max(KEYS, ROWS * KEYS // rows))
    heads = (ROWS * KEYS if workers > 1 else SCORES) // (rows * block_n)
    heads = _clamp(min(heads, problem.nheads_kv, problem.batch * problem.nheads_kv // workers), 1, problem.nheads_kv)
    return Config(block_m, block_n, switches=(("heads", heads), ("workers", workers)))


def _workers(problem: Problem, target: Target) -> int:
    """Threads of the launch: all the cores, if that leaves few of them idle and the work is worth their start."""
    pairs, cores = problem.batch * problem.nheads_kv, target.num_cus if target.vendor == "cpu" else 1
    used = pairs / (cores * -(-pairs // cores)) if pairs else 0.0
    scores = problem.batch * problem.nheads_q * problem.max_seqlen_q * problem.max_seqlen_k
    work = scores * score_flops(problem.head_dim_qk, problem.head_dim_v)
    return cores if used >= BUSY and work >= WORTH_THREADS else 1


def backward_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """D for every row, and, for the kv heads of one step and the longest segment, fp32 rows of Q, dO and dQ.

    A row buffer is (worker, kv head, query row, head of the group, dim): a tile of rows is one GEMM operand.
    """
    dims = (problem.head_dim_qk, problem.head_dim_v)
    return WorkspacePlan(
        (
            delta_buffer(problem, written_by="delta", read_by="main"),
            *_rows(problem, config, {"q_rows": dims[0], "do_rows": dims[1], "dq_acc": dims[0]}),
            *_row_scalars(problem, config, ("lse_rows", "delta_rows")),
            *_keys(config, {"k_tile": dims[0], "v_tile": dims[1], "dk_acc": dims[0], "dv_acc": dims[1]}),
            *(Buffer(name, "whsn", _tile(problem, config), "fp32", **MAIN) for name in ("s", "dp")),
        )
    )


def forward_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """fp32 keys and values of one step's kv heads, and a tile of rows with its running maximum and sum."""
    workers, heads, rows, _ = _tile(problem, config)
    keys = {"k_rows": problem.head_dim_qk, "v_rows": problem.head_dim_v}
    tiles = {"q_tile": problem.head_dim_qk, "out_acc": problem.head_dim_v, "row_max": 1, "row_sum": 1}
    length = max(1, problem.max_seqlen_k)
    return WorkspacePlan(
        (
            *(Buffer(n, "whsd", (workers, heads, length, d), "fp32", **FORWARD) for n, d in keys.items()),
            *(Buffer(n, "whsd", (workers, heads, rows, d), "fp32", **FORWARD) for n, d in tiles.items()),
            Buffer("s", "whsn", _tile(problem, config), "fp32", **FORWARD),
        )
    )


def _rows(problem: Problem, config: Config, dims: dict[str, int]) -> tuple[Buffer, ...]:
    shape = (config.switch("workers"), config.switch("heads"), max(1, problem.max_seqlen_q), problem.group)
    return tuple(Buffer(name, "whsgd", (*shape, dim), "fp32", **MAIN) for name, dim in dims.items())


def _row_scalars(problem: Problem, config: Config, names: tuple[str, ...]) -> tuple[Buffer, ...]:
    shape = (config.switch("workers"), config.switch("heads"), max(1, problem.max_seqlen_q), problem.group)
    return tuple(Buffer(name, "whsg", shape, "fp32", **MAIN) for name in names)


def _keys(config: Config, dims: dict[str, int]) -> tuple[Buffer, ...]:
    shape = (config.switch("workers"), config.switch("heads"), config.block_n)
    return tuple(Buffer(name, "whnd", (*shape, dim), "fp32", **MAIN) for name, dim in dims.items())


def _tile(problem: Problem, config: Config) -> tuple[int, int, int, int]:
    return config.switch("workers"), config.switch("heads"), config.block_m * problem.group, config.block_n


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
