"""What only a device can show: real workloads, streams, graphs, other devices, big strides, big grids."""

from dataclasses import replace

import pytest
import torch
from support import CASES, CAUSAL, call, close, gates, make, prove, red, same

import undertow
from undertow import dispatch
from undertow.dispatch import get
from undertow.instruments import inputs
from undertow.instruments.verify import verify
from undertow.instruments.workloads import Workload, verify_workloads
from undertow.kernels import hopper
from undertow.kernels.hopper import host as hopper_host
from undertow.kernels.triton import host
from undertow.problem import Band, Problem
from undertow.target import detect

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
GRADS = ("dq", "dk", "dv")
D64 = {"nheads_q": 4, "nheads_kv": 4, "head_dim_qk": 64, "head_dim_v": 64}
MLA = {"nheads_q": 32, "nheads_kv": 16, "head_dim_qk": 192, "head_dim_v": 128}
WORKLOADS = {w.name: w for w in verify_workloads(scale=8)}


@pytest.fixture(params=("triton", "hopper"))
def kernel(request):
    """Every kernel of ours for this GPU, by name."""
    return request.param


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Hopper's fused kernel wherever there is one: calls as short as here would all take the plan apart."""
    monkeypatch.setattr(hopper, "_better_apart", lambda problem: False)


def able(problem, kernel):
    """Skip, with the reasons, what a kernel cannot run here: no Hopper GPU, neither objects nor their compiler."""
    if reasons := get(kernel).unsupported(problem, detect(GPU)):
        pytest.skip(f"{kernel}: {'; '.join(reasons)}")


def ready(problem, kernel, **options):
    """Inputs of a problem that the kernel can run."""
    able(problem, kernel)
    return make(problem, **options)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_green(name, kernel):
    able(WORKLOADS[name].problem, kernel)
    faults = red(verify(WORKLOADS[name], GPU, kernel))
    assert not faults, faults


@pytest.mark.parametrize("name, value", [("num_warps", 8), ("num_stages", 1), ("TMA", False)])
def test_geometry_that_is_not_the_tables_is_red(name, value, monkeypatch):
    """The launch asks the compiler for something else than what the config says."""
    honest = host._meta

    def other(problem, stage, tensors):
        return honest(problem, stage, tensors) | ({name: value} if stage.switch("tma") else {})

    workload = Workload("test", "", Problem.dense(1, 300, 300, band=CAUSAL, **D64))
    assert red(verify(workload, GPU, "triton")) == []
    monkeypatch.setattr(host, "_meta", other)
    faults = red(verify(workload, GPU, "triton"))
    assert len(faults) == 1 and f"dq has {name} {value}, wanted " in faults[0], faults


def test_a_hopper_launch_that_is_not_the_config_is_red(monkeypatch):
    """Fewer blocks than there are SMs and tiles: every gradient is right, and it is slow."""
    workload = Workload("test", "", Problem.dense(1, 300, 300, band=CAUSAL, **D64))
    able(workload.problem, "hopper")
    assert red(verify(workload, GPU, "hopper")) == []
    monkeypatch.setattr(hopper_host, "key_tiles", lambda problem, geometry: 1)
    faults = red(verify(workload, GPU, "hopper"))
    assert len(faults) == 1 and "main has blocks 4, wanted 12" in faults[0], faults


# ---- the Hopper kernel's parity, for pairs of head dims that take different tiles and plans

PAIRS = ((192, 128), (128, 128), (96, 96), (64, 64), (80, 80), (40, 40), (144, 144), (176, 128), (240, 248), (256, 256))
LENGTHS = ((200, 0, 1, 130, 3), (129, 3, 36, 0, 300))
FORMS = {
    "dense": lambda **d: Problem.dense(2, 300, 300, nheads_q=2, nheads_kv=2, band=CAUSAL, **d),
    "gqa-window": lambda **d: Problem.dense(1, 400, 400, nheads_q=4, nheads_kv=1, band=Band(100, 0), **d),
    "gaps": lambda **d: Problem.packed(*LENGTHS, nheads_q=4, nheads_kv=2, band=CAUSAL, **d),
    "gqa-window-deterministic": lambda **d: FORMS["gqa-window"](deterministic=True, **d),
    "gaps-deterministic": lambda **d: FORMS["gaps"](deterministic=True, **d),
}
MORE = {
    "more keys": Problem.dense(2, 100, 333, band=CAUSAL, **D64),
    "more queries": Problem.dense(2, 333, 100, band=CAUSAL, **D64),
    "top left": Problem.dense(2, 333, 100, band=Band(None, 0, "top_left"), **D64),
    "two-sided": Problem.packed(*LENGTHS, band=Band(70, 9), **D64),
    "sink": Problem.packed(*LENGTHS, band=CAUSAL, has_sink=True, has_dlse=True, **D64),
    "fp16": Problem.dense(1, 300, 300, band=CAUSAL, dtype="fp16", **D64),
    "sbhd": Problem.dense(2, 200, 270, band=CAUSAL, layout="sbhd", **D64),
    "bhsd": Problem.dense(2, 200, 270, band=CAUSAL, layout="bhsd", deterministic=True, **D64),
    "70 segments": Problem.packed(tuple(1 + (7 * n) % 23 for n in range(70)), band=CAUSAL, **D64),
    "no keys at all": Problem.dense(1, 70, 0, **D64),
    "two rounds": Problem.dense(2, 1000, 1000, band=CAUSAL, **MLA),
    "two rounds packed": Problem.packed((3000, 0, 1, 1000), (2500, 70, 0, 1000), band=CAUSAL, **MLA),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk, v", PAIRS)
def test_hopper_head_dims(qk, v, form):
    problem = FORMS[form](head_dim_qk=qk, head_dim_v=v)
    able(problem, "hopper")
    prove(problem, "hopper", gap=5 if form.startswith("gaps") else 0)


@pytest.mark.parametrize("name", MORE)
def test_hopper_semantics(name):
    able(MORE[name], "hopper")
    prove(MORE[name], "hopper", gap=3 if MORE[name].is_packed else 0)


def shifted(x):
    """The same values three elements off, in rows whose distance is no multiple of 16 bytes."""
    return torch.full((*x.shape[:-1], x.shape[-1] + 9), torch.nan, dtype=x.dtype, device=GPU)[..., 3:-6].copy_(x)


def one_off(x):
    """The same values, contiguous, two bytes off any boundary."""
    return torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=GPU)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("moved", [shifted, one_off])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_hopper_takes_and_fills_what_the_copy_engine_cannot(layout, moved):
    fields = D64 | {"band": CAUSAL, "deterministic": True}
    packed = Problem.packed((130, 1, 70), (130, 60, 70), **fields)
    problem = packed if layout == "thd" else Problem.dense(2, 150, 200, layout=layout, **fields)
    tensors = ready(problem, "hopper")
    want = step(problem, tensors, "hopper")
    odd = {n: moved(tensors[n]) for n in ("q", "k", "v", "dout")}
    given = {f"d{n}": moved(torch.zeros_like(tensors[n])) for n in "qkv"}
    grads = gradients(problem, tensors | odd, want["out"], want["lse"], "hopper", **given)
    same(grads._asdict(), want, GRADS)
    assert all(getattr(grads, n).data_ptr() == given[n].data_ptr() for n in GRADS)


# ---- both kernels


def arguments(problem, tensors, kernel):
    args, keywords = inputs.arguments(problem, tensors)
    return args, keywords | {"kernel": kernel}


def gradients(problem, tensors, out, lse, kernel, **more):
    """The bare backward, unchecked: the hot path."""
    (q, k, v, *segments), keywords = arguments(problem, tensors, kernel)
    function = undertow.attention_varlen_backward if problem.is_packed else undertow.attention_backward
    layout = {"lse_layout": "ht" if problem.is_packed else "bhs"}
    return function(tensors["dout"], q, k, v, out, lse, *segments, **keywords, **layout, **more)


def step(problem, tensors, kernel):
    args, keywords = arguments(problem, tensors, kernel)
    function = undertow.attention_varlen if problem.is_packed else undertow.attention
    out, lse = function(*args, **keywords, return_lse=True)
    grads = gradients(problem, tensors, out, lse, kernel)
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


PACKED = Problem.packed((300, 1, 0, 723), band=CAUSAL, **D64)


def test_no_sync_in_the_hot_path(kernel):
    tensors = ready(PACKED, kernel)
    step(PACKED, tensors, kernel)  # compiles, and may ask the device what it is
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(PACKED, tensors, kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gates(PACKED, tensors, got)


def test_b62_a_device_tensor_as_max_seqlen_is_read():
    """The one documented synchronisation."""
    tensors = make(PACKED)
    (q, k, v, cu_q, cu_k, longest, _), keywords = arguments(PACKED, tensors, "triton")
    want = undertow.attention_varlen(q, k, v, cu_q, cu_k, longest, longest, **keywords)
    value = torch.tensor(longest, device=GPU)
    assert torch.equal(undertow.attention_varlen(q, k, v, cu_q, cu_k, value, value, **keywords), want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_replays_on_new_data(deterministic, kernel):
    problem = Problem.packed((300, 1, 0, 723), band=CAUSAL, deterministic=deterministic, **D64)
    tensors = ready(problem, kernel)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(problem, tensors, kernel)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(problem, tensors, kernel)
    for seed in (1, 2):
        for name, fresh in make(problem, seed=seed).items():
            if name in ("q", "k", "v", "dout"):
                tensors[name].copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        gates(problem, tensors, got, f"replay {seed}")


def busy(stream, seconds=0.02):
    """Keep a stream and a share of the device occupied."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * 1e9))
        x = torch.randn(2048, 2048, device=GPU)
        for _ in range(8):
            x = (x @ x).tanh()
    return x


@pytest.mark.parametrize("deterministic", [False, True])
def test_compile_fullgraph_is_eager(deterministic, kernel):
    tensors = ready(replace(PACKED, deterministic=deterministic), kernel)
    inputs_of = [tensors[n].requires_grad_() for n in "qkv"]

    def loss(q, k, v, cu):
        keywords = {"causal": True, "deterministic": deterministic, "kernel": kernel}
        return (undertow.attention_varlen(q, k, v, cu, cu, 723, 723, **keywords) * tensors["dout"]).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        found.append(torch.autograd.grad(function(*inputs_of, tensors["cu_seqlens_q"]), inputs_of))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled) if deterministic else close(compiled, eager, 1e-3) is None


def test_b65_launches_on_the_current_stream(kernel):
    """dO arrives on a side stream after a long wait; a helper kernel on another stream would read too early."""
    i = CASES["B65"]["input"]
    problem = Problem.dense(i["b"], i["sq"], i["sk"], deterministic=True, **D64)
    tensors = ready(problem, kernel)
    want = step(problem, tensors, kernel)
    dout, stream = tensors["dout"].clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        late = tensors | {"dout": torch.full_like(dout, float("nan"))}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late["dout"].copy_(dout)
            got = step(problem, late, kernel)
        stream.synchronize()
        same(got, want)


def test_two_streams_at_once(kernel):
    """Two problems that share nothing, launched in turn on two streams, each as alone."""
    problems = [replace(PACKED, deterministic=True), Problem.dense(1, 512, 700, band=CAUSAL, deterministic=True, **D64)]
    tensors = [ready(problem, kernel, seed=n) for n, problem in enumerate(problems)]
    want = [step(problem, x, kernel) for problem, x in zip(problems, tensors, strict=True)]
    streams, got = [torch.cuda.Stream() for _ in problems], [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(step(problems[n], tensors[n], kernel))
    torch.cuda.synchronize()
    for n in range(2):
        for one in got[n]:
            same(one, want[n])


@pytest.mark.parametrize("name", ["dense", "gqa", "packed", "mla"])
def test_b26_thirty_runs_agree_beside_a_busy_stream(name, kernel):
    fields = {"dtype": "fp16", "deterministic": True}
    d64 = {"head_dim_qk": 64, "head_dim_v": 64}
    problem = {
        "dense": Problem.dense(2, 1024, 1024, nheads_q=12, nheads_kv=12, **d64, **fields),
        "gqa": Problem.dense(1, 1024, 1024, nheads_q=16, nheads_kv=2, head_dim_qk=128, head_dim_v=128, **fields),
        "packed": Problem.packed((300, 1, 723), nheads_q=12, nheads_kv=12, band=Band(128, 0), **d64, **fields),
        "mla": Problem.packed(
            (1300, 0, 700), nheads_q=8, nheads_kv=8, head_dim_qk=192, head_dim_v=128, band=CAUSAL, deterministic=True
        ),
    }[name]
    tensors = ready(problem, kernel)
    first, other, held = step(problem, tensors, kernel), torch.cuda.Stream(), []
    gates(problem, tensors, first)
    for n in range(30):
        if n % 2:
            held.append(busy(other))
        same(step(problem, tensors, kernel), first)
    torch.cuda.synchronize()


def test_b28_key_lengths_that_differ_by_segment(kernel):
    i = CASES["B28"]["input"]
    sizes = [tuple(b - a for a, b in zip(i[c], i[c][1:], strict=False)) for c in ("cu_q", "cu_k")]
    problem = Problem.packed(*sizes, band=CAUSAL, deterministic=True, **D64)
    tensors = ready(problem, kernel)
    first = call(problem, tensors, kernel)
    gates(problem, tensors, first)
    for _ in range(10):
        same(step(problem, tensors, kernel), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_b64_tensors_on_a_device_that_is_not_current(kernel):
    i = CASES["B64"]["input"]
    problem = Problem.dense(
        i["b"], i["sq"], i["sk"], deterministic=True, nheads_q=2, nheads_kv=2, head_dim_qk=64, head_dim_v=64
    )
    tensors = ready(problem, kernel)
    want = call(problem, tensors, kernel)
    there = {n: None if x is None else x.to("cuda:1") for n, x in tensors.items()}
    assert torch.cuda.current_device() == 0
    got = call(problem, there, kernel)
    assert torch.cuda.current_device() == 0 and got["dq"].device.index == 1
    same({n: x.to(GPU) for n, x in got.items()}, want)
    with pytest.raises(ValueError, match="k is on cuda:1, wanted cuda:0"):
        undertow.attention(tensors["q"], there["k"], tensors["v"])


@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_devices_raise(name):
    problem = Problem.dense(1, 16, 16, **D64)
    tensors = make(problem)
    tensors[name] = tensors[name].cpu()
    with pytest.raises(ValueError, match=f"{name} is on cpu, wanted cuda"):
        undertow.attention(tensors["q"], tensors["k"], tensors["v"])


# ---- offsets and grids


def test_b20_a_row_stride_that_passes_two_to_the_31(kernel):
    i = CASES["B20"]["input"]
    sizes = tuple(b - a for a, b in zip(i["cu_q"], i["cu_q"][1:], strict=False))
    problem = Problem.packed(
        sizes, nheads_q=1, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=Band(64, 0), deterministic=True
    )
    tensors = ready(problem, kernel)
    want = call(problem, tensors, kernel)
    big = torch.empty(problem.total_q, 2**19 + 64, dtype=torch.bfloat16, device=GPU)
    assert problem.total_q * big.stride(0) > 2**31
    dout = big[:, :64].unsqueeze(1).copy_(tensors["dout"])
    same(step(problem, tensors | {"dout": dout}, kernel), want)


def test_b25_a_batch_offset_past_two_to_the_32_bytes(kernel):
    """Batch 1 equals the same data run as batch 0. Four tensors of 4.3 GB and their gradients."""
    i = CASES["B25"]["input"]
    if torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GB")
    dims = {"nheads_q": i["hq"], "nheads_kv": i["hq"], "head_dim_qk": 128, "head_dim_v": 128, "band": Band(64, 0)}
    able(Problem.dense(2, i["sq"], i["sq"], deterministic=True, **dims), kernel)
    torch.manual_seed(0)
    shape = (2, i["sq"], i["hq"], 128)
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device=GPU) for _ in range(4))
    keywords = {"window_size": (64, 0), "deterministic": True, "kernel": kernel}

    def run(rows):
        part = [x[rows] for x in (q, k, v)]
        out, lse = undertow.attention(*part, return_lse=True, **keywords)
        return undertow.attention_backward(dout[rows], *part, out, lse, **keywords)[:3]

    assert q.numel() * q.element_size() > 2**32
    both = run(slice(0, 2))
    alone = run(slice(1, 2))
    for a, b in zip(both, alone, strict=True):
        assert torch.equal(a[1:], b)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name, count", [("B22", 16500), ("B23", 65537)])
def test_b22_b23_more_segments_than_a_grid_axis_holds(name, count, deterministic, kernel):
    i = CASES[name]["input"]
    fields = {"nheads_q": i["hq"], "nheads_kv": i["hk"], "head_dim_qk": i["d_qk"], "head_dim_v": i["d_v"]}
    problem = Problem.packed((1,) * count, deterministic=deterministic, **fields)
    tensors = ready(problem, kernel)
    got = step(problem, tensors, kernel)
    assert torch.equal(got["out"], tensors["v"]) and torch.equal(got["dv"], tensors["dout"])
    assert got["dq"].float().abs().max() < 1e-2 and got["dk"].float().abs().max() < 1e-2


def test_b23_more_heads_than_a_grid_axis_holds(kernel):
    problem = Problem.dense(1, 2, 2, nheads_q=65536, nheads_kv=65536, head_dim_qk=64, head_dim_v=64, deterministic=True)
    tensors = ready(problem, kernel)
    whole = step(problem, tensors, kernel)
    half = Problem.dense(1, 2, 2, nheads_q=32768, nheads_kv=32768, head_dim_qk=64, head_dim_v=64, deterministic=True)
    for s in (slice(0, 32768), slice(32768, None)):
        part = step(half, tensors | {n: tensors[n][:, :, s] for n in ("q", "k", "v", "dout")}, kernel)
        same({n: whole[n][:, :, s] for n in GRADS}, part, GRADS)


# ---- what is promised of every kernel here


PEER_PROBLEMS = {
    "dense": Problem.dense(2, 300, 300, nheads_q=4, nheads_kv=4, head_dim_qk=128, head_dim_v=128, band=CAUSAL),
    "gqa": Problem.dense(2, 300, 300, nheads_q=8, nheads_kv=2, head_dim_qk=64, head_dim_v=64),
    "mla": Problem.dense(1, 300, 300, nheads_q=4, nheads_kv=4, head_dim_qk=192, head_dim_v=128, band=CAUSAL),
    "packed": Problem.packed((300, 1, 723), nheads_q=8, nheads_kv=2, head_dim_qk=128, head_dim_v=128, band=CAUSAL),
}


@pytest.mark.parametrize("name", PEER_PROBLEMS)
def test_b38_kernels_that_say_they_can_run_do(name):
    problem, target = PEER_PROBLEMS[name], detect(GPU)
    tensors = make(problem)
    want = call(problem, tensors, "torch_tiled")
    for kernel in dispatch.KERNELS:
        if kernel.unsupported(problem, target) or (kernel.forward and kernel.unsupported(problem, target, "forward")):
            continue
        got = call(problem, tensors, kernel.name)
        for n in ("out", *GRADS):
            close(got[n], want[n], 3e-2, f"{kernel.name} {n}")


def test_a_workspace_of_the_callers_on_the_device(kernel):
    tensors = ready(PACKED, kernel)
    want = step(PACKED, tensors, kernel)
    size = undertow.workspace_nbytes(PACKED, detect(GPU), kernel)
    memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=GPU)
    got = gradients(PACKED, tensors, want["out"], want["lse"], kernel, workspace=memory)
    close(got.dq, want["dq"], 1e-3), close(got.dk, want["dk"], 1e-3)
    assert (memory[size:] == 0xFF).all()
    with pytest.raises(ValueError, match="workspace is on cpu, wanted cuda"):
        gradients(PACKED, tensors, want["out"], want["lse"], kernel, workspace=memory.cpu())
    assert get(kernel).unsupported(PACKED, detect(GPU)) == ()
