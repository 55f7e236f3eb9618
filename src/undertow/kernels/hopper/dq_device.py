"""dQ alone for Hopper in CuTe DSL: three GEMMs, one query tile a block, no atomic and no fp32 copy of dQ.

A block is a producer warp and two warpgroups of consumers. Warpgroup g owns rows 64 g on of the query tile and walks
the key tiles its rows see, the last first. dS stays in registers as the left operand of dQ. What runs beside what:

    tensor cores   S of the next tile   dP of the next tile | dQ of this one        |
    other units                         P = exp2            | dS of the next tile   | its rounding
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .geometry import SHARED_BYTES, Geometry, cutlass_dtype, fake, fake_stream
from .pieces_device import (
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
    ring_layout,
    row_of,
    store_rows,
    take_ticket,
    tma_source,
    turned,
)  # fmt: skip

HALF, ROWS = 64, 128
CLEARED = 1
"""Named barriers: CLEARED + g belongs to warpgroup g."""


class Shared(NamedTuple):
    """A block's shared memory. A stage of `q` is one warpgroup's rows, `do` goes with it; `items` holds `Item`s."""

    q: Ring
    do: Any
    k: Ring
    v: Ring
    items: Ring


class Item(NamedTuple):
    """One query tile of one head.

    Tile, query head, batch index, first query row, lengths, query rows up to the next segment, key on the diagonal of
    query 0, key tiles [n_lo, n_hi), first tile of stats, first key row.
    """

    m: Any
    head: Any
    b: Any
    q0: Any
    len_q: Any
    len_k: Any
    room: Any
    shift: Any
    n_lo: Any
    n_hi: Any
    tile0: Any
    k0: Any


class DqBackward:
    """The kernel of one Geometry, for `cute.compile`.

    A row of dQ is summed by one warpgroup in one order: the same bits at every launch.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geo = geometry
        self.keys, self.k_stages, self.v_stages = rings(geometry.d_qk, geometry.d_v)

    def arguments(self) -> tuple:
        """Arguments to compile for: every length and stride free, but the last stride, which is 1."""
        dtype = cutlass_dtype(self.geo.dtype)
        tensors = [fake(dtype, 4) for _ in range(4)]
        stats = fake(Float32, 4, {2: 2, 3: self.geo.tile_q})
        scalars = (Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1), Int32(1))
        return *tensors, stats, fake(dtype, 4), fake(Int32, 2), fake(Int32, 1), *scalars, fake_stream()

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, stats: cute.Tensor, dq: cute.Tensor,
        table: cute.Tensor, counter: cute.Tensor, columns: Int32, together: Int32, scale: Float32, left: Int32,
        right: Int32, blocks: Int32, stream,
    ):  # fmt: skip
        """Launch `blocks` persistent blocks.

        They draw query tiles of query heads as the main kernel draws key tiles of its heads, but the last tiles first,
        which are the longest of a causal mask. q, dout, dq (b, s, h, d) and k, v alike with any strides; stats
        (nheads_q, tiles, 2, tile_q) fp32: LSE in base 2 (+inf for rows that see nothing), D; counter int32, 0; scale is
        in base 2. The table, int32 (9, batch + 1), has a column a segment: batch index, first query and key row, both
        real lengths, query rows up to the next segment (those beyond the length become zero), first tile in stats,
        first query tile, the key on the diagonal of query 0. Query tiles are of 128 rows and cover the rows up to the
        next segment; the last column holds how many there are in all.
        """
        geo, dtype = self.geo, cutlass_dtype(self.geo.dtype)
        layouts = self._layouts(dtype)
        sources = (
            tma_source(q, layouts[0], HALF, geo.d_qk), tma_source(k, layouts[2], self.keys, geo.d_qk),
            tma_source(v, layouts[3], self.keys, geo.d_v), tma_source(dout, layouts[1], HALF, geo.d_v),
        )  # fmt: skip
        mma = lambda major, n, source: make_trivial_tiled_mma(
            dtype, dtype, K_MAJOR, major, Float32, (1, 1, 1), (HALF, n), source
        )
        mma_s = mma(K_MAJOR, self.keys, OperandSource.SMEM)  # S = Q K^T, dP = dO V^T
        mma_dq = mma(MN_MAJOR, geo.d_qk, OperandSource.RMEM)  # dQ = dS K
        self._kernel(
            Sources(*sources, stats, table, counter), layouts, mma_s, mma_dq, dq,
            Work(columns, together, left, right), scale,
        ).launch(
            grid=[blocks, 1, 1], block=[3 * WARPGROUP, 1, 1], stream=stream, min_blocks_per_mp=1,
            use_pdl=True,  # it reads nothing of the kernel before it, and fills its tail
        )  # fmt: skip

    def _layouts(self, dtype):
        """Shared-memory layouts of q, do, k, v."""
        geo = self.geo
        ring = lambda *shape: ring_layout(dtype, geo.atom(shape[1]), shape)
        return (
            ring(HALF, geo.d_qk, 2), ring(HALF, geo.d_v, 2),
            ring(self.keys, geo.d_qk, self.k_stages), ring(self.keys, geo.d_v, self.v_stages),
        )  # fmt: skip

    @cute.kernel
    def _kernel(
        self, sources: Sources, layouts: tuple, mma_s: cute.TiledMma, mma_dq: cute.TiledMma, dq: cute.Tensor,
        work: Work, scale: Float32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        shared = self._shared(layouts, tid)
        if group == 0:
            cute.arch.setmaxregister_decrease(24)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self._produce(sources, shared, work)
                cute.arch.griddepcontrol_wait()  # what comes next may read what the kernel before this one wrote
        else:
            cute.arch.setmaxregister_increase(240)
            self._consume(group - 1, tid % WARPGROUP, shared, mma_s, mma_dq, sources.stats, dq, work, scale)

    def _shared(self, layouts, tid):
        """Place everything in shared memory and initialise the mbarriers."""
        dtype = cutlass_dtype(self.geo.dtype)
        smem = SmemAllocator()
        place = lambda layout: smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        q, do, k, v = (place(layout) for layout in layouts)
        items = smem.allocate_tensor(Int32, cute.make_layout((16, SLOTS)), byte_alignment=16)
        stages = ((k, self.k_stages, WARPS), (v, self.v_stages, WARPS), (items, SLOTS, WARPS))
        mine = (q, 2, WARPS // 2)  # the warps that own the rows
        q, k, v, items = make_rings(smem, tid, (mine, *stages))
        return Shared(q, do, k, v, items)

    # ---------------------------------------------------------------- producer

    @cute.jit
    def _produce(self, sources, shared, work):
        """Draw items, hand them to the consumers, and load their tiles: the last K, Q and dO, V, then K, V downward."""
        geo = self.geo
        heads = sources.q.tensor.shape[2] // sources.k.tensor.shape[2]
        k_at, k_phase, v_at, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase, q_phase = Int32(0), Int32(0), Int32(0)
        items = sources.table[7, sources.table.shape[1] - 1] * sources.q.tensor.shape[2]
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
                if item.n_lo < item.n_hi:
                    row, head_kv = item.k0 + (item.n_hi - 1) * self.keys, item.head // heads
                    for step in cutlass.range(item.n_hi - item.n_lo, unroll=1):
                        cute.arch.mbarrier_wait(shared.k.empty + k_at, k_phase ^ 1)
                        expect(shared.k.full + k_at, self.keys * geo.d_qk * 2)
                        load(sources.k, shared.k.tiles, k_at, row, head_kv, item.b, shared.k.full + k_at)
                        if step == 0:
                            for g in cutlass.range_constexpr(2):
                                i0 = item.q0 + item.m * ROWS + g * HALF
                                cute.arch.mbarrier_wait(shared.q.empty + g, q_phase ^ 1)
                                expect(shared.q.full + g, HALF * (geo.d_qk + geo.d_v) * 2)
                                load(sources.q, shared.q.tiles, g, i0, item.head, item.b, shared.q.full + g)
                                load(sources.do, shared.do, g, i0, item.head, item.b, shared.q.full + g)
                        cute.arch.mbarrier_wait(shared.v.empty + v_at, v_phase ^ 1)
                        expect(shared.v.full + v_at, self.keys * geo.d_v * 2)
                        load(sources.v, shared.v.tiles, v_at, row, head_kv, item.b, shared.v.full + v_at)
                        row -= self.keys
                        k_at, k_phase = following(k_at, k_phase, self.k_stages)
                        v_at, v_phase = following(v_at, v_phase, self.v_stages)
                    q_phase ^= 1
                slot, slot_phase = following(slot, slot_phase, SLOTS)

    @cute.jit
    def _item(self, sources, work, ticket):
        """Decode a ticket, see `__call__` for the order."""
        table, heads = sources.table, sources.q.tensor.shape[2]
        s, m, head, tiles, _ = draw(table, work, ticket, heads)
        m = tiles - 1 - m
        len_q, len_k, shift = table[3, s], table[4, s], table[8, s]
        n_lo, n_hi = self._key_tiles(m * ROWS, ROWS, len_q, len_k, shift, work)
        return Item(
            m, head, table[0, s], table[1, s], len_q, len_k, table[5, s], shift, n_lo, n_hi, table[6, s], table[2, s]
        )

    @cute.jit
    def _key_tiles(self, i0, rows: cutlass.Constexpr, len_q, len_k, shift, work):
        """Key tiles [n_lo, n_hi) that rows i0 to i0 + rows see."""
        end = cutlass.min(i0 + rows, len_q)
        lo = cutlass.max(0, i0 + shift - work.left)
        hi = cutlass.min(len_k, end + shift + work.right)
        n_lo = lo // self.keys
        n_hi = (hi + self.keys - 1) // self.keys
        if (i0 >= end) | (lo >= hi):
            n_hi = n_lo
        return n_lo, n_hi

    # ---------------------------------------------------------------- consumers

    @cute.jit
    def _consume(self, g, t, shared, mma_s, mma_dq, stats, dq, work, scale):
        """Warpgroup g, thread t: every item's dQ in registers. It waits for key tiles that only the other sees, too."""
        geo = self.geo
        s_q, s_k, s_v = shared.q, shared.k, shared.v
        mine = lambda s: cute.append_ones(mma_s.make_fragment_A(part_a(mma_s, 0, s))[None, None, None, g], up_to_rank=4)
        f_q, f_k = mine(s_q.tiles), fragment_b(mma_s, 0, s_k.tiles)
        f_do, f_v = mine(shared.do), fragment_b(mma_s, 0, s_v.tiles)
        f_kt = fragment_b(mma_dq, 0, turned(s_k.tiles))
        acc_dq = cute.make_rmem_tensor(mma_dq.get_slice(0).partition_shape_C((HALF, geo.d_qk)), Float32)
        ds = cute.make_rmem_tensor(operand_shape(self.keys), cutlass_dtype(geo.dtype))
        k_at, k_phase, v_at, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase, q_phase = Int32(0), Int32(0), Int32(0)
        more = Int32(1)
        while more > 0:
            cute.arch.mbarrier_wait(shared.items.full + slot, slot_phase)
            if cute.arch.make_warp_uniform(shared.items.tiles[0, slot]) < 0:
                more = Int32(0)
            else:
                item = Item(
                    *[cute.arch.make_warp_uniform(shared.items.tiles[i, slot]) for i in range(len(Item._fields))]
                )
                acc_dq.fill(0.0)
                i0 = item.m * ROWS + g * HALF
                if item.n_lo < item.n_hi:
                    lse, d = self._stats(t, stats, item, i0)
                    lo, hi = self._key_tiles(i0, HALF, item.len_q, item.len_k, item.shift, work)
                    if lo >= hi:
                        lo, hi = item.n_lo, item.n_lo
                    cute.arch.mbarrier_wait(s_q.full + g, q_phase)
                    q_phase ^= 1
                    k_at, k_phase, v_at, v_phase = self._skip(shared, item.n_hi - hi, k_at, k_phase, v_at, v_phase)
                    if lo < hi:
                        j0 = (hi - 1) * self.keys
                        cute.arch.mbarrier_wait(s_k.full + k_at, k_phase)
                        cute.arch.mbarrier_wait(s_v.full + v_at, v_phase)
                        if j0 + self.keys > item.len_k:
                            clear(s_k.tiles, k_at, item.len_k - j0, t, WARPGROUP)
                            clear(s_v.tiles, v_at, item.len_k - j0, t, WARPGROUP)
                            cute.arch.fence_view_async_shared()
                            cute.arch.barrier(barrier_id=CLEARED + g, number_of_threads=WARPGROUP)
                        acc_s, acc_dp = self._scores(mma_s), self._scores(mma_s)
                        warpgroup.fence()
                        chain(mma_s, acc_s, f_q, f_k, k_at)
                        warpgroup.commit_group()
                        chain(mma_s, acc_dp, f_do, f_v, v_at)
                        warpgroup.commit_group()
                        warpgroup.wait_group(1)
                        self._p(t, acc_s, lse, i0, Cut(j0, item.len_k, item.shift, work.left, work.right), scale)
                        warpgroup.wait_group(0)
                        arrive(s_v.empty + v_at)
                        v_at, v_phase = following(v_at, v_phase, self.v_stages)
                        self._ds(acc_s, acc_dp, d)
                        narrow(acc_dp, ds)
                        for _ in cutlass.range(hi - lo - 1, unroll=1):
                            here = k_at
                            k_at, k_phase = following(k_at, k_phase, self.k_stages)
                            j0 -= self.keys
                            cute.arch.mbarrier_wait(s_k.full + k_at, k_phase)
                            acc_s, acc_dp = self._scores(mma_s), self._scores(mma_s)
                            warpgroup.fence()
                            chain(mma_s, acc_s, f_q, f_k, k_at)
                            warpgroup.commit_group()
                            cute.arch.mbarrier_wait(s_v.full + v_at, v_phase)
                            warpgroup.fence()
                            chain(mma_s, acc_dp, f_do, f_v, v_at)
                            warpgroup.commit_group()
                            chain_rs(mma_dq, acc_dq, ds, f_kt, here)
                            warpgroup.commit_group()
                            warpgroup.wait_group(2)
                            self._p(t, acc_s, lse, i0, Cut(j0, item.len_k, item.shift, work.left, work.right), scale)
                            warpgroup.wait_group(1)
                            arrive(s_v.empty + v_at)
                            v_at, v_phase = following(v_at, v_phase, self.v_stages)
                            self._ds(acc_s, acc_dp, d)
                            warpgroup.wait_group(0)
                            arrive(s_k.empty + here)
                            narrow(acc_dp, ds)
                        arrive(s_q.empty + g)  # the next Q and dO come beside the last dQ and its way out
                        warpgroup.fence()
                        chain_rs(mma_dq, acc_dq, ds, f_kt, k_at)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        arrive(s_k.empty + k_at)
                        k_at, k_phase = following(k_at, k_phase, self.k_stages)
                    else:
                        arrive(s_q.empty + g)
                    k_at, k_phase, v_at, v_phase = self._skip(shared, lo - item.n_lo, k_at, k_phase, v_at, v_phase)
                at = (item.b, item.q0, item.head)
                store_rows(t, acc_dq, dq, at, i0, item.len_q, item.room, geo.head_dim_qk, scale * LN2)
                arrive(shared.items.empty + slot)
                slot, slot_phase = following(slot, slot_phase, SLOTS)

    def _scores(self, mma_s):
        return cute.make_rmem_tensor(mma_s.get_slice(0).partition_shape_C((HALF, self.keys)), Float32)

    @cute.jit
    def _stats(self, t, stats, item, i0):
        """LSE and D of this thread's two rows; +inf and 0 beyond the segment, where stats may have no tile."""
        lse, d = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        lse.fill(float("inf"))
        d.fill(0.0)
        for r in cutlass.range_constexpr(2):
            i = i0 + row_of(t) + 8 * r
            if i < item.len_q:
                tile, at = item.tile0 + i // self.geo.tile_q, i % self.geo.tile_q
                lse[r] = stats[item.head, tile, 0, at]
                d[r] = stats[item.head, tile, 1, at]
        return lse, d

    @cute.jit
    def _skip(self, shared, count, k_at, k_phase, v_at, v_phase):
        """Give back `count` key tiles that only the other warpgroup's rows see."""
        for _ in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(shared.k.full + k_at, k_phase)
            cute.arch.mbarrier_wait(shared.v.full + v_at, v_phase)
            arrive(shared.k.empty + k_at)
            arrive(shared.v.empty + v_at)
            k_at, k_phase = following(k_at, k_phase, self.k_stages)
            v_at, v_phase = following(v_at, v_phase, self.v_stages)
        return k_at, k_phase, v_at, v_phase

    @cute.jit
    def _p(self, t, acc, lse, i0, cut, scale):
        """P = exp2(scale S - LSE), masked where the tile is cut."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = exp2(acc[i] * scale - lse[i // 2 % 2])
        outside = (cut.j0 + self.keys > cut.len_k) | (cut.j0 + self.keys - 1 - i0 - cut.shift > cut.right)
        outside = outside | (i0 + HALF - 1 + cut.shift - cut.j0 > cut.left)
        if outside:
            self._mask(t, acc, i0, cut)

    @cute.jit
    def _mask(self, t, acc, i0, cut):
        """Zero what the band or the segment's end cuts off."""
        for r in cutlass.range_constexpr(2):
            diagonal = i0 + row_of(t) + 8 * r + cut.shift
            origin = cut.j0 + 2 * (cute.arch.lane_idx() % 4)
            low = diagonal - cut.left - origin
            high = cutlass.min(diagonal + cut.right, cut.len_k - 1) - origin
            for j in cutlass.range_constexpr(self.keys // 8):
                for i in cutlass.range_constexpr(2):
                    dead = (low > 8 * j + i) | (high < 8 * j + i)
                    acc[4 * j + 2 * r + i] = cutlass.select_(dead, Float32(0.0), acc[4 * j + 2 * r + i])

    @cute.jit
    def _ds(self, p, dp, d):
        """dS = P (dP - D), in place of dP."""
        for i in cutlass.range_constexpr(cute.size(p)):
            dp[i] = p[i] * (dp[i] - d[i // 2 % 2])


def rings(d_qk: int, d_v: int) -> tuple[int, int, int]:
    """Keys of a tile, stages of K and of V: 128 keys where registers hold them, and as deep as shared memory is.

    128 rather than 64 keys took 3 to 4 % less time at head dims 64/64, 64/128 and 80/80 (H200, 2026-11-29).
    """
    room = SHARED_BYTES - 512 - ROWS * (d_qk + d_v) * 2
    for keys in (128, 64) if d_qk <= 80 else (64,):
        for k, v in ((4, 3), (3, 3), (3, 2), (2, 2), (2, 1)):
            if 2 * keys * (k * d_qk + v * d_v) <= room:
                return keys, k, v
    raise ValueError(f"head dims {d_qk}/{d_v} need more shared memory than a block has")
