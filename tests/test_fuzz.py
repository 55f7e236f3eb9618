"""Random small problems: never a crash that is no refusal, never a wrong number, and what explain promises runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICE, NAN, call, gates, make

import undertow
from undertow.dispatch import BY_NAME, KERNELS, explain, get
from undertow.instruments import inputs
from undertow.problem import ALIGNMENTS, Band, Problem
from undertow.target import TARGETS, detect

DIMS = st.sampled_from([8, 16, 24, 40, 64, 72])
SIDE = st.one_of(st.none(), st.integers(0, 40))
BANDS = st.builds(Band, SIDE, SIDE, st.sampled_from(ALIGNMENTS))
LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 36))
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])


@st.composite
def problems(draw):
    heads = draw(HEADS)
    fields = {
        "nheads_q": heads[0], "nheads_kv": heads[1], "head_dim_qk": draw(DIMS), "head_dim_v": draw(DIMS),
        "dtype": draw(st.sampled_from(["bf16", "fp16", "fp32"])), "band": draw(BANDS),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])), "deterministic": draw(st.booleans()),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3])),
        "has_sink": draw(st.booleans()), "has_dlse": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        segments = draw(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=3))
        return Problem.packed(tuple(s[0] for s in segments), tuple(s[1] for s in segments), **fields)
    layout = draw(st.sampled_from(["bshd", "sbhd", "bhsd"]))
    return Problem.dense(draw(st.integers(1, 2)), draw(LENGTHS), draw(LENGTHS), layout=layout, **fields)


def prove(problem, kernel, gap, seed):
    """`unsupported() == ()` promises that it runs and is right."""
    assert get(kernel).unsupported(problem, detect(DEVICE)) == ()
    tensors = make(problem, seed=seed)
    if problem.is_packed and gap:
        tensors = inputs.with_gaps(problem, tensors, gap, fill=NAN)
    gates(problem, tensors, call(problem, tensors, kernel), kernel)


@given(problems(), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=60)
def test_torch_tiled_is_right_on_any_problem(problem, gap, seed):
    prove(problem, "torch_tiled", gap, seed)


@given(problems(), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=12)
def test_triton_is_right_on_any_problem(problem, gap, seed):
    prove(problem, "triton", gap, seed)


@pytest.mark.slow
@given(problems(), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=600)
def test_torch_tiled_is_right_on_many_problems(problem, gap, seed):
    prove(problem, "torch_tiled", gap, seed)


@pytest.mark.slow
@given(problems(), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=150)
def test_triton_is_right_on_many_problems(problem, gap, seed):
    prove(problem, "triton", gap, seed)


@given(problems())
@settings(max_examples=40)
def test_peers_that_can_run_are_right_and_others_are_refused(problem):
    """A limit that is missing shows as a wrong number, one too many as a refusal of what runs."""
    tensors = make(problem)
    target = detect(DEVICE)
    for kernel in KERNELS:
        if kernel.name in ("torch_tiled", "triton"):
            continue
        refused = kernel.unsupported(problem, target, "forward") + kernel.unsupported(problem, target)
        if refused:
            with pytest.raises(NotImplementedError) as caught:
                call(problem, tensors, kernel.name)
            assert any(reason in str(caught.value) for reason in refused)
            continue
        got = call(problem, tensors, kernel.name)
        assert all(torch.isfinite(got[n]).all() for n in ("dq", "dk", "dv")), kernel.name
        if problem.dtype == "fp32":
            gates(problem, tensors, got, kernel.name)


@given(problems(), st.sampled_from(sorted(TARGETS)))
@settings(max_examples=150)
def test_explain_names_every_kernel_and_chooses_one_that_can_run(problem, arch):
    for which in ("forward", "backward"):
        verdicts = explain(problem, TARGETS[arch], which)
        assert {v.kernel for v in verdicts} == {k.name for k in KERNELS + BY_NAME}
        assert [v.status for v in verdicts].count("chosen") == 1 and verdicts[0].status == "chosen"
        for v in verdicts:
            reasons = get(v.kernel).unsupported(problem, TARGETS[arch], which)
            assert (v.status == "cannot run") == bool(reasons)
            assert v.tax > 0 and all("{" not in text for text in (*v.reasons, *v.fixes))


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16]), min_size=1, max_size=5).map(tuple)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "window_size": st.tuples(st.integers(-3, 5), st.integers(-3, 5)),
        "softmax_scale": st.sampled_from([0.0, 1.0, -1.0, NAN, float("inf")]),
        "softcap": st.sampled_from([0.0, 3.0, -1.0, NAN]),
        "layout": st.sampled_from(["bshd", "sbhd", "bhsd", "thd", "nope"]),
        "causal_align": st.sampled_from(["bottom_right", "top_left", "x"]),
        "kernel": st.sampled_from(["torch_tiled", "sdpa_math", "nope"]),
        "deterministic": st.booleans(),
    },
)


@given(SHAPES, SHAPES, SHAPES, DTYPES, DTYPES, ARGUMENTS)
@settings(max_examples=300)
def test_nonsense_is_refused_not_crashed_on(q, k, v, dtype, other, keywords):
    """Any shapes and flags: a result of q's shape, or ValueError or NotImplementedError with a text."""
    tensors = [torch.ones(q, dtype=dtype), torch.ones(k, dtype=dtype), torch.ones(v, dtype=other)]
    try:
        out = undertow.attention(*(t.to(DEVICE) for t in tensors), **keywords)
    except (ValueError, NotImplementedError) as error:
        assert str(error)
    else:
        assert out.shape == (*q[:-1], v[-1])


@given(
    st.lists(st.integers(-2, 12), min_size=0, max_size=4), st.lists(st.integers(-2, 12), min_size=0, max_size=4),
    st.integers(-1, 12), st.integers(-1, 12), st.booleans(),
)  # fmt: skip
@settings(max_examples=300)
def test_any_cu_seqlens_is_used_rightly_or_refused(cu_q, cu_k, max_q, max_k, causal):
    """Ten rows; what is accepted must be what the reference computes."""
    fields = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 8, "head_dim_v": 8, "dtype": "fp32"}
    q, k, v = (torch.randn(10, h, 8, device=DEVICE) for h in (2, 1, 1))
    offsets = [torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in (cu_q, cu_k)]
    try:
        with undertow.checked():
            out = undertow.attention_varlen(q, k, v, *offsets, max_q, max_k, causal=causal, kernel="torch_tiled")
    except (ValueError, NotImplementedError) as error:
        assert str(error)
        return
    from undertow import reference

    sizes = [tuple(b - a for a, b in zip(cu, cu[1:], strict=False)) for cu in (cu_q, cu_k)]
    band = Band(None, 0) if causal else Band()
    problem = Problem.packed(*sizes, band=band, **fields)
    rows = {"q": q, "k": k, "v": v, "dout": q}
    want = reference.attention(problem, rows | {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]})
    torch.testing.assert_close(out.double(), want.out, rtol=1e-4, atol=1e-5)
