"""Inputs of a problem for verify, bench and tests: seeded, different in every head and row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.alloc import DTYPE
from ..layout import shapes
from ..problem import Problem


def make(
    problem: Problem, device: torch.device | str = "cpu", *, seed: int = 0, outliers: bool = False
) -> dict[str, Tensor | None]:
    """q, k, v, dout, and sink, dlse, cu_seqlens where the problem has them; absent inputs are None.

    Standard normal; with `outliers` two columns of q and k are 20 times larger, every 17th row of dout 30 times, as
    trained models have them.
    """
    generator = torch.Generator().manual_seed(seed)
    expected = shapes(problem)

    def normal(name: str, dtype: torch.dtype) -> Tensor:
        return torch.randn(expected[name], generator=generator).to(dtype).to(device)

    tensors: dict[str, Tensor | None] = {n: normal(n, DTYPE[problem.dtype]) for n in ("q", "k", "v", "dout")}
    if outliers:
        for n in ("q", "k"):
            tensors[n][..., :2] *= 20
        rows = "shd".index("s") if problem.is_packed else problem.layout.index("s")
        tensors["dout"].movedim(rows, 0)[::17] *= 30
    tensors["sink"] = normal("sink", torch.float32) if problem.has_sink else None
    tensors["dlse"] = normal("dlse", torch.float32) if problem.has_dlse else None
    tensors["delta"] = None
    for side in "qk":
        cu = torch.tensor(problem.cu_seqlens(side), dtype=torch.int32, device=device) if problem.is_packed else None
        tensors |= {f"cu_seqlens_{side}": cu, f"seqused_{side}": None}
    return tensors


def with_gaps(
    problem: Problem, tensors: dict[str, Tensor | None], gap: int, *, fill: float
) -> dict[str, Tensor | None]:
    """The same packed call with `gap` rows of `fill` behind every segment and at the end; lengths move to seqused."""
    spread = dict(tensors)
    by_token = dict(tensors)
    by_token["dlse"] = None if tensors["dlse"] is None else tensors["dlse"].t()
    for side, names in (("q", ("q", "dout", "dlse")), ("k", ("k", "v"))):
        lengths = [seg["qk".index(side)] for seg in problem.segments]
        starts = [at + b * gap for b, at in enumerate(problem.cu_seqlens(side))]
        old = problem.cu_seqlens(side)
        for name in names:
            x = by_token[name]
            if x is None:
                continue
            wide = x.new_full((x.shape[0] + gap * (len(lengths) + 1), *x.shape[1:]), fill)
            for b, n in enumerate(lengths):
                wide[starts[b] : starts[b] + n] = x[old[b] : old[b] + n]
            spread[name] = wide.t() if name == "dlse" else wide
        device = tensors["q"].device
        spread[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        spread[f"seqused_{side}"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return spread


def arguments(problem: Problem, tensors: dict[str, Tensor | None]) -> tuple[tuple, dict]:
    """(positional, keyword) arguments of `attention` or `attention_varlen` for this problem."""
    qkv = (tensors["q"], tensors["k"], tensors["v"])
    keywords = {
        "window_size": tuple(-1 if w is None else w for w in (problem.band.left, problem.band.right)),
        "causal_align": problem.band.align, "softmax_scale": problem.softmax_scale, "softcap": problem.softcap,
        "sink": tensors["sink"], "deterministic": problem.deterministic,
    }  # fmt: skip
    if not problem.is_packed:
        return qkv, keywords | {"layout": problem.layout}
    segments = (tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], problem.max_seqlen_q, problem.max_seqlen_k)
    return (*qkv, *segments), keywords | {n: tensors[n] for n in ("seqused_q", "seqused_k")}
