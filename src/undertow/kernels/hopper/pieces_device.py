"""What both Hopper kernels are made of: rings in shared memory, the draw of work, products, copies.

CuTe DSL; a Python function here is expanded where it is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
WARPGROUP, CONSUMERS, WARPS = 128, 256, 8
SLOTS = 2
LN2 = 0.6931471805599453


class Ring(NamedTuple):
    """Tiles in shared memory, the mbarriers that say a stage is full or empty, and how many stages there are."""

    tiles: Any
    full: Any
    empty: Any
    stages: Any


class Source(NamedTuple):
    """A TMA descriptor and its tensor of coordinates (s, d, h, b)."""

    atom: Any
    tensor: Any


class Sources(NamedTuple):
    """What the producer reads."""

    q: Source
    k: Source
    v: Source
    do: Source
    stats: Any
    table: Any
    counter: Any


class Work(NamedTuple):
    """Columns (heads, or heads of all segments) and how many run together; the band."""

    columns: Any
    together: Any
    left: Any
    right: Any


class Cut(NamedTuple):
    """Where the mask lies for one key tile: first key, keys of the segment, diagonal, band."""

    j0: Any
    len_k: Any
    shift: Any
    left: Any
    right: Any


def tma_source(tensor, layout, rows, dim):
    """TMA loads of (rows, dim) tiles of a (b, s, h, d) tensor into one stage of a ring's layout."""
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))
    copy = cpasync.CopyBulkTensorTileG2SOp()
    info = cpasync.make_tiled_tma_atom(copy, view, cute.select(layout, mode=[0, 1]), (rows, dim))
    return Source(info.atom, info.tma_tensor)


def ring_layout(dtype, width, shape):
    """(rows, dim, stages) in atoms of `width` elements, see `Geometry.atom`."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[width]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=(0, 1, 2))


def make_rings(smem, tid, parts):
    """Rings of (tiles, stages, warps): a stage is filled by one thread and emptied by that many warps."""
    rings = []
    for tiles, stages, _ in parts:
        bars = smem.allocate_array(cutlass.Int64, 2 * stages, byte_alignment=8)
        rings.append(Ring(tiles, bars, bars + stages, stages))
    _init(tid, rings, [warps for _, _, warps in parts])
    return rings


@cute.jit
def _init(tid, rings, warps):
    """Initialise the mbarriers, and let the block see them."""
    if tid == 0:
        for ring, count in zip(rings, warps, strict=True):
            for i in cutlass.range_constexpr(ring.stages):
                cute.arch.mbarrier_init(ring.full + i, 1)
                cute.arch.mbarrier_init(ring.empty + i, count)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def take_ticket(counter):
    """The next number of a counter in global memory, the same for the whole warp."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(counter.iterator, Int32(1))
    return cute.arch.shuffle_sync(ticket, 0)


@cute.jit
def hand_over(items, slot, values):
    """One thread tells the consumers what to work on; (-1,) ends it."""
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(values)):
            items.tiles[i, slot] = values[i]
        cute.arch.mbarrier_arrive(items.full + slot)


@cute.jit
def draw(table, work, ticket, heads):
    """(segment, tile, head, tiles of the segment, place among those that run together) of a ticket.

    The order: of a segment (dense: of the batch) `together` columns at a time, and of those tile by tile.
    """
    s = Int32(0)
    if work.columns == heads:  # else a dense batch, whose segments are alike
        s = segment_of(table, ticket // heads)
    first = table[7, s]
    tiles = table[7, s + 1] - first
    local = ticket - first * work.columns
    block = local // (tiles * work.together)
    width = cutlass.min(work.together, work.columns - block * work.together)
    inside = local - block * tiles * work.together
    tile = inside // width
    column = block * work.together + inside - tile * width
    return s + column // heads, tile, column % heads, tiles, inside


@cute.jit
def segment_of(table, tile):
    """The segment that holds `tile`: the last whose first tile is at or before it; 32 probes a round."""
    lane = cute.arch.lane_idx()
    low, span = Int32(0), table.shape[1] - 1
    while span > 1:
        step = (span + 31) // 32
        before = Int32(0)
        if lane * step < cutlass.min(span, table.shape[1] - 1 - low):
            if table[7, low + lane * step] <= tile:
                before = Int32(1)
        low += (cute.arch.popc(cute.arch.vote_ballot_sync(before == 1)) - 1) * step
        span = step
    return low


def operand_shape(k: int) -> tuple:
    """Registers of a 16-bit A operand of 64 rows by k: the accumulator's order, 8 values a k-block of 16."""
    return ((2, 2, 2), 1, k // 16)


def turned(s):
    """The same tile read along the other axis."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


def part_a(mma, thread, s):
    """This warpgroup's part of an A operand in shared memory."""
    return mma.get_slice(thread).partition_A(s)


def fragment_b(mma, thread, s):
    """Descriptors of a B operand in shared memory."""
    return mma.make_fragment_B(mma.get_slice(thread).partition_B(s))


def row_of(t):
    """The first of the two rows, 8 apart, that thread t of a warpgroup holds of 64."""
    return (t // 32) * 16 + cute.arch.lane_idx() // 4


@cute.jit
def store_rows(t, acc, out, at, row0, live, room, dim: cutlass.Constexpr, scale):
    """Store a warpgroup's accumulator of 64 rows, scaled and rounded, in pieces of 16 bytes.

    `at` is (batch index, the segment's first row in memory, head), row0 the first of the 64 in the segment. Rows from
    `live` on, up to `room` where the next segment starts, become zero.
    """
    dtype, groups, place = out.element_type, dim // 8, cute.arch.lane_idx() % 4
    b, first, head = at
    for r in cutlass.range_constexpr(2):
        row = row0 + row_of(t) + 8 * r
        line = out[b, first + cutlass.min(row, room - 1), head, None].iterator
        for j in cutlass.range_constexpr(0, groups, 4):
            here = min(4, groups - j)
            words = cute.make_rmem_tensor((4,), Int32)
            pairs = cute.recast_tensor(words, dtype)
            for i in cutlass.range_constexpr(2 * here):
                value = acc[4 * j + 4 * (i // 2) + 2 * r + i % 2] * scale if row < live else Float32(0.0)
                pairs[i] = value.to(dtype)
            if const_expr(here == 4):
                transpose(words, place)
                if row < room:
                    eight = cute.make_tensor(line + cute.assume(8 * j + 8 * place, divby=8), cute.make_layout((8,)))
                    cute.autovec_copy(words, cute.recast_tensor(eight, Int32))
            elif row < room:
                for i in cutlass.range_constexpr(here):
                    target = line + cute.assume(8 * j + 8 * i + 2 * place, divby=2)
                    two = cute.make_tensor(pairs.iterator + 2 * i, cute.make_layout((2,)))
                    cute.autovec_copy(two, cute.make_tensor(target, cute.make_layout((2,))))


@cute.jit
def transpose(words, place):
    """Of four words a lane and four lanes: lane `place` ends with word `place` of each, in order."""
    for bit in cutlass.range_constexpr(2):
        upper = (place >> bit) % 2 == 1
        for i in cutlass.range_constexpr(4):
            if const_expr((i >> bit) % 2 == 0):
                k = i + (1 << bit)
                other = cute.arch.shuffle_sync_bfly(words[i] if upper else words[k], offset=1 << bit)
                words[i], words[k] = (other if upper else words[i]), (words[k] if upper else other)


@cute.jit
def following(stage, phase, stages: cutlass.Constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def expect(bar, nbytes: cutlass.Constexpr):
    """One thread announces nbytes to an mbarrier."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, nbytes)


@cute.jit
def arrive(bar):
    """One thread of every warp arrives."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(bar)


@cute.jit
def load(source, s, stage, row, head, b, bar):
    """TMA: one stage of s from `row` on; what lies outside the tensor reads as zero."""
    src, dst = places(source, s, row, head, b)
    cute.copy(source.atom, src, dst[None, stage], tma_bar_ptr=bar)


@cute.jit
def prefetch(source, s, row, head, b):
    """TMA: bring to the L2 cache what `load` will ask for, where shared memory has no room for it yet."""
    src, _ = places(source, s, row, head, b)
    cute.prefetch(source.atom, src)


def places(source, s, row, head, b):
    """Where a tile lies in memory and, for every stage, in shared memory, as TMA takes it."""
    rows, dim = cute.size(s, mode=[0]), cute.size(s, mode=[1])
    g = cute.local_tile(cute.domain_offset((row, 0), source.tensor[None, None, head, b]), (rows, dim), (0, 0))
    dst, src = cpasync.tma_partition(
        source.atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )
    return src, dst


@cute.jit
def clear(s, stage, first, thread, threads: cutlass.Constexpr):
    """Zero rows `first` on of a tile, which belong to no segment or another and may hold anything, NaN too."""
    rows, units = cute.size(s, mode=[0]), cute.size(s, mode=[1]) // 8
    zeros = cute.make_rmem_tensor((1, 8), s.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(thread, (rows - first) * units, threads, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(s[None, None, stage], (1, 8), (first + i // units, i % units)))


@cute.jit
def chain(mma, acc, a, b, stage, more: cutlass.Constexpr = False):
    """acc = A B, or with `more` acc += A B, over every k-block, A and B in shared memory, B in a ring."""
    mma = own(mma, more)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k, 0], b[None, None, k, stage], acc)
        mma.set(Field.ACCUMULATE, True)


@cute.jit
def chain_rs(mma, acc, a, b, stage):
    """acc += A B over every k-block, A in registers."""
    mma = own(mma, True)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k, stage], acc)


def own(mma, accumulate):
    """A copy of the MMA, because `set` changes the object and must not escape a loop's body."""
    own = mma.__new_from_mlir_values__(mma.__extract_mlir_values__())
    own.set(Field.ACCUMULATE, accumulate)
    return own


def exp2(x):
    """2^x by the special function unit."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def narrow(acc, out):
    """Round an fp32 accumulator to 16 bits, in the same order."""
    flat = cute.make_tensor(out.iterator, cute.make_layout(cute.size(out)))
    flat.store(cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))).load().to(out.element_type))
