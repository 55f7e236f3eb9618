"""torch's flex_attention as a peer: compiled Triton with a block mask for the band and the packed documents.

Its backward belongs to the autograd graph of its own forward, so ours records that graph once for given q, k and v and
runs its backward alone as often as it is asked, while the tensors stay as they were. Compiled code, the block mask and
the graph are kept until `forget`; dynamo is reset there, since after a few recompiles it falls back to eager without a
word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...layout import AXES
from ...mask import shift
from ...problem import Problem
from ..spec import Config, Kernel, Limit, Tensors, no_config, no_workspace
from . import limits as _

ARCHS = _.NVIDIA | {"gfx942", "gfx950"}
SMALLEST_DIM = 16

ATTEND_LIMITS = (
    Limit("dtype is fp32, where flex multiplies in TF32 or is slow", lambda p, t: p.dtype != "fp32", "dtype bf16"),
    _.NOT_EMPTY,
    *_.COMMON,
)


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of compiled flex_attention."""
    _no_seqused(tensors)
    with torch.no_grad():
        out, lse = _run(_plain(problem), tensors, [_bhsd(problem, tensors[n]) for n in ("q", "k", "v")])
    _bhsd(problem, tensors["out"]).copy_(out)
    (tensors["lse"][None] if problem.is_packed else tensors["lse"]).copy_(lse)


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv by autograd through its own forward; ignores out and lse."""
    _no_seqused(tensors)
    given = tuple(tensors[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    out, leaves = _graph(_plain(problem), given, tuple(x._version for x in given[:3]))
    with _kept_buffers():
        found = torch.autograd.grad(out, leaves, _bhsd(problem, tensors["dout"]), retain_graph=True)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        _bhsd(problem, tensors[name]).copy_(gradient)


def executed_dims(problem: Problem) -> tuple[int, int]:
    """Each head dim as the next power of two."""
    return tuple(max(SMALLEST_DIM, 1 << (d - 1).bit_length()) for d in (problem.head_dim_qk, problem.head_dim_v))


def _plain(problem: Problem) -> Problem:
    """The problem without its wish for determinism, which flex always fulfils: one compilation serves both."""
    return replace(problem, deterministic=False)


def forget() -> None:
    """Drop compiled code, masks and graphs."""
    if _compiled.cache_info().currsize:
        torch._dynamo.reset()
    for cache in (_compiled, _block_mask, _graph):
        cache.cache_clear()


def compile_alone() -> None:
    """Compile in this process alone: where many processes compile at once, a pool in each only crowds the machine."""
    from torch._inductor import config

    config.compile_threads = 1


@lru_cache(maxsize=1)
def _graph(problem: Problem, given: tuple[Tensor | None, ...], versions: tuple[int, ...]) -> tuple:
    """(out with its graph, its leaves). Tensors are looked up by identity, `versions` tell when they were written."""
    tensors = {"cu_seqlens_q": given[3], "cu_seqlens_k": given[4]}
    leaves = [_bhsd(problem, x).detach().requires_grad_() for x in given[:3]]
    with torch.enable_grad(), _kept_buffers():
        out, _lse = _run(problem, tensors, leaves)
    return out, leaves


def _run(problem: Problem, tensors: Tensors, qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
    mask = _block_mask(problem, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], qkv[0].device)
    return _compiled(problem)(*qkv, mask)


@lru_cache(maxsize=1)
def _compiled(problem: Problem) -> Callable[..., tuple[Tensor, Tensor]]:
    """flex_attention with this problem's scale and grouping, compiled for its shapes alone."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    torch._dynamo.reset()
    options = {"scale": problem.scale, "enable_gqa": problem.group > 1}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True), **options)
        return out, aux.lse

    return torch.compile(attend, dynamic=False, fullgraph=True)


@lru_cache(maxsize=1)
def _block_mask(problem: Problem, cu_q: Tensor | None, cu_k: Tensor | None, device: torch.device) -> Any:
    """The band and the documents as a BlockMask; None where nothing is masked."""
    from torch.nn.attention.flex_attention import create_block_mask

    band = problem.band
    if not problem.is_packed and band.left is None and band.right is None:
        return None
    rows = (problem.total_q, problem.total_k) if problem.is_packed else (problem.max_seqlen_q, problem.max_seqlen_k)
    visible = _documents(problem, cu_q, cu_k, rows) if problem.is_packed else _dense(problem)
    return create_block_mask(visible, None, None, *rows, device=device)


def _dense(problem: Problem) -> Callable[..., Tensor]:
    offset = shift(problem.max_seqlen_q, problem.max_seqlen_k, problem.band)
    inside = _inside(problem)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return inside(j - i - offset)

    return visible


def _documents(problem: Problem, cu_q: Tensor, cu_k: Tensor, rows: tuple[int, int]) -> Callable[..., Tensor]:
    """Same document, and inside the band of that document; rows outside every document see nothing."""
    doc_q, doc_k = (_document_of(cu, n) for cu, n in ((cu_q, rows[0]), (cu_k, rows[1])))
    ends = (cu_k[1:] - cu_q[1:]) if problem.band.align == "bottom_right" else (cu_k[:-1] - cu_q[:-1])
    offset = ends[doc_q.clamp(0, problem.batch - 1)]
    inside = _inside(problem)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (doc_q[i] == doc_k[j]) & (doc_q[i] < problem.batch) & inside(j - i - offset[i])

    return visible


def _document_of(cu: Tensor, rows: int) -> Tensor:
    """The document of every row; `batch` for rows behind the last."""
    row = torch.arange(rows, dtype=torch.int32, device=cu.device)
    return torch.searchsorted(cu[1:].contiguous(), row, right=True)


def _inside(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Whether a distance from the diagonal lies in the band; python numbers, so that the compiler folds them."""
    left, right = problem.band.left, problem.band.right

    def inside(d: Tensor) -> Tensor:
        if left is not None and right is not None:
            return (d >= -left) & (d <= right)
        if right is not None:
            return d <= right
        return d >= -left if left is not None else d == d  # noqa: PLR0124

    return inside


def _bhsd(problem: Problem, x: Tensor) -> Tensor:
    """A view as (batch, head, row, dim); packed rows are one batch."""
    if problem.is_packed:
        return x.transpose(0, 1)[None]
    return x.permute(tuple(AXES[problem.layout].index(axis) for axis in "bhsd"))


def _kept_buffers() -> Any:
    """Without this a compiled backward may reuse the memory of what its graph saved, and runs only once."""
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def _no_seqused(tensors: Tensors) -> None:
    for side in "qk":
        if tensors.get(f"seqused_{side}") is not None:
            raise NotImplementedError(f"seqused_{side} was given: this peer takes packed documents without gaps")


KERNEL = Kernel(
    "flex",
    "torch's flex_attention, compiled; the backward recomputes scores twice and needs its own forward's graph",
    ARCHS,
    ATTEND_LIMITS,
    no_config,
    no_workspace,
    forward,
    backward,
    executed_dims,
    gemms=lambda p, t: (4, 3),
    vendor=True,
)
