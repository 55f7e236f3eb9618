"""Before and after the main kernel, in Triton: statistics, zeroing and the scheduling table; the rounding of dQ."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class Segments(NamedTuple):
    """Both sides' segments. Packed: int32 offsets (b+1), optional int32 lengths (b), rows in all. Dense: lengths."""

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    len_q: Any
    len_k: Any
    total_q: Any
    total_k: Any
    batch: Any


class Tile(NamedTuple):
    """Where a query tile lies: segment, batch index and first row in memory, tile of the segment, lengths."""

    s: Any
    b: Any
    row: Any
    m: Any
    len_q: Any
    len_k: Any
    room: Any


@triton.jit
def side(cu, used, length, total, s, batch):
    """(first row, real length, rows up to the next segment or the end) of segments s, one side; s may be a vector."""
    if cu is None:
        return s * 0, s * 0 + length, s * 0 + length
    else:
        live = s < batch
        start = tl.load(cu + s, mask=live, other=0)  # [S]
        stop = tl.load(cu + s + 1, mask=live, other=0)  # [S]
        n = stop - start
        if used is not None:
            n = tl.load(used + s, mask=live, other=0)  # [S]
        return start, n, tl.where(s == batch - 1, total, stop) - start


@triton.jit
def first_tile(cu, length, total, s, batch, ROWS: tl.constexpr):
    """The first tile of segments s. Packed segments have room // ROWS + 1 tiles at most, so no sum is needed."""
    if cu is None:
        return s * tl.maximum(tl.cdiv(length, ROWS), 1)
    else:
        start = tl.load(cu + s, mask=s < batch, other=0)  # [S]
        return tl.where(s < batch, start, total) // ROWS + s


@triton.jit
def find(seg, t, TILE_Q: tl.constexpr):
    """The segment that holds query tile t, and where the tile lies."""
    if seg.cu_q is None:
        s = t // tl.maximum(tl.cdiv(seg.len_q, TILE_Q), 1)
    else:
        low, high = t * 0, t * 0 + seg.batch
        while high - low > 1:
            middle = (low + high) // 2
            before = first_tile(seg.cu_q, seg.len_q, seg.total_q, middle, seg.batch, TILE_Q) <= t
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        s = low
    m = t - first_tile(seg.cu_q, seg.len_q, seg.total_q, s, seg.batch, TILE_Q)
    start, len_q, room = side(seg.cu_q, seg.used_q, seg.len_q, seg.total_q, s, seg.batch)
    _, len_k, _ = side(seg.cu_k, seg.used_k, seg.len_k, seg.total_k, s, seg.batch)
    b = s
    if seg.cu_q is not None:
        b = s * 0
    return Tile(s, b, start + m * TILE_Q, m, len_q, len_k, room)


@triton.jit
def address(x, b, h, row, UNIT: tl.constexpr = 1):
    """Pointer to a token row of batch b, head h, in 64 bits. The strides of x count UNIT elements."""
    offset = b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h + row.to(tl.int64) * x.stride_s
    return x.ptr + offset * UNIT


@triton.jit
def order(seg, s, length, ROWS: tl.constexpr, OF_QUERIES: tl.constexpr):
    """(place, first tile) of segments s, the longest first: as many comparisons as the square of the segments."""
    place, tile = s * 0, s * 0
    for o0 in range(0, seg.batch, 64):
        o = o0 + tl.arange(0, 64)  # [O]
        if OF_QUERIES:
            _, other, room = side(seg.cu_q, seg.used_q, seg.len_q, seg.total_q, o, seg.batch)
        else:
            _, other, room = side(seg.cu_k, seg.used_k, seg.len_k, seg.total_k, o, seg.batch)
        tiles = tl.maximum(tl.cdiv(room, ROWS), 1)
        longer = other[None, :] > length[:, None]
        earlier = longer | ((other[None, :] == length[:, None]) & (o[None, :] < s[:, None]))
        earlier = earlier & (o < seg.batch)[None, :]
        place += tl.sum(earlier.to(tl.int32), 1)
        tile += tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
    return place, tile


@triton.jit
def write_table(seg, table, block, TILE_Q: tl.constexpr, ROWS: tl.constexpr, TOP_LEFT: tl.constexpr,
                OF_QUERIES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The scheduling table of key tiles (or query tiles) of ROWS rows, int32 (9, batch + 1), a column a segment.

    Packed segments come by falling length of that side. Rows: batch index, first query row, first key row, seqlen_q,
    seqlen_k, rows of that side up to the next segment, first tile of stats, first tile of that side (the last column
    ends the list), the key on the diagonal of query 0.
    """
    s = block * CHUNK + tl.arange(0, CHUNK)  # [S]
    width = seg.batch + 1
    q0, len_q, room = side(seg.cu_q, seg.used_q, seg.len_q, seg.total_q, s, seg.batch)
    k0, len_k, room_k = side(seg.cu_k, seg.used_k, seg.len_k, seg.total_k, s, seg.batch)
    length = len_q
    if not OF_QUERIES:
        room, length = room_k, len_k
    shift = len_k - len_q
    if TOP_LEFT:
        shift = len_k * 0
    b, place = s, s
    tile = s * tl.maximum(tl.cdiv(length, ROWS), 1)
    if seg.cu_q is not None:
        b = s * 0
        place, tile = order(seg, s, tl.where(s < seg.batch, length, -1), ROWS, OF_QUERIES)
    stats_tile = first_tile(seg.cu_q, seg.len_q, seg.total_q, s, seg.batch, TILE_Q)
    live = s < width
    tl.store(table + 0 * width + place, b, mask=live)
    tl.store(table + 1 * width + place, q0, mask=live)
    tl.store(table + 2 * width + place, k0, mask=live)
    tl.store(table + 3 * width + place, len_q, mask=live)
    tl.store(table + 4 * width + place, len_k, mask=live)
    tl.store(table + 5 * width + place, room, mask=live)
    tl.store(table + 6 * width + place, stats_tile, mask=live)
    tl.store(table + 7 * width + place, tile, mask=live)
    tl.store(table + 8 * width + place, shift, mask=live)


@triton.jit
def prepare_kernel(out, dout, lse, dlse, given, sink, stats, dq_acc, dsink_rows, tables, counters, seg, left, right,
                   tiles, blocks, HEAD_DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, TILE_Q: tl.constexpr,
                   TILE_KV: tl.constexpr, TILE_ELEMENTS: tl.constexpr, TOP_LEFT: tl.constexpr, CHUNK: tl.constexpr,
                   UNIT: tl.constexpr):  # fmt: skip
    """LSE in base 2 and D of one query tile and head, its dQ accumulator zeroed; the first programs write the table.

    D = rowsum(dO * O) (or `given`) - dLSE. A row that sees no key gets LSE = +inf and D = 0, so that its P is 0.
    `tables` holds the table of key tiles and, where dq_acc is None, that of query tiles of TILE_KV rows.
    The strides of out and dout count UNIT elements (see address).
    Grid: blocks + tiles * nheads_q. Writes stats (fp32 [nheads_q, tiles, 2, TILE_Q]), dq_acc, dsink_rows, tables,
    counters.
    """
    pid = tl.program_id(0)
    if pid < blocks:
        write_table(seg, tables, pid, TILE_Q, TILE_KV, TOP_LEFT, False, CHUNK)
        if dq_acc is None:
            write_table(seg, tables + 9 * (seg.batch + 1), pid, TILE_Q, TILE_KV, TOP_LEFT, True, CHUNK)
        if pid == 0:
            tl.store(counters + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    else:
        t, h = (pid - blocks) % tiles, (pid - blocks) // tiles
        at = find(seg, t, TILE_Q)
        if at.m * TILE_Q < at.len_q:
            slot = h.to(tl.int64) * tiles + t
            r = tl.arange(0, TILE_Q)
            i = at.m * TILE_Q + r  # [M]
            live = i < at.len_q
            shift = at.len_k - at.len_q
            if TOP_LEFT:
                shift = at.len_k * 0
            first, last = tl.maximum(0, i + shift - left), tl.minimum(at.len_k - 1, i + shift + right)
            sees = live & (first <= last)  # [M]
            if given is None:
                c = tl.arange(0, BLOCK_V)
                keep = sees[:, None] & (c < HEAD_DIM_V)[None, :]
                at_o, at_do = address(out, at.b, h, at.row, UNIT), address(dout, at.b, h, at.row, UNIT)
                o = tl.load(at_o + r[:, None] * out.stride_s * UNIT + c[None, :], mask=keep, other=0.0)  # [M, DV]
                do = tl.load(at_do + r[:, None] * dout.stride_s * UNIT + c[None, :], mask=keep, other=0.0)  # [M, DV]
                d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [M]
            else:
                d = tl.load(address(given, at.b, h, at.row) + r * given.stride_s, mask=sees, other=0.0)  # [M]
            if dlse is not None:
                with_grad = sees
                if sink is not None:
                    with_grad = live  # without a sink, LSE of a row that sees no key is the constant -inf
                d -= tl.load(address(dlse, at.b, h, at.row) + r * dlse.stride_s, mask=with_grad, other=0.0)  # [M]
            l = tl.load(address(lse, at.b, h, at.row) + r * lse.stride_s, mask=sees, other=0.0)  # [M]
            tl.store(stats + slot * (2 * TILE_Q) + r, tl.where(sees, l * LOG2E, float("inf")))
            tl.store(stats + slot * (2 * TILE_Q) + TILE_Q + r, tl.where(sees, d, 0.0))
            if sink is not None:
                logit = tl.load(sink + h).to(tl.float32)
                share = -tl.exp2((logit - tl.where(sees, l, logit)) * LOG2E) * d
                tl.store(address(dsink_rows, at.b, h, at.row) + r * dsink_rows.stride_s, share, mask=live)
            if dq_acc is not None:
                for e in range(0, TILE_ELEMENTS, 1024):
                    tl.store(dq_acc + slot * TILE_ELEMENTS + e + tl.arange(0, 1024), tl.zeros((1024,), tl.float32))


@triton.jit
def finish_kernel(dq_acc, dq, seg, scale, tiles, HEAD_DIM_QK: tl.constexpr, D_QK: tl.constexpr,
                  TILE_Q: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """dq = scale * dq_acc, rounded once; rows between segments become zero.

    dq_acc holds a tile as the wgmma accumulators of two warpgroups (PTX ISA, wgmma.m64nNk16 matrix D), which share the
    columns of 64 rows or own 64 of 128 rows: [8 columns][warp][row % 8][column pair][row half][2].
    Grid: tiles * nheads_q. Writes every row of dq. LANES is how many groups of 8 columns are turned at a time. The
    strides of dq count UNIT elements (see address).
    """
    pid = tl.program_id(0)
    t, h = pid % tiles, pid // tiles
    at = find(seg, t, TILE_Q)
    if at.m * TILE_Q < at.room:
        HALVES: tl.constexpr = TILE_Q // 64
        COLUMNS: tl.constexpr = D_QK * HALVES // 2  # of one warpgroup
        base = dq_acc + (h.to(tl.int64) * tiles + t) * (TILE_Q * D_QK)
        r, c, x = tl.arange(0, 64), tl.arange(0, 8 * LANES), tl.arange(0, 512 * LANES)
        for g in range(2):
            rows = r + g * 64 * (HALVES - 1)
            i = at.m * TILE_Q + rows
            line = address(dq, at.b, h, at.row, UNIT) + rows[:, None] * dq.stride_s * UNIT
            for j in range(0, COLUMNS, 8 * LANES):
                value = tl.load(base + g * 64 * COLUMNS + j * 64 + x)
                value = tl.reshape(value, (LANES, 4, 8, 4, 2, 2))
                value = tl.reshape(tl.permute(value, (1, 4, 2, 0, 3, 5)), (64, 8 * LANES))
                value = tl.where((i < at.len_q)[:, None], value * scale, 0.0)
                col = g * COLUMNS * (2 - HALVES) + j + c
                keep = (i < at.room)[:, None] & (col < HEAD_DIM_QK)[None, :]
                tl.store(line + col[None, :], value.to(dq.ptr.dtype.element_ty), mask=keep)
