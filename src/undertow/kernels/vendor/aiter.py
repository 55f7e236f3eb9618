"""AMD's aiter as a peer, where it is importable; arguments are passed by name.

Two traps are closed here. Its batch call defaults to `deterministic=True`, with which the assembly is never reached, so
the flag is always passed. Its FlyDSL path compares the addresses of the two cu_seqlens, so equal lengths are passed as
one tensor.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...problem import Problem
from ...target import Target
from ..spec import Config, Kernel, Limit, Tensors, no_config, no_workspace
from . import limits as _

if TYPE_CHECKING:
    from torch import Tensor

AMD = frozenset({"gfx942", "gfx950"})
MODULE = "aiter.ops.mha"
CK_BUCKETS = (32, 64, 96, 128, 256)


def _importable() -> bool:
    """Whether AMD's aiter is there; a package of the same name is about asynchronous iterators."""
    try:
        return find_spec(MODULE) is not None
    except ImportError:
        return False


INSTALLED = Limit(
    f"AMD's package aiter (module {MODULE}) is not importable",
    lambda p, t: _importable(),
    "install amd-aiter, or build ROCm/aiter (the package named plainly aiter is another one)",
)
BSHD = Limit("layout is {p.layout}, aiter takes bshd and thd", lambda p, t: p.layout in ("bshd", "thd"))


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse."""
    from aiter.ops import mha

    call = mha._flash_attn_varlen_forward if problem.is_packed else mha._flash_attn_forward
    found = call(
        **_named(tensors, "q k v"), **_options(problem, tensors), return_lse=True, return_softmax=False
    )
    for name, x in {"out": found[0], "lse": found[1]}.items():
        tensors[name].copy_(x)


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv, written in place."""
    from aiter.ops import mha

    call = mha._flash_attn_varlen_backward if problem.is_packed else mha._flash_attn_backward
    call(
        **_named(tensors, "dout q k v out dq dk dv"), softmax_lse=tensors["lse"].contiguous(),
        **_options(problem, tensors), deterministic=problem.deterministic,
    )  # fmt: skip


def _options(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in (problem.band.left, problem.band.right))
    causal = (left, right) == (-1, 0)
    options = {
        "dropout_p": 0.0, "softmax_scale": problem.scale, "causal": causal, "window_size_left": left,
        "window_size_right": right, "alibi_slopes": None,
    }  # fmt: skip
    return options | segments(problem, tensors)


def segments(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """cu_seqlens and longest lengths of a packed call; one tensor for both sides where the lengths are known equal."""
    if not problem.is_packed:
        return {}
    if tensors.get("seqused_q") is not None or tensors.get("seqused_k") is not None:
        raise NotImplementedError("seqused was given: this peer takes packed segments without gaps")
    cu_q, cu_k = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
    if problem.seqlens_q is not None and problem.seqlens_q == problem.seqlens_k:
        cu_k = cu_q
    lengths = {"max_seqlen_q": problem.max_seqlen_q, "max_seqlen_k": problem.max_seqlen_k}
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **lengths}


def _named(tensors: Tensors, names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names.split()}


def _asm_dims(problem: Problem, target: Target) -> bool:
    qk, v = problem.head_dim_qk, problem.head_dim_v
    if target.arch == "gfx942":
        return qk == v and 64 <= qk <= 192
    return (qk == v and 64 <= qk <= 128) or (qk, v) == (192, 128)


def _asm_window(problem: Problem, target: Target) -> bool:
    return problem.band.left is None or (target.arch == "gfx942" and problem.head_dim_qk <= 128)


def _every_row_sees(problem: Problem, target: Target) -> bool:
    return problem.band.right is None or problem.max_seqlen_q <= problem.max_seqlen_k


def _bucket(problem: Problem) -> tuple[int, int]:
    wide = max(problem.head_dim_qk, problem.head_dim_v)
    return (next(size for size in CK_BUCKETS if wide <= size),) * 2


ATOMIC = Limit(
    "deterministic, and its additions to dQ have no order", lambda p, t: not p.deterministic, "deterministic=False"
)
MIN_ROWS = Limit(
    "max_seqlen_q is {p.max_seqlen_q}, aiter takes its assembly above 16", lambda p, t: p.max_seqlen_q > 16
)
ASM_DIMS = Limit(
    "head dims {p.head_dim_qk}/{p.head_dim_v}: gfx942 has equal dims from 64 to 192; gfx950 equal dims from 64 to 128, "
    "and 192/128 for dense tensors",
    _asm_dims,
    "v zero-padded to head_dim_v {p.head_dim_qk} (gfx942)",
)
ASM_WINDOW = Limit(
    "window (left={p.band.left}): windows are built for gfx942, dense, head dims up to 128",
    _asm_window,
    "window_size=(-1, 0)",
)
DENSE_ONLY = Limit(
    "{p.batch} packed segments: rows between and behind them are left unwritten (gfx950 has no packed 192/128 at all)",
    lambda p, t: not p.is_packed,
    "kernel='triton' or 'flydsl'",
)
KEYS_FOR_ALL = Limit(
    "seqlen_q {p.max_seqlen_q} > seqlen_k {p.max_seqlen_k}: what it does with a row that sees no key is not known",
    _every_row_sees,
)
ONE_SHAPE = Limit(
    "{p.head_dim_qk}/{p.head_dim_v}, {p.nheads_q} on {p.nheads_kv} heads, {p.dtype}, layout {p.layout}: it is one "
    "kernel, 192/128, equal heads, bf16, packed",
    lambda p, t: (p.head_dim_qk, p.head_dim_v, p.group, p.dtype, p.is_packed) == (192, 128, 1, "bf16", True),
)
CAUSAL_SELF = Limit(
    "it is causal self-attention: right 0, no window, one cu_seqlens tensor for queries and keys",
    lambda p, t: (p.band.left, p.band.right) == (None, 0) and p.seqlens_q is not None and p.seqlens_q == p.seqlens_k,
)
_SHARED = (INSTALLED, _.NOT_EMPTY, _.SIXTEEN_BIT, _.BOTTOM_RIGHT, BSHD, *_.COMMON)


def _path(name: str, about: str, archs: frozenset[str], own: tuple[Limit, ...], **fields: Any) -> Kernel:
    """A backward that aiter's own dispatch takes where these limits hold (read from its source, commit e4048607a5)."""
    return Kernel(
        name, about, archs, _SHARED + own, no_config, no_workspace, backward=backward, vendor=True, **fields
    )


KERNEL = Kernel(
    "aiter", "AMD's aiter: assembly, CK or FlyDSL, whichever its own dispatch takes", AMD, _SHARED, no_config,
    no_workspace, forward, backward, vendor=True,
)  # fmt: skip
ASM = _path(
    "aiter_asm", "aiter's assembly: dK and dV of a group are rounded to bf16 a head before they are summed", AMD,
    (ATOMIC, DENSE_ONLY, KEYS_FOR_ALL, MIN_ROWS, ASM_DIMS, ASM_WINDOW),
)  # fmt: skip
FLYDSL = _path(
    "aiter_flydsl", "aiter's FlyDSL kernel (pull request 4875): no atomics, seven products", frozenset({"gfx942"}),
    (ONE_SHAPE, CAUSAL_SELF), gemms=lambda p, t: (4, 3),
)  # fmt: skip
CK = _path(
    "aiter_ck", "Composable Kernel: both head dims padded to one of 32, 64, 96, 128, 256", AMD, (),
    executed_dims=_bucket,
)  # fmt: skip
