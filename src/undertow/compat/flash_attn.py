"""flash-attention 2's functions: same names, order and defaults. What undertow lacks raises; nothing is ignored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import attention, attention_varlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over (batch, seqlen, nheads, head_dim); with return_attn_probs also (lse, None).

    Raises:
        NotImplementedError: dropout_p other than 0, or alibi_slopes.
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    out, lse = attention(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over packed (total, nheads, head_dim); with return_attn_probs also (lse of (nheads, total_q), None).

    Raises:
        NotImplementedError: dropout_p other than 0, alibi_slopes, or block_table (paged keys).
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size,
        softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _refuse(*, dropout_p: float, **absent: Any) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}, wanted 0: undertow has no dropout")
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"{name} is a {type(value).__name__}, wanted None: undertow has no {name}")
