"""The oracle: attention forward and backward in fp64 (or fp32) torch, one function a stage, written to be read.

Every stage works on one segment and all its heads: q [h, i, d_qk], k [hk, j, d_qk], v [hk, j, d_v], scores [h, i, j].
Formulas: FlashAttention-2 (Dao 2023), algorithm 2; softcap as in Gemma 2; the sink as in gpt-oss (a logit that joins
the denominator only); D - dLSE as the chain rule gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import AXES
from .mask import shift
from .problem import Band, Problem


@dataclass(frozen=True)
class Stages:
    """Everything the reference computed, thd-shaped [tokens, heads, dim]; lse and delta [nheads_q, total_q]."""

    out: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def keep(seqlen_q: int, seqlen_k: int, band: Band, device: torch.device | str = "cpu") -> Tensor:
    """The mask [i, j] of one segment; True is visible."""
    i = torch.arange(seqlen_q, device=device)[:, None]
    d = torch.arange(seqlen_k, device=device)[None, :] - i - shift(seqlen_q, seqlen_k, band)
    visible = torch.ones_like(d, dtype=torch.bool)
    if band.left is not None:
        visible &= d >= -band.left
    if band.right is not None:
        visible &= d <= band.right
    return visible


def scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Unmasked scores s and ds/d(scale q.k), which is 1 without a softcap."""
    s = scale * q @ grouped(k, q).mT
    if softcap == 0.0:
        return s, torch.ones((), dtype=s.dtype, device=s.device)
    capped = softcap * torch.tanh(s / softcap)
    return capped, 1 - (capped / softcap) ** 2


def forward(s: Tensor, v: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [h, i, d_v], lse [h, i]); a row that sees no key has out 0 and lse -inf, or the sink's logit."""
    masked = s.masked_fill(~visible, -torch.inf)
    logits = masked if sink is None else torch.cat([masked, sink[:, None, None].expand(*s.shape[:2], 1)], -1)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else s.new_full(s.shape[:2], -torch.inf)
    return probabilities(s, lse, visible) @ grouped(v, s), lse


def probabilities(s: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    """P = exp(s - lse), exactly 0 where the mask hides the key, whatever lse holds there."""
    return torch.where(visible, torch.exp(s - lse[..., None]), 0.0)


def delta(dout: Tensor, out: Tensor, sees: Tensor, dlse: Tensor | None) -> Tensor:
    """D = rowsum(dO * O) - dLSE [h, i]; the first term is 0 for a row that sees no key."""
    d = torch.where(sees, (dout * out).sum(-1), 0.0)
    return d if dlse is None else d - dlse


def dv(p: Tensor, dout: Tensor, group: int) -> Tensor:
    """dV = P^T dO, summed over the query heads of a kv head."""
    return _sum_group(p.mT @ dout, group)


def dp(dout: Tensor, v: Tensor) -> Tensor:
    """dP = dO V^T."""
    return dout @ grouped(v, dout).mT


def ds(p: Tensor, dp_: Tensor, delta_: Tensor, slope: Tensor) -> Tensor:
    """dS = P * (dP - D), times the slope of the softcap; exactly 0 where P is."""
    return torch.where(p == 0, 0.0, p * (dp_ - delta_[..., None]) * slope)


def dk(ds_: Tensor, q: Tensor, scale: float, group: int) -> Tensor:
    """dK = scale * dS^T Q, summed over the query heads of a kv head."""
    return scale * _sum_group(ds_.mT @ q, group)


def dq(ds_: Tensor, k: Tensor, scale: float) -> Tensor:
    """dQ = scale * dS K."""
    return scale * ds_ @ grouped(k, ds_)


def dsink(sink: Tensor, lse: Tensor, delta_: Tensor) -> Tensor:
    """dsink_h = sum_i exp(sink_h - lse_i) * (dLSE_i - rowsum(dO_i * O_i)), as -D carries both terms."""
    return -(torch.exp(sink[:, None] - lse) * delta_).sum(-1)


def grouped(kv: Tensor, like: Tensor) -> Tensor:
    """A kv tensor [hk, ...] repeated to the heads of `like` [h, ...]: query head h reads kv head h // group."""
    return kv.repeat_interleave(like.shape[0] // kv.shape[0], 0)


def _sum_group(x: Tensor, group: int) -> Tensor:
    return x.unflatten(0, (x.shape[0] // group, group)).sum(1)


def attention(
    problem: Problem,
    tensors: Mapping[str, Tensor | None],
    dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
) -> Stages:
    """Forward and backward of a whole call, segment by segment, in `dtype`.

    `tensors` holds q, k, v, dout in the problem's layout, and optionally sink [nheads_q], dlse, and out, lse: where
    given, the backward uses that `out` (for D) and that `lse` (for P), as a kernel would. The problem must know its
    segment lengths; `cu_seqlens_q`, `cu_seqlens_k` in `tensors` place them when segments are padded. Rows outside every
    segment are 0 (lse: -inf). `round_to` emulates a kernel of that dtype: operands of the second GEMMs and the results
    are rounded to it, sums stay in `dtype`.
    """
    q, k, v, dout = (to_thd(tensors[name], problem.layout).to(dtype) for name in ("q", "k", "v", "dout"))
    given = {n: None if tensors.get(n) is None else tensors[n].to(dtype) for n in ("sink", "dlse", "out", "lse")}
    given["out"] = None if given["out"] is None else to_thd(given["out"], problem.layout)
    for name in ("lse", "dlse"):
        given[name] = None if given[name] is None else to_ht(given[name])
    stages = Stages(
        out=q.new_zeros(*q.shape[:2], v.shape[-1]),
        lse=q.new_full(q.shape[1::-1], -torch.inf),
        delta=q.new_zeros(q.shape[1::-1]),
        dq=torch.zeros_like(q),
        dk=torch.zeros_like(k),
        dv=torch.zeros_like(v),
        dsink=None if given["sink"] is None else torch.zeros_like(given["sink"]),
    )
    for b, (sq, sk) in enumerate(problem.segments):
        at_q, at_k = (start(tensors, problem, side, b) for side in "qk")
        rows, keys = slice(at_q, at_q + sq), slice(at_k, at_k + sk)
        visible = keep(sq, sk, problem.band, q.device)
        for heads, kv_heads in _head_chunks(problem, sq * sk):
            local = {"sink": None if given["sink"] is None else given["sink"][heads]}
            local |= {"out": None if given["out"] is None else given["out"][rows, heads].transpose(0, 1)}
            local |= {n: None if given[n] is None else given[n][heads, rows] for n in ("lse", "dlse")}
            inputs = (q[rows, heads], k[keys, kv_heads], v[keys, kv_heads], dout[rows, heads])
            done = segment(problem, tuple(x.transpose(0, 1) for x in inputs), local, visible, round_to)
            stages.lse[heads, rows], stages.delta[heads, rows] = done.lse, done.delta
            stages.out[rows, heads], stages.dq[rows, heads] = done.out.transpose(0, 1), done.dq.transpose(0, 1)
            stages.dk[keys, kv_heads], stages.dv[keys, kv_heads] = done.dk.transpose(0, 1), done.dv.transpose(0, 1)
            if stages.dsink is not None:
                stages.dsink[heads] += done.dsink
    return stages


def segment(
    problem: Problem,
    qkvdo: tuple[Tensor, ...],
    given: Mapping[str, Tensor | None],
    visible: Tensor,
    round_to: torch.dtype | None = None,
) -> Stages:
    """The stages of one segment, head-major."""
    q, k, v, dout = qkvdo

    def rounded(x: Tensor) -> Tensor:
        return x if round_to is None else x.to(round_to).to(x.dtype)

    s, slope = scores(q, k, problem.scale, problem.softcap)
    out, lse = forward(s, v, visible, given["sink"])
    sees = visible.any(-1)
    used_lse = lse if given["lse"] is None else torch.where(sees, given["lse"], lse)
    p = probabilities(s, used_lse, visible)
    d = delta(dout, rounded(out) if given["out"] is None else given["out"], sees, given["dlse"])
    ds_ = rounded(ds(p, dp(dout, v), d, slope))
    return Stages(
        out=rounded(rounded(p) @ grouped(v, p)) if round_to else out,
        lse=lse,
        delta=d,
        dq=rounded(dq(ds_, k, problem.scale)),
        dk=rounded(dk(ds_, q, problem.scale, problem.group)),
        dv=rounded(dv(rounded(p), dout, problem.group)),
        dsink=None if given["sink"] is None else dsink(given["sink"], used_lse, d),
    )


def _head_chunks(problem: Problem, pairs: int, budget: int = 1 << 25) -> list[tuple[slice, slice]]:
    """(query heads, kv heads) slices whose scores hold at most `budget` elements, at least one kv head each."""
    step = max(1, budget // max(1, pairs * problem.group))
    kv = range(0, problem.nheads_kv, step)
    ends = [min(h + step, problem.nheads_kv) for h in kv]
    return [(slice(h * problem.group, e * problem.group), slice(h, e)) for h, e in zip(kv, ends, strict=True)]


def to_thd(x: Tensor, layout: str) -> Tensor:
    """A tensor of any layout as [tokens, heads, dim], batch-major."""
    return x if layout == "thd" else x.permute(*(AXES[layout].index(a) for a in "bshd")).flatten(0, 1)


def from_thd(x: Tensor, layout: str, batch: int) -> Tensor:
    """The inverse of `to_thd`, as a view."""
    if layout == "thd":
        return x
    dense = x.unflatten(0, (batch, x.shape[0] // batch))
    return dense.permute(*("bshd".index(a) for a in AXES[layout]))


def to_ht(x: Tensor) -> Tensor:
    """LSE-like dense (batch, nheads_q, seqlen_q) or packed (nheads_q, total_q) as (nheads_q, tokens)."""
    return x if x.dim() == 2 else x.transpose(0, 1).flatten(1, 2)


def start(tensors: Mapping[str, Tensor | None], problem: Problem, side: str, b: int) -> int:
    """The first row of segment b on a side."""
    cu = tensors.get(f"cu_seqlens_{side}")
    return problem.cu_seqlens(side)[b] if cu is None else int(cu[b])
