"""What forward and backward share: score tiles, the band of a tile, and a true fp32 GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import log2

import torch
from torch import Tensor

from ...mask import fully_live, shift
from ...problem import Band, Problem
from .views import Step

LOG2E = log2(2.718281828459045)


@contextmanager
def true_fp32(device_type: str) -> Iterator[None]:
    """No gradient graph, no autocast, and fp32 GEMMs in fp32, whatever the caller allows for its own."""
    # torch.get_float32_matmul_precision raises for a caller who set the precision of one backend
    matmul = torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul
    allowed = matmul.fp32_precision
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        if allowed in ("none", "ieee"):
            yield
            return
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = allowed


def query_gain(problem: Problem) -> float:
    """What Q is multiplied by on its way into a tile: the scale with log2(e), or with 1/softcap.

    Scores then leave their GEMM ready for exp2 (3 to 4 times faster than exp in torch's CPU kernels) or for tanh.
    """
    return problem.scale / problem.softcap if problem.softcap else problem.scale * LOG2E


def tile(step: Step, name: str, rows: int, keys: int) -> Tensor:
    """The head of a scratch buffer as a contiguous tile [kv head, row * group, key]."""
    memory = step.buffer(name)
    return memory.view(-1)[: memory.shape[0] * rows * keys].view(memory.shape[0], rows, keys)


def band_bias(band: Band, device: torch.device) -> Callable[[int, int, int], Tensor]:
    """(rows, keys, offset) -> [rows, 1, keys], +inf where the band shows a score and -inf where it hides it.

    `offset` is the key of the tile that lies on the diagonal of its first row: tiles along a diagonal share a bias.
    """

    @lru_cache(maxsize=8)
    def bias(rows: int, keys: int, offset: int) -> Tensor:
        i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows, keys))
        d = j[None, None, :] - (i[:, None, None] + offset)
        seen = torch.ones_like(d, dtype=torch.bool)
        if band.left is not None:
            seen &= d >= -band.left
        if band.right is not None:
            seen &= d <= band.right
        return torch.where(seen, torch.inf, -torch.inf).float()

    return bias


def hide(step: Step, s: Tensor, rows: tuple[int, int], keys: tuple[int, int]) -> None:
    """Set scores outside the band to -inf, in place; a tile that is fully live is left alone.

    s: [kv head, row * group, key], fp32, of the query rows [i0, i1) and the keys [j0, j1).
    """
    band = step.problem.band
    if fully_live(rows, keys, step.seqlens, band):
        return
    m, n = rows[1] - rows[0], keys[1] - keys[0]
    s = s.view(s.shape[0], m, -1, n)
    torch.minimum(s, step.call.bias(m, n, rows[0] + shift(*step.seqlens, band) - keys[0]), out=s)
