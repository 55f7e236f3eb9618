"""AMD's aiter as a peer, where it is importable; arguments are passed by name.

Two traps are closed here. Its batch call defaults to `deterministic=True`, with which the assembly is never reached, so
the flag is always passed. Its FlyDSL path compares the addresses of the two cu_seqlens, so equal lengths are passed as
one tensor.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...problem import Problem
from ..spec import Config, Kernel, Limit, Tensors, no_config, no_workspace
from . import limits as _

if TYPE_CHECKING:
    from torch import Tensor

AMD = frozenset({"gfx942", "gfx950"})
MODULE = "aiter.ops.mha"


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


KERNEL = Kernel(
    "aiter",
    "AMD's aiter: assembly, CK or FlyDSL, whichever its own dispatch takes",
    AMD,
    (INSTALLED, _.NOT_EMPTY, _.SIXTEEN_BIT, _.BOTTOM_RIGHT, BSHD, *_.COMMON),
    no_config,
    no_workspace,
    forward,
    backward,
    vendor=True,
)
