"""Device helpers: where a segment lies, which rows see it, and tiles whose head dim is one or two power-of-two chunks.

A tile is a tuple of one or two tensors, so that 192 is 128 + 64 and nothing is multiplied that is not there. Arguments
that are None (no window, no softcap, no seqused) remove their lines at compile time.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ROW_PAD = tl.constexpr(128)
LN2 = tl.constexpr(0.6931471805599453)


class Seqs(NamedTuple):
    """Segments of one side. Packed: int32 offsets (b+1), optional int32 lengths (b), rows in all. Dense: a length."""

    cu_seqlens: Any
    seqused: Any
    seqlen: Any
    total: Any


class Window(NamedTuple):
    """The band `-left <= j - i - shift <= right`; None is unbounded."""

    left: Any
    right: Any


class Blocks(NamedTuple):
    """What a one-dimensional grid is made of: `columns` of the nheads * batch run together, their tiles in order.

    The tile index varies slowest inside a group of columns, so that the longest tiles start first and the columns in
    flight share the cache. `tiles`, int32 [2, entries], lists the real tiles of a packed batch (segment, tile), in that
    order; a column is then a head, and the grid has `entries` tiles a column instead of the longest segment's.
    """

    nheads: Any
    batch: Any
    columns: Any
    tiles: Any


@triton.jit
def locate(blocks):
    """(tile, head, batch, tiles a segment) of this program; batch is -1 where a list has no more tiles."""
    total = blocks.nheads
    if blocks.tiles is None:
        total = blocks.nheads * blocks.batch
    tiles = tl.num_programs(0) // total
    pid = tl.program_id(0)
    first = pid // (tiles * blocks.columns) * blocks.columns
    columns = tl.minimum(blocks.columns, total - first)
    rest = pid - first * tiles
    column = first + rest % columns
    if blocks.tiles is None:
        return rest // columns, column % blocks.nheads, column // blocks.nheads, tiles
    else:
        entry = rest // columns
        return tl.load(blocks.tiles + tiles + entry), column, tl.load(blocks.tiles + entry), tiles


@triton.jit
def tiles_of(blocks, tiles, length, ROWS: tl.constexpr):
    """Tiles of a segment that have a program: as many as the longest has, or its own where tiles are listed."""
    if blocks.tiles is None:
        return tiles
    else:
        return tl.maximum(tl.cdiv(length, ROWS), 1)


@triton.jit
def segment(seqs, b, batch):
    """(first row, real length, rows up to the next segment or the end of the tensor) of segment b."""
    if seqs.cu_seqlens is None:
        return b * 0, b * 0 + seqs.seqlen, b * 0 + seqs.seqlen
    else:
        start = tl.load(seqs.cu_seqlens + b)
        stop = tl.load(seqs.cu_seqlens + b + 1)
        length = stop - start
        if seqs.seqused is not None:
            length = tl.load(seqs.seqused + b)
        room = tl.where(b == batch - 1, seqs.total, stop) - start
        return start, length, room


@triton.jit
def padded_start(seqs, b, start):
    """Where segment b begins in a buffer of row values that has room for whole tiles of every segment."""
    if seqs.cu_seqlens is None:
        return b * 0
    else:
        return (start + b * ROW_PAD) // ROW_PAD * ROW_PAD


@triton.jit
def diagonal(seqlen_q, seqlen_k, TOP_LEFT: tl.constexpr):
    """The key on the diagonal of query 0."""
    if TOP_LEFT:
        return seqlen_q * 0
    else:
        return seqlen_k - seqlen_q


@triton.jit
def rows_that_see(j0, j1, seqlen_q, shift, window):
    """Query rows [lo, hi) that see any key of [j0, j1), and [full_lo, full_hi) that see all of them."""
    lo, full_lo = j0 * 0, j0 * 0
    hi, full_hi = seqlen_q, seqlen_q
    if window.right is not None:
        lo = tl.maximum(0, j0 - window.right - shift)
        full_lo = tl.maximum(0, j1 - 1 - window.right - shift)
    if window.left is not None:
        hi = tl.minimum(seqlen_q, j1 + window.left - shift)
        full_hi = tl.minimum(seqlen_q, j0 + 1 + window.left - shift)
    return lo, hi, full_lo, full_hi


@triton.jit
def keys_seen(i0, i1, seqlen_k, shift, window):
    """Keys [lo, hi) that any row of [i0, i1) sees, and [full_lo, full_hi) that all of them see."""
    lo, full_lo = i0 * 0, i0 * 0
    hi, full_hi = seqlen_k, seqlen_k
    if window.left is not None:
        lo = tl.maximum(0, i0 + shift - window.left)
        full_lo = tl.maximum(0, i1 - 1 + shift - window.left)
    if window.right is not None:
        hi = tl.minimum(seqlen_k, i1 + shift + window.right)
        full_hi = tl.minimum(seqlen_k, i0 + 1 + shift + window.right)
    return lo, hi, full_lo, full_hi


@triton.jit
def visible(live, i, j, shift, window):
    """`live` and the band over a tile, either may be None; i and j broadcast against one another."""
    keep = live
    if window.right is not None:
        keep = both(keep, j - i - shift <= window.right)
    if window.left is not None:
        keep = both(keep, j - i - shift >= -window.left)
    return keep


@triton.jit
def both(a, b):
    """`a & b`; `a` may be None, for all."""
    if a is None:
        return b
    else:
        return a & b


@triton.jit
def row_ptr(x, b, h, row):
    """Pointer to a token row of batch b, head h; the offset is computed in 64 bits.

    Rows of a tile are then reached by offsets of the strides' own width, which holds 128 rows of a stride below 2^24.
    """
    at = b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h + row.to(tl.int64) * x.stride_s
    return x.ptr + at


@triton.jit
def load_rows(x, ptr, r, live):
    """A value a row [R]: rows r from ptr; dead rows are 0, and `live` None means all live."""
    if live is None:
        return tl.load(ptr + r * x.stride_s)
    else:
        return tl.load(ptr + r * x.stride_s, mask=live, other=0.0)  # [R]


@triton.jit
def load_chunk(at, live, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """The first WIDTH columns of the rows `at` [R, WIDTH]; dead rows and columns >= DIM are 0."""
    d = tl.arange(0, WIDTH)
    if DIM >= WIDTH:
        if live is None:
            tile = tl.load(at[:, None] + d[None, :])
        else:
            tile = tl.load(at[:, None] + d[None, :], mask=live[:, None], other=0.0)  # [R, WIDTH]
    else:
        keep = (d < DIM)[None, :]
        if live is not None:
            keep &= live[:, None]
        tile = tl.load(at[:, None] + d[None, :], mask=keep, other=0.0)  # [R, WIDTH]
    return tile


@triton.jit
def load_tile(x, ptr, r, live, DIM: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    """Rows r from ptr as chunks [R, LO] and, where HI > 0, [R, HI]; dead rows and columns >= DIM are 0."""
    at = ptr + r * x.stride_s
    if HI == 0:
        return (load_chunk(at, live, LO, DIM),)
    else:
        return (load_chunk(at, live, LO, LO), load_chunk(at + LO, live, HI, DIM - LO))


@triton.jit
def open_heads(x, b, h, heads, start, rows, ROWS: tl.constexpr, DIM: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
               TMA: tl.constexpr):  # fmt: skip
    """Rows [start, start + rows) of `heads` heads from h of batch b, to be read a tile at a time: TMA, or a pointer.

    What lies outside reads as 0 through a TMA descriptor; through a pointer the reader masks it.
    """
    base = row_ptr(x, b, h, start)
    if TMA:
        rows = tl.maximum(rows, 1)
        lo = tl.make_tensor_descriptor(base, [heads, rows, DIM], [x.stride_h, x.stride_s, 1], [1, ROWS, LO])
        if HI == 0:
            return (lo,)
        else:
            hi = tl.make_tensor_descriptor(
                base + LO, [heads, rows, DIM - LO], [x.stride_h, x.stride_s, 1], [1, ROWS, HI]
            )
            return (lo, hi)
    else:
        return (base,)


@triton.jit
def read_tile(x, source, h, first, r, live, DIM: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, TMA: tl.constexpr):
    """The tile of rows first + r of head h of opened heads, as chunks."""
    if TMA:
        lo = tl.reshape(source[0].load([h, first, 0]), [r.shape[0], LO])  # [R, LO]
        if HI == 0:
            return (lo,)
        else:
            return (lo, tl.reshape(source[1].load([h, first, 0]), [r.shape[0], HI]))  # [R, HI]
    else:
        at = tl.cast(h, tl.int64) * x.stride_h + tl.cast(first, tl.int64) * x.stride_s
        return load_tile(x, source[0] + at, r, live, DIM, LO, HI)


@triton.jit
def store_tile(x, ptr, r, live, tile, DIM: tl.constexpr, LO: tl.constexpr):
    """Store chunks into the live rows r from ptr, cast to the tensor's dtype."""
    at = ptr + r * x.stride_s
    for c in tl.static_range(len(tile)):
        d = c * LO + tl.arange(0, tile[c].shape[1])
        keep = live[:, None] & (d < DIM)[None, :]
        tl.store(at[:, None] + d[None, :], tile[c].to(x.ptr.dtype.element_ty), mask=keep)


@triton.jit
def add_tile(x, ptr, r, live, tile, DIM: tl.constexpr, LO: tl.constexpr):
    """Atomically add chunks to the live rows r from ptr of an fp32 tensor, in no order."""
    at = ptr + r * x.stride_s
    for c in tl.static_range(len(tile)):
        d = c * LO + tl.arange(0, tile[c].shape[1])
        keep = (d < DIM)[None, :]
        if live is not None:
            keep &= live[:, None]
        tl.atomic_add(at[:, None] + d[None, :], tile[c], mask=keep, sem="relaxed")


@triton.jit
def zero_tile(ROWS: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    """An fp32 accumulator in chunks."""
    if HI == 0:
        return (tl.zeros([ROWS, LO], tl.float32),)
    else:
        return (tl.zeros([ROWS, LO], tl.float32), tl.zeros([ROWS, HI], tl.float32))


@triton.jit
def zero_gap(x, b, h, start, first, step, room, ROWS: tl.constexpr, DIM: tl.constexpr, LO: tl.constexpr,
             HI: tl.constexpr):  # fmt: skip
    """Zero the rows from `first` to `room` of a segment in strides of `step`: padding that no tile owns."""
    r = tl.arange(0, ROWS)
    for at in range(first, room, step):
        store_tile(x, row_ptr(x, b, h, start + at), r, at + r < room, zero_tile(ROWS, LO, HI), DIM, LO)


@triton.jit
def dot_nt(a, b):
    """Chunks a [M, D], b [N, D] to a b^T [M, N]."""
    acc = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")  # [M, N]
    if len(a) == 2:
        acc = tl.dot(a[1], tl.trans(b[1]), acc, input_precision="ieee")  # [M, N]
    return acc


@triton.jit
def dot_add(acc, p, x):
    """Chunks acc [R, D] + p [R, C] x [C, D]."""
    if len(x) == 1:
        return (tl.dot(p, x[0], acc[0], input_precision="ieee"),)  # [R, LO]
    else:
        lo = tl.dot(p, x[0], acc[0], input_precision="ieee")  # [R, LO]
        return (lo, tl.dot(p, x[1], acc[1], input_precision="ieee"))  # [R, HI]


@triton.jit
def scaled(tile, factor):
    """Chunks times a scalar or a column [R, 1]."""
    if len(tile) == 1:
        return (tile[0] * factor,)
    else:
        return (tile[0] * factor, tile[1] * factor)


@triton.jit
def capped(qk, scale, softcap):
    """(score in log2 units, d score / d (scale qk)): scale * qk, through softcap * tanh(. / softcap) if asked."""
    if softcap is None:
        return qk * (scale * LOG2E), 1.0
    else:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(qk * (scale * 2.0 * LOG2E / softcap)))  # tanh without a vendor library
        return t * (softcap * LOG2E), 1.0 - t * t
