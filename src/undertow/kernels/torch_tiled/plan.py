"""Tile sizes and scratch of the tiled kernel, in plain numbers."""

from __future__ import annotations

from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, delta_buffer
from ..spec import Config

ROWS = 256  # query rows of a tile, the heads of a GQA group folded in
KEYS = 512  # keys of a tile
MAIN = {"zeroed": False, "written_by": "main", "read_by": "main"}
SCORES = 4 * ROWS * KEYS  # scores a tile holds over all the kv heads it batches: S and dP take 2 MiB each


def config(problem: Problem, target: Target, which: str) -> Config:
    """Tiles of about SCORES scores: short or few rows are made up by more keys, short keys by more heads."""
    block_m = _clamp(problem.max_seqlen_q, 1, max(16, ROWS // problem.group))
    rows = block_m * problem.group
    block_n = _clamp(problem.max_seqlen_k, 1, max(KEYS, ROWS * KEYS // rows))
    heads = _clamp(problem.nheads_kv, 1, max(1, SCORES // (rows * block_n)))
    return Config(block_m, block_n, switches=(("heads", heads),))


def backward_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """D for every row, and, for the kv heads of one step and the longest segment, fp32 rows of Q, dO and dQ.

    A row buffer is (kv head, query row, head of the group, dim), so that a tile of rows is one GEMM operand.
    """
    dims = (problem.head_dim_qk, problem.head_dim_v)
    return WorkspacePlan(
        (
            delta_buffer(problem, written_by="delta", read_by="main"),
            *_rows(problem, config, {"q_rows": dims[0], "do_rows": dims[1], "dq_acc": dims[0]}),
            *_row_scalars(problem, config, ("lse_rows", "delta_rows")),
            *_keys(config, {"k_tile": dims[0], "v_tile": dims[1], "dk_acc": dims[0], "dv_acc": dims[1]}),
            *(Buffer(name, "hsn", _tile(problem, config), "fp32", **MAIN) for name in ("s", "dp")),
        )
    )


def forward_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """fp32 keys and values of one step's kv heads, and a tile of rows with its running maximum and sum."""
    heads, rows, _ = _tile(problem, config)
    main = {"dtype": "fp32", "zeroed": False, "written_by": "forward", "read_by": "forward"}
    keys = {"k_rows": problem.head_dim_qk, "v_rows": problem.head_dim_v}
    tiles = {"q_tile": problem.head_dim_qk, "out_acc": problem.head_dim_v, "row_max": 1, "row_sum": 1}
    return WorkspacePlan(
        (
            *(Buffer(n, "hsd", (heads, max(1, problem.max_seqlen_k), d), **main) for n, d in keys.items()),
            *(Buffer(n, "hsd", (heads, rows, d), **main) for n, d in tiles.items()),
            Buffer("s", "hsn", _tile(problem, config), **main),
        )
    )


def _rows(problem: Problem, config: Config, dims: dict[str, int]) -> tuple[Buffer, ...]:
    heads, length = config.switch("heads"), max(1, problem.max_seqlen_q)
    return tuple(
        Buffer(name, "hsgd", (heads, length, problem.group, dim), "fp32", **MAIN) for name, dim in dims.items()
    )


def _row_scalars(problem: Problem, config: Config, names: tuple[str, ...]) -> tuple[Buffer, ...]:
    shape = (config.switch("heads"), max(1, problem.max_seqlen_q), problem.group)
    return tuple(Buffer(name, "hsg", shape, "fp32", **MAIN) for name in names)


def _keys(config: Config, dims: dict[str, int]) -> tuple[Buffer, ...]:
    shape = (config.switch("heads"), config.block_n)
    return tuple(Buffer(name, "hnd", (*shape, dim), "fp32", **MAIN) for name, dim in dims.items())


def _tile(problem: Problem, config: Config) -> tuple[int, int, int]:
    return config.switch("heads"), config.block_m * problem.group, config.block_n


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
