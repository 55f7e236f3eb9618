"""D = rowsum(dO * O) before the main kernel, and the rounding of dQ after it."""

import triton
import triton.language as tl

from .chunks_device import (
    LOG2E,
    diagonal,
    keys_seen,
    load_tile,
    locate,
    row_offsets,
    scaled,
    segment,
    store_tile,
)  # fmt: skip


@triton.jit
def delta_kernel(out, dout, lse, dlse, given, sink, delta, dsink_rows, seqs_q, seqs_k, window, blocks,
                 BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
                 TOP_LEFT: tl.constexpr):  # fmt: skip
    """delta_i = sum_d dout_id * out_id - dlse_i, the first term `given` where there is one, 0 for a row without keys.

    dsink_rows_i = -exp(sink_h - lse_i) * delta_i, where there is a sink.

    Grid: cdiv(max_seqlen_q, BLOCK_M) * nheads_q * batch. Writes delta (fp32, LSE's layout) of real rows once, and
    dsink_rows (fp32, [nheads_q, total_q], zeroed before) where there is a sink.
    """
    m_block, h, b, _ = locate(blocks)
    start_q, seqlen_q, _ = segment(seqs_q, b, blocks.batch)
    _, seqlen_k, _ = segment(seqs_k, b, blocks.batch)
    if m_block * BLOCK_M >= seqlen_q:
        return
    i = m_block * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    live = i < seqlen_q
    lo, hi, _, _ = keys_seen(i, i + 1, seqlen_k, diagonal(seqlen_q, seqlen_k, TOP_LEFT), window)
    sees = live & (lo < hi)  # [M]
    if given is None:
        o = load_tile(out, row_offsets(out, b, h, start_q + i), sees, HEAD_DIM_V, V_LO, V_HI)  # [M, DV]
        do = load_tile(dout, row_offsets(dout, b, h, start_q + i), sees, HEAD_DIM_V, V_LO, V_HI)  # [M, DV]
        d = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)  # [M]
        if len(o) == 2:
            d += tl.sum(o[1].to(tl.float32) * do[1].to(tl.float32), 1)
    else:
        d = tl.load(given.ptr + row_offsets(given, b, h, start_q + i), mask=sees, other=0.0)  # [M]
    if dlse is not None:
        with_grad = sees if sink is None else live  # without a sink, LSE of a row that sees no key is the constant -inf
        d -= tl.load(dlse.ptr + row_offsets(dlse, b, h, start_q + i), mask=with_grad, other=0.0)  # [M]
    tl.store(delta.ptr + row_offsets(delta, b, h, start_q + i), d, mask=live)
    if sink is not None:
        logit = tl.load(sink + h).to(tl.float32)
        l = tl.where(sees, tl.load(lse.ptr + row_offsets(lse, b, h, start_q + i), mask=sees, other=0.0), logit)  # [M]
        share = -tl.exp2((logit - l) * LOG2E) * d
        tl.store(dsink_rows.ptr + row_offsets(dsink_rows, b, h, start_q + i), share, mask=live)


@triton.jit
def round_dq_kernel(dq_acc, dq, seqlen, scale, blocks, BLOCK_M: tl.constexpr, HEAD_DIM_QK: tl.constexpr,
                    QK_LO: tl.constexpr, QK_HI: tl.constexpr):  # fmt: skip
    """dq = scale * dq_acc, rounded once.

    Grid: cdiv(seqlen, BLOCK_M) * nheads_q * batch, where packed tensors are one batch of all rows, gaps included.
    Writes every row of dq.
    """
    m_block, h, b, _ = locate(blocks)
    i = m_block * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    acc = load_tile(dq_acc, row_offsets(dq_acc, b, h, i), i < seqlen, HEAD_DIM_QK, QK_LO, QK_HI)  # [M, DQK]
    store_tile(dq, row_offsets(dq, b, h, i), i < seqlen, scaled(acc, scale), HEAD_DIM_QK, QK_LO)
