"""torch's kernels as peers: parity with the fp64 reference inside their limits, and limits that say why."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_torch_tiled import NAN, close, make, one_thread  # noqa: F401

from undertow.kernels.vendor import KERNELS
from undertow.problem import Band, Problem
from undertow.reference import attention, to_ht, to_thd
from undertow.target import TARGETS

PEERS = {kernel.name: kernel for kernel in KERNELS}
CPU, H100 = TARGETS["cpu"], TARGETS["sm_90"]
SMALL = {"nheads_q": 4, "nheads_kv": 4, "head_dim_qk": 32, "head_dim_v": 32, "dtype": "fp32"}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}  # 16 bits: torch's kernels round P and dS before a product
CAUSAL, TOP_LEFT = Band(None, 0), Band(None, 0, "top_left")


def on_device(tensors, device):
    """The tensors with their strides on another device; int tensors as they are."""
    moved = {}
    for name, x in tensors.items():
        moved[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        moved[name].copy_(x)
    return moved


def check(kernel, problem, *, gap=0, device="cpu", tolerance=None):
    """Forward and backward of a peer against the reference, from odd strides into NaN outputs."""
    tolerance = tolerance or TOLERANCE[problem.dtype]
    problem, host = make(problem, gap)
    if gap == 0:
        host = {name: x for name, x in host.items() if not name.startswith("seqused")}
    device_tensors = on_device(host, device)
    kernel.forward(problem, None, device_tensors)
    host |= {name: x.cpu() for name, x in device_tensors.items()}
    want = attention(problem, {n: x for n, x in host.items() if n not in ("out", "lse")})
    close("out", to_thd(host["out"], problem.layout), want.out, tolerance, (want.out == 0).all(-1))
    close("lse", to_ht(host["lse"]), want.lse, 1e-5 if problem.dtype == "fp32" else 1e-3)
    if problem.is_packed:
        unseen = to_ht(host["lse"]) == -torch.inf
        device_tensors["lse"][unseen.to(device)] = NAN
        device_tensors["out"].transpose(0, 1)[unseen.to(device)] = NAN
    kernel.backward(problem, None, device_tensors, {})
    want = attention(problem, {**host, "lse": None})
    for name, by in {"dq": want.out, "dk": want.dv, "dv": want.dv}.items():
        dead = (by == 0).all(-1)
        close(name, to_thd(device_tensors[name].cpu(), problem.layout), getattr(want, name), tolerance, dead)


@pytest.mark.parametrize("name", ["sdpa_cpu_flash", "sdpa_math"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_cpu_peers(name, dtype, layout):
    fields = SMALL | {"dtype": dtype, "layout": layout}
    for problem in (
        Problem.dense(2, 65, 65, band=CAUSAL, **fields),
        Problem.dense(2, 33, 50, band=TOP_LEFT, **fields),
        Problem.dense(2, 50, 33, band=TOP_LEFT, softmax_scale=0.3, **fields),
        Problem.dense(1, 1, 40, **fields),
        Problem.dense(2, 40, 40, band=CAUSAL, **(fields | {"nheads_kv": 2})),
    ):
        assert PEERS[name].unsupported(problem, CPU) == ()
        check(PEERS[name], problem)


def test_math_takes_dims_that_differ():
    check(PEERS["sdpa_math"], Problem.dense(2, 20, 20, band=CAUSAL, **(SMALL | {"head_dim_v": 16, "nheads_kv": 1})))


def test_cpu_flash_is_deterministic():
    problem, tensors = make(Problem.dense(2, 300, 300, band=CAUSAL, deterministic=True, **SMALL))
    assert PEERS["sdpa_cpu_flash"].unsupported(problem, CPU) == ()
    PEERS["sdpa_cpu_flash"].forward(problem, None, tensors)
    runs = []
    for _ in range(3):
        PEERS["sdpa_cpu_flash"].backward(problem, None, tensors, {})
        runs.append([tensors[name].clone() for name in ("dq", "dk", "dv")])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


H = {"nheads_q": 8, "nheads_kv": 8, "head_dim_qk": 128, "head_dim_v": 128}
REFUSALS = [
    ("sdpa_flash", Problem.dense(1, 64, 64, **(H | {"head_dim_qk": 192})), "192", "128", "v zero-padded"),
    ("sdpa_flash", Problem.dense(1, 64, 96, band=CAUSAL, **H), "64", "96", "seqlen_q == seqlen_k"),
    ("sdpa_flash", Problem.dense(1, 64, 64, dtype="fp32", **H), "fp32", "bf16", "bf16"),
    ("sdpa_flash", Problem.dense(1, 64, 64, deterministic=True, **H), "dQ", "order", "deterministic=False"),
    ("sdpa_cudnn", Problem.dense(1, 64, 64, deterministic=True, **H), "9.19", "bits", "deterministic=False"),
    ("sdpa_cudnn", Problem.dense(1, 64, 96, band=CAUSAL, **H), "64", "96", "top_left"),
    ("sdpa_cudnn", Problem.packed((64, 32), **H), "2 packed", "thd", "padded to 64"),
    ("sdpa_efficient", Problem.dense(1, 64, 64, **(H | {"nheads_kv": 2})), "8", "2", "repeated 4 times"),
    ("sdpa_cpu_flash", Problem.dense(1, 64, 64, **H), "sm_90", "CPU", "CPU"),
    ("sdpa_math", Problem.dense(1, 64, 64, band=Band(31, 0), **H), "31", "window", "(-1, -1)"),
    ("sdpa_math", Problem.dense(1, 64, 64, softcap=30.0, **H), "30.0", "softcap", "softcap=0.0"),
    ("sdpa_math", Problem.dense(1, 64, 64, has_sink=True, **H), "sink", "sink", "sink=None"),
    ("sdpa_math", Problem.dense(1, 64, 64, has_dlse=True, **H), "LSE", "LSE", "return_lse=False"),
    ("sdpa_math", Problem.dense(1, 64, 64, has_delta=True, **H), "delta", "delta", "delta=None"),
    ("sdpa_math", Problem.dense(1, 0, 64, **H), "seqlen_q 0", "64", ""),
    ("aten_flash_varlen", Problem.dense(1, 64, 64, **H), "bshd", "packed", "layout='thd'"),
    ("aten_flash_varlen", Problem.packed((64, 9), (64, 70), band=TOP_LEFT, **H), "top-left", "seqlen", "bottom_right"),
    ("aten_flash_varlen", Problem.packed((64, 9), band=Band(-2, 9), **H), "-2", "9", ">= 0"),
]


@pytest.mark.parametrize("name, problem, number, word, fix", REFUSALS)
def test_a_refusal_says_why_and_what_lifts_it(name, problem, number, word, fix):
    failing = PEERS[name].failing(problem, H100)
    assert len(failing) == 1
    assert number in failing[0].text(problem, H100) and word in failing[0].text(problem, H100)
    assert fix in failing[0].remedy(problem, H100)


def test_what_only_the_backward_cannot_do():
    problem = Problem.dense(1, 64, 64, has_dlse=True, has_delta=True, deterministic=True, **H)
    assert PEERS["sdpa_flash"].unsupported(problem, H100, "forward") == ()
    assert len(PEERS["sdpa_flash"].unsupported(problem, H100, "backward")) == 3


def test_no_gpu_peer_runs_on_a_cpu_or_on_an_unlisted_architecture():
    problem = Problem.dense(1, 64, 64, **H)
    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"):
        assert PEERS[name].unsupported(problem, H100) == ()
        assert "cpu" in PEERS[name].unsupported(problem, CPU)[0]
        assert "gfx942" in PEERS[name].unsupported(problem, TARGETS["gfx942"])[0]


def test_head_dims_by_architecture():
    wide, odd = Problem.dense(1, 64, 64, **(H | {"head_dim_qk": 192})), Problem.dense(1, 64, 64, **(H | {
        "head_dim_qk": 208, "head_dim_v": 208}))  # fmt: skip
    assert PEERS["sdpa_cudnn"].unsupported(wide, H100) == ()
    assert "sm_80" in PEERS["sdpa_cudnn"].unsupported(wide, TARGETS["sm_80"])[0]
    assert "(192, 224]" in PEERS["sdpa_flash"].unsupported(odd, TARGETS["sm_89"])[0]
    assert PEERS["sdpa_flash"].executed_dims(odd) == (256, 256)
    assert PEERS["sdpa_flash"].executed_dims(Problem.dense(1, 64, 64, **(H | {"head_dim_qk": 40}))) == (64, 128)


def test_import_needs_no_torch():
    code = "import sys, undertow.kernels.vendor as m; assert len(m.KERNELS) == 6; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Flash2:
    """aten's packed entries as flash-attention 2 behaves: +inf LSE where no key is seen, NaN where it does not write.

    It shows that the adapter around it leaves nothing open; what the GPU computes is in the tests marked gpu.
    """

    def __init__(self, problem):
        self.problem = problem

    def call(self, tensors, cu_q, cu_k, window, causal):
        lengths = [tuple(cu.diff().tolist()) for cu in (cu_q, cu_k)]
        band = Band.from_flags(causal=causal, window_size=tuple(-1 if w is None else w for w in window))
        fields = {"seqlens_q": lengths[0], "seqlens_k": lengths[1], "band": band, "has_dlse": False}
        tensors |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        return attention(replace(self.problem, **fields), tensors)

    def keep_segments(self, x, cu):
        left_open = torch.full_like(x, NAN)
        left_open[cu[0] : cu[-1]] = x[cu[0] : cu[-1]]
        return left_open.to(torch.bfloat16)

    def _flash_attention_forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale, window_size_left,
                                 window_size_right, return_debug_mask):  # fmt: skip
        done = self.call({"q": q, "k": k, "v": v, "dout": torch.zeros_like(q)}, cu_q, cu_k,
                         (window_size_left, window_size_right), causal)  # fmt: skip
        out = self.keep_segments(done.out, cu_q)
        return out, done.lse.masked_fill(done.lse == -torch.inf, torch.inf).float()

    def _flash_attention_backward(self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed,
                                  offset, *, scale, window_size_left, window_size_right):  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
        done = self.call(tensors, cu_q, cu_k, (window_size_left, window_size_right), causal)
        inside = slice(int(cu_q[0]), int(cu_q[-1]))
        assert torch.equal(done.lse[:, inside] == -torch.inf, lse[:, inside] == torch.inf)
        assert torch.isfinite(out[inside]).all()
        return [self.keep_segments(x, cu) for x, cu in ((done.dq, cu_q), (done.dk, cu_k), (done.dv, cu_k))]


class Efficient:
    """aten's memory-efficient entries as CUTLASS addresses them: rows of out are nheads * head_dim_v apart, always;
    the stride of rows is a multiple of 16 bytes, even of one row."""

    def __init__(self, problem):
        self.problem = replace(problem, layout="bhsd")

    def _scaled_dot_product_efficient_attention(self, q, k, v, bias, *, compute_log_sumexp, is_causal, scale):
        assert not any(x.stride(2) % 8 for x in (q, k, v)), "not correctly aligned (strideM)"
        done = attention(self.problem, {"q": q, "k": k, "v": v, "dout": v.new_zeros(*q.shape[:3], v.shape[-1])})
        b, h, s, _ = q.shape
        out = done.out.view(b, s, h, -1).transpose(1, 2).to(q.dtype)
        lse = torch.full((b, h, -(-s // 32) * 32), torch.inf)
        lse[..., :s] = done.lse.view(h, b, s).transpose(0, 1)
        return out, lse

    def _scaled_dot_product_efficient_attention_backward(self, dout, q, k, v, bias, out, lse, *rest, scale):
        assert not any(x.stride(2) % 8 for x in (q, k, v, dout)), "not correctly aligned (strideM)"
        b, h, s, d = out.shape
        read = out.as_strided(out.shape, (out.stride(0), out.stride(1), h * d, 1), out.storage_offset())
        side = lse[..., :s].contiguous()
        done = attention(self.problem, {"q": q, "k": k, "v": v, "dout": dout, "out": read, "lse": side})
        return [x.view(b, -1, h, x.shape[-1]).transpose(1, 2).to(q.dtype) for x in (done.dq, done.dk, done.dv)]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_efficient_adapter_gives_strides_as_they_are_read(layout, monkeypatch):
    from undertow.kernels.vendor import dense

    for lengths in ((33, 50), (1, 40), (40, 1)):
        problem = Problem.dense(2, *lengths, band=TOP_LEFT, **(SMALL | {"dtype": "bf16", "layout": layout}))
        monkeypatch.setattr(dense, "ATEN", Efficient(problem))
        check(PEERS["sdpa_efficient"], problem)


PACKED_BANDS = [Band(), CAUSAL, Band(7, 0), Band(3, 4)]
PACKED_LENGTHS = [((33, 0, 1, 20, 5, 40), (33, 7, 1, 50, 0, 17)), ((65, 3, 20), (65, 3, 20)), ((0, 4), (3, 0))]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("band", PACKED_BANDS, ids=str)
def test_varlen_adapter_closes_what_flash_leaves_open(band, gap, monkeypatch):
    from undertow.kernels.vendor import varlen

    for lengths in PACKED_LENGTHS:
        problem = Problem.packed(*lengths, band=band, **(SMALL | {"dtype": "bf16", "nheads_kv": 2}))
        monkeypatch.setattr(varlen, "ATEN", Flash2(problem))
        check(PEERS["aten_flash_varlen"], problem, gap=gap)


GPU_DENSE = {
    "sdpa_flash": [(65, 65, CAUSAL), (33, 50, Band()), (1, 40, Band())],
    "sdpa_cudnn": [(65, 65, CAUSAL), (33, 50, TOP_LEFT), (50, 33, TOP_LEFT), (33, 50, Band()), (1, 40, Band())],
    "sdpa_efficient": [(65, 65, CAUSAL), (33, 50, TOP_LEFT), (50, 33, TOP_LEFT), (33, 50, Band()), (1, 40, Band())],
    "sdpa_math": [(65, 65, CAUSAL), (33, 50, TOP_LEFT)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_DENSE)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_gpu_dense(name, layout, dtype):
    tried = 0
    for sq, sk, band in GPU_DENSE[name]:
        for heads, dims in [((4, 4), (32, 32)), ((4, 2), (64, 64)), ((2, 2), (40, 40)), ((2, 2), (192, 128)),
                            ((2, 1), (256, 256)), ((2, 2), (64, 128)), ((2, 2), (72, 40))]:  # fmt: skip
            fields = dict(zip(SMALL, (*heads, *dims, dtype), strict=True))
            problem = Problem.dense(2, sq, sk, band=band, layout=layout, **fields)
            if PEERS[name].unsupported(problem, H100) == ():
                check(PEERS[name], problem, device="cuda")
                tried += 1
    assert tried or dtype == "fp32"


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("band", PACKED_BANDS, ids=str)
def test_gpu_varlen(band, gap):
    for heads, dim in [((4, 4), 32), ((4, 2), 128), ((2, 1), 72), ((2, 2), 256)]:
        fields = dict(zip(SMALL, (*heads, dim, dim, "bf16"), strict=True))
        for lengths in PACKED_LENGTHS:
            problem = Problem.packed(*lengths, band=band, **fields)
            assert PEERS["aten_flash_varlen"].unsupported(problem, H100) == ()
            check(PEERS["aten_flash_varlen"], problem, gap=gap, device="cuda")


@pytest.mark.gpu
def test_gpu_varlen_rows_beyond_the_last_segment():
    problem = replace(Problem.packed((33, 20), band=CAUSAL, **(SMALL | {"dtype": "bf16"})), total_q=60, total_k=70)
    cu = torch.tensor([0, 33, 53], dtype=torch.int32, device="cuda")
    shape = {"q": 60, "dout": 60, "out": 60, "dq": 60, "k": 70, "v": 70, "dk": 70, "dv": 70}
    tensors = {n: torch.full((rows, 4, 32), NAN, dtype=torch.bfloat16, device="cuda") for n, rows in shape.items()}
    for name in ("q", "k", "v", "dout"):
        tensors[name][:53].normal_()
    tensors |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "lse": torch.full((4, 60), NAN, device="cuda")}
    PEERS["aten_flash_varlen"].forward(problem, None, tensors)
    assert (tensors["lse"][:, 53:] == -torch.inf).all()
    PEERS["aten_flash_varlen"].backward(problem, None, tensors, {})
    for name in ("out", "dq", "dk", "dv"):
        assert torch.isfinite(tensors[name]).all() and (tensors[name][53:] == 0).all()
