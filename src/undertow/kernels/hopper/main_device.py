"""The fused backward for Hopper in CuTe DSL: five GEMMs, one key tile a block, dQ added up by the copy engine.

A block is a producer warp and two warpgroups of consumers. Warpgroup g owns rows 64 g on of the key tile and works on
transposed scores, so that P^T is the register operand of dV. What runs beside what, in one step:

    tensor cores   dP^T  dV                             | dQ | S^T of the next tile  dK  |
    other units          dS^T, its way to shared memory |    | dQ's way out  next P^T = exp2 |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .geometry import Geometry, cutlass_dtype, fake, fake_stream
from .pieces_device import (
    CONSUMERS,
    K_MAJOR,
    LN2,
    MN_MAJOR,
    SLOTS,
    WARPGROUP,
    WARPS,
    Cut,
    Ring,
    Sources,
    Work,
    arrive,
    chain,
    chain_rs,
    clear,
    draw,
    exp2,
    expect,
    following,
    fragment_b,
    hand_over,
    load,
    make_rings,
    narrow,
    operand_shape,
    part_a,
    prefetch,
    ring_layout,
    row_of,
    store_rows,
    take_ticket,
    tma_source,
    turned,
)  # fmt: skip

STAGED, DS_FREE, DS_FULL, CLEARED = 1, 3, 5, 6
"""Named barriers: STAGED + g and DS_FREE + g belong to warpgroup g, the others to both."""


class Shared(NamedTuple):
    """A block's shared memory. `stats` goes with the stages of `q`; `items` holds the work drawn, see `Item`."""

    kv: Ring
    v: Any
    q: Ring
    do: Ring
    ds: Any
    out: Any
    stats: Any
    items: Ring


class Item(NamedTuple):
    """One key tile of one head.

    Tile, kv head, batch index, first key row, lengths, key rows up to the next segment, key on the diagonal of query 0,
    query tiles [m_lo, m_hi), the one to begin with and the way from there, 1 or -1; first query tile in memory, first
    query row.
    """

    n: Any
    head: Any
    b: Any
    k0: Any
    len_q: Any
    len_k: Any
    room: Any
    shift: Any
    m_lo: Any
    m_hi: Any
    m_first: Any
    way: Any
    tile0: Any
    q0: Any


class Mmas(NamedTuple):
    """One tiled MMA a product; dP^T is multiplied as S^T is."""

    s: Any
    dv: Any
    dk: Any
    dq: Any


class Backward:
    """The kernel of one Geometry, for `cute.compile`."""

    def __init__(self, geometry: Geometry) -> None:
        self.geo = geometry

    def arguments(self) -> tuple:
        """Arguments to compile for: every length and stride free, but the last stride, which is 1."""
        geo, dtype = self.geo, cutlass_dtype(self.geo.dtype)
        tensors = [fake(dtype, 4) for _ in range(4)]
        stats, dq_acc = fake(Float32, 4, {2: 2, 3: geo.tile_q}), fake(Float32, 3)
        outputs = [fake(dtype, 4) for _ in range(2)]
        scalars = (Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1), Int32(1))
        return *tensors, stats, dq_acc, *outputs, fake(Int32, 2), fake(Int32, 1), *scalars, fake_stream()

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, stats: cute.Tensor,
        dq_acc: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, table: cute.Tensor, counter: cute.Tensor,
        columns: Int32, together: Int32, scale: Float32, left: Int32, right: Int32, blocks: Int32, stream,
    ):  # fmt: skip
        """Launch `blocks` persistent blocks, which draw key tiles of heads.

        In this order: of each segment (dense: of the batch) `together` of the `columns` (heads; dense: heads of all
        segments) at a time, and of those the first key tiles first, which are the longest of a causal mask.

        q, dout (b, s, h, d) and k, v, dk, dv alike with any strides; stats (nheads_q, tiles, 2, tile_q) fp32: LSE in
        base 2 (+inf for rows that see nothing), D; dq_acc (nheads_q, tiles, tile_q * d) fp32 in the accumulators'
        order; table int32 (9, batch + 1), see side_device.write_table; counter int32, 0; scale is in base 2.
        """
        geo, dtype = self.geo, cutlass_dtype(self.geo.dtype)
        layouts = self._layouts(dtype)
        sources = (
            tma_source(q, layouts[0], geo.tile_q, geo.d_qk), tma_source(k, layouts[1], geo.tile_kv, geo.d_qk),
            tma_source(v, layouts[2], geo.tile_kv, geo.d_v), tma_source(dout, layouts[3], geo.tile_q, geo.d_v),
        )  # fmt: skip
        self._kernel(
            Sources(*sources, stats, table, counter), layouts, self._mmas(dtype), dq_acc, dk, dv,
            Work(columns, together, left, right), scale,
        ).launch(
            grid=[blocks, 1, 1], block=[3 * WARPGROUP, 1, 1], stream=stream, min_blocks_per_mp=1,
            use_pdl=not self.geo.dk,  # a first kernel waits for the statistics, what follows it fills its tail
        )  # fmt: skip

    def _layouts(self, dtype):
        """Shared-memory layouts of q, k, v, do, ds: atoms that divide what a warpgroup reads along either axis."""
        geo = self.geo
        qk, v = geo.atom(geo.d_qk), geo.atom(geo.d_v)
        of_ds = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
        return (
            ring_layout(dtype, qk, (geo.tile_q, geo.d_qk, geo.q_stages)),
            ring_layout(dtype, geo.k_atom, (geo.tile_kv, geo.d_qk, 1)),
            ring_layout(dtype, v, (geo.tile_kv, geo.d_v, 1)),
            ring_layout(dtype, v, (geo.tile_q, geo.d_v, geo.do_stages)),
            cute.tile_to_shape(of_ds, (geo.tile_q, geo.tile_kv, 1), order=(1, 0, 2)),
        )

    def _mmas(self, dtype):
        """The four products."""
        geo = self.geo

        def mma(a, b, layout, n, source=OperandSource.SMEM):
            return make_trivial_tiled_mma(dtype, dtype, a, b, Float32, layout, (64, n), source)

        over_kv = (2, 1, 1)
        over_dq = (1, 2, 1) if geo.tile_q == 64 else (2, 1, 1)
        ds_from = OperandSource.SMEM if geo.dq else OperandSource.RMEM
        return Mmas(
            mma(K_MAJOR, K_MAJOR, over_kv, geo.tile_q),  # S^T = K Q^T, dP^T = V dO^T
            mma(K_MAJOR, MN_MAJOR, over_kv, geo.d_v, OperandSource.RMEM),  # dV = P^T dO
            mma(K_MAJOR, MN_MAJOR, over_kv, geo.d_qk, ds_from),  # dK = dS^T Q
            mma(MN_MAJOR, MN_MAJOR, over_dq, geo.dq_columns),  # dQ = dS K
        )

    @cute.kernel
    def _kernel(
        self, sources: Sources, layouts: tuple, mmas: Mmas, dq_acc: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor,
        work: Work, scale: Float32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        shared = self._shared(layouts, tid)
        if group == 0:
            cute.arch.setmaxregister_decrease(24)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                cute.arch.griddepcontrol_launch_dependents()
                self._produce(sources, shared, work)
                cute.arch.griddepcontrol_wait()
        else:
            cute.arch.setmaxregister_increase(240)
            self._consume(group - 1, tid % WARPGROUP, shared, mmas, dq_acc, dk, dv, work, scale)

    def _shared(self, layouts, tid):
        """Place everything in shared memory and initialise the mbarriers."""
        geo, dtype = self.geo, cutlass_dtype(self.geo.dtype)
        smem = SmemAllocator()
        place = lambda layout: smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        plain = lambda kind, shape: smem.allocate_tensor(kind, cute.make_layout(shape), byte_alignment=1024)
        k, v = place(layouts[1]), place(layouts[2]) if geo.dk else None
        q, do = place(layouts[0]), place(layouts[3])
        ds = place(layouts[4]) if geo.dq else None
        out = plain(Float32, (geo.tile_q * geo.d_qk,)) if geo.dq else None
        stats = smem.allocate_tensor(Float32, cute.make_layout((geo.tile_q, 2, geo.q_stages)), byte_alignment=128)
        items = smem.allocate_tensor(Int32, cute.make_layout((16, SLOTS)), byte_alignment=16)
        stages = ((k, 1, WARPS), (q, geo.q_stages, WARPS), (do, geo.do_stages, WARPS), (items, SLOTS, WARPS))
        kv, q, do, items = make_rings(smem, tid, stages)
        return Shared(kv, v, q, do, ds, out, stats, items)

    # ---------------------------------------------------------------- producer

    @cute.jit
    def _produce(self, sources, shared, work):
        """Draw items, hand them to the consumers, and load their tiles: K, V, then Q with its statistics and dO.

        The heads of a group innermost, and query tiles so that the blocks of a head are at the same one at a time and
        dQ is added up in the L2 cache: under a window downward, from the same multiple of the window; else downward in
        the first round of the blocks and upward in the next, whose items are the shorter the later a block is free.
        """
        geo = self.geo
        heads = sources.stats.shape[0] // sources.k.tensor.shape[2]
        stage, phase, do_stage, do_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase, kv_phase = Int32(0), Int32(0), Int32(0)
        items = sources.table[7, sources.table.shape[1] - 1] * sources.k.tensor.shape[2]
        more = Int32(1)
        while more > 0:
            ticket = take_ticket(sources.counter)
            cute.arch.mbarrier_wait(shared.items.empty + slot, slot_phase ^ 1)
            if ticket >= items:
                hand_over(shared.items, slot, (Int32(-1),))
                more = Int32(0)
            else:
                item = self._item(sources, work, ticket)
                hand_over(shared.items, slot, item)
                if item.m_lo < item.m_hi:
                    cute.arch.mbarrier_wait(shared.kv.empty, kv_phase ^ 1)
                    kv_phase ^= 1
                    row = item.k0 + item.n * geo.tile_kv
                    expect(shared.kv.full, geo.tile_kv * (geo.d_qk + (geo.d_v if geo.dk else 0)) * 2)
                    load(sources.k, shared.kv.tiles, 0, row, item.head, item.b, shared.kv.full)
                    if const_expr(geo.dk):
                        load(sources.v, shared.v, 0, row, item.head, item.b, shared.kv.full)
                    m, h = item.m_first, Int32(0)
                    for _ in cutlass.range(heads * (item.m_hi - item.m_lo), unroll=1):
                        row, head = item.q0 + m * geo.tile_q, item.head * heads + h
                        full = shared.q.full + stage
                        cute.arch.mbarrier_wait(shared.q.empty + stage, phase ^ 1)
                        expect(full, geo.tile_q * (geo.d_qk * 2 + 8))
                        load(sources.q, shared.q.tiles, stage, row, head, item.b, full)
                        stats = sources.stats[head, item.tile0 + m, None, None].iterator
                        bulk_load(shared.stats[None, None, stage].iterator, stats, geo.tile_q * 8, full)
                        if const_expr(geo.do_stages == 1):
                            prefetch(sources.do, shared.do.tiles, row, head, item.b)
                        full = shared.do.full + do_stage
                        cute.arch.mbarrier_wait(shared.do.empty + do_stage, do_phase ^ 1)
                        expect(full, geo.tile_q * geo.d_v * 2)
                        load(sources.do, shared.do.tiles, do_stage, row, head, item.b, full)
                        stage, phase = following(stage, phase, geo.q_stages)
                        do_stage, do_phase = following(do_stage, do_phase, geo.do_stages)
                        h += 1
                        if h == heads:
                            h = Int32(0)
                            m += item.way
                            if m < item.m_lo:
                                m = item.m_hi - 1
                slot, slot_phase = following(slot, slot_phase, SLOTS)

    @cute.jit
    def _item(self, sources, work, ticket):
        """Decode a ticket, see `__call__` for the order."""
        geo, table, heads_kv = self.geo, sources.table, sources.k.tensor.shape[2]
        s, n, head, tiles, inside = draw(table, work, ticket, heads_kv)
        if const_expr(geo.reverse):
            n = tiles - 1 - n
        len_q, len_k, shift = table[3, s], table[4, s], table[8, s]
        j0 = n * geo.tile_kv
        lo = cutlass.max(0, j0 - work.right - shift)
        hi = cutlass.min(len_q, cutlass.min(j0 + geo.tile_kv, len_k) + work.left - shift)
        m_lo = lo // geo.tile_q
        m_hi = (hi + geo.tile_q - 1) // geo.tile_q
        if (j0 >= len_k) | (lo >= hi):
            m_hi = m_lo
        period = (work.left + work.right + geo.tile_kv - 1) // geo.tile_q + 2  # tiles a key tile sees, at most
        m_first = (m_hi - 1) // period * period + period - 1
        if m_first >= m_hi:
            m_first = cutlass.max(m_lo - 1, m_first - period)
        if m_first < m_lo:
            m_first = m_hi - 1
        way = Int32(-1)
        if const_expr(geo.turning):
            if (inside // cute.arch.grid_dim()[0] % 2 == 1) & (period >= m_hi):
                m_first, way = m_lo, Int32(1)
        rows = (len_q, len_k, table[5, s], shift)
        return Item(n, head, table[0, s], table[2, s], *rows, m_lo, m_hi, m_first, way, table[6, s], table[1, s])

    # ---------------------------------------------------------------- consumers

    @cute.jit
    def _consume(self, g, t, shared, mmas, dq_acc, dk, dv, work, scale):
        """Warpgroup g, thread t: every item's dK and dV in registers, dQ tile by tile into dq_acc."""
        geo = self.geo
        first = g * WARPGROUP  # uniform, so that descriptors stay in uniform registers
        s_q, s_do, s_k = shared.q, shared.do, shared.kv
        f_k, f_q = mmas.s.make_fragment_A(part_a(mmas.s, first, s_k.tiles)), fragment_b(mmas.s, first, s_q.tiles)
        f_v = mmas.s.make_fragment_A(part_a(mmas.s, first, shared.v)) if const_expr(geo.dk) else None
        f_do, f_dot = (fragment_b(m, first, s) for m, s in ((mmas.s, s_do.tiles), (mmas.dv, turned(s_do.tiles))))
        f_qt = fragment_b(mmas.dk, first, turned(s_q.tiles))
        f_ds, f_dst, f_kt, store = self._of_ds(g, first, shared, mmas)
        acc_dk = self._accumulator(mmas.dk, (geo.tile_kv, geo.d_qk)) if const_expr(geo.dk) else None
        acc_dv = self._accumulator(mmas.dv, (geo.tile_kv, geo.d_v)) if const_expr(geo.dv) else None
        p = cute.make_rmem_tensor(operand_shape(geo.tile_q), cutlass_dtype(geo.dtype))
        ds = cute.make_rmem_tensor(operand_shape(geo.tile_q), cutlass_dtype(geo.dtype))
        stage, phase, do_stage, do_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase, kv_phase, more = Int32(0), Int32(0), Int32(0), Int32(1)
        while more > 0:
            cute.arch.mbarrier_wait(shared.items.full + slot, slot_phase)
            if cute.arch.make_warp_uniform(shared.items.tiles[0, slot]) < 0:
                more = Int32(0)
            else:
                fields = [shared.items.tiles[i, slot] for i in range(len(Item._fields))]
                item = Item(*(cute.arch.make_warp_uniform(x) for x in fields))
                if const_expr(geo.dk):
                    acc_dk.fill(0.0)
                if const_expr(geo.dv):
                    acc_dv.fill(0.0)
                if item.m_lo < item.m_hi:
                    cut = Cut(item.n * geo.tile_kv, item.len_k, item.shift, work.left, work.right)
                    cute.arch.mbarrier_wait(s_k.full, kv_phase)
                    kv_phase ^= 1
                    if cut.j0 + geo.tile_kv > cut.len_k:
                        clear(s_k.tiles, 0, cut.len_k - cut.j0, first + t, CONSUMERS)
                        if const_expr(geo.dk):
                            clear(shared.v, 0, cut.len_k - cut.j0, first + t, CONSUMERS)
                        cleared()
                    row_tiles, heads = dq_acc.shape[1], dq_acc.shape[0] // dk.shape[2]
                    m, h = item.m_first, Int32(0)
                    tile = cute.arch.make_warp_uniform((item.head * heads + h) * row_tiles + item.tile0 + m)
                    wait_rows(s_q, stage, phase, item.len_q - m * geo.tile_q, first + t)
                    acc_s = self._scores(mmas)
                    warpgroup.fence()
                    chain(mmas.s, acc_s, f_k, f_q, stage)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    self._p(g, t, acc_s, shared, stage, m * geo.tile_q, cut, scale)
                    narrow(acc_s, p)
                    steps = heads * (item.m_hi - item.m_lo)
                    for step in cutlass.range(steps, unroll=1):
                        wait_rows(s_do, do_stage, do_phase, item.len_q - m * geo.tile_q, first + t)
                        if const_expr(geo.dk):
                            acc_dp = self._scores(mmas)
                            warpgroup.fence()
                            chain(mmas.s, acc_dp, f_v, f_do, do_stage)
                            warpgroup.commit_group()
                            if const_expr(geo.dv):
                                chain_rs(mmas.dv, acc_dv, p, f_dot, do_stage)
                                warpgroup.commit_group()
                            warpgroup.wait_group(1 if geo.dv else 0)
                            self._ds(acc_dp, acc_s if geo.keeps_p else p, ds, shared, stage)
                            if const_expr(geo.dq):
                                self._share(g, first + t, ds, shared, mmas, store)
                            warpgroup.wait_group(0)  # with dV in flight beside dQ, ptxas would serialise
                            arrive(s_do.empty + do_stage)
                        if const_expr(geo.dq):
                            acc_dq = self._accumulator(mmas.dq, (geo.tile_q, geo.d_qk))
                            warpgroup.fence()
                            chain(mmas.dq, acc_dq, f_ds, f_kt, 0)
                            warpgroup.commit_group()
                            self._stage_dq(g, t, acc_dq, shared)
                            if const_expr(not geo.late):
                                self._add_dq(g, t, tile, dq_acc, shared)
                        here, this_tile = stage, tile
                        stage, phase = following(stage, phase, geo.q_stages)
                        h += 1
                        tile += row_tiles
                        if h == heads:
                            h = Int32(0)
                            m += item.way
                            tile += item.way - heads * row_tiles
                            if m < item.m_lo:
                                m = item.m_hi - 1
                                tile += item.m_hi - item.m_lo
                        if step + 1 < steps:
                            wait_rows(s_q, stage, phase, item.len_q - m * geo.tile_q, first + t)
                        if const_expr(not geo.keeps_p):
                            acc_s = self._scores(mmas)
                        warpgroup.fence()
                        chain(mmas.s, acc_s, f_k, f_q, stage)  # behind the last step unread; a branch would serialise
                        warpgroup.commit_group()
                        if const_expr(geo.dq):
                            chain(mmas.dk, acc_dk, f_dst, f_qt, here, more=True)
                        elif const_expr(geo.dk):
                            chain_rs(mmas.dk, acc_dk, ds, f_qt, here)
                        else:
                            chain_rs(mmas.dv, acc_dv, p, f_dot, do_stage)
                        warpgroup.commit_group()
                        if const_expr(geo.dq and geo.late):
                            self._add_dq(g, t, this_tile, dq_acc, shared)
                        warpgroup.wait_group(1)
                        self._p(g, t, acc_s, shared, stage, m * geo.tile_q, cut, scale)
                        if const_expr(geo.dk):
                            narrow(acc_s, p)
                        warpgroup.wait_group(0)
                        arrive(s_q.empty + here)
                        if const_expr(not geo.dk):
                            narrow(acc_s, p)
                            arrive(s_do.empty + do_stage)
                        do_stage, do_phase = following(do_stage, do_phase, geo.do_stages)
                    arrive(s_k.empty)
                at, row0 = (item.b, item.k0, item.head), item.n * geo.tile_kv + g * 64
                if const_expr(geo.dk):
                    store_rows(t, acc_dk, dk, at, row0, item.len_k, item.room, geo.head_dim_qk, scale * LN2)
                if const_expr(geo.dv):
                    store_rows(t, acc_dv, dv, at, row0, item.len_k, item.room, geo.head_dim_v, Float32(1.0))
                arrive(shared.items.empty + slot)
                slot, slot_phase = following(slot, slot_phase, SLOTS)
        if const_expr(geo.dq):
            if t == 0:
                cute.arch.cp_async_bulk_wait_group(0)

    def _of_ds(self, g, first, shared, mmas):
        """Descriptors of dS as operand of dQ and of dK, of K as operand of dQ, and how dS^T goes to shared memory."""
        if not self.geo.dq:
            return None, None, None, None
        cute.arch.barrier_arrive(barrier_id=DS_FREE + 1 - g, number_of_threads=CONSUMERS)
        f_ds = mmas.dq.make_fragment_A(part_a(mmas.dq, first, shared.ds))
        f_dst = mmas.dk.make_fragment_A(part_a(mmas.dk, first, turned(shared.ds)))
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass_dtype(self.geo.dtype))
        return f_ds, f_dst, fragment_b(mmas.dq, first, turned(shared.kv.tiles)), store

    def _scores(self, mmas):
        """An accumulator of transposed scores."""
        return self._accumulator(mmas.s, (self.geo.tile_kv, self.geo.tile_q))

    def _accumulator(self, mma, shape):
        return cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(shape), Float32)

    @cute.jit
    def _p(self, g, t, acc, shared, stage, i0, cut, scale):
        """P^T = exp2(scale S^T - LSE), masked where the tile is cut."""
        geo = self.geo
        lse = row_pairs(shared.stats, 0, stage, geo.tile_q)
        pair = cute.make_rmem_tensor((2,), Float32)
        for j in cutlass.range_constexpr(geo.tile_q // 8):
            cute.autovec_copy(lse[None, j], pair)
            for i in cutlass.range_constexpr(4):
                acc[4 * j + i] = exp2(acc[4 * j + i] * scale - pair[i % 2])
        outside = (cut.j0 + geo.tile_kv > cut.len_k) | (cut.j0 + geo.tile_kv - 1 - i0 - cut.shift > cut.right)
        outside = outside | (i0 + geo.tile_q - 1 + cut.shift - cut.j0 > cut.left)
        if outside:
            self._mask(t, acc, cut.j0 + g * 64, i0, cut)

    @cute.jit
    def _mask(self, t, acc, j0, i0, cut):
        """Zero what the band or the segment's end cuts off; j0 is the warpgroup's first key."""
        for r in cutlass.range_constexpr(2):
            key = j0 + row_of(t) + 8 * r
            x = key - cut.shift - i0 - 2 * (cute.arch.lane_idx() % 4)
            low, high = x - cut.right, x + cut.left
            if key >= cut.len_k:
                high = Int32(-1)
            for j in cutlass.range_constexpr(self.geo.tile_q // 8):
                for i in cutlass.range_constexpr(2):
                    dead = (low > 8 * j + i) | (high < 8 * j + i)
                    acc[4 * j + 2 * r + i] = cutlass.select_(dead, Float32(0.0), acc[4 * j + 2 * r + i])

    @cute.jit
    def _ds(self, acc_dp, p, ds, shared, stage):
        """dS^T = P^T (dP^T - D), rounded."""
        d = row_pairs(shared.stats, 1, stage, self.geo.tile_q)
        pair = cute.make_rmem_tensor((2,), Float32)
        for j in cutlass.range_constexpr(self.geo.tile_q // 8):
            cute.autovec_copy(d[None, j], pair)
            for i in cutlass.range_constexpr(4):
                acc_dp[4 * j + i] = Float32(p[4 * j + i]) * (acc_dp[4 * j + i] - pair[i % 2])
        narrow(acc_dp, ds)

    @cute.jit
    def _share(self, g, thread, ds, shared, mmas, store):
        """Put this warpgroup's dS^T beside the other's, once both have read the last one."""
        copy = cute.make_tiled_copy_C(store, mmas.s).get_slice(thread)
        cute.arch.barrier(barrier_id=DS_FREE + g, number_of_threads=CONSUMERS)
        cute.copy(store, copy.retile(ds), copy.partition_D(turned(shared.ds))[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_FULL, number_of_threads=CONSUMERS)

    @cute.jit
    def _stage_dq(self, g, t, acc, shared):
        """Put this warpgroup's part of one dQ tile in shared memory, once the last one has left it; dS is free then."""
        if t == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STAGED + g, number_of_threads=WARPGROUP)
        warpgroup.wait_group(0)
        cute.arch.barrier_arrive(barrier_id=DS_FREE + 1 - g, number_of_threads=CONSUMERS)
        half, count = self.geo.tile_q * self.geo.d_qk // 2, cute.size(acc)
        source = cute.make_tensor(acc.iterator, cute.make_layout((4, count // 4)))
        target = cute.make_tensor(
            shared.out.iterator + cute.assume(g * half + t * 4, divby=4),
            cute.make_layout((4, count // 4), stride=(1, 4 * WARPGROUP)),
        )
        cute.autovec_copy(source, target)

    @cute.jit
    def _add_dq(self, g, t, tile, dq_acc, shared):
        """Let the copy engine add what was staged to dq_acc."""
        half = self.geo.tile_q * self.geo.d_qk // 2
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=STAGED + g, number_of_threads=WARPGROUP)
        if t == 0:
            bulk_add(dq_acc.iterator + (Int64(tile) * (2 * half) + g * half), shared.out.iterator + g * half, half * 4)
            cute.arch.cp_async_bulk_commit_group()


def row_pairs(stats, which, stage, rows):
    """A statistic of the two query rows a thread holds in each group of 8: (2, rows / 8)."""
    at = cute.assume(2 * (cute.arch.lane_idx() % 4), divby=2)
    return cute.make_tensor(stats[None, which, stage].iterator + at, cute.make_layout((2, rows // 8), stride=(1, 8)))


@cute.jit
def wait_rows(ring, stage, phase, live, thread):
    """Wait for a tile of query rows; rows beyond the segment may hold anything, NaN too, and are cleared."""
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    if live < cute.size(ring.tiles, mode=[0]):
        clear(ring.tiles, stage, live, thread, CONSUMERS)
        cleared()


@cute.jit
def cleared():
    """Show what both warpgroups cleared to the tensor cores."""
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=CLEARED, number_of_threads=CONSUMERS)


@cute.jit
def bulk_load(target, source, nbytes: cutlass.Constexpr, bar):
    """One thread copies nbytes to shared memory, counted by an mbarrier."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target.toint(), source.toint(), Int32(nbytes), bar.toint()],
        )


@cute.jit
def bulk_add(target, source, nbytes: cutlass.Constexpr):
    """The calling thread adds nbytes of fp32 in shared memory to global memory."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(nbytes)],
    )
