"""Forward: out and LSE by online softmax over the key tiles a query tile sees."""

import triton
import triton.language as tl

from .chunks_device import (
    LN2,
    LOG2E,
    capped,
    diagonal,
    dot_add,
    dot_nt,
    keys_seen,
    load_tile,
    locate,
    open_heads,
    read_tile,
    row_ptr,
    scaled,
    segment,
    store_tile,
    tiles_of,
    visible,
    zero_gap,
    zero_tile,
)  # fmt: skip


@triton.jit
def sweep_keys(state, q_tile, k, v, k_rows, v_rows, i, bounds, shift, window, scale, softcap, BLOCK_N: tl.constexpr,
               TMA: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr,
               QK_HI: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr):  # fmt: skip
    """Fold the key tiles of [j_first, j_last) into (acc, m, l); m is a running maximum in log2 units."""
    acc, m, l = state
    j_first, j_last, j_end = bounds
    r = tl.arange(0, BLOCK_N)
    for j0 in range(j_first, j_last, BLOCK_N):
        j = j0 + r  # [N]
        live = (j < j_end) if MASKED else None
        k_tile = read_tile(k, k_rows, 0, j0, r, live, HEAD_DIM_QK, QK_LO, QK_HI, TMA)  # [N, DQK]
        s, _ = capped(dot_nt(q_tile, k_tile), scale, softcap)  # [M, N]
        if MASKED:
            s = tl.where(visible(live[None, :], i[:, None], j[None, :], shift, window), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))  # [M]
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])  # [M, N]
        carry = tl.exp2(m - base)
        l = l * carry + tl.sum(p, 1)
        v_tile = read_tile(v, v_rows, 0, j0, r, live, HEAD_DIM_V, V_LO, V_HI, TMA)  # [N, DV]
        acc = dot_add(scaled(acc, carry[:, None]), p.to(v_tile[0].dtype), v_tile)  # [M, DV]
        m = m_new
    return acc, m, l


@triton.jit
def forward_kernel(q, k, v, sink, out, lse, seqs_q, seqs_k, window, scale, softcap, blocks,
                   GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
                   HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
                   TOP_LEFT: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """out = softmax(s) v and lse = log sum exp(s), the sink's logit counted in the sum.

    Grid: see Blocks, query tiles * nheads_q * batch. Writes every row of out and lse: a row that sees no key has
    out 0 and lse -inf (or the sink), as has a row of a gap (out 0, lse -inf).
    """
    m_block, h, b, m_blocks = locate(blocks)
    if b < 0:
        return
    start_q, seqlen_q, room_q = segment(seqs_q, b, blocks.batch)
    m_blocks = tiles_of(blocks, m_blocks, seqlen_q, BLOCK_M)
    start_k, seqlen_k, _ = segment(seqs_k, b, blocks.batch)
    step, r = m_blocks * BLOCK_M, tl.arange(0, BLOCK_M)
    zero_gap(out, b, h, start_q, seqlen_q + m_block * BLOCK_M, step, room_q, BLOCK_M, HEAD_DIM_V, V_LO, V_HI)
    for at in range(seqlen_q + m_block * BLOCK_M, room_q, step):
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(row_ptr(lse, b, h, start_q + at) + r * lse.stride_s, nothing, mask=at + r < room_q)
    m_block = m_blocks - 1 - m_block  # under a causal mask the last rows see the most keys: start them first
    if m_block * BLOCK_M >= seqlen_q:
        return
    i0 = m_block * BLOCK_M
    i = i0 + r  # [M]
    live_i = i < seqlen_q
    shift = diagonal(seqlen_q, seqlen_k, TOP_LEFT)
    q_tile = load_tile(q, row_ptr(q, b, h, start_q + i0), r, live_i, HEAD_DIM_QK, QK_LO, QK_HI)  # [M, DQK]
    lo, hi, full_lo, full_hi = keys_seen(i0, tl.minimum(i0 + BLOCK_M, seqlen_q), seqlen_k, shift, window)
    head = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK_N) * BLOCK_N, hi)
    tail = head + tl.maximum(full_hi - head, 0) // BLOCK_N * BLOCK_N
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink + h).to(tl.float32) * LOG2E
        l += 1.0
    state = (zero_tile(BLOCK_M, V_LO, V_HI), m, l)
    k_rows = open_heads(k, b, h // GROUP, 1, start_k, hi, BLOCK_N, HEAD_DIM_QK, QK_LO, QK_HI, TMA)
    v_rows = open_heads(v, b, h // GROUP, 1, start_k, hi, BLOCK_N, HEAD_DIM_V, V_LO, V_HI, TMA)
    state = sweep_keys(state, q_tile, k, v, k_rows, v_rows, i, (lo, head, hi), shift, window, scale, softcap, BLOCK_N,
                       TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
    state = sweep_keys(state, q_tile, k, v, k_rows, v_rows, i, (head, tail, hi), shift, window, scale, softcap, BLOCK_N,
                       TMA, False, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
    state = sweep_keys(state, q_tile, k, v, k_rows, v_rows, i, (tail, hi, hi), shift, window, scale, softcap, BLOCK_N,
                       TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
    acc, m, l = state
    empty = l == 0.0  # NaN inputs are not empty: they stay NaN
    l = tl.where(empty, 1.0, l)
    store_tile(out, row_ptr(out, b, h, start_q + i0), r, live_i, scaled(acc, (1.0 / l)[:, None]), HEAD_DIM_V, V_LO)
    norm = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)  # [M]
    tl.store(row_ptr(lse, b, h, start_q + i0) + r * lse.stride_s, norm, mask=live_i)
