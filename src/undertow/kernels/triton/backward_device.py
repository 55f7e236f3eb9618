"""Backward: one fused KV-outer kernel (five GEMMs, dQ accumulated), and the deterministic plan's dQ-only kernel."""

import triton
import triton.language as tl

from .chunks_device import (
    LOG2E,
    add_tile,
    capped,
    diagonal,
    dot_add,
    dot_nt,
    keys_seen,
    load_rows,
    load_tile,
    locate,
    open_rows,
    read_tile,
    row_ptr,
    rows_that_see,
    scaled,
    segment,
    store_tile,
    tiles_of,
    visible,
    zero_gap,
    zero_tile,
)  # fmt: skip


@triton.jit
def grad_scores(a, b, c, d, lse, delta, keep, scale, softcap, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """(p, ds) of a tile, fp32, for (a, b, c, d) = (q, k, do, v): [M, N], or for (k, q, v, do): both transposed, [N, M].

    lse and delta broadcast over the tile; ds is without the softmax scale.
    """
    # 1 S = Q K^T
    s, slope = capped(dot_nt(a, b, PRECISION), scale, softcap)
    # 2 P = exp(S - LSE)
    p = tl.exp2(s - lse * LOG2E)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    # 3 dP = dO V^T
    dp = dot_nt(c, d, PRECISION)
    # 4 dS = P (dP - D)
    ds = p * (dp - delta)
    if softcap is not None:
        ds *= slope
    return p, ds


@triton.jit
def sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, lse, delta, dq_acc, place, bounds, keys, mask, scale,
               softcap, BLOCK_M: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM_QK: tl.constexpr,
               QK_LO: tl.constexpr, QK_HI: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr,
               V_HI: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold the query tiles of [i_first, i_last) into (dk, dv), and add their dq to dq_acc where there is one."""
    dk_acc, dv_acc = grads
    i_first, i_last, i_end = bounds
    b, h, start_q = place
    j, live_j = keys
    shift, window = mask
    lse_ptr, delta_ptr = row_ptr(lse, b, h, start_q), row_ptr(delta, b, h, start_q)
    r = tl.arange(0, BLOCK_M)
    for i0 in range(i_first, i_last, BLOCK_M):
        live_i, keep = None, None
        if MASKED:
            live_i = i0 + r < i_end  # [M]
            keep = visible(live_i[None, :] & live_j[:, None], (i0 + r)[None, :], j[:, None], shift, window)  # [N, M]
        q_tile = read_tile(q, q_rows, i0, r, live_i, HEAD_DIM_QK, QK_LO, QK_HI, TMA)  # [M, DQK]
        do_tile = read_tile(dout, do_rows, i0, r, live_i, HEAD_DIM_V, V_LO, V_HI, TMA)  # [M, DV]
        lse_i = load_rows(lse, lse_ptr, i0 + r, live_i)  # [M]
        delta_i = load_rows(delta, delta_ptr, i0 + r, live_i)  # [M]
        p_t, ds_t = grad_scores(k_tile, q_tile, v_tile, do_tile, lse_i[None, :], delta_i[None, :], keep, scale, softcap,
                                MASKED, PRECISION)  # fmt: skip
        # 5 dV += P^T dO
        dv_acc = dot_add(dv_acc, p_t.to(do_tile[0].dtype), do_tile, PRECISION)  # [N, DV]
        ds_t = ds_t.to(q_tile[0].dtype)
        # 6 dK += dS^T Q
        dk_acc = dot_add(dk_acc, ds_t, q_tile, PRECISION)  # [N, DQK]
        # 7 dQ += dS K
        if dq_acc is not None:
            dq_tile = dot_add(zero_tile(BLOCK_M, QK_LO, QK_HI), tl.trans(ds_t), k_tile, PRECISION)  # [M, DQK]
            add_tile(dq_acc, row_ptr(dq_acc, b, h, start_q + i0), r, live_i, dq_tile, HEAD_DIM_QK, QK_LO)
    return dk_acc, dv_acc


@triton.jit
def dkdv_kernel(q, k, v, dout, lse, delta, dq_acc, dk, dv, seqs_q, seqs_k, window, scale, softcap, blocks,
                GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
                HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
                TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dk, dv of one key tile, summed over the query heads of its group; with dq_acc also its share of dq.

    lse is natural log with the scale folded in; delta is rowsum(dout * out) - dlse.

    Grid: see Blocks, key tiles * nheads_kv * batch. Writes every row of dk and dv once, rows of gaps as 0; adds
    to dq_acc (fp32, zero before; without the scale), if not None.
    """
    n_block, h_kv, b, n_blocks = locate(blocks)
    if b < 0:
        return
    start_q, seqlen_q, _ = segment(seqs_q, b, blocks.batch)
    start_k, seqlen_k, room_k = segment(seqs_k, b, blocks.batch)
    n_blocks = tiles_of(blocks, n_blocks, seqlen_k, BLOCK_N)
    j0 = n_block * BLOCK_N
    step = n_blocks * BLOCK_N
    zero_gap(dk, b, h_kv, start_k, seqlen_k + j0, step, room_k, BLOCK_N, HEAD_DIM_QK, QK_LO, QK_HI)
    zero_gap(dv, b, h_kv, start_k, seqlen_k + j0, step, room_k, BLOCK_N, HEAD_DIM_V, V_LO, V_HI)
    if j0 >= seqlen_k:
        return
    r = tl.arange(0, BLOCK_N)
    j = j0 + r  # [N]
    live_j = j < seqlen_k
    row = start_k + j0
    k_tile = load_tile(k, row_ptr(k, b, h_kv, row), r, live_j, HEAD_DIM_QK, QK_LO, QK_HI)  # [N, DQK]
    v_tile = load_tile(v, row_ptr(v, b, h_kv, row), r, live_j, HEAD_DIM_V, V_LO, V_HI)  # [N, DV]
    shift = diagonal(seqlen_q, seqlen_k, TOP_LEFT)
    lo, hi, full_lo, full_hi = rows_that_see(j0, tl.minimum(j0 + BLOCK_N, seqlen_k), seqlen_q, shift, window)
    full_hi = tl.where(j0 + BLOCK_N <= seqlen_k, full_hi, 0)  # a key tile with a tail is masked everywhere
    head = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK_M) * BLOCK_M, hi)
    tail = head + tl.maximum(full_hi - head, 0) // BLOCK_M * BLOCK_M
    grads = (zero_tile(BLOCK_N, QK_LO, QK_HI), zero_tile(BLOCK_N, V_LO, V_HI))
    for g in range(GROUP):
        h = h_kv * GROUP + g
        q_rows = open_rows(q, b, h, start_q, hi, BLOCK_M, HEAD_DIM_QK, QK_LO, QK_HI, TMA)
        do_rows = open_rows(dout, b, h, start_q, hi, BLOCK_M, HEAD_DIM_V, V_LO, V_HI, TMA)
        place = (b, h, start_q)
        grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, lse, delta, dq_acc, place, (lo, head, hi),
                           (j, live_j), (shift, window), scale, softcap, BLOCK_M, TMA, True, HEAD_DIM_QK, QK_LO,
                           QK_HI, HEAD_DIM_V, V_LO, V_HI, PRECISION)  # fmt: skip
        grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, lse, delta, dq_acc, place, (head, tail, hi),
                           (j, live_j), (shift, window), scale, softcap, BLOCK_M, TMA, False, HEAD_DIM_QK, QK_LO,
                           QK_HI, HEAD_DIM_V, V_LO, V_HI, PRECISION)  # fmt: skip
        grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, lse, delta, dq_acc, place, (tail, hi, hi),
                           (j, live_j), (shift, window), scale, softcap, BLOCK_M, TMA, True, HEAD_DIM_QK, QK_LO,
                           QK_HI, HEAD_DIM_V, V_LO, V_HI, PRECISION)  # fmt: skip
    dk_acc, dv_acc = grads
    store_tile(dk, row_ptr(dk, b, h_kv, row), r, live_j, scaled(dk_acc, scale), HEAD_DIM_QK, QK_LO)
    store_tile(dv, row_ptr(dv, b, h_kv, row), r, live_j, dv_acc, HEAD_DIM_V, V_LO)


@triton.jit
def sweep_keys_dq(dq_acc, q_tile, do_tile, lse_i, delta_i, k, v, k_rows, v_rows, bounds, i, live_i, shift, window,
                  scale, softcap, BLOCK_N: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
                  HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                  V_LO: tl.constexpr, V_HI: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold the key tiles of [j_first, j_last) into dq (without the scale)."""
    j_first, j_last, j_end = bounds
    r = tl.arange(0, BLOCK_N)
    for j0 in range(j_first, j_last, BLOCK_N):
        live_j, keep = None, None
        if MASKED:
            live_j = j0 + r < j_end  # [N]
            keep = visible(live_i[:, None] & live_j[None, :], i[:, None], (j0 + r)[None, :], shift, window)  # [M, N]
        k_tile = read_tile(k, k_rows, j0, r, live_j, HEAD_DIM_QK, QK_LO, QK_HI, TMA)  # [N, DQK]
        v_tile = read_tile(v, v_rows, j0, r, live_j, HEAD_DIM_V, V_LO, V_HI, TMA)  # [N, DV]
        _, ds = grad_scores(q_tile, k_tile, do_tile, v_tile, lse_i[:, None], delta_i[:, None], keep, scale, softcap,
                            MASKED, PRECISION)  # fmt: skip
        # 7 dQ += dS K
        dq_acc = dot_add(dq_acc, ds.to(k_tile[0].dtype), k_tile, PRECISION)  # [M, DQK]
    return dq_acc


@triton.jit
def dq_kernel(q, k, v, dout, lse, delta, dq, seqs_q, seqs_k, window, scale, softcap, blocks,
              GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
              HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
              TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dq of one query tile, owned by this program: no accumulator in memory, bitwise reproducible.

    Grid: see Blocks, query tiles * nheads_q * batch. Writes every row of dq once, rows of gaps as 0.
    """
    m_block, h, b, m_blocks = locate(blocks)
    if b < 0:
        return
    start_q, seqlen_q, room_q = segment(seqs_q, b, blocks.batch)
    m_blocks = tiles_of(blocks, m_blocks, seqlen_q, BLOCK_M)
    start_k, seqlen_k, _ = segment(seqs_k, b, blocks.batch)
    first = seqlen_q + m_block * BLOCK_M
    zero_gap(dq, b, h, start_q, first, m_blocks * BLOCK_M, room_q, BLOCK_M, HEAD_DIM_QK, QK_LO, QK_HI)
    m_block = m_blocks - 1 - m_block  # under a causal mask the last rows see the most keys: start them first
    if m_block * BLOCK_M >= seqlen_q:
        return
    i0 = m_block * BLOCK_M
    r = tl.arange(0, BLOCK_M)
    i = i0 + r  # [M]
    live_i = i < seqlen_q
    shift = diagonal(seqlen_q, seqlen_k, TOP_LEFT)
    lo_i, hi_i, _, _ = keys_seen(i, i + 1, seqlen_k, shift, window)
    sees = live_i & (lo_i < hi_i)  # rows that see no key are not even loaded: their dout, lse may hold anything
    row = start_q + i0
    q_tile = load_tile(q, row_ptr(q, b, h, row), r, sees, HEAD_DIM_QK, QK_LO, QK_HI)  # [M, DQK]
    do_tile = load_tile(dout, row_ptr(dout, b, h, row), r, sees, HEAD_DIM_V, V_LO, V_HI)  # [M, DV]
    lse_i = load_rows(lse, row_ptr(lse, b, h, row), r, sees)  # [M]
    delta_i = load_rows(delta, row_ptr(delta, b, h, row), r, sees)  # [M]
    lo, hi, full_lo, full_hi = keys_seen(i0, tl.minimum(i0 + BLOCK_M, seqlen_q), seqlen_k, shift, window)
    head = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK_N) * BLOCK_N, hi)
    tail = head + tl.maximum(full_hi - head, 0) // BLOCK_N * BLOCK_N
    acc = zero_tile(BLOCK_M, QK_LO, QK_HI)
    k_rows = open_rows(k, b, h // GROUP, start_k, hi, BLOCK_N, HEAD_DIM_QK, QK_LO, QK_HI, TMA)
    v_rows = open_rows(v, b, h // GROUP, start_k, hi, BLOCK_N, HEAD_DIM_V, V_LO, V_HI, TMA)
    acc = sweep_keys_dq(acc, q_tile, do_tile, lse_i, delta_i, k, v, k_rows, v_rows, (lo, head, hi), i, sees, shift,
                        window, scale, softcap, BLOCK_N, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                        V_HI, PRECISION)  # fmt: skip
    acc = sweep_keys_dq(acc, q_tile, do_tile, lse_i, delta_i, k, v, k_rows, v_rows, (head, tail, hi), i, sees, shift,
                        window, scale, softcap, BLOCK_N, TMA, False, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                        V_HI, PRECISION)  # fmt: skip
    acc = sweep_keys_dq(acc, q_tile, do_tile, lse_i, delta_i, k, v, k_rows, v_rows, (tail, hi, hi), i, sees, shift,
                        window, scale, softcap, BLOCK_N, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                        V_HI, PRECISION)  # fmt: skip
    store_tile(dq, row_ptr(dq, b, h, row), r, live_i, scaled(acc, scale), HEAD_DIM_QK, QK_LO)
