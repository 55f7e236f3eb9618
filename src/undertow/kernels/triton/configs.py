"""Tile sizes of the Triton kernels: one table a stage, and the shared memory a row of it needs."""

from __future__ import annotations

from dataclasses import replace

from ...cost import split_dim
from ...problem import DTYPES, Problem
from ...target import Target
from ..spec import Config

MAX_LISTED = 4096
SHORT = 1024  # tokens a segment, on average, below which a "-short" table holds
STAGES = ("forward", "dkdv", "dq")
HAS_TMA = ("sm_90", "sm_100", "sm_103")
HAS_TENSOR_MEMORY = ("sm_100", "sm_103")

# Switches of a row, all but columns off unless named: `tma` reads through descriptors; `columns`, the heads in flight
# together, 0 is all; `flat`, one loop over the tiles of all heads of a group; `one_sweep`, one loop that masks every
# tile; `apart`, dv in a pass of its own before dk, as registers do not hold both; `maxnreg`, registers a thread.
#
# width is head_dim_qk + head_dim_v as executed (the sum of the chunks); the first row at least as wide that fits is
# taken. Milliseconds: H200, torch 2.11.0+cu130, triton 3.6.0, median of the kernel alone; forward 2026-11-29, of 4 to 8
# launches; the rest 2026-11-30, of 6, dq with D in it.
# The fused plan was slower on every shape timed (2026-11-29, dkdv with dQ atomics, best tile, against dkdv + dq, ms):
# 192/128 S8192 6.02 : 4.39, 128/128 GQA S8192 7.86 : 6.54, 64/64 S4096 1.28 : 1.02, 256/256 S4096 3.04 : 1.55.
POINTERS = (("columns", 8),)
TMA = (("tma", True), *POINTERS)
FLAT = (*TMA, ("flat", True))
APART = (*FLAT, ("apart", True))
ONE_LOOP = (*FLAT, ("one_sweep", True))
ONE_LOOP_APART = (*APART, ("one_sweep", True))
ONE_LOOP_POINTERS = (("columns", 0), ("one_sweep", True))
TABLE: dict[str, dict[str, tuple[tuple[int, Config], ...]]] = {
    "sm_90": {
        "forward": (
            (128, Config(128, 64, 4, 3, POINTERS)),  # 64/64 S4096 H16: 0.379; TMA 0.398
            (192, Config(128, 64, 4, 3, TMA)),  # 96/96 S4096 H16: 0.545; 8 warps 0.727
            (256, Config(64, 64, 4, 3, TMA)),  # 128/128 S8192 GQA 32:8: 2.245; 128 rows 2.58
            (320, Config(128, 64, 8, 3, POINTERS)),  # 192/128 S8192 H16: 1.394; TMA 1.458
            (512, Config(64, 64, 4, 3, TMA)),  # 256/256 S4096 H8: 0.327; 128 rows 0.349
        ),
        "dkdv": (
            (128, Config(64, 64, 4, 3, TMA)),  # 64/64: 0.563
            (192, Config(64, 64, 4, 2, TMA)),  # 96/96: 0.860
            (256, Config(64, 64, 4, 2, TMA)),  # 128/128: 3.54, not causal 6.95; (32, 64) 3.82 and 8.04; flat 7.11
            (320, Config(32, 64, 4, 3, FLAT)),  # 192/128: 2.47; 8 heads a group 2.64, not flat 3.74
            (384, Config(64, 128, 8, 2, APART)),  # 256/128 S4096 H16: 2.22; (32, 128) three stages 2.28; not apart 7.30
            (384, Config(32, 64, 4, 3, TMA)),  # for less shared memory
            (512, Config(32, 128, 8, 3, APART)),  # 256/256: 0.731; not apart 1.163
            (320, Config(32, 64, 4, 2, FLAT)),  # for less shared memory
            (512, Config(32, 64, 8, 2, APART)),
        ),
        "dkdv-short": (
            (192, Config(64, 64, 4, 2, ONE_LOOP)),
            (320, Config(32, 64, 4, 3, ONE_LOOP)),  # X2, 64 documents of 256 tokens, GQA 32:8: 0.313; two stages 0.351
            (384, Config(64, 128, 8, 2, ONE_LOOP_APART)),
            (384, Config(32, 64, 4, 3, ONE_LOOP)),
            (512, Config(32, 128, 8, 3, ONE_LOOP_APART)),
            (320, Config(32, 64, 4, 2, ONE_LOOP)),
            (512, Config(32, 64, 8, 2, ONE_LOOP_APART)),
        ),
        "dq": (
            (128, Config(64, 64, 4, 3, TMA)),  # 64/64: 0.393
            (192, Config(64, 64, 4, 2, (*TMA, ("maxnreg", 168)))),  # 96/96: 0.623; without maxnreg 0.794
            (256, Config(64, 64, 4, 2, TMA)),  # 128/128: 2.90, not causal 5.64
            (320, Config(64, 32, 4, 3, TMA)),  # 192/128: 1.842
            (384, Config(128, 32, 8, 3, TMA)),  # 256/128: 1.254; (64, 32) 1.515
            (384, Config(64, 32, 4, 3, TMA)),
            (512, Config(128, 32, 8, 3, TMA)),  # 256/256: 0.375
            (512, Config(64, 32, 4, 2, TMA)),  # for less shared memory
        ),
        "dq-short": (
            (320, Config(64, 32, 4, 2, ONE_LOOP_POINTERS)),  # X2: 0.324; 8 heads in flight 0.339; TMA 0.389
            (384, Config(128, 32, 8, 3, TMA)),
            (384, Config(64, 32, 4, 3, TMA)),
            (512, Config(128, 32, 8, 3, TMA)),
            (512, Config(64, 32, 4, 2, TMA)),
        ),
    },
    "gfx942": {
        "forward": ((256, Config(64, 32, 4, 1)), (512, Config(32, 32, 4, 1))),
        "dkdv": ((384, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
        "dq": ((384, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
    },
    "fp32": {
        "forward": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
        "dkdv": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
        "dq": ((256, Config(32, 32, 4, 1)), (512, Config(16, 16, 4, 1))),
    },
}
SMALLEST = Config(16, 16, 4, 1)


def entries(problem: Problem, stage: Config, owner: str) -> int:
    """Entries of the list of real query ("q") or key ("k") tiles: a bound that needs no lengths. 0 lists none.

    A dense batch has no dead tiles to skip, nor has one segment; the list's cost grows with the square of the segments.
    """
    if not problem.is_packed or not 1 < problem.batch <= MAX_LISTED:
        return 0
    rows, block = (problem.total_q, stage.block_m) if owner == "q" else (problem.total_k, stage.block_n)
    return rows // block + problem.batch


def programs(problem: Problem, stage: Config, owner: str) -> int:
    """Programs of a kernel that owns query tiles ("q") or key tiles ("k"), at least one a segment to zero gaps."""
    rows, block, heads = (
        (problem.max_seqlen_q, stage.block_m, problem.nheads_q)
        if owner == "q"
        else (problem.max_seqlen_k, stage.block_n, problem.nheads_kv)
    )
    return (entries(problem, stage, owner) or max(1, -(-rows // block)) * problem.batch) * heads


def executed_dims(problem: Problem) -> tuple[int, int]:
    """The head dims the kernels multiply: the sum of the chunks."""
    return sum(split_dim(problem.head_dim_qk)), sum(split_dim(problem.head_dim_v))


def shared_bytes(problem: Problem, config: Config, stage: str, *, fused: bool) -> int:
    """Shared memory of one program in bytes, from above: the rows it owns, the staged rows of the other side, barriers.

    Checked against the compiler's figure by a test and by verify. The dk/dv kernel also stages LSE and D of its rows;
    the fused plan, and fp32 without tensor cores, turn P and dS around in shared memory.
    """
    qk, v = executed_dims(problem)
    item, m, n = DTYPES[problem.dtype], config.block_m, config.block_n
    own, streamed = (n * (qk + v), m) if stage == "dkdv" else (m * qk, n) if stage == "forward" else (m * (qk + v), n)
    turned = 2 * m * n if stage == "dkdv" and (fused or problem.dtype == "fp32") else 0
    scalars = 8 * m * config.num_stages if stage == "dkdv" else 0
    return (own + streamed * config.num_stages * (qk + v) + turned) * item + scalars + 1024


def feasible(problem: Problem, config: Config, target: Target, stage: str) -> bool:
    """Whether the tile fits the target's shared memory."""
    if target.vendor == "amd" and config.num_stages == 1:  # operands go through LDS one tile at a time
        needed = max(config.block_m, config.block_n) * max(executed_dims(problem)) * DTYPES[problem.dtype]
    else:
        needed = shared_bytes(problem, config, stage, fused=fused(problem, target))
        if target.arch in HAS_TENSOR_MEMORY and stage != "forward":  # compiled sizes: two tiles of scores more
            needed += 2 * config.block_m * config.block_n * DTYPES[problem.dtype]
    return target.arch == "cpu" or needed <= target.lds_bytes


def stage_config(problem: Problem, target: Target, stage: str) -> Config:
    """The table's row for this problem, or the smallest tile where no row is feasible."""
    if target.arch == "cpu":
        return Config(32, 32, 4, 1, TMA)
    family = "fp32" if problem.dtype == "fp32" else "gfx942" if target.vendor == "amd" else "sm_90"
    width = sum(executed_dims(problem))
    short = problem.is_packed and problem.total_k < SHORT * problem.batch
    table = TABLE[family].get(f"{stage}-short" if short else stage, TABLE[family][stage])
    rows = [config for limit, config in table if width <= limit]
    chosen = next((c for c in rows if feasible(problem, c, target, stage)), SMALLEST)
    listed = not problem.is_packed or problem.batch <= MAX_LISTED  # else the grid, and descriptors, outgrow the tokens
    if target.arch in HAS_TMA and listed:
        return chosen
    kept = tuple((name, value) for name, value in chosen.switches if name not in ("tma", "maxnreg"))
    return replace(chosen, switches=kept or POINTERS)


def fused(problem: Problem, target: Target) -> bool:
    """Whether dQ is accumulated by the dk/dv kernel: five GEMMs and atomics against seven GEMMs and none.

    Never for a deterministic call. Measured slower on Hopper (see TABLE); not measured on AMD, where the FLOPs decide.
    """
    return not problem.deterministic and target.vendor != "nvidia"


def _rung(dkdv: Config, dq: Config, *, one_kernel: bool) -> Config:
    return Config(switches=(("forward", SMALLEST), ("dkdv", dkdv), ("dq", dq), ("fused", one_kernel)))


_HEAD_BY_HEAD, _ALL = Config(64, 64, 4, 1, (("columns", 1),)), Config(64, 64, 4, 1)
LADDER = (
    ("plain", "fused, fp32 atomics, one head after the other", _rung(_HEAD_BY_HEAD, _HEAD_BY_HEAD, one_kernel=True)),
    ("order", "all heads in flight, longest tiles first", _rung(_ALL, _ALL, one_kernel=True)),
    ("split", "dq in a kernel of its own: seven GEMMs, no atomics", _rung(_ALL, _ALL, one_kernel=False)),
    ("tiles", "a tile and stages for each kernel", _rung(Config(32, 64, 4, 2), Config(64, 32, 4, 3), one_kernel=False)),
    (
        "columns", "eight heads in flight share the cache",
        _rung(Config(32, 64, 4, 2, POINTERS), Config(64, 32, 4, 3, POINTERS), one_kernel=False),
    ),
    ("tma", "TMA loads", _rung(Config(32, 64, 4, 3, TMA), Config(64, 32, 4, 3, TMA), one_kernel=False)),
)  # fmt: skip
"""The backward from naive to tuned, as (name, about, Config): rungs at 192/128 on Hopper, timed by `bench --ladder`."""
