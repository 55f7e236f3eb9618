"""dQ by a kernel that owns its rows: no atomics, so the sum has one order. Recomputes S and dP, three products a tile.

Wave w owns query rows [w * 16 * key_tiles, ...) of the block; K is the wide streamed tensor, V the slim one.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc  # noqa: TID253
import flydsl.expr as fx  # noqa: TID253
from flydsl.expr import const_expr, gpu, range_constexpr  # noqa: TID253

from .geometry import TILE, Geometry
from .prims_device import FAR, HIGH, LOG2E, Grid, Scales, View, capped, exp2, greater, lesser, load, rows
from .segments_device import Segments
from .tiles_device import Tiles


def build(geometry: Geometry, features: frozenset[str]):
    """The launcher of one build; `features` is a subset of {"packed", "used_q", "used_k", "softcap"}."""
    G, X = geometry, Tiles(geometry)
    BM, BN, KT, NQ = G.block_m, G.block_n, G.key_tiles, G.qk_tiles
    Lds = X.lds_type()

    def gradients(src, lds, copy, own, at, j0):
        """# 1 S^T = K Q^T  # 2 P = exp2(S - LSE)  # 4 dP^T = V dO^T  # 5 dS^T = P (dP - D), as A operands of dS."""
        found = []
        for it in range(G.q_tiles):
            found.append([])
            for kt in range(KT):
                s = X.product(lds, "wide", copy, it, own.q[kt], at)
                dp = X.product(lds, "slim", copy, it, own.dout[kt], at)
                ds = []
                for r in range(4):
                    seen = fx.Uint32(own.diagonal[kt] + (j0 + (it * TILE + r))) <= fx.Uint32(own.width[kt])
                    x, slope = capped(s[r], src.scale_log2, src.cap)
                    p = seen.select(exp2(x - own.lse[kt]), fx.Float32(0.0))
                    grad = p * (dp[r] - own.delta[kt])
                    ds.append(grad if slope is None else grad * slope)
                found[it].append(X.small(ds))
        return found

    @flyc.kernel(known_block_size=[G.threads, 1, 1], name=f"undertow_dq_{G.qk_head_dim}_{G.v_head_dim}")
    def dq_kernel(
        q: View, k: View, v: View, dout: View, lse: View, delta: View, dq: View,
        cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, group: fx.Int32,
        scales: Scales,
    ):  # fmt: skip
        """dS = P (dO V^T - D), dQ = scale dS K, keys in ascending order.

        Grid: (nheads_q, batch, query blocks), the last block first: under a causal mask it has the most keys.
        Writes: dq, every real row of the query block.
        """
        h, b = fx.block_idx.x, fx.block_idx.y
        i_block = (segments.seqlen_q + (BN - 1)) // BN - 1 - fx.block_idx.z
        q0, seqlen_q = segments.side("q", cu_q).of(b)
        k0, seqlen_k = segments.side("k", cu_k).of(b)
        i0 = i_block * BN
        if i0 < seqlen_q:
            lds = X.lds(fx.SharedAllocator().allocate(Lds).peek())
            at = X.place(fx.thread_idx.x)
            valid, row0 = lesser(seqlen_q - i0, fx.Int32(BN)), q0 + i0
            own = SimpleNamespace(
                q=X.resident(q, b, h, row0, valid, at, G.qk_head_dim),
                dout=X.resident(dout, b, h, row0, valid, at, G.v_head_dim),
                lse=[], delta=[], diagonal=[], width=[],
            )  # fmt: skip
            shift = segments.shift(seqlen_q, seqlen_k)
            for kt in range_constexpr(KT):
                i = X.owned(at, kt)
                offset = (i < valid).select(i * 4, fx.Int32(FAR))
                own.lse.append(load(rows(lse.at(b, h, row0), fx.Int64(1), valid, 1, 4), offset, fx.Float32))
                own.delta.append(load(rows(delta.at(b, h, row0), fx.Int64(1), valid, 1, 4), offset, fx.Float32))
                lowest = greater(i0 + i + shift - segments.left, fx.Int32(0))
                highest = lesser(i0 + i + shift + segments.right, seqlen_k - 1)
                some = lowest <= highest
                # A row without keys starts so far away that no key reaches it.
                own.diagonal.append(at.lg * 4 - some.select(lowest, fx.Int32(HIGH)))
                own.width.append(some.select(highest - lowest, fx.Int32(0)))
            first = greater(i0 + shift - segments.left, fx.Int32(0)) // BM * BM
            last = lesser(seqlen_k, i0 + valid + shift + segments.right)
            src = SimpleNamespace(scale_log2=scales.softmax * LOG2E)
            src.cap = (scales.to_cap, scales.cap_log2) if "softcap" in features else None
            h_kv = h // group
            tensors = ((k.at(b, h_kv, k0), k.s), (v.at(b, h_kv, k0), v.s))
            dq_acc = [X.zero() for _ in range_constexpr(KT * NQ)]
            copy = fx.Int32(0)
            if const_expr(G.pipeline):
                X.keep(X.fetch(tensors, (), first, seqlen_k, at), lds, copy, at)
                gpu.barrier()
            for j in range(first, last, fx.Int32(BM)):
                j0 = fx.Int32(j)
                tile = X.fetch(tensors, (), j0 + BM if G.pipeline else j0, seqlen_k, at)
                if const_expr(not G.pipeline):
                    gpu.barrier()
                    X.keep(tile, lds, copy, at)
                    gpu.barrier()
                ds = gradients(src, lds, copy, own, at, j0)
                dq_acc = X.outer(ds, lds, "wide", copy, dq_acc, at)  # 7 dQ += dS K
                if const_expr(G.pipeline):
                    copy = 1 - copy
                    X.keep(tile, lds, copy, at)
                    gpu.barrier()
            X.write(dq, b, h, row0, valid, "wide", dq_acc, scales.softmax, at)

    @flyc.jit
    def launch(
        q: View, k: View, v: View, dout: View, lse: View, delta: View, dq: View,
        cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, group: fx.Int32,
        scales: Scales, grid: Grid, stream: fx.Stream,
    ):  # fmt: skip
        """Launch over the grid."""
        dq_kernel(
            q, k, v, dout, lse, delta, dq, cu_q, cu_k, segments, group, scales
        ).launch(grid=(grid.x, grid.y, grid.z), block=(G.threads, 1, 1), stream=stream)  # fmt: skip

    return launch
