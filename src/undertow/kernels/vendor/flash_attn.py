"""flash-attention 2, 3 and 4 as peers, where their packages are importable; arguments are passed by name.

Version 4 is the CuTe DSL package, 3 the `hopper/` build, 2 the classic wheel. None is a dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

from torch import Tensor

from ...problem import Problem
from ..spec import Config, Kernel, Limit, Tensors, no_config, no_workspace
from . import limits as _

FA3_DIMS = (64, 96, 128, 192, 256)
FA4_STEP = 16

EQUAL_DIMS_FA4_GQA = Limit(
    "{p.nheads_q} query heads on {p.nheads_kv} kv heads with head dims {p.head_dim_qk} != {p.head_dim_v}: "
    "its GQA backward wants them equal",
    lambda p, t: p.group == 1 or p.head_dim_qk == p.head_dim_v,
    "k and v repeated {p.group} times",
    only="backward",
)
FA4_WRONG_DQ = Limit(
    "head dim {p.head_dim_qk}: dq is wrong where the dim rounds to other multiples of 16 and of 32 "
    "(4.0.0b36 on sm_90, relative error 1.1, measured 2026-11-29)",
    lambda p, t: t.arch != "sm_90" or -(-p.head_dim_qk // 16) * 16 == -(-p.head_dim_qk // 32) * 32,
    "q and k zero-padded to a multiple of 32",
    only="backward",
)
FA3_NOT_DETERMINISTIC_256 = Limit(
    "deterministic at head dim {p.head_dim_qk}: flash-attention 3 has none above 192",
    lambda p, t: not p.deterministic or max(p.head_dim_qk, p.head_dim_v) <= 192,
    "deterministic=False",
    only="backward",
)
BSHD = Limit("layout is {p.layout}, flash-attention takes bshd and thd", lambda p, t: p.layout in ("bshd", "thd"))


def _installed(module: str, package: str, extra: str) -> Limit:
    return Limit(
        f"package {package} (module {module}) is not importable",
        lambda p, t: _importable(module),
        f"pip install {package} (extra '{extra}')" if extra else f"build {package}; no wheel of it has a backward",
    )


def _importable(module: str) -> bool:
    """Whether a dotted module is there, without importing what it is made of."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def fa2_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of flash-attention 2."""
    from flash_attn import flash_attn_interface as fa

    call = fa._flash_attn_varlen_forward if problem.is_packed else fa._flash_attn_forward
    found = call(
        tensors["q"], tensors["k"], tensors["v"], **_segments(problem, tensors), **_fa2_options(problem),
        return_softmax=False,
    )  # fmt: skip
    _store(tensors, {"out": found[0], "lse": found[1]})


def fa2_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of flash-attention 2, written in place."""
    from flash_attn import flash_attn_interface as fa

    call = fa._flash_attn_varlen_backward if problem.is_packed else fa._flash_attn_backward
    call(
        **_named(tensors, "dout q k v out dq dk dv"), softmax_lse=tensors["lse"].contiguous(),
        **_segments(problem, tensors), **_fa2_options(problem), deterministic=problem.deterministic,
    )  # fmt: skip


def fa3_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of flash-attention 3."""
    import flash_attn_interface as fa

    found = fa._flash_attn_forward(
        tensors["q"], tensors["k"], tensors["v"], **_segments(problem, tensors), softmax_scale=problem.scale,
        **_window(problem),
    )  # fmt: skip
    _store(tensors, {"out": found[0], "lse": found[1]})


def fa3_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of flash-attention 3, written in place."""
    import flash_attn_interface as fa

    options = _window(problem)
    causal = "is_causal" if "is_causal" in signature(_python(fa._flash_attn_backward)).parameters else "causal"
    options[causal] = options.pop("causal")
    fa._flash_attn_backward(
        **_named(tensors, "dout q k v out dq dk dv"), softmax_lse=tensors["lse"].contiguous(),
        **_segments(problem, tensors), softmax_scale=problem.scale, **options, deterministic=problem.deterministic,
    )  # fmt: skip


def fa4_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of flash-attention 4."""
    from flash_attn.cute import interface as fa

    found = fa._flash_attn_fwd(
        tensors["q"], tensors["k"], tensors["v"], **_fa4_options(problem, tensors), return_lse=True
    )
    _store(tensors, {"out": found[0], "lse": found[1]})


def fa4_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of flash-attention 4."""
    from flash_attn.cute import interface as fa

    found = fa._flash_attn_bwd(
        **_named(tensors, "q k v out dout"), lse=tensors["lse"].contiguous(), **_fa4_options(problem, tensors),
        deterministic=problem.deterministic,
    )  # fmt: skip
    _store(tensors, dict(zip(("dq", "dk", "dv"), found[:3], strict=True)))


def _fa2_options(problem: Problem) -> dict[str, Any]:
    return {"dropout_p": 0.0, "softmax_scale": problem.scale, "softcap": 0.0, "alibi_slopes": None, **_window(problem)}


def _fa4_options(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """Version 4 spells an unbounded side None."""
    window = _window(problem)
    sides = {n: None if window[n] == -1 else window[n] for n in ("window_size_left", "window_size_right")}
    return {"softmax_scale": problem.scale, "causal": window["causal"], **sides, **_segments(problem, tensors)}


def _window(problem: Problem) -> dict[str, Any]:
    """The band as flash-attention's inclusive window, -1 unbounded, bottom-right; causal has no sides."""
    left, right = problem.band.left, problem.band.right
    causal = left is None and right == 0
    sides = (-1, -1) if causal else tuple(-1 if side is None else side for side in (left, right))
    return {"causal": causal, "window_size_left": sides[0], "window_size_right": sides[1]}


def _segments(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    if not problem.is_packed:
        return {}
    if tensors.get("seqused_q") is not None or tensors.get("seqused_k") is not None:
        raise NotImplementedError("seqused was given: this peer takes packed segments without gaps")
    lengths = {"max_seqlen_q": problem.max_seqlen_q, "max_seqlen_k": problem.max_seqlen_k}
    return {n: tensors[n] for n in ("cu_seqlens_q", "cu_seqlens_k")} | lengths


def _named(tensors: Tensors, names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names.split()}


def _store(tensors: Tensors, found: dict[str, Tensor]) -> None:
    for name, x in found.items():
        tensors[name].copy_(x)


def _python(function: Callable) -> Callable:
    """The function behind a torch custom operator."""
    return getattr(function, "_init_fn", function)


def _fa3_dims(problem: Problem) -> tuple[int, int]:
    dim = next(d for d in FA3_DIMS if d >= max(problem.head_dim_qk, problem.head_dim_v))
    return dim, dim


def _fa4_dims(problem: Problem) -> tuple[int, int]:
    return tuple(-(-d // FA4_STEP) * FA4_STEP for d in (problem.head_dim_qk, problem.head_dim_v))


SAME = (_.NOT_EMPTY, _.SIXTEEN_BIT, _.BOTTOM_RIGHT, BSHD, *_.COMMON)
KERNELS = (
    Kernel(
        "flash_attn_2",
        "flash-attention 2, the classic wheel",
        _.NVIDIA,
        (_installed("flash_attn.flash_attn_interface", "flash-attn", "peers"), *SAME, _.EQUAL_DIMS, _.SM86_BACKWARD),
        no_config, no_workspace, fa2_forward, fa2_backward, _.flash_dims, vendor=True,
    ),
    Kernel(
        "flash_attn_3",
        "flash-attention 3 for Hopper; v is multiplied at the rounded qk dim",
        frozenset({"sm_90"}),
        (_installed("flash_attn_interface", "flash-attention hopper/", ""), *SAME, FA3_NOT_DETERMINISTIC_256),
        no_config, no_workspace, fa3_forward, fa3_backward, _fa3_dims, vendor=True,
    ),
    Kernel(
        "flash_attn_4",
        "flash-attention 4, CuTe DSL",
        frozenset({"sm_90", "sm_100", "sm_120"}),
        (_installed("flash_attn.cute.interface", "flash-attn-4", "peers"), *SAME, EQUAL_DIMS_FA4_GQA, FA4_WRONG_DQ),
        no_config, no_workspace, fa4_forward, fa4_backward, _fa4_dims, vendor=True,
    ),
)  # fmt: skip
