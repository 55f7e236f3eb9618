"""The public functions: registration, autograd, compile, autocast, outputs of the caller's, and what they refuse."""

import re

import pytest
import torch
import torch._dynamo.testing
from support import CAUSAL, DEVICE, call, close, make, randn, same

import undertow
from undertow.instruments import inputs
from undertow.problem import Band, Problem

SMALL = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 24, "head_dim_v": 16}
FP32 = SMALL | {"dtype": "fp32", "band": CAUSAL}
TILED = "torch_tiled"


def positional(problem, tensors, which, **changes):
    """Arguments of the two operators, in order."""
    t = tensors | changes
    segments = [t[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")]
    band = problem.band
    numbers = [problem.max_seqlen_q, problem.max_seqlen_k, problem.scale, problem.softcap, band.left, band.right]
    numbers += [band.align, problem.layout, problem.deterministic, TILED]
    if which == "forward":
        return [t["q"], t["k"], t["v"], t["sink"], *segments, *numbers]
    side = [t[n] for n in ("dout", "q", "k", "v", "out", "lse", "sink", "dlse", "delta")]
    return [*side, *segments, *numbers]


PROBLEMS = {
    "packed": Problem.packed((9, 0, 5), (7, 3, 5), has_sink=True, has_dlse=True, **FP32),
    "bshd": Problem.dense(2, 9, 12, **FP32),
    "sbhd": Problem.dense(2, 9, 12, layout="sbhd", has_sink=True, **FP32),
    "bhsd": Problem.dense(2, 9, 12, layout="bhsd", **(FP32 | {"softcap": 3.0})),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward(name):
    problem = PROBLEMS[name]
    tensors = make(problem)
    for n in ("q", "k", "v", "sink"):
        if tensors[n] is not None:
            tensors[n].requires_grad_()
    torch.library.opcheck(torch.ops.undertow.forward.default, tuple(positional(problem, tensors, "forward")))


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_backward(name):
    """Detached inputs: the backward has no derivative of its own."""
    problem = PROBLEMS[name]
    tensors = make(problem)
    tensors |= call(problem, tensors, TILED)
    torch.library.opcheck(torch.ops.undertow.backward.default, tuple(positional(problem, tensors, "backward")))


def plain(q, k, v, sink=None, causal=True):
    """(out, lse) of bshd tensors, differentiable, one kv head a group."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    sq, sk = s.shape[-2:]
    if causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1), -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(s.shape[0], -1, sq, 1)], -1)
    p = s.softmax(-1)[..., :sk]
    return torch.einsum("bhij,bjhd->bihd", p, v), s.logsumexp(-1)


def leaves(sq=9, sk=12, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((2, sq, 4, 24), (2, sk, 2, 24), (2, sk, 2, 16), (4,))
    return [torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("kernel", ["torch_tiled", "triton"])
def test_autograd_through_out_and_lse_and_sink(kernel):
    """B56: the loss uses LSE, so D must lose dLSE."""
    results = []
    for function in (
        plain,
        lambda q, k, v, sink: undertow.attention(q, k, v, sink=sink, causal=True, return_lse=True, kernel=kernel),
    ):
        q, k, v, sink = leaves()
        out, lse = function(q, k, v, sink=sink)
        loss = (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum() + lse.sigmoid().sum()
        results.append([out, lse, *torch.autograd.grad(loss, (q, k, v, sink))])
    for name, want, got in zip(("out", "lse", "dq", "dk", "dv", "dsink"), *results, strict=True):
        close(got.detach(), want.detach(), 1e-5, name)


def test_lse_alone_has_a_gradient():
    q, k, v, _ = leaves()
    out, lse = undertow.attention(q, k, v, causal=True, return_lse=True, kernel=TILED)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    want = torch.autograd.grad(plain(q, k, v)[1].sum(), (q, k))
    close(dq, want[0], 1e-5), close(dk, want[1], 1e-5)
    assert (dv == 0).all()


def test_second_derivative_raises():
    """B59: an error, never a constant graph."""
    q, k, v, _ = leaves()
    loss = undertow.attention(q, k, v, kernel=TILED).square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


def test_activation_checkpointing():
    q, k, v, _ = leaves()
    want = torch.autograd.grad(undertow.attention(q * 2, k, v, causal=True).square().sum(), (q, k, v))

    def block(q, k, v):
        return undertow.attention(q * 2, k, v, causal=True)

    out = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
    for got, expected in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), want, strict=True):
        assert torch.equal(got, expected)


def packed(lengths, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, h, d, device=DEVICE).to(dtype).requires_grad_() for h, d in ((4, 24), (2, 24), (2, 16))
    )
    cu = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    return q, k, v, cu


def step(q, k, v, cu, longest):
    out = undertow.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True, kernel=TILED)
    return out.mean()


def test_compile_is_eager_and_follows_segment_lengths_without_recompiling():
    """B61, B62: 20 packings of the same number of rows, one graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in range(20):
        lengths = (10 + n, 20 - n, 10)
        q, k, v, cu = packed(lengths, seed=n)
        eager = torch.autograd.grad(step(q, k, v, cu, 40), (q, k, v))
        got = torch.autograd.grad(compiled(q, k, v, cu, 40), (q, k, v))
        for a, b in zip(got, eager, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_compile_with_dynamic_lengths():
    """B61's lengths: 128, 196, 256, 257, loss = out.mean()."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    builds = set()
    for length in (128, 196, 256, 257):
        q, k, v, cu = packed((length, 3))
        eager = torch.autograd.grad(step(q, k, v, cu, length), (q, k, v))
        got = torch.autograd.grad(compiled(q, k, v, cu, length), (q, k, v))
        for a, b in zip(got, eager, strict=True):
            assert torch.equal(a, b)
        builds.add(counter.frame_count)
    assert len(builds) == 1, "a length compiled again"


def test_max_seqlen_as_a_tensor_is_its_value():
    q, k, v, cu = packed((10, 20))
    want = undertow.attention_varlen(q, k, v, cu, cu, 20, 20)
    got = undertow.attention_varlen(q, k, v, cu, cu, torch.tensor(20), torch.tensor(20, device=DEVICE))
    assert torch.equal(got, want)


def test_autocast_is_sdpas():
    """Floating inputs are cast to the autocast dtype, out has it, gradients have the leaves' dtype."""
    q, k, v, _ = leaves(12, 12)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = undertow.attention(q, k, v, kernel=TILED)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        ).transpose(1, 2)
    assert out.dtype == theirs.dtype == torch.bfloat16
    close(out.detach(), theirs.detach(), 1e-2)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in grads)
    direct = undertow.attention(*(x.bfloat16() for x in (q, k, v)), kernel=TILED)
    assert torch.equal(out, direct)


def test_deterministic_none_follows_torch(monkeypatch):
    """The switch reaches the problem that the kernel is chosen for."""
    from undertow import dispatch

    asked = []
    honest = dispatch.select

    def select(problem, *rest):
        asked.append(problem.deterministic)
        return honest(problem, *rest)

    monkeypatch.setattr(dispatch, "select", select)
    q, k, v, _ = leaves()
    for switch in (False, True):
        torch.use_deterministic_algorithms(switch)
        try:
            torch.autograd.grad(undertow.attention(q, k, v).sum(), q)
        finally:
            torch.use_deterministic_algorithms(False)
    for flag in (False, True):
        torch.autograd.grad(undertow.attention(q, k, v, deterministic=flag).sum(), q)
    assert asked == [False, False, True, True] * 2


def test_a_named_kernel_that_has_no_deterministic_plan_is_refused():
    """B30: before launch, with the reason; never a silent switch."""
    from undertow.dispatch import select
    from undertow.target import TARGETS

    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"):
        problem = Problem.dense(1, 64, 64, nheads_q=2, nheads_kv=2, head_dim_qk=64, head_dim_v=64, deterministic=True)
        with pytest.raises(NotImplementedError, match="no fixed order|differ in bits"):
            select(problem, TARGETS["sm_90"], "backward", name)
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128)):
        problem = Problem.dense(
            1, 64, 64, nheads_q=2, nheads_kv=2, head_dim_qk=dims[0], head_dim_v=dims[1], deterministic=True
        )
        for arch in ("sm_90", "gfx942"):
            assert select(problem, TARGETS[arch]).name in ("hopper", "triton", "torch_tiled")


# ---- outputs of the caller's, LSE of the caller's


def backward_of(problem, tensors, got, **more):
    args, keywords = inputs.arguments(problem, tensors)
    function = undertow.attention_varlen_backward if problem.is_packed else undertow.attention_backward
    q, k, v, *segments = args
    kernel = {"kernel": TILED, "dlse": tensors["dlse"]} | more
    lse = kernel.pop("lse", got["lse"])
    return function(tensors["dout"], q, k, v, got["out"], lse, *segments, **keywords, **kernel)


@pytest.mark.parametrize("kernel", ["torch_tiled", "triton"])
@pytest.mark.parametrize("packed_call", [False, True])
def test_gradients_into_slices_of_one_buffer(kernel, packed_call):
    """B19's second: dq, dk, dv are slices of one dqkv buffer; their neighbours stay as they were."""
    fields = SMALL | {"nheads_kv": 4, "head_dim_v": 24, "band": CAUSAL}
    problem = Problem.packed((9, 5), **fields) if packed_call else Problem.dense(2, 9, 9, **fields)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    buffer = torch.full((*tensors["q"].shape[:-2], 5, 4, 24), 7.0, dtype=torch.bfloat16, device=DEVICE)
    outs = {name: buffer[..., n, :, :] for n, name in ((0, "dq"), (2, "dk"), (3, "dv"))}
    grads = backward_of(problem, tensors, got, kernel=kernel, **outs)
    for name, out in outs.items():
        assert getattr(grads, name) is out
        assert torch.equal(out, got[name]), name
    assert (buffer[..., 1, :, :] == 7).all() and (buffer[..., 4, :, :] == 7).all()


def test_an_output_whose_last_stride_is_not_one_is_written_too():
    problem = Problem.dense(2, 9, 12, **FP32)
    tensors = make(problem)
    got = call(problem, tensors, TILED)
    dq = torch.full((2, 9, 24, 4), float("nan"), device=DEVICE).transpose(2, 3)
    grads = backward_of(problem, tensors, got, dq=dq)
    assert grads.dq is dq and torch.equal(dq, got["dq"])


def test_lse_of_other_layouts_and_bases():
    """B58: (H, T), (T, H) and per-segment padded (B, H, max); base 2; delta and dlse alike."""
    problem = Problem.packed((3, 0, 7), (3, 2, 7), has_dlse=True, **FP32)
    tensors = make(problem)
    got = call(problem, tensors, TILED)
    padded = {}
    for name, x in (("lse", got["lse"]), ("dlse", tensors["dlse"])):
        padded[name] = torch.full((3, 4, 7), float("nan"), device=DEVICE)
        padded[name][0, :, :3], padded[name][2, :, :7] = x[:, :3], x[:, 3:]
    for lse_layout, change in (
        ("ht", lambda name, x: x), ("th", lambda name, x: x.t().contiguous()), ("bhs", lambda name, x: padded[name]),
    ):  # fmt: skip
        lse, dlse = change("lse", got["lse"]), change("dlse", tensors["dlse"])
        grads = backward_of(problem, tensors, got, lse=lse, dlse=dlse, lse_layout=lse_layout)
        same({"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}, got, ("dq", "dk", "dv"))
    grads = backward_of(problem, tensors, got, lse=got["lse"] / 0.6931471805599453, lse_base="2")
    close(grads.dq, got["dq"], 1e-5)
    dense = Problem.dense(2, 9, 12, **FP32)
    tensors = make(dense)
    got = call(dense, tensors, TILED)
    grads = backward_of(dense, tensors, got, lse=got["lse"].transpose(1, 2).contiguous(), lse_layout="bsh")
    same({"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}, got, ("dq", "dk", "dv"))


def test_an_ambiguous_lse_is_refused_until_it_is_named():
    """B58's trap: as many heads as tokens, so (H, T) and (T, H) look alike."""
    for problem in (Problem.packed((3, 1), **FP32), Problem.dense(2, 4, 4, **FP32)):
        tensors = make(problem)
        got = call(problem, tensors, TILED)
        with pytest.raises(ValueError, match="ambiguous: heads and rows are both 4; name its lse_layout"):
            backward_of(problem, tensors, got)
        ours, other = ("ht", "th") if problem.is_packed else ("bhs", "bsh")
        grads = backward_of(problem, tensors, got, lse_layout=ours)
        same({"dq": grads.dq}, got, ("dq",))
        grads = backward_of(problem, tensors, got, lse=got["lse"].transpose(-1, -2).contiguous(), lse_layout=other)
        same({"dq": grads.dq}, got, ("dq",))


# ---- bad input: the argument, its value, what is wanted

B, S, T = 2, 9, 12


def dense_case(**changes):
    t = {"q": randn(B, S, 4, 24), "k": randn(B, T, 2, 24), "v": randn(B, T, 2, 16), "kw": {}}
    return t | changes


def ids(faults):
    return [re.sub(r"\W+", "-", text)[:48] for _, text in faults]


def meta(x):
    return x.to("meta")


DENSE_FAULTS = [
    ({"q": randn(S, 4, 24)}, r"q has shape \(9, 4, 24\), wanted 4 dimensions"),
    ({"k": randn(T, 2, 24)}, r"k has shape \(12, 2, 24\), wanted 4 dimensions"),
    ({"v": randn(T, 2, 16)}, r"v has shape \(12, 2, 16\), wanted 4 dimensions"),
    ({"k": randn(B, T, 2, 32)}, r"k has shape \(2, 12, 2, 32\), wanted \(2, 12, 2, 24\)"),
    ({"k": randn(3, T, 2, 24)}, r"k has shape \(3, 12, 2, 24\), wanted \(2, 12, 2, 24\)"),
    ({"v": randn(B, T + 1, 2, 16)}, r"v has shape \(2, 13, 2, 16\), wanted \(2, 12, 2, 16\)"),
    ({"v": randn(B, T, 4, 16)}, r"v has shape \(2, 12, 4, 16\), wanted \(2, 12, 2, 16\)"),
    ({"k": randn(B, T, 3, 24), "v": randn(B, T, 3, 16)}, "nheads_q=4 is not a positive multiple of nheads_kv=3"),
    ({"k": randn(B, T, 2, 24, dtype="fp16")}, "k has dtype torch.float16, wanted torch.bfloat16"),
    ({"q": randn(B, S, 4, 24).double()}, "q has dtype torch.float64, wanted bfloat16, float16 or float32"),
    ({"q": randn(B, S, 4, 24).int()}, "q has dtype torch.int32, wanted"),
    ({"q": randn(B, S, 4, 20), "k": randn(B, T, 2, 20)}, "head_dim_qk is 20, wanted a multiple of 8 up to 256"),
    ({"q": randn(B, S, 4, 264), "k": randn(B, T, 2, 264)}, "head_dim_qk is 264, wanted a multiple of 8 up to 256"),
    ({"v": randn(B, T, 2, 12)}, "head_dim_v is 12, wanted a multiple of 8 up to 256"),
    ({"kw": {"layout": "thd"}}, "layout is 'thd': call attention_varlen"),
    ({"kw": {"layout": "dhsb"}}, "layout is 'dhsb', wanted one of bshd, sbhd, bhsd"),
    ({"kw": {"window_size": (-3, 0)}}, r"window_size is \(-3, 0\), wanted \(left, right\), each >= -1"),
    ({"kw": {"window_size": (3,)}}, r"window_size is \(3,\), wanted \(left, right\)"),
    ({"kw": {"softcap": -2.0}}, "softcap is -2.0, wanted a finite number >= 0"),
    ({"kw": {"softmax_scale": float("nan")}}, "softmax_scale is nan, wanted a finite number"),
    ({"kw": {"causal_align": "left"}}, "causal_align is 'left', wanted one of"),
    ({"kw": {"kernel": "magic"}}, "kernel is 'magic', wanted one of aiter_asm, hopper, triton, flydsl, torch_tiled"),
    ({"kw": {"sink": torch.zeros(3, device=DEVICE)}}, r"sink has shape \(3,\), wanted \(4,\)"),
    ({"kw": {"sink": torch.zeros(4, dtype=torch.int32, device=DEVICE)}}, "sink has dtype torch.int32, wanted"),
]


@pytest.mark.parametrize("changes, text", DENSE_FAULTS, ids=ids(DENSE_FAULTS))
def test_bad_input_of_a_dense_call(changes, text):
    t = dense_case(**changes)
    with pytest.raises((ValueError, NotImplementedError), match=text):
        undertow.attention(t["q"], t["k"], t["v"], **t["kw"])


def i32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


CU = torch.tensor([0, 4, 10], dtype=torch.int32, device=DEVICE)
VARLEN_FAULTS = [
    ({"cu_q": CU.long()}, r"cu_seqlens_q is torch.int64 \(3,\), wanted int32 of shape \(batch \+ 1,\)"),
    ({"cu_q": CU[None]}, r"cu_seqlens_q is torch.int32 \(1, 3\), wanted int32"),
    ({"cu_k": None}, r"cu_seqlens_k is None, wanted int32"),
    ({"cu_q": CU[:0]}, r"cu_seqlens_q is torch.int32 \(0,\), wanted int32"),
    ({"cu_k": CU[:2]}, r"cu_seqlens_k has shape \(2,\), wanted \(3,\)"),
    ({"cu_q": CU + 1}, r"cu_seqlens_q is \[1, 5, 11\], wanted to rise from 0 to at most 10"),
    ({"cu_k": CU.flip(0) - CU.flip(0)[0]}, r"cu_seqlens_k is \[0, -6, -10\], wanted to rise"),
    ({"cu_k": CU * 2}, r"cu_seqlens_k is \[0, 8, 20\], wanted to rise from 0 to at most 10, the rows of k"),
    ({"max_q": 5}, "max_seqlen_q is 5, but a segment has 6 rows"),
    ({"max_k": 5}, "max_seqlen_k is 5, but a segment has 6 rows"),
    ({"max_q": -1}, "max_seqlen_q is -1, wanted >= 0"),
    ({"kw": {"seqused_q": i32(5, 6)}}, r"seqused_q is \[5, 6\], wanted within"),
    ({"kw": {"seqused_k": i32(1, -1)}}, r"seqused_k is \[1, -1\], wanted within"),
    ({"kw": {"seqused_q": i32(5)}}, r"seqused_q has shape \(1,\), wanted \(2,\)"),
    ({"kw": {"seqused_q": torch.tensor([4, 6], device=DEVICE)}}, "seqused_q has dtype torch.int64, wanted torch.int32"),
    ({"q": randn(10, 24)}, r"q has shape \(10, 24\), wanted 3 dimensions"),
    ({"q": randn(1, 10, 4, 24)}, r"q has shape \(1, 10, 4, 24\), wanted 3 dimensions"),
    ({"v": randn(9, 2, 16)}, r"v has shape \(9, 2, 16\), wanted \(10, 2, 16\)"),
]  # fmt: skip


@pytest.mark.parametrize("changes, text", VARLEN_FAULTS, ids=ids(VARLEN_FAULTS))
def test_bad_input_of_a_packed_call(changes, text):
    t = {"q": randn(10, 4, 24), "k": randn(10, 2, 24), "v": randn(10, 2, 16), "cu_q": CU, "cu_k": CU}
    t |= {"max_q": 6, "max_k": 6, "kw": {}} | changes
    with undertow.checked(), pytest.raises((ValueError, NotImplementedError), match=text):
        undertow.attention_varlen(
            t["q"], t["k"], t["v"], t["cu_q"], t["cu_k"], t["max_q"], t["max_k"], causal=True, **t["kw"]
        )


def f32(*shape):
    return torch.zeros(shape, device=DEVICE)


BACKWARD_FAULTS = [
    ({"dout": randn(B, S, 4, 24)}, r"dout has shape \(2, 9, 4, 24\), wanted \(2, 9, 4, 16\)"),
    ({"out": randn(B, S, 2, 16)}, r"out has shape \(2, 9, 2, 16\), wanted \(2, 9, 4, 16\)"),
    ({"dout": randn(B, S, 4, 16, dtype="fp32")}, "dout has dtype torch.float32, wanted torch.bfloat16"),
    ({"lse": f32(B, 4, T)}, r"lse has shape \(2, 4, 12\), wanted \(2, 4, 9\)"),
    ({"lse": f32(4, B * S)}, r"lse has shape \(4, 18\), wanted \(2, 4, 9\)"),
    ({"lse": f32(B, 4, S).bfloat16()}, "lse has dtype torch.bfloat16, wanted torch.float32"),
    ({"kw": {"delta": f32(B, S, 4)}}, r"delta has shape \(2, 9, 4\), wanted \(2, 4, 9\)"),
    ({"kw": {"dlse": f32(B, 4, S).double()}}, "dlse has dtype torch.float64, wanted torch.float32"),
    ({"kw": {"lse_layout": "ht"}}, r"lse_layout is 'ht', wanted one of \('bhs', 'bsh'\)"),
    ({"kw": {"lse_base": "10"}}, "lse_base is '10', wanted 'e' or '2'"),
    ({"kw": {"dq": randn(B, S, 4, 16)}}, r"dq has shape \(2, 9, 4, 16\), wanted \(2, 9, 4, 24\)"),
    ({"kw": {"dk": randn(B, T, 4, 24)}}, r"dk has shape \(2, 12, 4, 24\), wanted \(2, 12, 2, 24\)"),
    ({"kw": {"dv": randn(B, T, 2, 16, dtype="fp32")}}, "dv has dtype torch.float32, wanted torch.bfloat16"),
    ({"kw": {"dq": meta(randn(B, S, 4, 24))}}, "dq is on meta, wanted"),
]


@pytest.mark.parametrize("changes, text", BACKWARD_FAULTS, ids=ids(BACKWARD_FAULTS))
def test_bad_input_of_a_backward(changes, text):
    t = dense_case(dout=randn(B, S, 4, 16), out=randn(B, S, 4, 16), lse=f32(B, 4, S)) | changes
    with pytest.raises((ValueError, NotImplementedError), match=text):
        undertow.attention_backward(t["dout"], t["q"], t["k"], t["v"], t["out"], t["lse"], **t["kw"])


@pytest.mark.parametrize("name", ["k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_mixed_devices_are_refused(name):
    """The operator's own function, as torch dispatches to it for a GPU: beside meta tensors it would take the fake."""
    problem = Problem.packed((4, 6), has_sink=True, **SMALL)
    tensors = make(problem)
    for side in "qk":
        tensors[f"seqused_{side}"] = torch.tensor([4, 6], dtype=torch.int32, device=DEVICE)
    arguments = positional(problem, tensors | {name: meta(tensors[name])}, "forward")
    with pytest.raises(ValueError, match=f"{name} is on meta, wanted {DEVICE}"):
        undertow.ops._forward._init_fn(*arguments)


def test_every_public_argument_is_documented():
    """pydoclint's rule, for what a user calls: each parameter is in the docstring or in that of the dense twin."""
    import inspect

    texts = undertow.attention.__doc__ + undertow.attention_varlen.__doc__ + undertow.attention_backward.__doc__
    for function in (
        undertow.attention,
        undertow.attention_varlen,
        undertow.attention_backward,
        undertow.attention_varlen_backward,
    ):
        for name in inspect.signature(function).parameters:
            assert re.search(rf"\b{name}\b", function.__doc__ + texts), f"{function.__name__}({name})"


def test_windows_of_the_public_functions_are_bands():
    """window_size through autograd is the band of a bare backward: the flag is not lost on the way (B54)."""
    for keywords, band in (
        ({"causal": True}, CAUSAL), ({}, Band()), ({"window_size": (3, 1)}, Band(3, 1)),
        ({"causal": True, "window_size": (3, 1)}, Band(3, 0)), ({"window_size": (-1, 0)}, CAUSAL),
    ):  # fmt: skip
        problem = Problem.dense(1, 9, 12, **(FP32 | {"band": band}))
        tensors = make(problem)
        leaf = tensors["q"].clone().requires_grad_()
        out = undertow.attention(leaf, tensors["k"], tensors["v"], kernel=TILED, **keywords)
        got = torch.autograd.grad(out, leaf, tensors["dout"])[0]
        assert torch.equal(got, call(problem, tensors, TILED)["dq"]), keywords
