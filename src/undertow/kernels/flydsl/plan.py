"""Which geometry a problem gets, and the scratch it needs. Plain Python: needs neither FlyDSL nor a device."""

from __future__ import annotations

from dataclasses import fields, replace

from ...problem import Problem
from ...target import Target
from ...workspace import Buffer, WorkspacePlan, delta_buffer, dq_acc_buffer, dsink_rows_buffer
from ..spec import Config
from .geometry import Geometry

ROUND_ROWS = 16
TILES = ((32, 128, 8), (16, 128, 8), (32, 64, 4), (16, 64, 4))
"""(block_m, block_n, num_waves), best first: 8 waves on 128 keys where the registers suffice."""
DQ_GROUPS = (1, 2, 4)
REGISTERS = {8: 256, 4: 512}
"""Registers of a lane by waves of a workgroup; beyond 256 the rest are accumulator registers."""
TEMPORARIES = 72
"""What the loop needs beside resident registers: 192/128 holds 180 and compiles to 256; 256/64 at 32x128 holds 196
and spills."""
KNOBS = tuple(f.name for f in fields(Geometry))


def geometry_of(problem: Problem, config: Config) -> Geometry:
    """The geometry a config stands for, checked.

    Raises:
        ValueError: a size that does not divide or fit, with its numbers.
    """
    return Geometry(
        problem.head_dim_qk, problem.head_dim_v, config.block_m, config.block_n, config.num_warps,
        dtype=problem.dtype, **dict(config.switches),
    )  # fmt: skip


def config_of(geometry: Geometry) -> Config:
    """The config that stands for a geometry: switches hold what differs from the default knobs, and the arch."""
    own = {f.name: f.default for f in fields(Geometry)}
    named = ("qk_head_dim", "v_head_dim", "block_m", "block_n", "num_waves", "dtype")
    switches = {n: getattr(geometry, n) for n in KNOBS if n not in named and getattr(geometry, n) != own[n]}
    switches |= {"arch": geometry.arch, "accumulate": geometry.accumulate}
    return Config(geometry.block_m, geometry.block_n, geometry.num_waves, switches=tuple(sorted(switches.items())))


def default_geometry(problem: Problem, arch: str, accumulate: str = "fp32") -> Geometry:
    """The first of TILES, and the fewest dq_groups, that divide and leave enough registers for temporaries.

    A deterministic problem makes dQ elsewhere, whatever `accumulate` says.

    Raises:
        ValueError: no tile does; the text has each one's fault.
    """
    accumulate = "none" if problem.deterministic else accumulate
    faults = []
    for block_m, block_n, num_waves in TILES:
        for groups in DQ_GROUPS if accumulate != "none" else (1,):
            try:
                found = Geometry(
                    problem.head_dim_qk, problem.head_dim_v, block_m, block_n, num_waves, groups,
                    arch=arch, dtype=problem.dtype, accumulate=accumulate,
                )  # fmt: skip
            except ValueError as fault:
                faults.append(f"{block_m}x{block_n}, {num_waves} waves, dq_groups={groups}: {fault}")
                continue
            if found.resident_registers + TEMPORARIES <= REGISTERS[num_waves]:
                return found
            faults.append(f"{block_m}x{block_n}, {num_waves} waves: {found.resident_registers} resident registers")
    raise ValueError("no tile fits: " + "; ".join(faults))


def owner_of(geometry: Geometry) -> Geometry:
    """The geometry of the kernel that owns dQ beside a main kernel that makes none."""
    for block_m, block_n, num_waves in TILES:
        try:
            return replace(
                geometry, block_m=block_m, block_n=block_n, num_waves=num_waves, dq_groups=1, transposed_tiles=False,
                pipeline=True, accumulate="owner",
            )  # fmt: skip
        except ValueError:
            continue
    raise ValueError(f"no tile fits a dQ kernel beside {geometry.echo()}")


def config(problem: Problem, target: Target, which: str) -> Config:
    """The default config on a target."""
    return config_of(default_geometry(problem, target.arch))


def low_memory_config(problem: Problem, target: Target, which: str) -> Config:
    """The config of the low-memory mode: dQ summed in bf16."""
    return config_of(default_geometry(problem, target.arch, "bf16"))


def plan_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """delta and LSE in base 2 (fp32, LSE's layout), and the dQ accumulator of the plan in force.

    "fp32": packed (nheads_q, total_q, head_dim_qk), zeroed by the preprocess kernel. "bf16": by segment, (batch,
    nheads_q, pad16(max_seqlen_q), head_dim_qk), half the bytes of fp32 where segments are of equal length. "none": a
    kernel that owns its rows computes dQ: no accumulator, 1.385x the FLOPs at 192/128.
    """
    mine = "preprocess"
    delta = delta_buffer(problem, written_by=mine, read_by="main")
    buffers = [delta, replace(delta, name="lse_log2")]
    accumulate = config.switch("accumulate", "fp32")
    if accumulate == "fp32":
        buffers.append(dq_acc_buffer(problem, zeroed=False, written_by="main", read_by="convert"))
    elif accumulate == "bf16":
        buffers.append(_padded_dq(problem))
    if problem.has_sink:
        buffers.append(dsink_rows_buffer(problem, written_by=mine, read_by="host"))
    return WorkspacePlan(tuple(buffers))


def _padded_dq(problem: Problem) -> Buffer:
    rows = -(-problem.max_seqlen_q // ROUND_ROWS) * ROUND_ROWS
    shape = (problem.batch, problem.nheads_q, rows, problem.head_dim_qk)
    return Buffer("dq_acc", "bhsd", shape, "bf16", zeroed=True, written_by="main", read_by="convert")


def ladder(arch: str) -> tuple[tuple[str, str, Config], ...]:
    """The backward from plain to default at 192/128, as (name, about, Config): one change a rung."""
    both = {"transposed_tiles": True, "pipeline": False}
    rungs = (
        ("plain", "two LDS copies, no prefetch, key tile fastest", both | {"kv_major": False}),
        ("kv_major", "key tile slowest: longest blocks first", both),
        ("one copy", "second orientation out of one LDS copy", {"pipeline": False}),
        ("pipeline", "next tile into a second buffer, two barriers", {}),
    )  # fmt: skip
    return tuple((name, about, config_of(Geometry(arch=arch, **knobs))) for name, about, knobs in rungs)
