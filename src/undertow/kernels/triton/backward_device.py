"""Backward: a KV-outer kernel of dK and dV, of dQ too when fused (five GEMMs), and the two-kernel plan's dQ kernel."""

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
    open_heads,
    padded_start,
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
from .preprocess_device import row_deltas

FLAT, ONE_SWEEP, APART = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""Bits of LOOPS: one loop over the tiles of all heads of a group; one loop that masks all; dv in a pass of its own."""


@triton.jit
def probabilities(a, b, lse2, keep, scale, softcap):
    """(p, slope of the softcap) of a tile, fp32, for (a, b) = (q, k): [M, N], or (k, q): transposed, [N, M].

    lse2, LSE times log2(e), broadcasts over the tile.
    """
    # 1 S = Q K^T
    s, slope = capped(dot_nt(a, b), scale, softcap)
    # 2 P = exp(S - LSE)
    p = tl.exp2(s - lse2)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    return p, slope


@triton.jit
def grad_scores(a, b, c, d, lse2, delta, keep, scale, softcap):
    """(p, ds) of a tile, fp32, for (a, b, c, d) = (q, k, do, v): [M, N], or for (k, q, v, do): both transposed, [N, M].

    lse2 and delta broadcast over the tile; ds is without the softmax scale.
    """
    p, slope = probabilities(a, b, lse2, keep, scale, softcap)
    # 3 dP = dO V^T
    dp = dot_nt(c, d)
    # 4 dS = P (dP - D)
    ds = p * (dp - delta)
    if softcap is not None:
        ds *= slope
    return p, ds


@triton.jit
def read_row_values(lse, delta, row_values, b, h, start_q, i0, r, live_i):
    """(LSE in log2 units, delta) of a tile's rows; those of row_values are whole tiles, whose dead rows have P = 0."""
    if row_values is None:
        lse2_i = load_rows(lse, row_ptr(lse, b, h, start_q), i0 + r, live_i) * LOG2E
        delta_i = load_rows(delta, row_ptr(delta, b, h, start_q), i0 + r, live_i)
    else:
        lse2, delta2, start = row_values
        i0 = tl.multiple_of(i0, r.shape[0])
        lse2_i = load_rows(lse2, row_ptr(lse2, b, h, start + i0), r, None)
        delta_i = load_rows(delta2, row_ptr(delta2, b, h, start + i0), r, None)
    return lse2_i, delta_i


@triton.jit
def sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, place, bounds, keys, mask, scale,
               softcap, HEADS: tl.constexpr, OF: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr,
               MASKED: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
               HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr):  # fmt: skip
    """Fold the query tiles of [i_first, i_last) of HEADS heads from h0 + g into (dk, dv), or the one that OF names.

    One loop runs over the tiles of all heads, so that it fills its pipeline once. Adds dq to dq_acc where there is one.
    """
    dk_acc, dv_acc = grads
    i_first, i_last, i_end = bounds
    b, h0, g, start_q, i_seen = place
    j, live_j = keys
    shift, window = mask
    lse, delta, row_values = values
    r = tl.arange(0, BLOCK_M)
    live_j = live_j[:, None] if row_values is None else None  # without dq, the sums of dead keys go nowhere
    i0 = i_first
    for _ in range(0, tl.cdiv(tl.maximum(i_last - i_first, 0), BLOCK_M) * HEADS):
        live_i, keep = None, None
        if MASKED:
            live_i = (i0 + r < i_end) & (i0 + r >= i_seen)  # [M]
            keep = visible(live_j, (i0 + r)[None, :], j[:, None], shift, window)  # [N, M]
        q_tile = read_tile(q, q_rows, g, i0 - i_seen, r, live_i, HEAD_DIM_QK, QK_LO, QK_HI, TMA)  # [M, DQK]
        do_tile = read_tile(dout, do_rows, g, i0 - i_seen, r, live_i, HEAD_DIM_V, V_LO, V_HI, TMA)  # [M, DV]
        lse2_i, delta_i = read_row_values(lse, delta, row_values, b, h0 + g, start_q, i0, r, live_i)  # [M]
        if OF != "dv":
            p_t, ds_t = grad_scores(
                k_tile, q_tile, v_tile, do_tile, lse2_i[None, :], delta_i[None, :], keep, scale, softcap
            )
        else:
            p_t, _ = probabilities(k_tile, q_tile, lse2_i[None, :], keep, scale, softcap)
        if OF != "dk":
            # 5 dV += P^T dO
            dv_acc = dot_add(dv_acc, p_t.to(do_tile[0].dtype), do_tile)  # [N, DV]
        if OF != "dv":
            ds_t = ds_t.to(q_tile[0].dtype)
            # 6 dK += dS^T Q
            dk_acc = dot_add(dk_acc, ds_t, q_tile)  # [N, DQK]
            # 7 dQ += dS K
            if dq_acc is not None:
                dq_tile = dot_add(zero_tile(BLOCK_M, QK_LO, QK_HI), tl.trans(ds_t), k_tile)  # [M, DQK]
                add_tile(dq_acc, row_ptr(dq_acc, b, h0 + g, start_q + i0), r, live_i, dq_tile, HEAD_DIM_QK, QK_LO)
        i0 += BLOCK_M
        if HEADS > 1:
            last = i0 >= i_last
            g, i0 = tl.where(last, g + 1, g), tl.where(last, i_first, i0)
    return dk_acc, dv_acc


@triton.jit
def sweep_group(k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, place, rows, keys, mask, scale, softcap,
                GROUP: tl.constexpr, LOOPS: tl.constexpr, OF: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, TMA: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr,
                QK_HI: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr):  # fmt: skip
    """(dk, dv) of a key tile over the query rows of a group: masked rows, rows that see every key, masked rows."""
    # whole tiles of TMA rows and row values need no mask at the end of a segment
    THREE: tl.constexpr = mask[1].left is not None or values[2] is None or not TMA
    HEADS: tl.constexpr = GROUP if FLAT & LOOPS else 1
    lo, head, tail, hi = rows
    b, h0, start_q, i_seen = place
    grads = (zero_tile(BLOCK_N, QK_LO, QK_HI), zero_tile(BLOCK_N, V_LO, V_HI))
    for g in range(0, GROUP, HEADS):
        at = (b, h0, g, start_q, i_seen)
        grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, at, (lo, head, hi), keys,
                           mask, scale, softcap, HEADS, OF, BLOCK_M, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V,
                           V_LO, V_HI)  # fmt: skip
        if not ONE_SWEEP & LOOPS:
            grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, at, (head, tail, hi),
                               keys, mask, scale, softcap, HEADS, OF, BLOCK_M, TMA, False, HEAD_DIM_QK, QK_LO, QK_HI,
                               HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
        if not ONE_SWEEP & LOOPS and THREE:
            grads = sweep_rows(grads, k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, at, (tail, hi, hi),
                               keys, mask, scale, softcap, HEADS, OF, BLOCK_M, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI,
                               HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
    return grads


@triton.jit
def dkdv_kernel(q, k, v, dout, lse, delta, row_values, dq_acc, dk, dv, seqs_q, seqs_k, window, scale, softcap, blocks,
                GROUP: tl.constexpr, LOOPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
                HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
                TOP_LEFT: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dk, dv of one key tile, summed over the query heads of its group; with dq_acc also its share of dq.

    lse is natural log with the scale folded in; delta is rowsum(dout * out) - dlse; row_values, if not None, has both
    by whole tiles, from dq_kernel.

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
    shift = diagonal(seqlen_q, seqlen_k, TOP_LEFT)
    lo, hi, full_lo, full_hi = rows_that_see(j0, tl.minimum(j0 + BLOCK_N, seqlen_k), seqlen_q, shift, window)
    if dq_acc is not None:
        full_hi = tl.where(j0 + BLOCK_N <= seqlen_k, full_hi, 0)  # dq wants the P of dead keys masked
    i_seen = start_q * 0
    if row_values is not None:
        row_values = (row_values[0], row_values[1], padded_start(seqs_q, b, start_q))
        lo = lo // BLOCK_M * BLOCK_M
        if window.right is not None:
            i_seen = tl.maximum(-shift - window.right, 0)  # no row before it sees a key, nor is any loaded
    head = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK_M) * BLOCK_M, hi)
    tail = head + tl.maximum(full_hi - head, 0) // BLOCK_M * BLOCK_M
    if ONE_SWEEP & LOOPS:
        head, tail = hi, hi
    if row_values is not None and TMA and window.left is None:
        tail = hi
    h0 = h_kv * GROUP
    q_rows = open_heads(q, b, h0, GROUP, start_q + i_seen, hi - i_seen, BLOCK_M, HEAD_DIM_QK, QK_LO, QK_HI, TMA)
    do_rows = open_heads(dout, b, h0, GROUP, start_q + i_seen, hi - i_seen, BLOCK_M, HEAD_DIM_V, V_LO, V_HI, TMA)
    values = (lse, delta, row_values)
    place, rows, keys, mask = (b, h0, start_q, i_seen), (lo, head, tail, hi), (j, live_j), (shift, window)
    k_tile = load_tile(k, row_ptr(k, b, h_kv, row), r, live_j, HEAD_DIM_QK, QK_LO, QK_HI)  # [N, DQK]
    if APART & LOOPS:  # two GEMMs, then three: registers do not hold both sums of wide heads
        _, dv_acc = sweep_group(k_tile, None, q, dout, q_rows, do_rows, values, dq_acc, place, rows, keys, mask, scale,
                                softcap, GROUP, LOOPS, "dv", BLOCK_M, BLOCK_N, TMA, HEAD_DIM_QK, QK_LO, QK_HI,
                                HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
        store_tile(dv, row_ptr(dv, b, h_kv, row), r, live_j, dv_acc, HEAD_DIM_V, V_LO)
    v_tile = load_tile(v, row_ptr(v, b, h_kv, row), r, live_j, HEAD_DIM_V, V_LO, V_HI)  # [N, DV]
    dk_acc, dv_acc = sweep_group(k_tile, v_tile, q, dout, q_rows, do_rows, values, dq_acc, place, rows, keys, mask,
                                 scale, softcap, GROUP, LOOPS, "dk" if APART & LOOPS else "dkdv", BLOCK_M, BLOCK_N, TMA,
                                 HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO, V_HI)  # fmt: skip
    store_tile(dk, row_ptr(dk, b, h_kv, row), r, live_j, scaled(dk_acc, scale), HEAD_DIM_QK, QK_LO)
    if not APART & LOOPS:
        store_tile(dv, row_ptr(dv, b, h_kv, row), r, live_j, dv_acc, HEAD_DIM_V, V_LO)


@triton.jit
def sweep_keys_dq(dq_acc, q_tile, do_tile, lse2_i, delta_i, k, v, k_rows, v_rows, bounds, i, shift, window, scale,
                  softcap, BLOCK_N: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM_QK: tl.constexpr,
                  QK_LO: tl.constexpr, QK_HI: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr,
                  V_HI: tl.constexpr):  # fmt: skip
    """Fold the key tiles of [j_first, j_last) into dq (without the scale)."""
    j_first, j_last, j_end = bounds
    r = tl.arange(0, BLOCK_N)
    for j0 in range(j_first, j_last, BLOCK_N):
        live_j, keep = None, None
        if MASKED:
            live_j = j0 + r < j_end  # [N]
            keep = visible(live_j[None, :], i[:, None], (j0 + r)[None, :], shift, window)  # [M, N]
        k_tile = read_tile(k, k_rows, 0, j0, r, live_j, HEAD_DIM_QK, QK_LO, QK_HI, TMA)  # [N, DQK]
        v_tile = read_tile(v, v_rows, 0, j0, r, live_j, HEAD_DIM_V, V_LO, V_HI, TMA)  # [N, DV]
        _, ds = grad_scores(q_tile, k_tile, do_tile, v_tile, lse2_i[:, None], delta_i[:, None], keep, scale, softcap)
        # 7 dQ += dS K
        dq_acc = dot_add(dq_acc, ds.to(k_tile[0].dtype), k_tile)  # [M, DQK]
    return dq_acc


@triton.jit
def dq_kernel(q, k, v, out, dout, lse, deltas, row_values, dq, seqs_q, seqs_k, window, scale, softcap, blocks,
              GROUP: tl.constexpr, LOOPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HEAD_DIM_QK: tl.constexpr, QK_LO: tl.constexpr, QK_HI: tl.constexpr,
              HEAD_DIM_V: tl.constexpr, V_LO: tl.constexpr, V_HI: tl.constexpr,
              TOP_LEFT: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dq of one query tile, owned by this program: no accumulator in memory, bitwise reproducible.

    Grid: see Blocks, query tiles * nheads_q * batch. Writes every row of dq once, rows of gaps as 0; what row_deltas
    does; and row_values, (LSE * log2(e), delta) by whole tiles, fp32, for dkdv_kernel: (inf, 0) of rows without keys.
    """
    deltas = (deltas[0], deltas[1], deltas[2], deltas[3], deltas[4])  # anew: triton 3.6 lost types of strides of 1
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
    delta_i = row_deltas(out, do_tile, lse, deltas, b, h, row, r, live_i, sees, HEAD_DIM_V, V_LO, V_HI)  # [M]
    lse2_i = lse_i * LOG2E
    lse2, delta2 = row_values
    whole = padded_start(seqs_q, b, start_q) + i0
    tl.store(row_ptr(lse2, b, h, whole) + r, tl.where(sees, lse2_i, float("inf")))
    tl.store(row_ptr(delta2, b, h, whole) + r, tl.where(sees, delta_i, 0.0))
    lo, hi, full_lo, full_hi = keys_seen(i0, tl.minimum(i0 + BLOCK_M, seqlen_q), seqlen_k, shift, window)
    head = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK_N) * BLOCK_N, hi)
    tail = head + tl.maximum(full_hi - head, 0) // BLOCK_N * BLOCK_N
    if ONE_SWEEP & LOOPS:
        tail = lo
    acc = zero_tile(BLOCK_M, QK_LO, QK_HI)
    k_rows = open_heads(k, b, h // GROUP, 1, start_k, hi, BLOCK_N, HEAD_DIM_QK, QK_LO, QK_HI, TMA)
    v_rows = open_heads(v, b, h // GROUP, 1, start_k, hi, BLOCK_N, HEAD_DIM_V, V_LO, V_HI, TMA)
    if window.left is not None and not ONE_SWEEP & LOOPS:
        acc = sweep_keys_dq(acc, q_tile, do_tile, lse2_i, delta_i, k, v, k_rows, v_rows, (lo, head, hi), i, shift,
                            window, scale, softcap, BLOCK_N, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                            V_HI)  # fmt: skip
    if not ONE_SWEEP & LOOPS:
        acc = sweep_keys_dq(acc, q_tile, do_tile, lse2_i, delta_i, k, v, k_rows, v_rows, (head, tail, hi), i, shift,
                            window, scale, softcap, BLOCK_N, TMA, False, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                            V_HI)  # fmt: skip
    acc = sweep_keys_dq(acc, q_tile, do_tile, lse2_i, delta_i, k, v, k_rows, v_rows, (tail, hi, hi), i, shift,
                        window, scale, softcap, BLOCK_N, TMA, True, HEAD_DIM_QK, QK_LO, QK_HI, HEAD_DIM_V, V_LO,
                        V_HI)  # fmt: skip
    store_tile(dq, row_ptr(dq, b, h, row), r, live_i, scaled(acc, scale), HEAD_DIM_QK, QK_LO)
