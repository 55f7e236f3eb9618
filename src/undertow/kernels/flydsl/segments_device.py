"""Where a segment lies, by cu_seqlens and seqused in device memory or by equal lengths, and the band its rows see."""

from __future__ import annotations

import flydsl.compiler as flyc  # noqa: TID253
import flydsl.expr as fx  # noqa: TID253

from .prims_device import Bundle, lesser


class Side:
    """Segments of the query or key side, inside a kernel: pointers, the dense length, and what the build knows."""

    def __init__(self, cu, used, seqlen, features):
        """`used` is None where the build does not read it."""
        self.cu, self.used, self.seqlen, self.packed = cu, used, seqlen, "packed" in features

    def of(self, b):
        """(first row, length) of segment b; dense rows count from 0 in every batch."""
        start, length = fx.Int32(0), self.seqlen
        if self.packed:
            start = fx.ptr_load(self.cu + b)
            length = fx.ptr_load(self.cu + (b + 1)) - start
        if self.used is not None:
            length = lesser(fx.ptr_load(self.used + b), length)
        return start, length


class Segments(Bundle):
    """The argument: seqused pointers (null where the build does not read them), the dense lengths, the band.

    `left`, `right` bound j - i - shift from both sides, far away where the band is open. `align` is 1 where the
    diagonal starts at seqlen_k - seqlen_q, 0 where it starts at 0. The cu_seqlens pointers are arguments of their own:
    a null pointer argument tells FlyDSL to compile without a launch.
    """

    names = ("used_q", "used_k", "batch", "seqlen_q", "seqlen_k", "align", "left", "right")
    types = (fx.Pointer,) * 2 + (fx.Int32,) * 6

    def __init__(self, *parts, features=frozenset()):
        super().__init__(*parts)
        self.features = features

    def side(self, name, cu):
        """The segments of side "q" or "k"."""
        used = getattr(self, f"used_{name}") if f"used_{name}" in self.features else None
        return Side(cu, used, getattr(self, f"seqlen_{name}"), self.features)

    def shift(self, seqlen_q, seqlen_k):
        """The key on the diagonal of query 0."""
        return (seqlen_k - seqlen_q) * self.align

    def __cache_signature__(self):
        return (*super().__cache_signature__(), self.features)

    @classmethod
    def __construct_from_ir_values__(cls, values, exemplar=None):
        found = super().__construct_from_ir_values__(values)
        found.features = exemplar.features
        return found


@flyc.jit
def last_start(cu, row, batch, search):
    """The last n <= batch with cu[n] <= row (0 if there is none), by `search` halvings: bits of `batch`."""
    found = fx.Int32(0)
    for n in range(fx.Int32(0), search, fx.Int32(1)):
        further = found + (fx.Int32(1) << (search - 1 - fx.Int32(n)))
        start = fx.ptr_load(cu + lesser(further, batch))
        found = ((further <= batch) & (start <= row)).select(further, found)
    return found


def locate(segments, cu, name, b, row, search):
    """(segment, row inside it, whether it is a real row) of token row `row` of batch b; packed rows are one batch."""
    n = last_start(cu, row, segments.batch, search) if "packed" in segments.features else b
    known = n < segments.batch
    n = known.select(n, fx.Int32(0))
    start, length = segments.side(name, cu).of(n)
    i = row - start
    return n, i, known & (i >= 0) & (i < length)
