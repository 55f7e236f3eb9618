"""What both matrix kernels do with tiles: one side is streamed through LDS, the other stays in registers.

The main kernel streams (Q, dO) past resident (K, V); the dQ kernel streams (K, V) past resident (Q, dO). Streamed tiles
have `block_m` rows, resident blocks `block_n`. Letters in shapes: M streamed rows, N resident rows, D a head dim, E
elements a lane holds of an operand.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.expr as fx  # noqa: TID253

from .geometry import TILE, WAVE, Geometry
from .prims_device import CARRIER, FAR, Vec, join, lesser, load, mfma, narrow, read_turned, rows, store, uniform

LDS_FIELDS = ("wide", "slim", "ds", "wide_t", "slim_t", "lse", "delta")


class Tiles:
    """Traced helpers for one geometry. "wide" is the streamed tensor of qk_head_dim columns, "slim" of v_head_dim."""

    def __init__(self, geometry: Geometry):
        G = self.G = geometry
        self.elem = CARRIER[G.dtype]
        self.dims = {"wide": G.qk_head_dim, "slim": G.v_head_dim}
        self.pitch = {name: G.row_elems(dim) for name, dim in self.dims.items()}
        self.pitch_t, self.pitch_ds = G.row_elems(G.block_m), G.row_elems(G.block_n)
        self.pack = fx.Vector[self.elem, G.lane_elems]
        self.four = fx.Vector[self.elem, 4]

    def lds_type(self):
        """The LDS struct: exactly the arrays of the geometry's budget, in its order."""
        size = {"lse": 4, "delta": 4}
        arrays = {
            name: fx.Array[fx.Float32 if name in size else self.elem, nbytes // size.get(name, 2), 16]
            for name, nbytes in self.G.lds().items()
        }
        return fx.struct(type("Lds", (), {"__annotations__": arrays}))

    def lds(self, memory):
        """Pointers by array name, None for the arrays this geometry does without."""
        here = self.G.lds()
        return SimpleNamespace(**{n: getattr(memory, n).ptr if n in here else None for n in LDS_FIELDS})

    def place(self, tid):
        """This thread's wave (scalar), lane row lm, lane group lg, and its place among the threads that stage a row."""
        wave, lane, per_row = uniform(tid // WAVE), tid % WAVE, self.G.threads_per_row
        at = SimpleNamespace(wave=wave, lm=lane % TILE, lg=lane // TILE)
        at.row, at.column = tid // per_row, tid % per_row
        return at

    def zero(self):
        """An empty 16x16 accumulator."""
        return Vec.filled(4, 0.0, fx.Float32)

    def dot(self, a, b, c):
        """C + A B."""
        return mfma(a, b, c, self.G.dtype, self.G.mfma_k)

    def small(self, values):
        """fp32 values in the 16-bit type."""
        return narrow(values, self.G.dtype, self.G.arch)

    def owned(self, at, kt):
        """Row of the resident block that lane row lm of this wave's tile kt stands for."""
        return at.wave * (self.G.key_tiles * TILE) + (kt * TILE + at.lm)

    def resident(self, view, b, h, start, valid, at, dim):
        """This wave's rows as B operands: [tile][step] of [N, E], 0 behind the segment's end."""
        G = self.G
        rsrc = rows(view.at(b, h, start), view.s, valid, dim, 2)
        stride, found = fx.Int32(view.s), []
        for kt in range(G.key_tiles):
            row = self.owned(at, kt)
            offset = (row < valid).select((row * stride + at.lg * G.lane_elems) * 2, fx.Int32(FAR))
            steps = range(dim // G.mfma_k)
            found.append([load(rsrc, offset + c * (G.mfma_k * 2), self.elem, G.lane_elems) for c in steps])
        return found

    def fetch(self, sources, stats, first, seqlen, at):
        """Global to registers: this thread's part of the two streamed tiles [M, D] and of the statistics [M].

        `sources` are (pointer to row 0, stride) of the wide and the slim tensor; 0 behind the last row.
        """
        G, found = self.G, []
        count = lesser(seqlen - first, fx.Int32(G.block_m))
        for (ptr, stride), dim in zip(sources, self.dims.values(), strict=True):
            rsrc = rows(ptr + fx.Int64(first) * stride, stride, count, dim, 2)
            for column, width in G.sections(dim):
                offset = (at.row * fx.Int32(stride) + (at.column * width + column)) * 2
                found.append(load(rsrc, offset, self.elem, width))
        for ptr in stats:
            rsrc = rows(ptr + fx.Int64(first), fx.Int64(1), count, 1, 4)
            found.append(load(rsrc, at.row * 4, fx.Float32))
        return found

    def keep(self, held, lds, copy, at):
        """Registers to LDS copy `copy`: rows [M, D], statistics [M], and, for transposed_tiles, columns [D, M]."""
        G, held = self.G, list(held)
        for name, dim in self.dims.items():
            ptr, ptr_t, pitch = getattr(lds, name), getattr(lds, f"{name}_t"), self.pitch[name]
            for first, width in G.sections(dim):
                part, column = held.pop(0), at.column * width + first
                for e in range(0, width, 4):
                    some = Vec.from_elements([part[x] for x in range(e, min(width, e + 4))], self.elem)
                    fx.ptr_store(some, ptr + (copy * (G.block_m * pitch) + at.row * pitch + column + e))
                for e in range(width if G.transposed_tiles else 0):
                    fx.ptr_store(part[e], ptr_t + (copy * (dim * self.pitch_t) + (column + e) * self.pitch_t + at.row))
        # All threads of a row, lanes of one wave, store the same two values: no branch splits the loop body.
        for value, ptr in zip(held, (lds.lse, lds.delta), strict=False):
            fx.ptr_store(value, ptr + (copy * G.block_m + at.row))

    def product(self, lds, name, copy, it, resident, at):
        """Streamed tile `it` times resident rows, over columns: C row 4 * lg + r is streamed, column lm resident."""
        G, acc = self.G, self.zero()
        row = copy * G.block_m + it * TILE + at.lm
        for c in range(self.dims[name] // G.mfma_k):
            where = row * self.pitch[name] + c * G.mfma_k + at.lg * G.lane_elems
            acc = self.dot(fx.ptr_load(getattr(lds, name) + where, result_type=self.pack), resident[c], acc)  # [M, E]
        return acc

    def outer(self, left, lds, name, copy, acc, at):
        """acc [N, D] += left^T rows, the rows [M, D] out of LDS in the second orientation.

        `left` is [streamed tile][resident tile] of four streamed rows of one resident row, as `product` leaves it.
        """
        G, acc, tiles = self.G, list(acc), self.dims[name] // TILE
        for step in range(G.block_m // G.mfma_k):
            its = range(step * (G.mfma_k // TILE), (step + 1) * (G.mfma_k // TILE))
            a = [join([left[it][kt] for it in its], self.elem) for kt in range(G.key_tiles)]
            n = 0
            for first, columns in G.turned(self.dims[name]):
                parts = [self.turned(lds, name, copy, it, (first, columns), at) for it in its]
                for e in range(columns):
                    b = join([part[e] for part in parts], self.elem)  # [M, 1 column]
                    for kt in range(G.key_tiles):
                        acc[kt * tiles + n] = self.dot(a[kt], b, acc[kt * tiles + n])
                    n += 1
        return acc

    def turned(self, lds, name, copy, it, section, at):
        """Four rows of each column of a section of one 16-row tile, a column a vector."""
        G, pitch, dim, (first, columns) = self.G, self.pitch[name], self.dims[name], section
        base = copy * (G.block_m * pitch) + (it * TILE) * pitch
        ptr = getattr(lds, name)
        if G.transposed_tiles:
            start = copy * (dim * self.pitch_t) + it * TILE + at.lg * 4
            where = [start + (at.lm * columns + (first + e)) * self.pitch_t for e in range(columns)]
            return [fx.ptr_load(getattr(lds, f"{name}_t") + w, result_type=self.four) for w in where]
        if columns == 1:
            row, column = at.lg * 4 + at.lm // 4, first + (at.lm % 4) * 4
            return [read_turned(ptr + (base + row * pitch + column), self.elem)]
        wide = fx.Vector[self.elem, columns]
        start = base + (at.lg * 4) * pitch + (first + at.lm * columns)
        four_rows = [fx.ptr_load(ptr + (start + x * pitch), result_type=wide) for x in range(4)]
        return [Vec.from_elements([four_rows[x][e] for x in range(4)], self.elem) for e in range(columns)]

    def write(self, view, b, h, start, valid, name, acc, factor, at):
        """This wave's resident rows of a gradient, rounded once, in the caller's dtype and strides."""
        G, dim = self.G, self.dims[name]
        rsrc = rows(view.at(b, h, start), view.s, valid, dim, 2)
        stride = fx.Int32(view.s)
        for kt in range(G.key_tiles):
            for r in range(4):
                row = at.wave * (G.key_tiles * TILE) + (kt * TILE + r) + at.lg * 4
                n = kt * (dim // TILE)
                for first, columns in G.turned(dim):
                    values = [acc[n + e][r] * factor for e in range(columns)]
                    n += columns
                    offset = (row * stride + (at.lm * columns + first)) * 2
                    store(self.small(values), rsrc, (row < valid).select(offset, fx.Int32(FAR)))
