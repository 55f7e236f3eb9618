"""What only a device can show: real workloads, streams, graphs, other devices, big strides, big grids."""

import pytest
import torch
from support import CASES, CAUSAL, call, close, gates, make, red, same

import undertow
from undertow import dispatch
from undertow.dispatch import get
from undertow.instruments import inputs
from undertow.instruments.verify import verify
from undertow.instruments.workloads import Workload, verify_workloads
from undertow.kernels.triton import host
from undertow.problem import Band, Problem
from undertow.target import detect

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
GRADS = ("dq", "dk", "dv")
D64 = {"nheads_q": 4, "nheads_kv": 4, "head_dim_qk": 64, "head_dim_v": 64}
WORKLOADS = {w.name: w for w in verify_workloads(scale=8)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_green(name):
    faults = red(verify(WORKLOADS[name], GPU, "triton"))
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


def arguments(problem, tensors):
    args, keywords = inputs.arguments(problem, tensors)
    return args, keywords | {"kernel": "triton"}


def gradients(problem, tensors, out, lse, **more):
    """The bare backward, unchecked: the hot path."""
    (q, k, v, *segments), keywords = arguments(problem, tensors)
    function = undertow.attention_varlen_backward if problem.is_packed else undertow.attention_backward
    layout = {"lse_layout": "ht" if problem.is_packed else "bhs"}
    return function(tensors["dout"], q, k, v, out, lse, *segments, **keywords, **layout, **more)


def step(problem, tensors):
    args, keywords = arguments(problem, tensors)
    function = undertow.attention_varlen if problem.is_packed else undertow.attention
    out, lse = function(*args, **keywords, return_lse=True)
    grads = gradients(problem, tensors, out, lse)
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


PACKED = Problem.packed((300, 1, 0, 723), band=CAUSAL, **D64)


def test_no_sync_in_the_hot_path():
    tensors = make(PACKED)
    step(PACKED, tensors)  # compiles, and may ask the device what it is
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(PACKED, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gates(PACKED, tensors, got)


def test_b62_a_device_tensor_as_max_seqlen_is_read():
    """The one documented synchronisation."""
    tensors = make(PACKED)
    (q, k, v, cu_q, cu_k, longest, _), keywords = arguments(PACKED, tensors)
    want = undertow.attention_varlen(q, k, v, cu_q, cu_k, longest, longest, **keywords)
    value = torch.tensor(longest, device=GPU)
    assert torch.equal(undertow.attention_varlen(q, k, v, cu_q, cu_k, value, value, **keywords), want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_replays_on_new_data(deterministic):
    problem = Problem.packed((300, 1, 0, 723), band=CAUSAL, deterministic=deterministic, **D64)
    tensors = make(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(problem, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(problem, tensors)
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


def test_b65_launches_on_the_current_stream():
    """dO arrives on a side stream after a long wait; a helper kernel on another stream would read too early."""
    i = CASES["B65"]["input"]
    problem = Problem.dense(i["b"], i["sq"], i["sk"], deterministic=True, **D64)
    tensors = make(problem)
    want = step(problem, tensors)
    dout, stream = tensors["dout"].clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        late = tensors | {"dout": torch.full_like(dout, float("nan"))}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late["dout"].copy_(dout)
            got = step(problem, late)
        stream.synchronize()
        same(got, want)


@pytest.mark.parametrize("name", ["dense", "gqa", "packed"])
def test_b26_thirty_runs_agree_beside_a_busy_stream(name):
    fields = {"dtype": "fp16", "deterministic": True}
    d64 = {"head_dim_qk": 64, "head_dim_v": 64}
    problem = {
        "dense": Problem.dense(2, 1024, 1024, nheads_q=12, nheads_kv=12, **d64, **fields),
        "gqa": Problem.dense(1, 1024, 1024, nheads_q=16, nheads_kv=2, head_dim_qk=128, head_dim_v=128, **fields),
        "packed": Problem.packed((300, 1, 723), nheads_q=12, nheads_kv=12, band=Band(128, 0), **d64, **fields),
    }[name]
    tensors = make(problem)
    first, other, held = step(problem, tensors), torch.cuda.Stream(), []
    gates(problem, tensors, first)
    for n in range(30):
        if n % 2:
            held.append(busy(other))
        same(step(problem, tensors), first)
    torch.cuda.synchronize()


def test_b28_key_lengths_that_differ_by_segment():
    i = CASES["B28"]["input"]
    sizes = [tuple(b - a for a, b in zip(i[c], i[c][1:], strict=False)) for c in ("cu_q", "cu_k")]
    problem = Problem.packed(*sizes, band=CAUSAL, deterministic=True, **D64)
    tensors = make(problem)
    first = call(problem, tensors, "triton")
    gates(problem, tensors, first)
    for _ in range(10):
        same(step(problem, tensors), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_b64_tensors_on_a_device_that_is_not_current():
    i = CASES["B64"]["input"]
    problem = Problem.dense(
        i["b"], i["sq"], i["sk"], deterministic=True, nheads_q=2, nheads_kv=2, head_dim_qk=64, head_dim_v=64
    )
    tensors = make(problem)
    want = call(problem, tensors, "triton")
    there = {n: None if x is None else x.to("cuda:1") for n, x in tensors.items()}
    assert torch.cuda.current_device() == 0
    got = call(problem, there, "triton")
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


def test_b20_a_row_stride_that_passes_two_to_the_31():
    i = CASES["B20"]["input"]
    sizes = tuple(b - a for a, b in zip(i["cu_q"], i["cu_q"][1:], strict=False))
    problem = Problem.packed(
        sizes, nheads_q=1, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=Band(64, 0), deterministic=True
    )
    tensors = make(problem)
    want = call(problem, tensors, "triton")
    big = torch.empty(problem.total_q, 2**19 + 64, dtype=torch.bfloat16, device=GPU)
    assert problem.total_q * big.stride(0) > 2**31
    dout = big[:, :64].unsqueeze(1).copy_(tensors["dout"])
    same(step(problem, tensors | {"dout": dout}), want)


def test_b25_a_batch_offset_past_two_to_the_32_bytes():
    """Batch 1 equals the same data run as batch 0. Four tensors of 4.3 GB and their gradients."""
    i = CASES["B25"]["input"]
    if torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GB")
    torch.manual_seed(0)
    shape = (2, i["sq"], i["hq"], 128)
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device=GPU) for _ in range(4))
    keywords = {"window_size": (64, 0), "deterministic": True, "kernel": "triton"}

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
def test_b22_b23_more_segments_than_a_grid_axis_holds(name, count, deterministic):
    i = CASES[name]["input"]
    fields = {"nheads_q": i["hq"], "nheads_kv": i["hk"], "head_dim_qk": i["d_qk"], "head_dim_v": i["d_v"]}
    problem = Problem.packed((1,) * count, deterministic=deterministic, **fields)
    tensors = make(problem)
    got = step(problem, tensors)
    assert torch.equal(got["out"], tensors["v"]) and torch.equal(got["dv"], tensors["dout"])
    assert got["dq"].float().abs().max() < 1e-2 and got["dk"].float().abs().max() < 1e-2


def test_b23_more_heads_than_a_grid_axis_holds():
    problem = Problem.dense(1, 2, 2, nheads_q=65536, nheads_kv=65536, head_dim_qk=64, head_dim_v=64, deterministic=True)
    tensors = make(problem)
    whole = step(problem, tensors)
    half = Problem.dense(1, 2, 2, nheads_q=32768, nheads_kv=32768, head_dim_qk=64, head_dim_v=64, deterministic=True)
    for s in (slice(0, 32768), slice(32768, None)):
        part = step(half, tensors | {n: tensors[n][:, :, s] for n in ("q", "k", "v", "dout")})
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
        if kernel.unsupported(problem, target, "forward") + kernel.unsupported(problem, target):
            continue
        got = call(problem, tensors, kernel.name)
        for n in ("out", *GRADS):
            close(got[n], want[n], 3e-2, f"{kernel.name} {n}")


def test_a_workspace_of_the_callers_on_the_device():
    tensors = make(PACKED)
    want = step(PACKED, tensors)
    size = undertow.workspace_nbytes(PACKED, detect(GPU), "triton")
    memory = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=GPU)
    got = gradients(PACKED, tensors, want["out"], want["lse"], workspace=memory)
    close(got.dq, want["dq"], 1e-3), close(got.dk, want["dk"], 1e-3)
    assert (memory[size:] == 0xFF).all()
    with pytest.raises(ValueError, match="workspace is on cpu, wanted cuda"):
        gradients(PACKED, tensors, want["out"], want["lse"], workspace=memory.cpu())
    assert get("triton").unsupported(PACKED, detect(GPU)) == ()
