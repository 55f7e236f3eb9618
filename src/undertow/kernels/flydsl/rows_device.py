"""The kernels around the main one, row by row: D and LSE in base 2 before it, dQ in the caller's dtype behind it."""

from __future__ import annotations

import flydsl.compiler as flyc  # noqa: TID253
import flydsl.expr as fx  # noqa: TID253
from flydsl.expr import const_expr, range_constexpr  # noqa: TID253

from .geometry import WAVE, RowGeometry
from .prims_device import ELEMENT, FAR, LOG2E, Grid, View, exp2, greater, lesser, load, narrow, rows, store
from .segments_device import Segments, locate

VEC = 8  # elements of 16 bits a lane loads at once


def build_preprocess(geometry: RowGeometry, features: frozenset[str]):
    """D, LSE and the zeroed dQ accumulator; `features` out of packed, used_q, used_k, dlse, delta, sink, zero."""
    G, elem = geometry, ELEMENT[geometry.dtype]
    LANES, ROWS = G.lanes_per_row(G.v_head_dim), G.rows(G.v_head_dim)
    ZEROS = -(-ROWS * G.qk_head_dim // (G.threads * 4))

    @flyc.kernel(known_block_size=[G.threads, 1, 1], name=f"undertow_preprocess_{G.qk_head_dim}_{G.v_head_dim}")
    def preprocess_kernel(
        dout: View, out: View, lse_in: View, dlse: View, delta_in: View, lse: View, delta: View, dq_acc: View,
        dsink: View, sink: fx.Pointer, cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, search: fx.Int32,
    ):  # fmt: skip
        """delta = rowsum(dO * O) - dLSE, lse = log2(e) LSE; +inf and -dLSE for a row that sees no key.

        Grid: (row tiles, nheads_q, batch), packed rows as one batch.
        Writes: lse, delta of every row (+inf and 0 in gaps), zeros to dq_acc, dsink = -exp(sink - LSE) delta.
        """
        tid, h, b = fx.thread_idx.x, fx.block_idx.y, fx.block_idx.z
        t0 = fx.block_idx.x * ROWS
        count = segments.seqlen_q - t0
        row, lane = tid // LANES, tid % LANES
        # The segment this row lies in, its place there, and whether the band shows it any key.
        n, i, live = locate(segments, cu_q, "q", b, t0 + row, search)
        _, seqlen_q = segments.side("q", cu_q).of(n)
        _, seqlen_k = segments.side("k", cu_k).of(n)
        diagonal = i + segments.shift(seqlen_q, seqlen_k)
        sees = live & (greater(diagonal - segments.left, fx.Int32(0)) < lesser(diagonal + segments.right + 1, seqlen_k))

        tile = lesser(count, fx.Int32(ROWS))
        total = fx.Float32(0.0)
        if const_expr("delta" not in features):
            parts = []
            for view in (dout, out):
                rsrc = rows(view.at(b, h, t0), view.s, tile, G.v_head_dim, 2)
                offset = (row * fx.Int32(view.s) + lane * VEC) * 2
                real = (row < count) & (lane * VEC < G.v_head_dim)
                parts.append(load(rsrc, real.select(offset, fx.Int32(FAR)), elem, VEC).to(fx.Float32))
            product = parts[0] * parts[1]
            for e in range_constexpr(VEC):
                total = total + product[e]
            hop = LANES // 2
            while const_expr(hop >= 1):
                total = total + total.shuffle_xor(hop, WAVE)
                hop //= 2

        side = lambda view: rows(view.at(b, h, t0), fx.Int64(1), tile, 1, 4)
        if const_expr("delta" in features):
            total = load(side(delta_in), row * 4, fx.Float32)
        total = sees.select(total, fx.Float32(0.0))
        natural = load(side(lse_in), row * 4, fx.Float32)
        if const_expr("dlse" in features):
            total = total - live.select(load(side(dlse), row * 4, fx.Float32), fx.Float32(0.0))
        writes = (lane == 0).select(row * 4, fx.Int32(FAR))
        inf = fx.Float32(float("inf"))
        store(sees.select(natural * LOG2E, inf), side(lse), writes)
        if const_expr("sink" in features):
            logit = fx.ptr_load(sink + h)
            share = exp2((logit - natural) * LOG2E)
            share = fx.Float32(0.0) - sees.select(share, fx.Float32(1.0)) * total
            store(live.select(share, fx.Float32(0.0)), side(dsink), writes)
        store(total, side(delta), writes)
        if const_expr("zero" in features):
            rsrc = rows(dq_acc.at(b, h, t0), dq_acc.s, tile, G.qk_head_dim, 4)
            zeros = fx.Vector.filled(4, 0.0, fx.Float32)
            quads = G.qk_head_dim // 4
            for n in range_constexpr(ZEROS):
                e = tid + n * G.threads
                offset = ((e // quads) * fx.Int32(dq_acc.s) + (e % quads) * 4) * 4
                store(zeros, rsrc, (e // quads < tile).select(offset, fx.Int32(FAR)))

    @flyc.jit
    def launch(
        dout: View, out: View, lse_in: View, dlse: View, delta_in: View, lse: View, delta: View, dq_acc: View,
        dsink: View, sink: fx.Pointer, cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, search: fx.Int32,
        grid: Grid, stream: fx.Stream,
    ):  # fmt: skip
        """Launch over the grid."""
        preprocess_kernel(
            dout, out, lse_in, dlse, delta_in, lse, delta, dq_acc, dsink, sink, cu_q, cu_k, segments, search
        ).launch(grid=(grid.x, grid.y, grid.z), block=(G.threads, 1, 1), stream=stream)  # fmt: skip

    return launch


def build_convert(geometry: RowGeometry, features: frozenset[str]):
    """dQ out of its accumulator: packed fp32, or, with "bf16" in `features`, bf16 by segment."""
    G = geometry
    LANES, ROWS = G.lanes_per_row(G.qk_head_dim), G.rows(G.qk_head_dim)

    @flyc.kernel(known_block_size=[G.threads, 1, 1], name=f"undertow_convert_{G.qk_head_dim}")
    def convert_kernel(
        dq_acc: View, dq: View, cu_q: fx.Pointer, segments: Segments, search: fx.Int32, scale: fx.Float32
    ):
        """dq = scale dq_acc, rounded once.

        Grid: (row tiles, nheads_q, batch), packed rows as one batch.
        Writes: every row of dq (0 outside the segments: the fp32 accumulator is 0 there, the bf16 one is not read).
        """
        tid, h, b = fx.thread_idx.x, fx.block_idx.y, fx.block_idx.z
        t0 = fx.block_idx.x * ROWS
        tile = lesser(segments.seqlen_q - t0, fx.Int32(ROWS))
        row, column = tid // LANES, (tid % LANES) * VEC
        real = (row < tile) & (column < G.qk_head_dim)
        if const_expr("bf16" in features):
            n, i, live = locate(segments, cu_q, "q", b, t0 + row, search)
            safe = (live & real).select(i, fx.Int32(0))
            at = dq_acc.at(n, h, safe) + (real.select(column, fx.Int32(0)))
            some = fx.ptr_load(at, result_type=fx.Vector[fx.BFloat16, VEC]).to(fx.Float32)
            values = [live.select(some[e], fx.Float32(0.0)) for e in range_constexpr(VEC)]
        else:
            rsrc = rows(dq_acc.at(b, h, t0), dq_acc.s, tile, G.qk_head_dim, 4)
            offset = (row * fx.Int32(dq_acc.s) + column) * 4
            halves = [load(rsrc, real.select(offset + x, fx.Int32(FAR)), fx.Float32, 4) for x in (0, 16)]
            values = [half[e] for half in halves for e in range_constexpr(4)]
        rounded = narrow([x * scale for x in values], G.dtype, G.arch)
        offset = (row * fx.Int32(dq.s) + column) * 2
        rsrc = rows(dq.at(b, h, t0), dq.s, tile, G.qk_head_dim, 2)
        store(rounded, rsrc, real.select(offset, fx.Int32(FAR)))

    @flyc.jit
    def launch(
        dq_acc: View, dq: View, cu_q: fx.Pointer, segments: Segments, search: fx.Int32, scale: fx.Float32,
        grid: Grid, stream: fx.Stream,
    ):  # fmt: skip
        """Launch over the grid."""
        convert_kernel(dq_acc, dq, cu_q, segments, search, scale).launch(
            grid=(grid.x, grid.y, grid.z), block=(G.threads, 1, 1), stream=stream
        )

    return launch


def build_gaps(geometry: RowGeometry, features: frozenset[str]):
    """Zeros to the rows that no segment owns: of dK and dV, or, with "queries" in `features`, of dQ."""
    G, elem = geometry, ELEMENT[geometry.dtype]
    side = "q" if "queries" in features else "k"
    DIMS = (G.qk_head_dim,) if side == "q" else (G.qk_head_dim, G.v_head_dim)
    LANES, ROWS = G.lanes_per_row(max(DIMS)), G.rows(max(DIMS))

    @flyc.kernel(known_block_size=[G.threads, 1, 1], name=f"undertow_gaps_{side}_{G.qk_head_dim}_{G.v_head_dim}")
    def gaps_kernel(qk: View, v: View, cu: fx.Pointer, segments: Segments, search: fx.Int32):
        """dK = dV = 0, or dQ = 0, in gaps between segments and behind the last.

        Grid: (row tiles, heads, batch), packed rows as one batch.
        Writes: rows of qk (dK or dQ) and v (dV) outside every segment, and no other.
        """
        tid, h, b = fx.thread_idx.x, fx.block_idx.y, fx.block_idx.z
        t0 = fx.block_idx.x * ROWS
        total = segments.seqlen_q if side == "q" else segments.seqlen_k
        tile = lesser(total - t0, fx.Int32(ROWS))
        row, column = tid // LANES, (tid % LANES) * VEC
        _, _, live = locate(segments, cu, side, b, t0 + row, search)
        zeros = fx.Vector.filled(VEC, 0.0, elem)
        for n in range_constexpr(len(DIMS)):
            view = (qk, v)[n]
            rsrc = rows(view.at(b, h, t0), view.s, tile, DIMS[n], 2)
            offset = (row * fx.Int32(view.s) + column) * 2
            dead = (row < tile) & (column < DIMS[n])
            store(zeros, rsrc, live.select(fx.Int32(FAR), dead.select(offset, fx.Int32(FAR))))

    @flyc.jit
    def launch(
        qk: View, v: View, cu: fx.Pointer, segments: Segments, search: fx.Int32,
        grid: Grid, stream: fx.Stream,
    ):  # fmt: skip
        """Launch over the grid."""
        gaps_kernel(qk, v, cu, segments, search).launch(
            grid=(grid.x, grid.y, grid.z), block=(G.threads, 1, 1), stream=stream
        )

    return launch
