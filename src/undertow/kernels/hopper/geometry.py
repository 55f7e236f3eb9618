"""The tile of a head-dim pair on Hopper, and what it needs. The standard library only, until something is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...problem import Problem

SHARED_BYTES = 227 * 1024
REGISTERS = 208
"""What accumulators and operands may take of a consumer thread's 240 registers."""
STAGES = ((3, 3), (3, 2), (2, 2), (2, 1))
"""Depths of the rings of Q and dO, the best first."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One build: head dims, rows of a query and a key tile, and the depth of the rings in shared memory.

    With `late`, dQ is handed to the copy engine once the next products are issued, without it before. With `turning`,
    every other round of blocks walks its query tiles upward; `reverse` takes the last key tiles first. These are rungs
    of the ladder.
    `dq`, `dk` and `dv` say what the kernel computes, see `launches`.
    """

    head_dim_qk: int
    head_dim_v: int
    dtype: str = "bf16"
    tile_q: int = 64
    tile_kv: int = 128
    q_stages: int = 2
    do_stages: int = 2
    late: bool = True
    reverse: bool = False
    turning: bool = True
    dq: bool = True
    dk: bool = True
    dv: bool = True

    @property
    def d_qk(self) -> int:
        """head_dim_qk as multiplied: a multiple of 16; of 32 where two warpgroups share dQ's columns."""
        step = 32 if self.tile_q == 64 and self.dq else 16
        return -(-self.head_dim_qk // step) * step

    @property
    def d_v(self) -> int:
        """head_dim_v as multiplied."""
        return -(-self.head_dim_v // 16) * 16

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warpgroup multiplies: half of 64 rows, or all of its own 64 rows of 128."""
        return self.d_qk // 2 if self.tile_q == 64 else self.d_qk

    @property
    def k_atom(self) -> int:
        """The swizzle atom of K: divides what one warpgroup multiplies of it along either axis.

        Without dQ, K is never split by columns: then 16 where half of them would ask for 8, the unswizzled layout,
        which nothing else uses and no GPU test has run.
        """
        return max(16, self.atom(self.dq_columns))

    @staticmethod
    def atom(columns: int) -> int:
        """The widest swizzle atom, in elements, that divides `columns`."""
        return next(w for w in (64, 32, 16, 8) if columns % w == 0)

    @property
    def sums(self) -> int:
        """Registers of a consumer thread that hold dK and dV."""
        return (self.d_qk * self.dk + self.d_v * self.dv) * self.tile_kv // 256

    @property
    def scores(self) -> int:
        """Registers of a consumer thread that hold a tile of scores in fp32."""
        return self.tile_q * self.tile_kv // 256

    @property
    def registers(self) -> int:
        """Accumulator and operand registers a consumer thread holds at the fullest moment."""
        return self.sums + max(self.scores + self.scores // 2, self.dq * self.tile_q * self.d_qk // 256)

    @property
    def keeps_p(self) -> bool:
        """Whether P stays in registers in fp32 until dS is made of it, and need not be unpacked from 16 bits.

        On an H200, 2026-11-30, that took 2 to 4 % less time at 128/128 and 48/48, but apart and by 128 rows 3 % more.
        """
        room = self.sums + 2 * self.scores + self.scores // 2 <= REGISTERS
        return self.dk and room and (self.dq or self.tile_q == 64)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: K, V, the rings of Q and dO, dS, dQ on its way out, statistics, barriers."""
        own = self.tile_kv * (self.d_qk + self.dk * self.d_v)
        rings = self.tile_q * (self.q_stages * self.d_qk + self.do_stages * self.d_v + self.dq * self.tile_kv)
        return 2 * (own + rings) + 4 * self.tile_q * (self.dq * self.d_qk + 2 * self.q_stages) + 512

    @property
    def deepest(self) -> Geometry | None:
        """This with the deepest rings that shared memory holds; None where registers or shared memory hold none."""
        deep = (replace(self, q_stages=q, do_stages=do) for q, do in STAGES)
        return next((g for g in deep if g.shared_bytes <= SHARED_BYTES and g.registers <= REGISTERS), None)


@lru_cache(maxsize=1024)
def choose(head_dim_qk: int, head_dim_v: int, dtype: str = "bf16", *, dq: bool = True) -> Geometry | None:
    """The geometry for a pair of head dims; None where no tile fits. 128 query rows where registers hold them.

    With `dq`, one fused kernel; without, the plan that has dQ in a kernel of its own, and where dK and dV do not fit
    together, those too.
    """
    wide = Geometry(head_dim_qk, head_dim_v, dtype, 128, dq=dq)
    narrow = Geometry(head_dim_qk, head_dim_v, dtype, 64, dq=dq)
    apart = () if dq else (replace(narrow, dv=False),)
    return next((g for tile in (wide, narrow, *apart) if (g := tile.deepest)), None)


def launches(geometry: Geometry) -> tuple[tuple[str, Geometry], ...]:
    """The kernels of a plan, in order, as (kind, geometry); a geometry without dV stands for one kernel each."""
    if geometry.dq:
        return (("main", geometry),)
    if geometry.dk and geometry.dv:
        return ("main", geometry), ("dq", geometry)
    return ("main", geometry), ("main", replace(geometry, dk=False, dv=True).deepest), ("dq", geometry)


def query_tiles(problem: Problem, geometry: Geometry) -> int:
    """Query tiles of all segments, from above where lengths are on the device."""
    return _tiles(problem.is_packed, problem.total_q, problem.max_seqlen_q, problem.batch, geometry.tile_q)


def key_tiles(problem: Problem, geometry: Geometry) -> int:
    """Key tiles of all segments, at least one each, from above where lengths are on the device."""
    return _tiles(problem.is_packed, problem.total_k, problem.max_seqlen_k, problem.batch, geometry.tile_kv)


def dq_tiles(problem: Problem, geometry: Geometry) -> int:
    """Query tiles of the deterministic plan's second kernel, which own dq rows, from above."""
    return _tiles(problem.is_packed, problem.total_q, problem.max_seqlen_q, problem.batch, geometry.tile_kv)


def _tiles(packed: bool, total: int, longest: int, batch: int, rows: int) -> int:
    return total // rows + batch if packed else max(1, -(-longest // rows)) * batch


def cutlass_dtype(name: str) -> Any:
    """The DSL's type of a dtype name."""
    import cutlass

    return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[name]


def fake(dtype: Any, rank: int, fixed: dict[int, int] | None = None) -> Any:
    """A tensor to compile for: free extents but the `fixed`, free strides but the last, 16-byte aligned rows."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    divisor = max(1, 128 // dtype.width) if rank > 2 else 1
    shape = tuple((fixed or {}).get(i, cute.sym_int32()) for i in range(rank))
    strides = tuple(1 if i == rank - 1 else cute.sym_int64(divisibility=divisor) for i in range(rank))
    return make_fake_tensor(dtype, shape, strides, assumed_align=16 if rank > 2 else 4)


def fake_stream() -> Any:
    """torch's current stream, found at each call."""
    from cutlass.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
