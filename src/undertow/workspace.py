"""Scratch of a launch: one plan is the source of size, strides and zeroing for sizing, allocation and every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .problem import Problem

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "i32": 4}
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous scratch tensor. `axes` names every dimension with one letter (h, b, s, d, ...), slowest first."""

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    zeroed: bool
    written_by: str
    read_by: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def stride(self, axis: str) -> int:
        """Elements between neighbours along `axis`; 0 for an axis this buffer does not have."""
        return prod(self.shape[self.axes.index(axis) + 1 :]) if axis in self.axes else 0


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """All scratch of one launch, laid one after another at 256-byte boundaries."""

    buffers: tuple[Buffer, ...] = ()
    growth: str = "linear in tokens"

    @property
    def nbytes(self) -> int:
        """Bytes a caller must provide."""
        return sum(_padded(b) for b in self.buffers)

    @property
    def zero_init(self) -> bool:
        """Whether some buffer must be zero before the first kernel."""
        return any(b.zeroed for b in self.buffers)

    def offset(self, name: str) -> int:
        """Byte offset of a buffer."""
        at = [b.name for b in self.buffers].index(name)
        return sum(_padded(b) for b in self.buffers[:at])

    def __contains__(self, name: str) -> bool:
        return any(b.name == name for b in self.buffers)

    def __getitem__(self, name: str) -> Buffer:
        return {b.name: b for b in self.buffers}[name]


def _padded(buffer: Buffer) -> int:
    return -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT


def delta_buffer(p: Problem, *, written_by: str, read_by: str) -> Buffer:
    """D = rowsum(dO * O) - dLSE, fp32, with LSE's layout: dense (b, h, s), packed (h, total_q)."""
    axes = "hs" if p.is_packed else "bhs"
    shape = (p.nheads_q, p.total_q) if p.is_packed else (p.batch, p.nheads_q, p.max_seqlen_q)
    return Buffer("delta", axes, shape, "fp32", zeroed=False, written_by=written_by, read_by=read_by)


def dq_acc_buffer(p: Problem, *, zeroed: bool, written_by: str, read_by: str) -> Buffer:
    """Packed fp32 dQ accumulator (nheads_q, total_q, head_dim_qk): no padding, so no tile size can disagree."""
    dense = (p.nheads_q, p.batch, p.max_seqlen_q, p.head_dim_qk)
    axes, shape = ("hsd", (p.nheads_q, p.total_q, p.head_dim_qk)) if p.is_packed else ("hbsd", dense)
    return Buffer("dq_acc", axes, shape, "fp32", zeroed=zeroed, written_by=written_by, read_by=read_by)


def dsink_rows_buffer(p: Problem, *, written_by: str, read_by: str) -> Buffer:
    """Each query row's share of dsink, (nheads_q, total_q) fp32; zero where no row writes (gaps)."""
    dense = (p.nheads_q, p.batch, p.max_seqlen_q)
    axes, shape = ("hs", (p.nheads_q, p.total_q)) if p.is_packed else ("hbs", dense)
    return Buffer("dsink_rows", axes, shape, "fp32", zeroed=True, written_by=written_by, read_by=read_by)
