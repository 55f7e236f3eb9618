"""flash-attention 2's signatures: names, order, defaults, results, refusals."""

import inspect

import pytest
import torch

import undertow
from undertow.compat import flash_attn

FUNC = (
    "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None"
)


@pytest.mark.parametrize(("name", "wanted"), [("flash_attn_func", FUNC), ("flash_attn_varlen_func", VARLEN)])
def test_names_order_and_defaults_are_flash_attentions(name, wanted):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    have = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(have) == wanted


def test_dense_equals_ours():
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    q.requires_grad_()
    out, lse, mask = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(4, 0), return_attn_probs=True)
    want, want_lse = undertow.attention(q, k, v, causal=True, window_size=(4, 0), return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and mask is None
    out.sum().backward()
    assert q.grad.abs().sum() > 0


def test_varlen_equals_ours():
    q, k = torch.randn(14, 4, 16), torch.randn(14, 2, 16)
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, 9, 9, 0.0, 0.3, True)
    assert torch.equal(out, undertow.attention_varlen(q, k, k, cu, cu, 9, 9, softmax_scale=0.3, causal=True))


@pytest.mark.parametrize("refused", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}])
def test_what_we_lack_raises(refused):
    q = torch.randn(1, 4, 4, 16)
    with pytest.raises(NotImplementedError, match=next(iter(refused))):
        flash_attn.flash_attn_func(q, q, q, **refused)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, block_table=cu)
