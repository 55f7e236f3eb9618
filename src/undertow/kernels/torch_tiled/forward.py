"""The tiled forward: a tile of query rows against tiles of keys, with a running maximum and sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ...mask import k_range
from .tiles import LOG2E, hide, query_gain, tile
from .views import Step, live_rows

LOWEST = torch.finfo(torch.float32).min


def attend(step: Step) -> None:
    """out and lse of one segment and a run of kv heads. Writes: their rows, all of them."""
    sink = step.call.tensors.get("sink")
    if sink is not None:
        sink = sink.float().view(step.problem.nheads_kv, 1, step.problem.group)[step.heads]
    lo, hi = live_rows(step.problem, *step.seqlens)
    for dead in (slice(0, lo), slice(hi, step.seqlens[0])):
        step["out"][:, dead] = 0.0
        step["lse"][:, dead] = -torch.inf if sink is None else sink
    step.buffer("k_rows", "k").copy_(step["k"])
    step.buffer("v_rows", "k").copy_(step["v"])
    for i in range(lo, hi, step.config.block_m):
        _rows_tile(step, (i, min(i + step.config.block_m, hi)), sink)


def _rows_tile(step: Step, rows: tuple[int, int], sink: Tensor | None) -> None:
    """out and lse of the query rows [i0, i1), each of which sees a key."""
    here = slice(*rows)
    m, group = rows[1] - rows[0], step.problem.group
    q, acc, top, total = (step.buffer(name)[:, : m * group] for name in ("q_tile", "out_acc", "row_max", "row_sum"))
    q.unflatten(1, (m, group)).copy_(step["q"][:, here])
    q.mul_(query_gain(step.problem))
    acc.zero_()
    # the sink is a key that every row sees and that carries no value
    top.unflatten(1, (m, group)).copy_(torch.tensor(-torch.inf) if sink is None else (sink * LOG2E)[..., None])
    total.fill_(0.0 if sink is None else 1.0)
    a, z = k_range(rows, *step.seqlens, step.problem.band)
    for j0 in range(a, z, step.config.block_n):
        _tile(step, rows, (j0, min(j0 + step.config.block_n, z)), (q, acc, top, total))
    step["out"][:, here].copy_(acc.div_(total).unflatten(1, (m, group)))
    lse = total.log2_().add_(top).mul_(1 / LOG2E)
    step["lse"][:, here].copy_(lse.unflatten(1, (m, group))[..., 0])


def _tile(step: Step, rows: tuple[int, int], keys: tuple[int, int], state: tuple[Tensor, ...]) -> None:
    """Add the keys of one tile to the running (acc, maximum, sum) of its rows."""
    q, acc, top, total = state
    k, v = (step.buffer(name)[:, slice(*keys)] for name in ("k_rows", "v_rows"))
    # 1 S = Q K^T, in base 2
    s = torch.bmm(q, k.mT, out=tile(step, "s", q.shape[1], k.shape[1]))
    if step.problem.softcap:
        s.tanh_().mul_(step.problem.softcap * LOG2E)
    hide(step, s, rows, keys)
    # 2 P = exp2(S - max); a row that has seen no key yet keeps a finite maximum, for -inf - -inf is NaN
    risen = torch.maximum(top, s.amax(-1, keepdim=True)).clamp_(min=LOWEST)
    p = s.sub_(risen).exp2_()
    # 3 O = O * exp2(old max - max) + P V
    decay = torch.exp2(top - risen)
    total.mul_(decay).add_(p.sum(-1, keepdim=True))
    acc.mul_(decay).baddbmm_(p, v)
    top.copy_(risen)
