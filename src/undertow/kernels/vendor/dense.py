"""torch's SDPA kernels, called as aten operators: forward and backward apart, from anyone's out and lse.

The operators take (batch, head, row, dim) views of any strides that 16-byte loads allow, and return new tensors.
`sdpa_math` writes its backward out, because no autograd graph can be recorded below a custom operator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...layout import AXES
from ...problem import Problem
from ..spec import Config, Tensors

ATEN = torch.ops.aten
LOAD_BYTES = 16
LSE_ROWS = 32  # the memory-efficient kernels read the LSE of a head in blocks of this many rows


def flash_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of aten::_scaled_dot_product_flash_attention."""
    found = ATEN._scaled_dot_product_flash_attention(
        *_qkv(problem, tensors), 0.0, _causal(problem), scale=problem.scale
    )
    _store(problem, tensors, {"out": found[0], "lse": found[1]})


def flash_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of aten::_scaled_dot_product_flash_attention_backward."""
    q, k, v, dout, out, lse = _saved(problem, tensors)
    found = ATEN._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, problem.max_seqlen_q, problem.max_seqlen_k, 0.0, _causal(problem),
        *_no_dropout(q), scale=problem.scale,
    )  # fmt: skip
    _store(problem, tensors, dict(zip(("dq", "dk", "dv"), found, strict=True)))


def cudnn_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of aten::_scaled_dot_product_cudnn_attention."""
    q, k, v = _in_one_order(problem, tensors, ("q", "k", "v"))
    found = _cudnn_forward(q, k, v, is_causal=_causal(problem), scale=problem.scale)
    _store(problem, tensors, {"out": found[0], "lse": found[1].view(found[1].shape[:3])})


def cudnn_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of aten::_scaled_dot_product_cudnn_attention_backward."""
    q, k, v, dout, out = _in_one_order(problem, tensors, ("q", "k", "v", "dout", "out"))
    lse = tensors["lse"].contiguous()
    lse = lse[..., None] if _cudnn_lse_dims(q.device) == 4 else lse
    found = ATEN._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *_no_dropout(q), None, None, None, problem.max_seqlen_q, problem.max_seqlen_k, 0.0,
        _causal(problem), scale=problem.scale,
    )  # fmt: skip
    _store(problem, tensors, dict(zip(("dq", "dk", "dv"), found, strict=True)))


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, **fields: Any) -> tuple:
    return ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, compute_log_sumexp=True, **fields)


@lru_cache(maxsize=16)
def _cudnn_lse_dims(device: torch.device) -> int:
    """Dimensions of the LSE of this torch's cuDNN forward, and so of what its backward wants: 3, or 4 with a last 1.

    It changed between releases and the meta kernels do not follow it, so a small forward is asked once.
    """
    x = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return _cudnn_forward(x, x, x)[1].dim()


def _in_one_order(problem: Problem, tensors: Tensors, names: tuple[str, ...]) -> list[Tensor]:
    """Tensors as (batch, head, row, dim), dense and with the dimensions of all in the first one's order in memory.

    cuDNN's graphs are cached by the strides of q, k and v alone, and take those of out and of the results as like q's.
    """
    views = [tensors[name].permute(_order(problem)) for name in names]
    order = sorted(range(3), key=lambda d: -views[0].stride(d)) + [3]
    back = [order.index(d) for d in range(4)]
    return [x.permute(order).contiguous().permute(back) for x in views]


def efficient_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of aten::_scaled_dot_product_efficient_attention, whose LSE is padded to blocks of LSE_ROWS."""
    found = ATEN._scaled_dot_product_efficient_attention(
        *_qkv(problem, tensors), None, compute_log_sumexp=True, is_causal=_causal(problem), scale=problem.scale
    )
    _store(problem, tensors, {"out": found[0], "lse": found[1][..., : problem.max_seqlen_q]})


def efficient_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of aten::_scaled_dot_product_efficient_attention_backward.

    Where the kernel computes D itself (16 bits) it takes the rows of out to be nheads * head_dim_v apart, as its own
    forward leaves them, whatever the tensor's stride.
    """
    q, k, v, dout, out, lse = _saved(problem, tensors)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padded = -problem.max_seqlen_q % LSE_ROWS
    lse = torch.nn.functional.pad(lse, (0, padded), value=torch.inf)  # exp(s - inf) is 0
    found = ATEN._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *_no_dropout(q), 0.0, [True, True, True, False], _causal(problem),
        scale=problem.scale,
    )  # fmt: skip
    _store(problem, tensors, dict(zip(("dq", "dk", "dv"), found[:3], strict=True)))


def cpu_flash_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of aten::_scaled_dot_product_flash_attention_for_cpu."""
    found = ATEN._scaled_dot_product_flash_attention_for_cpu(
        *_qkv(problem, tensors), 0.0, _causal(problem), scale=problem.scale
    )
    _store(problem, tensors, {"out": found[0], "lse": found[1]})


def cpu_flash_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    q, k, v, dout, out, lse = _saved(problem, tensors)
    found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, _causal(problem), scale=problem.scale
    )
    _store(problem, tensors, dict(zip(("dq", "dk", "dv"), found, strict=True)))


def math_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out of aten::_scaled_dot_product_attention_math in fp32; it returns no LSE, so that comes from scores of ours."""
    q, k, v = (x.float() for x in _qkv(problem, tensors))
    out, _ = _math(problem, q, k, v)
    s = (q @ k.repeat_interleave(problem.group, 1).mT).mul_(problem.scale)
    if _causal(problem):
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -torch.inf)
    _store(problem, tensors, {"out": out, "lse": s.logsumexp(-1)})


def math_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv from recomputed probabilities, as autograd of the unfused operators gives them; ignores out, lse."""
    q, k, v, dout = (_bhsd(problem, tensors[name]).float() for name in ("q", "k", "v", "dout"))
    _, p = _math(problem, q, k, v)
    dp = dout @ v.repeat_interleave(problem.group, 1).mT
    ds = ATEN._softmax_backward_data(dp, p, -1, torch.float32).mul_(problem.scale)
    gradients = {"dq": ds @ k.repeat_interleave(problem.group, 1), "dk": ds.mT @ q, "dv": p.mT @ dout}
    for name in ("dk", "dv"):
        gradients[name] = gradients[name].unflatten(1, (problem.nheads_kv, problem.group)).sum(2)
    _store(problem, tensors, gradients)


def _math(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, probabilities)."""
    return ATEN._scaled_dot_product_attention_math(
        q, k, v, None, 0.0, _causal(problem), scale=problem.scale, enable_gqa=problem.group > 1
    )


def _causal(problem: Problem) -> bool:
    return problem.band.right == 0


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is off."""
    return like.new_zeros((), dtype=torch.int64), like.new_zeros((), dtype=torch.int64)


def _order(problem: Problem) -> tuple[int, ...]:
    return tuple(AXES[problem.layout].index(axis) for axis in "bhsd")


def _bhsd(problem: Problem, x: Tensor) -> Tensor:
    """A dense tensor as (batch, head, row, dim), copied where 16-byte loads could not read its rows.

    The memory-efficient kernels refuse the stride of rows even where there is one row, which `contiguous` leaves alone.
    """
    x = x.permute(_order(problem))
    apart = [stride for dim, stride in enumerate(x.stride()[:3]) if dim == 2 or x.shape[dim] > 1]
    if x.stride(-1) == 1 and not any(n % LOAD_BYTES for n in (*(s * x.element_size() for s in apart), x.data_ptr())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _qkv(problem: Problem, tensors: Tensors) -> list[Tensor]:
    return [_bhsd(problem, tensors[name]) for name in ("q", "k", "v")]


def _saved(problem: Problem, tensors: Tensors) -> list[Tensor]:
    """q, k, v, dout, out as (batch, head, row, dim), and lse (batch, head, row), contiguous."""
    named = [_bhsd(problem, tensors[name]) for name in ("q", "k", "v", "dout", "out")]
    return [*named, tensors["lse"].contiguous()]


def _store(problem: Problem, tensors: Tensors, found: dict[str, Any]) -> None:
    """Copy results into the call's own tensors."""
    for name, x in found.items():
        into = tensors[name] if name == "lse" else tensors[name].permute(_order(problem))
        into.copy_(x)
