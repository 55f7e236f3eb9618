"""Every FlyDSL name outside its stable interface, wrapped once, and the argument that carries a tensor.

Nothing here branches at run time: these helpers are called while a kernel is traced. Imported inside functions only,
since FlyDSL is an optional package.
"""

from __future__ import annotations

import flydsl.expr as fx  # noqa: TID253
from flydsl._mlir.dialects import llvm  # noqa: TID253
from flydsl.compiler.protocol import c_abi_spec, extract_to_ir_values, get_ir_types  # noqa: TID253
from flydsl.expr import rocdl  # noqa: TID253
from flydsl.expr.typing import T  # noqa: TID253

Vec = fx.Vector
ELEMENT = {"bf16": fx.BFloat16, "fp16": fx.Float16, "fp32": fx.Float32}
CARRIER = {"bf16": fx.BFloat16, "fp16": fx.Int16}  # fp16 moves as bits between products
LOG2E = 1.4426950408889634
FAR = 0x40000000  # a byte offset behind every descriptor: loads give 0, stores are dropped
LOW, HIGH = -(1 << 30), 1 << 30


class Bundle:
    """Several kernel arguments under one name. Subclasses list their names and types, in the order of the metadata."""

    names: tuple[str, ...] = ()
    types: tuple[type, ...] = ()

    def __init__(self, *parts):
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, part)

    def _parts(self):
        return [getattr(self, name) for name in self.names]

    def __get_ir_types__(self):
        return [t for part in self._parts() for t in get_ir_types(part)]

    def __extract_to_ir_values__(self):
        return [v for part in self._parts() for v in extract_to_ir_values(part)]

    def __cache_signature__(self):
        return (type(self), *(part.__cache_signature__() for part in self._parts()))

    def __c_abi_spec__(self):
        slots = []
        for name in self.names:
            for ctype, fill in c_abi_spec(getattr(self, name)):
                slots.append((ctype, lambda bundle, slot, n=name, f=fill: f(getattr(bundle, n), slot)))
        return slots

    @classmethod
    def __construct_from_ir_values__(cls, values, exemplar=None):
        return cls(*(kind(v) for kind, v in zip(cls.types, values, strict=True)))


class View(Bundle):
    """A tensor argument: its pointer, and the int64 element strides of batch, token and head (the last is 1)."""

    names = ("ptr", "b", "s", "h")
    types = (fx.Pointer, fx.Int64, fx.Int64, fx.Int64)

    def at(self, b, h, row):
        """Pointer to (b, row, h), in 64-bit arithmetic."""
        return self.ptr + (fx.Int64(b) * self.b + fx.Int64(h) * self.h + fx.Int64(row) * self.s)


class Scales(Bundle):
    """The softmax scale; with a softcap, 2 scale log2(e) / softcap and log2(e) softcap."""

    names = ("softmax", "to_cap", "cap_log2")
    types = (fx.Float32, fx.Float32, fx.Float32)


class Grid(Bundle):
    """Workgroups along x, y, z."""

    names = ("x", "y", "z")
    types = (fx.Int32, fx.Int32, fx.Int32)


def uniform(x):
    """x, which is equal in all lanes, as a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, x))


def clip(x, lo, hi):
    """min(max(x, lo), hi)."""
    x = (x < lo).select(fx.Int32(lo), x)
    return (x > hi).select(fx.Int32(hi), x)


def lesser(a, b):
    """min(a, b) of two Int32."""
    return (a < b).select(a, b)


def greater(a, b):
    """max(a, b) of two Int32."""
    return (a > b).select(a, b)


def rows(ptr, stride, count, dim, nbytes):
    """Bounded descriptor of `count` rows of `dim` elements of `nbytes`, `stride` >= `dim` elements apart.

    Whatever lies behind the last row is out of bounds, with its row index alone; count <= 0 leaves nothing inside.
    """
    size = (fx.Int64(count - 1) * stride + dim) * nbytes
    size = (size > 0).select(size, fx.Int64(0))
    return rocdl.get_buffer_rsrc(rocdl.make_buffer_ptr(ptr, num_records_bytes=size))


def load(rsrc, offset, elem, width=1):
    """`width` elements at a byte offset; 0 outside the descriptor."""
    if width == 1:
        return elem(rocdl.raw_ptr_buffer_load(elem.ir_type, rsrc, offset, 0))
    return Vec(rocdl.raw_ptr_buffer_load(fx.Vector[elem, width].ir_type, rsrc, offset, 0), dtype=elem)


def store(value, rsrc, offset):
    """Store a vector or scalar at a byte offset; dropped outside the descriptor."""
    rocdl.raw_ptr_buffer_store(value.ir_value(), rsrc, offset.ir_value(), fx.Int32(0).ir_value())


def atomic_add(value, rsrc, offset):
    """fp32 += at a byte offset, no return; dropped outside the descriptor.

    The whole offset is a vector operand: the bound is checked against num_records less the scalar offset, which wraps.
    """
    rocdl.raw_ptr_buffer_atomic_fadd(value, rsrc, offset, 0, 0)


def atomic_add_pair(pair, ptr):
    """Two bf16 += at a 4-byte aligned pointer."""
    llvm.atomicrmw(
        llvm.AtomicBinOp.fadd, ptr.llvm_ptr, pair.ir_value(), llvm.AtomicOrdering.monotonic,
        syncscope="agent", alignment=4,
    )  # fmt: skip


def exp2(x):
    """2**x: one v_exp_f32."""
    return fx.Float32(rocdl.exp2(T.f32, x.ir_value()))


def recip(x):
    """1/x: one v_rcp_f32, 1 ulp."""
    return fx.Float32(rocdl.rcp(T.f32, x.ir_value()))


def capped(s, scale_log2, cap):
    """Score times log2(e), softcapped where `cap` is (2 scale log2(e) / softcap, log2(e) softcap); and the cap's slope.

    tanh(x) = 1 - 2 / (exp(2 x) + 1), its derivative 1 - tanh(x)^2.
    """
    if cap is None:
        return s * scale_log2, None
    tanh = fx.Float32(1.0) - fx.Float32(2.0) * recip(exp2(s * cap[0]) + fx.Float32(1.0))
    return tanh * cap[1], fx.Float32(1.0) - tanh * tanh


def mfma(a, b, c, dtype, k):
    """C + A B on a 16x16 tile: a, b hold k/4 elements a lane, c four floats.

    A: row lane % 16, B: column lane % 16, both k-index (k/4)*(lane // 16) + e; C: row 4*(lane // 16) + r, column
    lane % 16.
    """
    if k == 32:
        form = rocdl.mfma_f32_16x16x32_bf16 if dtype == "bf16" else rocdl.mfma_f32_16x16x32_f16
    elif dtype == "bf16":
        form, a, b = rocdl.mfma_f32_16x16x16bf16_1k, a.bitcast(fx.Int16), b.bitcast(fx.Int16)
    else:
        form = rocdl.mfma_f32_16x16x16f16
    if dtype == "fp16":
        a, b = a.bitcast(fx.Float16), b.bitcast(fx.Float16)
    return Vec(form(c.type, [a, b, c]), dtype=fx.Float32)


def narrow(values, dtype, arch):
    """fp32 values as one vector of the 16-bit carrier type, or a scalar for one value.

    gfx942 has no bf16 conversion: add half an ulp and keep the high halves.
    """
    if dtype == "bf16" and (arch == "gfx950" or len(values) == 1):
        return values[0].to(fx.BFloat16) if len(values) == 1 else Vec.from_elements(values, fx.Float32).to(fx.BFloat16)
    if dtype == "fp16":
        halves = [v.to(fx.Float16).bitcast(fx.Int16) for v in values]
        if len(values) == 1:
            return halves[0]
        low = fx.Int32(0xFFFF)
        pairs = [(fx.Int32(halves[i]) & low) | (fx.Int32(halves[i + 1]) << 16) for i in range(0, len(values), 2)]
        return Vec.from_elements(pairs, fx.Int32).bitcast(fx.Int16)
    bits = [v.bitcast(fx.Int32) + 0x8000 for v in values]
    high = fx.Int32(-65536)
    pairs = [(bits[i + 1] & high) | bits[i].shrui(fx.Int32(16)) for i in range(0, len(bits), 2)]
    return Vec.from_elements(pairs, fx.Int32).bitcast(fx.BFloat16)


def join(vectors, elem):
    """Short vectors, one behind the other."""
    return Vec.from_elements([v[e] for v in vectors for e in range(len(v))], elem) if len(vectors) > 1 else vectors[0]


def read_turned(ptr, elem):
    """gfx950: four rows of one column out of a 16-lane group's 4x16 LDS tile.

    Lane l of the group addresses row l // 4, columns 4 * (l % 4) on, and receives column l.
    """
    return Vec(rocdl.ds_read_tr16_b64(fx.Vector[elem, 4].ir_type, ptr.llvm_ptr).result, dtype=elem)
