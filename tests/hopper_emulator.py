"""What the Hopper main kernel computes, tile by tile in torch: the same arguments, scheduling table and dQ order."""

import torch

LN2 = 0.6931471805599453


def fragment(tile: torch.Tensor) -> torch.Tensor:
    """A (tile_q, d) dQ tile in the order of two warpgroups' wgmma accumulators (PTX ISA, matrix D of m64nNk16)."""
    rows, d = tile.shape
    halves = tile.split(d // 2, 1) if rows == 64 else tile.split(64, 0)
    order = []
    for half in halves:
        x = half.reshape(4, 2, 8, half.shape[1] // 8, 4, 2)  # warp, row half, row, columns of 8, pair, 2
        order.append(x.permute(3, 0, 2, 4, 1, 5).reshape(-1))
    return torch.cat(order)


def emulate(geometry, kind="main"):
    """The stand-in for a compiled kernel of one geometry."""
    return {"main": _main, "dq": _dq}[kind](geometry)


def _main(geometry):
    def run(q, k, v, dout, stats, dq_acc, dk, dv, table, counter, columns, together, scale, left, right, blocks):
        assert counter.tolist() == [0] and blocks > 0
        for ticket in range(int(table[7, -1]) * k.shape[2]):
            item = _decode(ticket, table, columns, together, k.shape[2])
            _item(geometry, (q, k, v, dout), stats, dq_acc, (dk, dv), item, (scale, left, right))

    return run


def _dq(geometry):
    def run(q, k, v, dout, stats, dq, table, counter, columns, together, scale, left, right, blocks):
        assert counter.tolist() == [0] and blocks > 0
        for ticket in range(int(table[7, -1]) * q.shape[2]):
            item = _decode(ticket, table, columns, together, q.shape[2])
            _dq_item(geometry, (q, k, v, dout), stats, dq, item, (scale, left, right))

    return run


def _decode(ticket, table, columns, together, heads):
    segments = table.shape[1] - 1
    s = 0
    if columns == heads:
        s = max(i for i in range(segments) if table[7, i] <= ticket // heads)
    first = int(table[7, s])
    tiles = int(table[7, s + 1]) - first
    local = ticket - first * columns
    block = local // (tiles * together)
    width = min(together, columns - block * together)
    inside = local - block * tiles * together
    column = block * together + inside % width
    return inside // width, column % heads, [int(x) for x in table[:, s + column // heads]]


def _dq_item(geometry, inputs, stats, dq, item, numbers):
    (q, k, v, dout), (m, head, row), (scale, left, right) = inputs, item, numbers
    b, q0, k0, len_q, len_k, room, tile0, _, shift = row
    i0, i1, rows = m * 128, min(m * 128 + 128, len_q), geometry.tile_q
    dq[b, q0 + i0 : q0 + min(i0 + 128, room), head] = 0
    if i0 >= i1 or not len_k:
        return
    i = torch.arange(i0, i1)
    d = torch.arange(len_k)[None, :] - i[:, None] - shift
    lse, delta = (stats[head, tile0 + i // rows, which, i % rows][:, None] for which in (0, 1))
    keys, values = (x[b, k0 : k0 + len_k, head // (q.shape[2] // k.shape[2])].float() for x in (k, v))
    query, do = (x[b, q0 + i0 : q0 + i1, head].float() for x in (q, dout))
    p = torch.where((d <= right) & (d >= -left), torch.exp2(scale * query @ keys.T - lse), 0.0)
    ds = (p * (do @ values.T - delta)).to(q.dtype).float()
    dq[b, q0 + i0 : q0 + i1, head] = (ds @ keys * scale * LN2).to(q.dtype)


def _item(geometry, inputs, stats, dq_acc, outputs, item, numbers):
    (q, k, v, dout), (dk, dv), (n, head, row), (scale, left, right) = inputs, outputs, item, numbers
    b, q0, k0, len_q, len_k, room, tile0, _, shift = row
    group, j0, rows = q.shape[2] // k.shape[2], n * geometry.tile_kv, geometry.tile_q
    j1 = min(j0 + geometry.tile_kv, len_k)
    keys = k[b, k0 + j0 : k0 + j1, head].float() if j0 < j1 else None
    values = v[b, k0 + j0 : k0 + j1, head].float() if j0 < j1 else None
    sum_k, sum_v = 0.0, 0.0
    lo, hi = max(0, j0 - right - shift), min(len_q, j1 + left - shift)
    for m in range(lo // rows, -(-hi // rows)) if j0 < j1 and lo < hi else ():
        i0, i1 = m * rows, min((m + 1) * rows, len_q)
        d = torch.arange(j0, j1)[None, :] - torch.arange(i0, i1)[:, None] - shift
        live = (d <= right) & (d >= -left)
        for h in range(head * group, (head + 1) * group):
            lse, delta = stats[h, tile0 + m, :, : i1 - i0, None]
            query, do = q[b, q0 + i0 : q0 + i1, h].float(), dout[b, q0 + i0 : q0 + i1, h].float()
            p = torch.where(live, torch.exp2(scale * query @ keys.T - lse), 0.0).to(q.dtype).float()
            ds = (p * (do @ values.T - delta)).to(q.dtype).float()
            sum_v, sum_k = sum_v + p.T @ do, sum_k + ds.T @ query
            if geometry.dq:
                tile = torch.zeros(rows, geometry.d_qk)
                tile[: i1 - i0, : q.shape[3]] = ds @ keys
                dq_acc[h, tile0 + m] += fragment(tile)
    end = min(j0 + geometry.tile_kv, room)
    for out, total, factor, computed in ((dk, sum_k, scale * LN2, geometry.dk), (dv, sum_v, 1.0, geometry.dv)):
        if computed and j0 < end:
            out[b, k0 + j0 : k0 + end, head] = 0
            if j0 < j1:
                out[b, k0 + j0 : k0 + j1, head] = torch.as_tensor(total * factor).to(q.dtype)
