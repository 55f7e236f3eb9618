"""The fused backward of one key block: five products a query tile, dK and dV in registers, dQ added to scratch.

MFMA 16x16; wave w owns keys [w * 16 * key_tiles, ...) of the block, and a share of the dQ tiles. Q is the wide streamed
tensor, dO the slim one. Letters in shapes: M query rows of a tile, N keys of the block, DQK, DV head dims, E elements a
lane holds of an operand.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc  # noqa: TID253
import flydsl.expr as fx  # noqa: TID253
from flydsl.expr import const_expr, gpu, range_constexpr, rocdl  # noqa: TID253

from .geometry import TILE, Geometry
from .prims_device import (
    FAR,
    LOG2E,
    LOW,
    Grid,
    Scales,
    Vec,
    View,
    atomic_add,
    atomic_add_pair,
    capped,
    exp2,
    greater,
    lesser,
    load,
    rows,
)
from .segments_device import Segments
from .tiles_device import Tiles


def build(geometry: Geometry, features: frozenset[str]):
    """The launcher of one build; `features` is a subset of {"packed", "used_q", "used_k", "softcap"}."""
    G, X = geometry, Tiles(geometry)
    BM, BN, KT, NQ, NV, DT = G.block_m, G.block_n, G.key_tiles, G.qk_tiles, G.v_tiles, G.dq_tiles
    KEYS = BN // G.dq_groups  # keys of a dQ group
    STEPS = KEYS // G.mfma_k
    Lds = X.lds_type()
    four_f32 = fx.Vector[fx.Float32, 4]

    def dq_column(at, dt):
        """Column of dQ that a lane computes in its tile dt: neighbours in pairs where pairs are added at once."""
        if G.accumulate == "bf16":
            return at.d + (dt // 2) * (2 * TILE) + at.lm * 2 + dt % 2
        return at.d + dt * TILE + at.lm

    def turned_keys(view, b, h, start, valid, at):
        """K^T of this wave's dQ tiles as B operands: [dQ tile][step] of E keys of one column; gathered once a block."""
        rsrc = rows(view.at(b, h, start), view.s, valid, G.qk_head_dim, 2)
        stride = fx.Int32(view.s)

        def one(dt, ks):
            found = []
            for e in range(G.lane_elems):
                j = at.group * KEYS + (ks * G.mfma_k + e) + at.lg * G.lane_elems
                offset = (j < valid).select((j * stride + dq_column(at, dt)) * 2, fx.Int32(FAR))
                found.append(load(rsrc, offset, X.elem))
            return Vec.from_elements(found, X.elem)

        return [[one(dt, ks) for ks in range(STEPS)] for dt in range(DT)]

    def scores(src, lds, copy, keys, at, i0):
        """# 1 S = Q K^T  # 2 P = exp2(S - LSE)  # 4 dP = dO V^T  # 5 dS = P (dP - D); dS goes to LDS too.

        Returns P and dS as A operands of the transposed products: [query tile][key tile] of four rows of one key.
        """
        p_all, ds_all = [], []
        for it in range(G.q_tiles):
            row4 = copy * BM + it * TILE + at.lg * 4
            lse, delta = (fx.ptr_load(ptr + row4, result_type=four_f32) for ptr in (lds.lse, lds.delta))
            p_row, ds_row = [], []
            for kt in range(KT):
                s = X.product(lds, "wide", copy, it, keys.k[kt], at)
                dp = X.product(lds, "slim", copy, it, keys.v[kt], at)
                p, ds = [], []
                for r in range(4):
                    from_left = keys.diagonal[kt] - (i0 + (it * TILE + r))
                    seen = fx.Uint32(from_left) <= fx.Uint32(src.width)
                    x, slope = capped(s[r], src.scale_log2, src.cap)
                    p.append(seen.select(exp2(x - lse[r]), fx.Float32(0.0)))
                    grad = p[r] * (dp[r] - delta[r])
                    ds.append(grad if slope is None else grad * slope)
                ds = X.small(ds)
                if G.makes_dq:
                    column = X.owned(at, kt)
                    for r in range(4):
                        fx.ptr_store(ds[r], lds.ds + ((it * TILE + r + at.lg * 4) * X.pitch_ds + column))
                p_row.append(X.small(p))
                ds_row.append(ds)
            p_all.append(p_row)
            ds_all.append(ds_row)
        return p_all, ds_all

    def add_dq(src, lds, keys, at, i0):
        """# 7 dQ += dS K, without the scale: dS [M, N] out of LDS, K^T resident, fp32 or paired bf16 atomics.

        Accumulator rows lie qk_head_dim apart, as the plan has them: a constant that the offset field takes.
        """
        count, pitch = lesser(src.seqlen_q - i0, fx.Int32(BM)), fx.Int64(G.qk_head_dim)
        rsrc = rows(src.dq + fx.Int64(i0) * pitch, pitch, count, G.qk_head_dim, 4)
        sums = []
        for dt in range(DT):
            acc = X.zero()
            for ks in range(STEPS):
                column = at.group * KEYS + (ks * G.mfma_k) + at.lg * G.lane_elems
                where = (at.i * TILE + at.lm) * X.pitch_ds + column
                acc = X.dot(fx.ptr_load(lds.ds + where, result_type=X.pack), keys.k_t[dt][ks], acc)  # [M, E]
            sums.append(acc)
        row4 = at.i * TILE + at.lg * 4
        for dt in range(0, DT, 2 if G.accumulate == "bf16" else 1):
            for r in range(4):
                if G.accumulate == "bf16":
                    # A pointer has no bounds: rows behind the last hold exact zeros, added to the last row.
                    inside = fx.Int64(lesser(i0 + row4 + r, src.seqlen_q - 1)) * pitch
                    pair = X.small([sums[dt][r], sums[dt + 1][r]])
                    atomic_add_pair(pair, src.dq + (inside + fx.Int64(dq_column(at, dt))))
                else:
                    offset = row4 * (4 * G.qk_head_dim) + dq_column(at, dt) * 4
                    atomic_add(sums[dt][r], rsrc, offset + 4 * r * G.qk_head_dim)

    def hints():
        """Ask for sched_steps groups of LDS reads followed by MFMA in the score products, at a raised priority."""
        reads = G.q_tiles * KT * (G.qk_head_dim + G.v_head_dim) // G.mfma_k
        for _ in range(G.sched_steps):
            rocdl.sched_group_barrier(rocdl.mask_dsrd, max(1, reads // G.sched_steps), 0)
            rocdl.sched_group_barrier(rocdl.mask_mfma, max(1, reads // G.sched_steps), 0)
        rocdl.s_setprio(0)

    @flyc.kernel(known_block_size=[G.threads, 1, 1], name=f"undertow_bwd_{G.qk_head_dim}_{G.v_head_dim}")
    def bwd_kernel(
        q: View, k: View, v: View, dout: View, lse: View, delta: View, dq_acc: View, dk: View, dv: View,
        cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, group: fx.Int32,
        scales: Scales,
    ):  # fmt: skip
        """P = exp2(scale log2(e) Q K^T - LSE), dV = P^T dO, dS = P (dO V^T - D), dK = scale dS^T Q, dQ += dS K.

        Grid: (nheads_kv, batch, key blocks) with kv_major, (key blocks, nheads_kv, batch) without.
        Writes: dk, dv (rows of this key block, all of them), adds to dq_acc (zero before; the scale is applied later).
        `lse` is in base 2, +inf for rows that see no key.
        """
        if const_expr(G.kv_major):
            h_kv, b, n_block = fx.block_idx.x, fx.block_idx.y, fx.block_idx.z
        else:
            n_block, h_kv, b = fx.block_idx.x, fx.block_idx.y, fx.block_idx.z
        q0, seqlen_q = segments.side("q", cu_q).of(b)
        k0, seqlen_k = segments.side("k", cu_k).of(b)
        j0 = n_block * BN
        if j0 < seqlen_k:
            lds = X.lds(fx.SharedAllocator().allocate(Lds).peek())
            at = X.place(fx.thread_idx.x)
            share = (at.wave // G.dq_groups) * DT
            at.group, at.i, at.d = at.wave % G.dq_groups, share // NQ, (share % NQ) * TILE
            valid, kv_row = lesser(seqlen_k - j0, fx.Int32(BN)), k0 + j0
            keys = SimpleNamespace(
                k=X.resident(k, b, h_kv, kv_row, valid, at, G.qk_head_dim),
                v=X.resident(v, b, h_kv, kv_row, valid, at, G.v_head_dim),
                k_t=turned_keys(k, b, h_kv, kv_row, valid, at) if G.makes_dq else None,
                diagonal=[],
            )
            left, shift = segments.left, segments.shift(seqlen_q, seqlen_k)
            for kt in range_constexpr(KT):
                j = X.owned(at, kt)
                # A key behind the end gets a diagonal that no row's band reaches.
                keys.diagonal.append((j < valid).select(j0 + j - shift + left, fx.Int32(2 * LOW)) - at.lg * 4)
            first = greater(j0 - segments.right - shift, fx.Int32(0)) // BM * BM
            last = lesser(seqlen_q, j0 + valid + left - shift)
            call = {"seqlen_q": seqlen_q, "width": left + segments.right, "scale_log2": scales.softmax * LOG2E}
            call |= {"cap": (scales.to_cap, scales.cap_log2) if "softcap" in features else None}
            dk_acc = [X.zero() for _ in range_constexpr(KT * NQ)]
            dv_acc = [X.zero() for _ in range_constexpr(KT * NV)]
            for g in range(fx.Int32(0), group, fx.Int32(1)):
                h = h_kv * group + fx.Int32(g)
                src = SimpleNamespace(**call)
                tensors = ((q.at(b, h, q0), q.s), (dout.at(b, h, q0), dout.s))
                stats = (lse.at(b, h, q0), delta.at(b, h, q0))
                # The bf16 accumulator counts rows from the segment's start, the packed one from the tensor's.
                src.dq = dq_acc.at(b, h, fx.Int32(0) if G.accumulate == "bf16" else q0)
                copy = fx.Int32(0)
                if const_expr(G.pipeline):
                    X.keep(X.fetch(tensors, stats, first, seqlen_q, at), lds, copy, at)
                    gpu.barrier()
                for i in range(first, last, fx.Int32(BM)):
                    i0 = fx.Int32(i)
                    tile = X.fetch(tensors, stats, i0 + BM if G.pipeline else i0, seqlen_q, at)
                    if const_expr(not G.pipeline):
                        gpu.barrier()
                        X.keep(tile, lds, copy, at)
                        gpu.barrier()
                    if const_expr(G.schedule == "interleave"):
                        rocdl.s_setprio(1)
                    p, ds = scores(src, lds, copy, keys, at, i0)
                    if const_expr(G.schedule == "interleave"):
                        hints()
                    dv_acc = X.outer(p, lds, "slim", copy, dv_acc, at)  # 3 dV += P^T dO
                    dk_acc = X.outer(ds, lds, "wide", copy, dk_acc, at)  # 6 dK += dS^T Q
                    if const_expr(G.makes_dq):
                        gpu.barrier()
                        add_dq(src, lds, keys, at, i0)
                    if const_expr(G.pipeline):
                        copy = 1 - copy
                        X.keep(tile, lds, copy, at)
                        gpu.barrier()
            X.write(dk, b, h_kv, kv_row, valid, "wide", dk_acc, scales.softmax, at)
            X.write(dv, b, h_kv, kv_row, valid, "slim", dv_acc, fx.Float32(1.0), at)

    @flyc.jit
    def launch(
        q: View, k: View, v: View, dout: View, lse: View, delta: View, dq_acc: View, dk: View, dv: View,
        cu_q: fx.Pointer, cu_k: fx.Pointer, segments: Segments, group: fx.Int32,
        scales: Scales, grid: Grid, stream: fx.Stream,
    ):  # fmt: skip
        """Launch over the grid."""
        bwd_kernel(
            q, k, v, dout, lse, delta, dq_acc, dk, dv, cu_q, cu_k, segments, group, scales
        ).launch(grid=(grid.x, grid.y, grid.z), block=(G.threads, 1, 1), stream=stream)  # fmt: skip

    return launch
