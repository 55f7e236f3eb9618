"""Stages of the tiled backward: delta, then the key-outer main loop with five GEMMs a tile.

FlashAttention-2 (Dao 2023), algorithm 2, with the rows of a GQA group folded into a tile's rows, so that dK and dV are
summed over the group inside the GEMM, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...mask import k_range, q_range
from ...problem import Problem
from ..spec import Tensors
from .tiles import LOG2E, hide, query_gain, tile
from .views import Segment, Step, lengths, live_rows, of_segment

ROWS = ("q_rows", "do_rows", "dq_acc", "lse_rows", "delta_rows")
DELTA_ELEMENTS = 1 << 18  # of dO * O at once: a temporary of 1 MiB


def delta(step: Step) -> None:
    """D = rowsum(dO * O) - dLSE of a step's rows, in LSE's layout; a given delta replaces the first term.

    Writes: the rows of scratch delta, fp32. A row that sees no key has D = -dLSE, whatever O holds.
    """
    d, (lo, hi) = step["D"], live_rows(step.problem, *step.seqlens)
    d.zero_()
    if "delta" in step:
        d[:, lo:hi].copy_(step["delta"][:, lo:hi])
    else:
        length = max(1, DELTA_ELEMENTS // (d.shape[0] * d.shape[2] * step.problem.head_dim_v))
        for i in range(lo, hi, length):
            rows = slice(i, min(i + length, hi))
            d[:, rows].copy_((step["dout"][:, rows].float() * step["out"][:, rows]).sum(-1))
    if "dlse" in step:
        d.sub_(step["dlse"])


def dsink(problem: Problem, tensors: Tensors, scratch: Tensors, found: list[Segment]) -> None:
    """dsink_h = -sum_i exp(sink_h - lse_i) * D_i; a row that sees no key has lse = sink, whatever the input says.

    Writes: dsink.
    """
    sink = tensors["sink"].float().view(problem.nheads_kv, 1, problem.group)
    total = torch.zeros_like(sink)
    for segment in found:
        (lse,) = of_segment(problem, tensors, ("lse",), segment).values()
        (d,) = of_segment(problem, scratch, ("delta",), segment).values()
        lo, hi = live_rows(problem, *lengths(segment))
        live = (torch.exp(sink - lse[:, lo:hi]) * d[:, lo:hi]).sum(1, keepdim=True)
        total -= live + d[:, :lo].sum(1, keepdim=True) + d[:, hi:].sum(1, keepdim=True)
    tensors["dsink"].copy_(total.view(-1))


def gradients(step: Step) -> None:
    """dQ, dK and dV of one segment and a run of kv heads. Writes: their rows of dq, dk, dv, all of them."""
    _load_rows(step)
    for j in range(0, step.seqlens[1], step.config.block_n):
        _keys_tile(step, j, min(j + step.config.block_n, step.seqlens[1]))
    step["dq"].copy_(step.buffer("dq_acc", "q").mul_(step.problem.scale))


def _load_rows(step: Step) -> None:
    """fp32 rows: Q times its gain, dO, -LSE in base 2 and -D; dQ is zeroed, for its tiles add to it."""
    step.buffer("q_rows", "q").copy_(step["q"]).mul_(query_gain(step.problem))
    step.buffer("do_rows", "q").copy_(step["dout"])
    step.buffer("lse_rows", "q").copy_(step["lse"]).mul_(-LOG2E)
    step.buffer("delta_rows", "q").copy_(step["D"]).neg_()
    step.buffer("dq_acc", "q").zero_()


def _keys_tile(step: Step, j0: int, j1: int) -> None:
    """dK and dV of the keys [j0, j1), and their share of dQ."""
    k, v, dk, dv = (step.buffer(name)[:, : j1 - j0] for name in ("k_tile", "v_tile", "dk_acc", "dv_acc"))
    k.copy_(step["k"][:, j0:j1])
    v.copy_(step["v"][:, j0:j1])
    dk.zero_()
    dv.zero_()
    lo, hi = q_range((j0, j1), *step.seqlens, step.problem.band)
    for i0 in range(lo, hi, step.config.block_m):
        rows = (i0, min(i0 + step.config.block_m, hi))
        a, z = k_range(rows, *step.seqlens, step.problem.band)
        a, z = max(a, j0), min(z, j1)
        _tile(step, rows, (a, z), tuple(x[:, a - j0 : z - j0] for x in (k, v, dk, dv)))
    # dS^T Q was taken with Q times its gain
    step["dk"][:, j0:j1].copy_(dk.mul_(step.problem.scale / query_gain(step.problem)))
    step["dv"][:, j0:j1].copy_(dv)


def _tile(step: Step, rows: tuple[int, int], keys: tuple[int, int], key_side: tuple[Tensor, ...]) -> None:
    """The five GEMMs of a tile. Writes: adds to the rows of dq_acc and to dk, dv."""
    k, v, dk, dv = key_side
    folded = (step.buffer(name)[:, slice(*rows)].flatten(1, 2) for name in ROWS)
    q, do, dq, lse, d = folded  # [kv head, row * group(, dim)]
    s, dp = (tile(step, name, q.shape[1], k.shape[1]) for name in ("s", "dp"))
    # 1 S = Q K^T - LSE, in base 2
    slope = None
    if step.problem.softcap:
        torch.bmm(q, k.mT, out=s).tanh_()
        slope = 1 - s * s
        s.mul_(step.problem.softcap * LOG2E).add_(lse[..., None])
    else:
        torch.baddbmm(lse[..., None], q, k.mT, out=s)
    # 2 P = exp2(S), 0 where the band hides the key
    hide(step, s, rows, keys)
    p = s.exp2_()
    # 3 dV += P^T dO
    dv.baddbmm_(p.mT, do)
    # 4 dP - D = dO V^T - D
    torch.baddbmm(d[..., None], do, v.mT, out=dp)
    # 5 dS = P (dP - D)
    ds = dp.mul_(p) if slope is None else dp.mul_(p).mul_(slope)
    # 6 dK += dS^T Q
    dk.baddbmm_(ds.mT, q)
    # 7 dQ += dS K
    dq.baddbmm_(ds, k)
