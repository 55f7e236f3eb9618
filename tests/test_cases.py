"""Every public fault of cases.json as a test of its kind, named test_bNN_*, on every kernel that runs here.

`cases.json` holds the inputs; what is shrunk for the interpreter keeps what made the fault appear. A case that only a
GPU can show is in test_gpu.py, and what a CPU can check of it is here.
"""

import ast
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import CASES, CAUSAL, DEVICE, NAN, OURS, call, close, gates, make, prove, randn, same

import undertow
from undertow import reference
from undertow.dispatch import KERNELS, get, select
from undertow.instruments import inputs
from undertow.instruments.verify import compare
from undertow.kernels.alloc import DTYPE
from undertow.problem import Band, Problem
from undertow.target import TARGETS, detect

GPU_ONLY = {"B65": "a race between streams: test_gpu.py::test_b65_launches_on_the_current_stream"}
kernels = pytest.mark.parametrize("kernel", OURS)
cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="maps host memory that no tensor could fill")


def lengths(cu):
    return tuple(b - a for a, b in zip(cu, cu[1:], strict=False))


def problem_of(name, **changes):
    """The Problem of a case's input, with some of its fields changed."""
    i = CASES[name]["input"] | changes
    window = i.get("window", [-1, -1])
    fields = {
        "nheads_q": i["hq"], "nheads_kv": i["hk"], "head_dim_qk": i["d_qk"], "head_dim_v": i["d_v"],
        "dtype": i.get("dtype", "bf16"), "deterministic": i.get("deterministic", False) is True,
        "band": Band.from_flags(causal=i.get("causal", False) is True, window_size=tuple(window)),
    }  # fmt: skip
    if "cu_q" in i:
        return Problem.packed(lengths(i["cu_q"]), lengths(i.get("cu_k", i["cu_q"])), **fields)
    layout = i.get("layout", "bshd")
    return Problem.dense(i["b"], i["sq"], i["sk"], layout=layout if layout in ("sbhd", "bhsd") else "bshd", **fields)


def backward(problem, tensors, got, kernel, **more):
    """The bare backward of a call in hand, in checked mode; `more` replaces tensors or adds arguments."""
    args, keywords = inputs.arguments(problem, tensors | {k: more.pop(k) for k in ("q", "k", "v") if k in more})
    q, k, v, *segments = args
    function = undertow.attention_varlen_backward if problem.is_packed else undertow.attention_backward
    given = [more.pop(n, tensors[n] if n == "dout" else got[n]) for n in ("dout", "out", "lse")]
    more = {"lse_layout": "ht" if problem.is_packed else "bhs"} | keywords | more
    with undertow.checked():
        grads = function(given[0], q, k, v, *given[1:], *segments, **more, kernel=kernel)
    return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


GRADS = ("dq", "dk", "dv")


# ---- empty or masked


@kernels
def test_b01_causal_rows_without_keys(kernel):
    problem = problem_of("B01")
    tensors = make(problem)
    tensors |= {n: tensors[n] * 3 for n in "qkv"} | {"dout": torch.ones_like(tensors["dout"])}
    got = call(problem, tensors, kernel)
    last = [4, 6, 11]
    dead = [i for i in range(12) if i not in last]
    assert torch.equal(got["out"][last], tensors["v"]) and (got["out"][dead] == 0).all()
    assert (got["dq"][dead] == 0).all() and got["dq"].abs().max() < 1e-4 and got["dk"].abs().max() < 1e-4
    assert (got["dv"] == 1).all() and (got["lse"][:, dead] == -torch.inf).all()


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_b02_one_query_one_key(kernel, causal):
    problem = problem_of("B02", causal=causal)
    tensors = make(problem, seed=352)
    tensors |= {n: tensors[n] * 3 for n in "qkv"} | {"dout": torch.ones_like(tensors["dout"])}
    got = call(problem, tensors, kernel)
    assert got["dq"].abs().max() < 1e-4 and got["dk"].abs().max() < 1e-4 and (got["dv"] == 1).all()


@kernels
@pytest.mark.parametrize("name", ["B03", "B04"])
def test_b03_b04_segments_without_queries(kernel, name):
    """Empty query segments, keys not: exact zeros where every output and scratch was NaN, the rest as alone."""
    problem = problem_of(name, hq=2, hk=1) if kernel == "triton" else problem_of(name)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got, name)
    dead = [(0, 25), (51, 81)] if name == "B03" else [(0, 70)]
    for lo, hi in dead:
        assert (got["dk"][lo:hi] == 0).all() and (got["dv"][lo:hi] == 0).all()
    keep = slice(25, 51) if name == "B03" else slice(70, 140)
    live = [s for s in problem.segments if s[0]]
    alone = Problem.packed(
        tuple(s[0] for s in live), tuple(s[1] for s in live), band=problem.band, nheads_q=problem.nheads_q,
        nheads_kv=problem.nheads_kv, head_dim_qk=problem.head_dim_qk, head_dim_v=problem.head_dim_v,
    )  # fmt: skip
    part = make(alone) | {"q": tensors["q"], "dout": tensors["dout"], "k": tensors["k"][keep], "v": tensors["v"][keep]}
    want = call(alone, part, kernel)
    (
        close(got["dq"], want["dq"], 2e-3),
        close(got["dk"][keep], want["dk"], 2e-3),
        close(got["dv"][keep], want["dv"], 2e-3),
    )


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
def test_b04_the_grid_of_the_case(dtype, causal):
    for heads in ((4, 4), (4, 1)):
        for dims in ((64, 64), (128, 128), (192, 128)):
            fields = {"dtype": dtype, "causal": causal, "d_qk": dims[0], "d_v": dims[1]}
            prove(problem_of("B04", hq=heads[0], hk=heads[1], **fields), "torch_tiled")


@kernels
def test_b07_more_queries_than_keys(kernel):
    """The first four rows see nothing: their dO of a million changes no gradient, bit for bit."""
    problem = problem_of("B07")
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    loud = tensors["dout"].clone()
    loud[:, :4] = 1e6
    got = call(problem, tensors | {"dout": loud}, kernel)
    same(got, want, GRADS)
    assert (got["out"][:, :4] == 0).all() and (got["dq"][:, :4] == 0).all()
    gates(problem, tensors, want)


@kernels
def test_b67_tiny_problems(kernel):
    for sq, sk in CASES["B67"]["input"]["shapes"]:
        for causal in (False, True):
            hq = 8 if kernel == "torch_tiled" else 2
            fields = {"nheads_q": hq, "nheads_kv": 1, "head_dim_qk": 128, "head_dim_v": 128, "dtype": "fp16"}
            batch = 3 if kernel == "torch_tiled" else 1
            prove(Problem.dense(batch, sq, sk, band=CAUSAL if causal else Band(), **fields), kernel)


# ---- the varlen contract


@kernels
def test_b08_rows_past_the_last_segment(kernel):
    problem = problem_of("B08", **({"hq": 1, "hk": 1, "d_qk": 16, "d_v": 16} if kernel == "triton" else {}))
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    longer = {n: torch.cat([tensors[n], torch.full_like(tensors[n][:2], NAN)]) for n in ("q", "k", "v", "dout")}
    got = call(problem, tensors | longer, kernel)
    for name in ("out", *GRADS):
        assert torch.equal(got[name][:94], want[name]) and (got[name][94:] == 0).all(), name
    assert (got["lse"][:, 94:] == -torch.inf).all()


@kernels
def test_b09_padding_between_segments(kernel):
    problem = problem_of("B09", **({"hq": 1, "hk": 1, "d_qk": 16, "d_v": 16} if kernel == "triton" else {}))
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    starts, used = CASES["B09"]["input"]["cu_q_padded"], lengths(CASES["B09"]["input"]["cu_q"])
    rows = [s + i for s, n in zip(starts, used, strict=False) for i in range(n)]
    rest = [i for i in range(starts[-1]) if i not in rows]
    assert len(rest) == 3
    wide = {}
    for name in ("q", "k", "v", "dout"):
        wide[name] = torch.full((starts[-1], *tensors[name].shape[1:]), NAN, dtype=tensors[name].dtype, device=DEVICE)
        wide[name][rows] = tensors[name]
    for side in "qk":
        wide[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        wide[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    got = call(problem, tensors | wide, kernel)
    for name in ("out", *GRADS):
        assert torch.equal(got[name][rows], want[name]) and (got[name][rest] == 0).all(), name


@kernels
@pytest.mark.parametrize("fill", [NAN, float("inf")])
def test_b11_lse_storage_beyond_the_rows(kernel, fill):
    """A tile's tail must not read LSE (or D, poisoned by checked mode) as numbers: 0 * NaN is NaN."""
    small = {"cu_q": [0, 5, 40], "cu_k": [0, 5, 40], "hq": 2, "hk": 1, "d_qk": 16, "d_v": 16}
    problem = problem_of("B11", **small) if kernel == "triton" else problem_of("B11")
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    store = torch.full((problem.nheads_q, problem.total_q + 64), fill, device=DEVICE)
    store[:, : problem.total_q] = want["lse"]
    same(backward(problem, tensors, want, kernel, lse=store[:, : problem.total_q]), want, GRADS)


@kernels
def test_b13_max_seqlen_too_small_or_too_large(kernel):
    problem = problem_of("B13") if kernel == "torch_tiled" else problem_of("B13", cu_q=[0, 4, 40], cu_k=[0, 4, 40])
    longest = problem.max_seqlen_q
    tensors = make(problem)
    q, k, v, cu_q, cu_k, *_ = inputs.arguments(problem, tensors)[0]
    want = undertow.attention_varlen(q, k, v, cu_q, cu_k, longest, longest, causal=True, kernel=kernel)
    with undertow.checked():
        for sizes in ((longest - 1, longest), (longest, longest - 1)):
            with pytest.raises(ValueError, match=f"max_seqlen_[qk] is {longest - 1}, but a segment has {longest} rows"):
                undertow.attention_varlen(q, k, v, cu_q, cu_k, *sizes, causal=True, kernel=kernel)
    roomy = 4096 if kernel == "torch_tiled" else 128
    got = undertow.attention_varlen(q, k, v, cu_q, cu_k, roomy, roomy, causal=True, kernel=kernel)
    close(got, want, 1e-6 if kernel == "triton" else 2e-3)


# ---- strides


@kernels
def test_b15_dout_of_stride_zero(kernel):
    problem = problem_of("B15", b=1, hq=2, hk=1) if kernel == "triton" else problem_of("B15")
    tensors = make(problem)
    one = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    want = call(problem, tensors | {"dout": torch.ones_like(tensors["dout"])}, kernel)
    got = call(problem, tensors | {"dout": one.expand_as(tensors["dout"])}, kernel)
    same(got, want, GRADS)
    q, k, v = (tensors[n].clone().requires_grad_() for n in "qkv")
    undertow.attention(q, k, v, kernel=kernel).sum().backward()
    same({"dq": q.grad, "dk": k.grad, "dv": v.grad}, want, GRADS)


@kernels
def test_b16_dout_in_another_memory_order_than_out(kernel):
    problem = problem_of("B16", b=2, hq=2, hk=1) if kernel == "triton" else problem_of("B16")
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    dout = tensors["dout"].transpose(0, 1).contiguous().transpose(0, 1)
    assert dout.stride() != tensors["dout"].stride()
    same(call(problem, tensors | {"dout": dout}, kernel), want, GRADS)
    for order in ((2, 0, 1, 3), (0, 2, 1, 3)):  # every other order of batch, row and head
        back = [order.index(d) for d in range(4)]
        moved = {n: tensors[n].permute(order).contiguous().permute(back) for n in ("q", "k", "v", "dout")}
        same(call(problem, tensors | moved, kernel), want, GRADS)


@kernels
def test_b18_last_stride_not_one(kernel):
    problem = problem_of("B18")
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    for names in (("q",), ("k",), ("v",), ("dout",), ("q", "k", "v", "dout")):
        flipped = {n: tensors[n].transpose(2, 3).contiguous().transpose(2, 3) for n in names}
        same(call(problem, tensors | flipped, kernel), want, GRADS)
        if kernel == "triton":
            break


@kernels
def test_b19_transposed_views_and_fused_qkv(kernel):
    problem = problem_of("B19", hq=2, hk=2, sq=40, sk=40) if kernel == "triton" else problem_of("B19")
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    views = {n: tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "dout")}
    same(call(problem, tensors | views, kernel), want, GRADS)
    square = problem_of("B19", hq=2, hk=2, sq=40, sk=40, d_v=192)
    tensors = make(square)
    want = call(square, tensors, kernel)
    qkv = torch.stack([tensors[n] for n in "qkv"], 2)
    dqkv = torch.full_like(qkv, NAN)
    fused = {n: qkv[:, :, x] for x, n in enumerate("qkv")}
    outs = {f"d{n}": dqkv[:, :, x] for x, n in enumerate("qkv")}
    got = backward(square, tensors, want, kernel, **fused, **outs)
    same(got, want, GRADS)
    assert torch.equal(dqkv, torch.stack([want[n] for n in GRADS], 2))


def reserved(shape, strides):
    """A bf16 tensor over address space nobody backs: only the pages it touches exist."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which the module names from 3.13 on
    memory = np.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), dtype=np.int16)
    return torch.from_numpy(memory).view(torch.bfloat16).as_strided(shape, strides)


@cpu_only
@kernels
def test_b20_b25_offsets_past_two_to_the_31_and_32(kernel):
    """Row, head and batch strides that pass 2^31 elements, and 2^32 bytes, in tensors read and in tensors written."""
    fields = {"nheads_q": 2, "nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "band": Band(64, 0)}
    for problem, strides in (
        (Problem.packed((40, 30), **fields), (2**25 + 64, 64, 1)),
        (Problem.packed((40, 30), **fields), (128, 2**31 + 128, 1)),
        (Problem.dense(2, 20, 20, **fields), (2**31 + 512, 128, 64, 1)),
    ):
        tensors = make(problem)
        want = call(problem, tensors, kernel)
        far = {n: reserved(tensors[n].shape, strides).copy_(tensors[n]) for n in ("q", "k", "v", "dout")}
        outs = {n: reserved(want[n].shape, strides) for n in GRADS}
        out = reserved(want["out"].shape, strides).copy_(want["out"])
        same(backward(problem, tensors, want, kernel, **far, out=out, **outs), want, GRADS)


# ---- overflow of grids and accumulators


def one_key_each(problem, tensors, got):
    """Segments of one token: softmax of one key is 1."""
    group = problem.group
    assert torch.equal(got["out"], tensors["v"].repeat_interleave(group, 1))
    assert got["dq"].float().abs().max() < 1e-3 and got["dk"].float().abs().max() < 1e-3
    assert torch.equal(got["dv"], tensors["dout"])


@kernels
@pytest.mark.parametrize("name", ["B22", "B23"])
def test_b22_b23_many_segments_of_one_token(kernel, name):
    """The full counts of segments run on a GPU, and as launch grids in test_triton; here a few hundred."""
    i = CASES[name]["input"]
    count = 300 if kernel == "torch_tiled" else 12
    fields = {"nheads_q": i["hq"], "nheads_kv": i["hk"], "head_dim_qk": i["d_qk"], "head_dim_v": i["d_v"]}
    if kernel == "triton":
        fields |= {"nheads_q": 1, "nheads_kv": 1}
    problem = Problem.packed((1,) * count, **fields)
    tensors = make(problem)
    one_key_each(problem, tensors, call(problem, tensors, kernel))


def test_b23_as_many_heads_as_a_grid_axis_has_no_room_for():
    """The case's second: 65536 heads equal two halves of them."""
    problem = Problem.dense(1, 2, 2, nheads_q=65536, nheads_kv=65536, head_dim_qk=8, head_dim_v=8)
    tensors = make(problem)
    q, k, v = (tensors[n] for n in "qkv")
    whole = undertow.attention(q, k, v, kernel="torch_tiled")
    halves = [undertow.attention(*(x[:, :, s] for x in (q, k, v)), kernel="torch_tiled")
              for s in (slice(0, 32768), slice(32768, None))]  # fmt: skip
    close(whole, torch.cat(halves, 2), 1e-3)


def test_b22_the_accumulator_has_no_padding_to_overflow():
    """Packed: 16500 tokens are 16500 rows, where 128 pad rows each would pass 2^31 elements."""
    problem = Problem.packed((1,) * 16500, nheads_q=8, nheads_kv=8, head_dim_qk=128, head_dim_v=128)
    kernel = get("triton")
    for arch in TARGETS:
        target = TARGETS[arch]
        plan = kernel.plan_workspace(problem, kernel.config(problem, target, "backward"))
        assert plan.nbytes < 2**28
        assert "dq_acc" not in plan or plan["dq_acc"].shape == (8, 16500, 128)


# ---- determinism


@kernels
def test_b26_deterministic_means_the_same_bits(kernel):
    """30 runs beside a busy stream are in test_gpu; here: the flag reaches the plan, and the bits stay."""
    small = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "dtype": "fp16", "deterministic": True}
    small |= {} if kernel == "torch_tiled" else {"nheads_q": 2, "nheads_kv": 1}
    sizes = (300, 1, 123) if kernel == "torch_tiled" else (36, 1)
    for problem in (
        Problem.packed(sizes, band=Band(128, 0), **small),
        Problem.dense(2, sizes[0] // 3, sizes[0] // 3, **small),
    ):
        tensors = make(problem)
        first = call(problem, tensors, kernel)
        gates(problem, tensors, first)
        for _ in range(2 if kernel == "torch_tiled" else 1):
            same(call(problem, tensors, kernel), first)
        target = detect(DEVICE)
        assert select(problem, target, "backward", kernel).name == kernel
        if kernel == "triton":
            assert get(kernel).config(problem, target, "backward").switch("fused") is False


@kernels
def test_b28_key_lengths_that_differ_by_segment(kernel):
    problem = problem_of("B28") if kernel == "torch_tiled" else problem_of(
        "B28", hq=2, hk=2, cu_q=[0, 40, 42, 75], cu_k=[0, 1, 40, 46]
    )  # fmt: skip
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    same(call(problem, tensors, kernel), got)


def test_b30_the_global_switch_finds_a_deterministic_plan_or_says_why_not():
    for dims in (64, 128, 256, (192, 128)):
        qk, v = dims if isinstance(dims, tuple) else (dims, dims)
        problem = Problem.dense(1, 40, 40, nheads_q=2, nheads_kv=2, head_dim_qk=qk, head_dim_v=v, deterministic=True)
        for target in TARGETS.values():
            chosen = select(problem, target)
            assert chosen.unsupported(problem, target) == ()
            for other in KERNELS:
                verdict = other.unsupported(problem, target)
                assert not other.vendor or verdict or other.name.startswith(("sdpa_math", "sdpa_cpu")), other.name
    q, k, v = (randn(1, 20, 2, 64, seed=s).requires_grad_() for s in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(undertow.attention(q, k, v).sum(), q)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(g, grads[0]) for g in grads)


# ---- workspace


@kernels
def test_b31_every_segment_of_dq_is_right(kernel):
    """Cosine by segment is a gate of verify; test_verify shows that it catches this fault."""
    for sizes in CASES["B31"]["input"]["segments"]:
        fields = {"nheads_q": 4, "nheads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64, "band": CAUSAL}
        if kernel == "triton":
            fields |= {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 16, "head_dim_v": 16}
            sizes = [1 + n // 6 for n in sizes]
        prove(Problem.packed(tuple(sizes), **fields), kernel)


@kernels
def test_b32_the_accumulator_is_sized_by_d_qk(kernel):
    problem = problem_of("B32") if kernel == "torch_tiled" else problem_of("B32", cu_q=[0, 40, 70], cu_k=[0, 40, 70])
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    size = undertow.workspace_nbytes(problem, detect(DEVICE), kernel)
    if kernel == "triton":
        assert size >= problem.total_q * 2 * 192 * 4
    memory = torch.full((size + 4096 + 256,), 0x5A, dtype=torch.uint8, device=DEVICE)
    memory = memory[-memory.data_ptr() % 256 :]
    same(backward(problem, tensors, want, kernel, workspace=memory), want, GRADS)
    assert (memory[size:] == 0x5A).all(), "the 4 KiB behind the workspace changed"


@pytest.mark.parametrize("deterministic", CASES["B35"]["input"]["deterministic"])
@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "cpu"])
def test_b35_workspace_is_linear_in_tokens(deterministic, arch):
    """At most twice for twice the tokens, where both are the same plan: short segments have one without dq_acc."""
    i = CASES["B35"]["input"]
    sizes, plans = [], []
    for total in i["total_tokens"]:
        problem = Problem.packed(
            (total // i["segments"],) * i["segments"], deterministic=deterministic, nheads_q=i["hq"],
            nheads_kv=i["hq"], head_dim_qk=i["d_qk"], head_dim_v=i["d_v"], band=CAUSAL,
        )  # fmt: skip
        sizes.append(undertow.workspace_nbytes(problem, TARGETS[arch]))
        assert sizes[-1] <= total * i["hq"] * (i["d_qk"] + 64) * 4 + 2**26
        plans.append(tuple(buffer.name for buffer in _plan(problem, TARGETS[arch]).buffers))
    assert all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
    twice = [b <= 2 * a for a, b, p, q in zip(sizes, sizes[1:], plans, plans[1:], strict=False) if p == q]
    assert twice and all(twice)


def _plan(problem, target):
    chosen = select(problem, target)
    return chosen.plan_workspace(problem, chosen.config(problem, target, "backward"))


# ---- GQA


@kernels
def test_b36_only_the_kv_head_of_the_query_head_gets_gradient(kernel):
    ratios = [(8, 2), (6, 3), (21, 7), (5, 1)] if kernel == "torch_tiled" else [(6, 3), (3, 1)]
    for hq, hk in ratios:
        problem = problem_of("B36", hq=hq, hk=hk, **({"d_qk": 16, "d_v": 16} if kernel == "triton" else {}))
        tensors = make(problem)
        for h in sorted({0, hq // 2, hq - 1}) if kernel == "torch_tiled" else (hq - 1,):
            one = torch.zeros_like(tensors["dout"])
            one[:, h] = tensors["dout"][:, h]
            got = call(problem, tensors | {"dout": one}, kernel)
            gates(problem, tensors | {"dout": one}, got)
            for name in ("dk", "dv"):
                hit = [x for x in range(hk) if got[name][:, x].any()]
                assert hit == [h // (hq // hk)], (hq, hk, h, name)


def test_b38_every_kernel_takes_a_gqa_shape_or_says_why_not():
    fields = {"nheads_q": 8, "nheads_kv": 2, "head_dim_qk": 128, "head_dim_v": 128}
    for problem in (Problem.dense(1, 40, 40, **fields), Problem.packed((40, 9), **fields)):
        for kernel in KERNELS:
            for arch, target in TARGETS.items():
                reasons = kernel.unsupported(problem, target)
                assert all(isinstance(r, str) and r for r in reasons), (kernel.name, arch)
            if not kernel.unsupported(problem, detect(DEVICE)) and kernel.name != "triton":
                tensors = make(problem)
                got = call(problem, tensors, kernel.name)
                want = reference.attention(problem, tensors)
                for name in ("dk", "dv"):
                    close(reference.to_thd(got[name], problem.layout), getattr(want, name), 2e-2, kernel.name)
    efficient = Problem.dense(1, 40, 40, **fields)
    assert "8 query heads on 2 kv heads" in " ".join(get("sdpa_efficient").unsupported(efficient, TARGETS["sm_90"]))


# ---- head dims


@kernels
@pytest.mark.parametrize("dim", [72, 40, 104, 112, 120, 136])
def test_b39_head_dims_that_no_tile_has(kernel, dim):
    problem = Problem.packed((64,), nheads_q=8, nheads_kv=8, head_dim_qk=dim, head_dim_v=dim)
    if kernel == "triton":
        problem = Problem.packed((35,), nheads_q=1, nheads_kv=1, head_dim_qk=dim, head_dim_v=dim)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    size = undertow.workspace_nbytes(problem, detect(DEVICE), kernel)
    stale = torch.full((size // 4 + 1,), 1e4, device=DEVICE)
    same(backward(problem, tensors, got, kernel, workspace=stale), got, GRADS)


@kernels
@pytest.mark.parametrize("dims", CASES["B41"]["input"]["pairs"], ids=str)
def test_b41_dv_of_every_column_block(kernel, dims):
    problem = problem_of("B41", d_qk=dims[0], d_v=dims[1])
    if kernel == "triton":
        problem = problem_of("B41", d_qk=dims[0], d_v=dims[1], sq=33, sk=33, hq=1, hk=1)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    want = reference.attention(problem, tensors | {"out": got["out"]})
    for name, x in ((n, reference.to_thd(got[n], "bshd")) for n in GRADS):
        for c in range(0, x.shape[-1], 8):
            close(x[..., c : c + 8], getattr(want, name)[..., c : c + 8], 1e-2, f"{name}[{c}:{c + 8}]")


@kernels
def test_b42_v_wider_and_narrower_than_q(kernel):
    problem = problem_of("B42")
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    cut = tensors["v"].clone()
    cut[..., 64:] = 0
    assert "dq" in {r.tensor for r in compare(problem, tensors | {"v": cut}, got) if not r.ok}, "half of V told nothing"
    narrow = problem_of("B42", d_qk=192, d_v=128)
    tensors = make(narrow)
    store = torch.full((10 * 128 + 10 * 192,), NAN, dtype=torch.bfloat16, device=DEVICE)
    tensors["v"] = store[-10 * 128 :].view(10, 1, 128).copy_(tensors["v"])  # the last of an exact allocation
    gates(narrow, tensors, call(narrow, tensors, kernel))


# ---- numerics


def within_twice_the_emulation(problem, tensors, got, name):
    """For a gradient that is nothing but cancellation: sums of dS are 0, and a 16-bit dS times a huge K is noise."""
    given = tensors | {"out": got["out"]}
    exact, plain = reference.attention(problem, given), reference.attention(
        problem, given, torch.float32, DTYPE[problem.dtype]
    )  # fmt: skip
    want = getattr(exact, name)
    error = (reference.to_thd(got[name], problem.layout).double() - want).norm()
    emulated = (getattr(plain, name).double() - want).norm()
    assert error <= 2 * emulated + 1e-3 * want.norm(), f"{name}: {error:.3f}, emulated {emulated:.3f}"


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_b44_a_tail_beside_very_low_scores(kernel, causal):
    """LSE about -115: a tail column scored 0 would be e^115 times too large."""
    wide = kernel == "torch_tiled"
    for length in (192, 1, 63, 65, 130) if wide else (40,):
        problem = problem_of("B44", causal=causal, sk=length, sq=length)
        tensors = make(problem)
        q, k = 0.1 * tensors["q"], 0.1 * tensors["k"]
        q[..., 0], k[..., 0] = 1, -120 * 64**0.5
        tensors |= {"q": q, "k": k}
        got = call(problem, tensors, kernel)
        assert got["lse"].min() > -121 and got["lse"].max() < -110
        assert all(torch.isfinite(got[n]).all() for n in ("out", *GRADS))
        assert {r.tensor for r in compare(problem, tensors, got) if not r.ok} <= {"dq"}, f"length {length}"
        within_twice_the_emulation(problem, tensors, got, "dq")


@kernels
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_b46_huge_equal_logits(kernel, dtype):
    problem = problem_of("B46", dtype=dtype)
    tensors = make(problem)
    tensors |= {n: torch.full_like(tensors[n], 1000.0) for n in "qkv"}
    got = call(problem, tensors, kernel)
    assert float(got["lse"].mean()) == pytest.approx(2828428.7, rel=1e-5)
    total = tensors["dout"].float().sum(1, keepdim=True) / 5
    assert ((got["dv"].float() - total).abs() <= 0.3 * total.abs() + 0.05).all()
    assert all(torch.isfinite(got[n]).all() for n in ("out", *GRADS))
    one = Problem.dense(1, 1, 1, nheads_q=1, nheads_kv=1, head_dim_qk=8, head_dim_v=8, dtype=dtype)
    tensors = make(one)
    tensors |= {n: torch.full_like(tensors[n], 133120.0) for n in "qkv"}
    got = call(one, tensors, kernel)
    assert all(torch.isfinite(got[n]).all() for n in ("out", "lse", *GRADS))


@kernels
def test_b48_v_of_a_large_mean(kernel):
    """D comes from the 16-bit out that the caller holds; so does the reference's. The gap to exact is the caller's."""
    problem = problem_of("B48")
    tensors = make(problem)
    tensors["v"] = (tensors["v"].float() + 100).bfloat16()
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    exact = reference.attention(problem, tensors).dq
    gap = float((reference.to_thd(got["dq"], "bshd").double() - exact).norm() / exact.norm())
    assert 0.02 < gap < 0.5, f"16-bit out moves dQ by {gap:.3f} here"
    out = reference.from_thd(reference.attention(problem, tensors).out, "bshd", 1)
    delta = (tensors["dout"].double() * out).sum(-1)
    better = backward(problem, tensors, got, kernel, delta=delta.transpose(1, 2).float().contiguous())
    close(reference.to_thd(better["dq"], "bshd"), exact, 2e-2, "dq from an exact delta")


@kernels
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_b49_real_activations_and_two_batch_entries(kernel, dims):
    small = {"sq": 40, "sk": 40, "hq": 2, "hk": 1} if kernel == "triton" else {"sq": 70, "sk": 70, "hq": 4, "hk": 2}
    problem = problem_of("B49", d_qk=dims[0], d_v=dims[1], **small)
    tensors = make(problem)
    for n in ("q", "k"):
        tensors[n][..., :2] *= 5
        tensors[n][:, 1] *= 0.3
    tensors["k"][0] *= 3  # a sink token
    tensors["dout"][:, 1] *= 20
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    alone = problem_of("B49", d_qk=dims[0], d_v=dims[1], b=1, **small)
    for b in range(2):
        part = tensors | {n: tensors[n][:, b : b + 1] for n in ("q", "k", "v", "dout")}
        want = call(alone, part, kernel)
        for name in GRADS:
            close(got[name][:, b : b + 1], want[name], 2e-3, f"{name} of batch {b}")


@kernels
def test_b50_fp32_is_fp32(kernel):
    """Relative error 1e-5 is a gate of verify at fp32; TF32 has 1e-3."""
    prove(problem_of("B50") if kernel == "torch_tiled" else problem_of("B50", sq=40, sk=40), kernel)


# ---- mask


@kernels
def test_b51_backward_is_bottom_right_where_the_forward_is(kernel):
    problem = problem_of("B51")
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    assert (got["dk"][:, :, 16:80].float().norm(dim=-1) > 0).all()


@kernels
def test_b52_window_bounds_are_inclusive(kernel):
    """Row i of V is the unit vector i, q is 0: out shows which keys a row sees, dV which rows see a key."""
    q = k = torch.zeros(1, 8, 1, 8, dtype=torch.float32, device=DEVICE)
    v = torch.eye(8, device=DEVICE)[None, :, None].clone().requires_grad_()
    out = undertow.attention(q, k, v, window_size=(2, 0), kernel=kernel)
    assert (out[0, :, 0] > 0).sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    (dv,) = torch.autograd.grad(out, v, torch.eye(8, device=DEVICE)[None, :, None])
    assert (dv[0, :, 0] > 0).sum(-1).tolist() == [3, 3, 3, 3, 3, 3, 2, 1]


@kernels
def test_b54_no_mask_means_none_in_the_backward(kernel):
    problem = problem_of("B54") if kernel == "torch_tiled" else problem_of("B54", sq=40, sk=40)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    gates(problem, tensors, got)
    causal = reference.attention(
        problem_of("B54", sq=problem.max_seqlen_q, sk=problem.max_seqlen_k, causal=True), tensors
    )
    far = reference.to_thd(got["dq"], "bhsd").double() - causal.dq
    assert float(far.norm() / causal.dq.norm()) > 0.3


@kernels
def test_b55_windows_that_are_causal(kernel):
    problem = problem_of("B55", causal=True) if kernel == "torch_tiled" else problem_of("B55", sq=40, sk=40, hq=1, hk=1)
    length = problem.max_seqlen_q
    tensors = make(problem)
    results = []
    for keywords in ({"causal": True}, *({"window_size": (w, 0)} for w in (-1, length, length - 1))):
        q, k, v = (tensors[n].clone().requires_grad_() for n in "qkv")
        out = undertow.attention(q, k, v, kernel=kernel, **keywords)
        out.backward(tensors["dout"])
        results.append({"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad})
    for other in results[1:]:
        same(other, results[0], ("out", *GRADS))
    problem = Problem.dense(1, 4, 12, nheads_q=1, nheads_kv=1, head_dim_qk=16, head_dim_v=16, band=Band(2, 0))
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    assert (got["dk"][:, :6] == 0).all() and (got["dv"][:, :6] == 0).all() and (got["dv"][:, 6:] != 0).any(-1).all()


# ---- autograd and compile


@kernels
def test_b56_gradient_through_the_returned_lse(kernel):
    """The case's one-dimensional head, in the first of eight columns."""
    q, k, v = (torch.zeros(1, 1, 1, 8, device=DEVICE) for _ in range(3))
    q[..., 0], k[..., 0], v[..., 0] = 1, 1, 2
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = undertow.attention(q, k, v, softmax_scale=1.0, return_lse=True, kernel=kernel)
    (out[..., 0] * lse.sigmoid()).sum().backward()
    assert float(q.grad[..., 0]) == pytest.approx(0.39322387, abs=1e-5)
    assert float(k.grad[..., 0]) == pytest.approx(0.39322387, abs=1e-5)
    assert float(v.grad[..., 0]) == pytest.approx(0.73105858, abs=1e-5)


@kernels
def test_b58_packed_and_padded_lse(kernel):
    problem = problem_of("B58", d_qk=16, d_v=16)
    tensors = make(problem)
    got = call(problem, tensors, kernel)
    padded = torch.full((2, 3, 7), NAN, device=DEVICE)
    padded[0, :, :3], padded[1] = got["lse"][:, :3], got["lse"][:, 3:]
    same(backward(problem, tensors, got, kernel, lse=padded, lse_layout="bhs"), got, GRADS)
    same(backward(problem, tensors, got, kernel, lse=got["lse"].t().contiguous(), lse_layout="th"), got, GRADS)
    trap = Problem.packed((10, 6), nheads_q=16, nheads_kv=16, head_dim_qk=8, head_dim_v=8)
    tensors = make(trap)
    with pytest.raises(ValueError, match="ambiguous"):
        backward(
            trap, tensors, {"out": tensors["dout"], "lse": torch.zeros(16, 16, device=DEVICE)}, kernel, lse_layout=None
        )


@kernels
def test_b59_double_backward_raises(kernel):
    q, k, v = (randn(1, 8, 1, 16, dtype="fp32", seed=s).requires_grad_() for s in range(3))
    out = undertow.attention(q, k, v, kernel=kernel)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        sum(g.square().sum() for g in grads).backward()


@pytest.mark.parametrize("length", CASES["B61"]["input"]["lengths"])
def test_b61_the_fake_kernels_are_the_real_ones(length):
    """Shapes and strides at lengths off the tile; the compiled step is in test_ops."""
    i = CASES["B61"]["input"]
    problem = Problem.packed((length,), nheads_q=2, nheads_kv=2, head_dim_qk=i["d_qk"], head_dim_v=i["d_v"])
    tensors = make(problem)
    q, k, v = (tensors[n].requires_grad_() for n in "qkv")
    cu = tensors["cu_seqlens_q"]
    numbers = (length, length, 0.125, 0.0, None, 0, "bottom_right", "thd", False, "torch_tiled")
    arguments = (q, k, v, None, cu, cu, None, None, *numbers)
    torch.library.opcheck(torch.ops.undertow.forward.default, arguments, test_utils=("test_schema", "test_faketensor"))
    out, lse = torch.ops.undertow.forward(*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))
    given = (
        tensors["dout"],
        *(x.detach() for x in (q, k, v)),
        out,
        lse,
        None,
        None,
        None,
        cu,
        cu,
        None,
        None,
        *numbers,
    )
    torch.library.opcheck(torch.ops.undertow.backward.default, given, test_utils=("test_schema", "test_faketensor"))


def test_b62_one_build_for_twenty_packings():
    """What a launch is compiled for (its constants, and which arguments are there) is the same for every packing."""
    from undertow.kernels.triton import offline

    builds = set()
    for n in range(20):
        problem = Problem.packed((10 + n, 30 - n), nheads_q=2, nheads_kv=2, head_dim_qk=64, head_dim_v=64, band=CAUSAL)
        found = []
        for which in ("forward", "backward"):
            for launch in offline.launches(problem, TARGETS["sm_90"], which):
                missing = tuple(a is None for a in launch.args)
                found.append((launch.stage, missing, tuple(sorted(launch.meta.items()))))
        builds.add(tuple(found))
    assert len(builds) == 1
    q, k, v = (randn(30, 2, 64, seed=s) for s in range(3))
    cu = torch.tensor([0, 10, 30], dtype=torch.int32, device=DEVICE)
    want = undertow.attention_varlen(q, k, v, cu, cu, 20, 20)
    for longest in (torch.tensor(20), torch.tensor(20, device=DEVICE)):
        assert torch.equal(undertow.attention_varlen(q, k, v, cu, cu, longest, longest), want)


# ---- system


def test_b64_launches_on_the_tensors_device(monkeypatch):
    """A fake launcher: q's device is current while every stage is launched. Mixed devices: test_ops and test_gpu."""
    from contextlib import contextmanager

    from undertow.kernels.triton import host

    current, seen = [0], []

    @contextmanager
    def device(index):
        current.append(torch.device(index).index)
        yield
        current.pop()

    class Launcher:
        def __getitem__(self, grid):
            return lambda *args, **meta: seen.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "device", device)
    fake = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    host._run(iter([host.Launch("a", Launcher(), 5, (), {}), host.Launch("b", Launcher(), 0, (), {})]), fake, None)
    assert seen == [((5,), 1)] and current == [0]


# ---- nothing is left out


def test_every_case_has_a_test_or_a_reason():
    tree = ast.parse(Path(__file__).read_text())
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_b")]
    tested = {part.upper() for name in names for part in name.split("_") if part[0] == "b" and part[1:].isdigit()}
    assert tested | set(GPU_ONLY) == set(CASES)
    assert not tested & set(GPU_ONLY)
    gpu = (Path(__file__).parent / "test_gpu.py").read_text()
    for reason in GPU_ONLY.values():
        assert f"def {reason.split('::')[1]}(" in gpu


def test_the_data_is_whole():
    assert len(CASES) == 45
    for case in CASES.values():
        assert set(case) >= {"id", "source", "family", "kind", "symptom", "input", "expected", "check", "tier"}
        assert case["input"].get("dtype", "bf16") in (*DTYPE, ["fp32", "bf16"])
