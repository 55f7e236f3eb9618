"""D = rowsum(dO * O) before or in the main kernels, lists of tiles, and the rounding of dQ after the fused one."""

import triton
import triton.language as tl

from .chunks_device import (
    LOG2E,
    diagonal,
    keys_seen,
    load_rows,
    load_tile,
    locate,
    row_ptr,
    scaled,
    segment,
    store_tile,
)


@triton.jit
def tile_counts(seqs, b, batch, ROWS: tl.constexpr):
    """Tiles of segments b, a vector: at least one each, so that gaps are zeroed; 0 from `batch` on."""
    live = b < batch
    stop = tl.load(seqs.cu_seqlens + b + 1, mask=live, other=0)  # [S]
    length = stop - tl.load(seqs.cu_seqlens + b, mask=live, other=0)  # [S]
    if seqs.seqused is not None:
        length = tl.load(seqs.seqused + b, mask=live, other=0)  # [S]
    return tl.where(live, tl.maximum(tl.cdiv(length, ROWS), 1), 0)


@triton.jit
def list_tiles(seqs, tiles, entries, b, batch, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Enter the tiles of segment b into a list (int32 [2, entries]), and its share of the empty entries behind all."""
    before, total = b * 0, b * 0
    for s0 in range(0, batch, CHUNK):
        s = s0 + tl.arange(0, CHUNK)  # [S]
        counts = tile_counts(seqs, s, batch, ROWS)
        before += tl.sum(tl.where(s < b, counts, 0), 0)
        total += tl.sum(counts, 0)
    mine = tl.sum(tile_counts(seqs, b + tl.arange(0, CHUNK), b + 1, ROWS), 0)
    for t0 in range(0, mine, CHUNK):
        t = t0 + tl.arange(0, CHUNK)  # [T]
        tl.store(tiles + before + t, b, mask=t < mine)
        tl.store(tiles + entries + before + t, t, mask=t < mine)
    for t0 in range(total + b * CHUNK, entries, batch * CHUNK):  # many where padding is long
        t = t0 + tl.arange(0, CHUNK)  # [T]
        tl.store(tiles + t, -1, mask=t < entries)


@triton.jit
def list_tiles_kernel(seqs, tiles, entries, other_seqs, other_tiles, other_entries, batch, ROWS: tl.constexpr,
                      OTHER_ROWS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """List the real tiles of packed segments, segment by segment, so that programs beside one another share rows.

    Makes one list, and another where other_tiles is not None. Grid: batch. Writes tiles (int32 [2, entries]): segment
    and tile, segment -1 behind the last; entries is at least the sum of the counts.
    """
    list_tiles(seqs, tiles, entries, tl.program_id(0), batch, ROWS, CHUNK)
    if other_tiles is not None:
        list_tiles(other_seqs, other_tiles, other_entries, tl.program_id(0), batch, OTHER_ROWS, CHUNK)


@triton.jit
def row_deltas(out, do, lse, deltas, b, h, row, r, live, sees,
               HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr):  # fmt: skip
    """delta_i = sum_d dout_id * out_id - dlse_i [M]; the sum is `given` where there is one, 0 for a row without keys.

    dsink_rows_i = -exp(sink_h - lse_i) * delta_i, where there is a sink. `do`: the chunks of dout, rows that see no key
    as 0. Writes delta (fp32, LSE's layout) of live rows, and dsink_rows (fp32, [nheads_q, total_q]).
    """
    dlse, given, sink, delta, dsink_rows = deltas
    if given is None:
        o = load_tile(out, row_ptr(out, b, h, row), r, sees, HEAD_DIM_V, V_LO, V_HI)  # [M, DV]
        d = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)  # [M]
        if len(o) == 2:
            d += tl.sum(o[1].to(tl.float32) * do[1].to(tl.float32), 1)
    else:
        d = load_rows(given, row_ptr(given, b, h, row), r, sees)  # [M]
    if dlse is not None:
        with_grad = sees if sink is None else live  # without a sink, LSE of a row that sees no key is the constant -inf
        d -= load_rows(dlse, row_ptr(dlse, b, h, row), r, with_grad)  # [M]
    tl.store(row_ptr(delta, b, h, row) + r * delta.stride_s, d, mask=live)
    if sink is not None:
        logit = tl.load(sink + h).to(tl.float32)
        l = tl.where(sees, load_rows(lse, row_ptr(lse, b, h, row), r, sees), logit)  # [M]
        share = -tl.exp2((logit - l) * LOG2E) * d
        tl.store(row_ptr(dsink_rows, b, h, row) + r * dsink_rows.stride_s, share, mask=live)
    return d


@triton.jit
def delta_kernel(out, dout, lse, dlse, given, sink, delta, dsink_rows, seqs_q, seqs_k, window, blocks,
                 BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
                 TOP_LEFT: tl.constexpr):  # fmt: skip
    """delta and, where there is a sink, dsink_rows of a tile of rows (see row_deltas), before the fused kernel.

    Grid: cdiv(max_seqlen_q, BLOCK_M) * nheads_q * batch. Writes them of real rows once; dsink_rows is zeroed before.
    """
    m_block, h, b, _ = locate(blocks)
    start_q, seqlen_q, _ = segment(seqs_q, b, blocks.batch)
    _, seqlen_k, _ = segment(seqs_k, b, blocks.batch)
    if m_block * BLOCK_M >= seqlen_q:
        return
    r = tl.arange(0, BLOCK_M)
    i = m_block * BLOCK_M + r  # [M]
    row = start_q + m_block * BLOCK_M
    live = i < seqlen_q
    lo, hi, _, _ = keys_seen(i, i + 1, seqlen_k, diagonal(seqlen_q, seqlen_k, TOP_LEFT), window)
    sees = live & (lo < hi)  # [M]
    do = None
    if given is None:
        do = load_tile(dout, row_ptr(dout, b, h, row), r, sees, HEAD_DIM_V, V_LO, V_HI)  # [M, DV]
    deltas = (dlse, given, sink, delta, dsink_rows)
    row_deltas(out, do, lse, deltas, b, h, row, r, live, sees, HEAD_DIM_V, V_LO, V_HI)


@triton.jit
def round_dq_kernel(dq_acc, dq, seqlen, scale, blocks, BLOCK_M: tl.constexpr, HEAD_DIM_QK: tl.constexpr,
                    QK_LO: tl.constexpr, QK_HI: tl.constexpr):  # fmt: skip
    """dq = scale * dq_acc, rounded once.

    Grid: cdiv(seqlen, BLOCK_M) * nheads_q * batch, where packed tensors are one batch of all rows, gaps included.
    Writes every row of dq.
    """
    m_block, h, b, _ = locate(blocks)
    row, r = m_block * BLOCK_M, tl.arange(0, BLOCK_M)
    live = row + r < seqlen
    acc = load_tile(dq_acc, row_ptr(dq_acc, b, h, row), r, live, HEAD_DIM_QK, QK_LO, QK_HI)  # [M, DQK]
    store_tile(dq, row_ptr(dq, b, h, row), r, live, scaled(acc, scale), HEAD_DIM_QK, QK_LO)
