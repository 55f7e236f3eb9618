"""torch_tiled against the fp64 reference: gradients of every feature, through odd strides, gaps and poisoned memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from undertow.kernels.alloc import DTYPE, Fence, scratch
from undertow.kernels.torch_tiled import KERNEL
from undertow.kernels.torch_tiled.plan import forward_workspace
from undertow.layout import shapes
from undertow.problem import Band, Problem
from undertow.reference import attention, to_ht, to_thd
from undertow.target import TARGETS

CPU, H100 = TARGETS["cpu"], TARGETS["sm_90"]
CAUSAL = Band(None, 0)
INPUTS = ("q", "k", "v", "dout")
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 4e-4}  # relative Frobenius; 16 bits: one rounding at the store
NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiles this small gain nothing from a second thread, and wait for it where other work holds the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def odd_strides(shape, dtype, seed):
    """A NaN tensor of `shape` inside a bigger one, its dimensions in another order in memory; last stride 1."""
    order = torch.randperm(len(shape) - 1, generator=torch.Generator().manual_seed(seed)).tolist() + [len(shape) - 1]
    store = torch.full([shape[d] + 1 + i for i, d in enumerate(order)], NAN, dtype=dtype)
    inverse = [order.index(d) for d in range(len(shape))]
    return store.permute(inverse)[tuple(slice(1, 1 + n) for n in shape)]


def padded(problem, gap):
    """The same packed problem with `gap` rows before, between and behind its segments; (problem, cu_q, cu_k, used)."""
    cus = []
    for side in "qk":
        sizes = [s + gap for s in (problem.seqlens_q if side == "q" else problem.seqlens_k)]
        cus.append(torch.tensor([gap, *sizes], dtype=torch.int32).cumsum(0).int())
    roomy = replace(problem, total_q=int(cus[0][-1]) + gap, total_k=int(cus[1][-1]) + gap)
    used = [torch.tensor(s, dtype=torch.int32) for s in (problem.seqlens_q, problem.seqlens_k)]
    return roomy, {"cu_seqlens_q": cus[0], "cu_seqlens_k": cus[1], "seqused_q": used[0], "seqused_k": used[1]}


def live(problem, lengths, side):
    """Which rows of a packed tensor belong to a segment."""
    total = problem.total_q if side == "q" else problem.total_k
    rows = torch.zeros(total, dtype=torch.bool)
    starts, used = lengths[f"cu_seqlens_{side}"][:-1].tolist(), lengths[f"seqused_{side}"].tolist()
    for start, length in zip(starts, used, strict=True):
        rows[start : start + length] = True
    return rows


def make(problem, gap=0, seed=0):
    """(problem, tensors): random inputs, NaN between them, and NaN outputs."""
    lengths = {}
    if problem.is_packed:
        problem, lengths = padded(problem, gap)
    torch.manual_seed(seed)
    shape, dtype, tensors = shapes(problem), DTYPE[problem.dtype], dict(lengths)
    for n, name in enumerate((*INPUTS, "out", "dq", "dk", "dv")):
        tensors[name] = odd_strides(shape[name], dtype, seed + n)
        if name in INPUTS:
            tensors[name].copy_(torch.randn(shape[name]) * (1 + n / 4))
            if problem.is_packed:
                tensors[name][~live(problem, lengths, "k" if name in "kv" else "q")] = NAN
    tensors["lse"] = torch.full(shape["lse"], NAN)
    if problem.has_dlse:
        tensors["dlse"] = odd_strides((*shape["lse"], 1), torch.float32, seed)[..., 0].copy_(torch.randn(shape["lse"]))
        if problem.is_packed:
            tensors["dlse"][:, ~live(problem, lengths, "q")] = NAN
    if problem.has_sink:
        tensors["sink"], tensors["dsink"] = torch.randn(problem.nheads_q), torch.full((problem.nheads_q,), NAN)
    return problem, tensors


def unseen(problem, tensors):
    """Rows, [nheads_q, tokens], that see no key, or lie in no segment."""
    probe = replace(problem, has_sink=False, dtype="fp32")
    zeros = {n: torch.zeros_like(tensors[n], dtype=torch.float32) for n in INPUTS}
    zeros |= {n: x for n, x in tensors.items() if n.startswith("cu_")}
    return attention(probe, zeros, torch.float32).lse == -torch.inf


def run_forward(problem, tensors, config):
    KERNEL.forward(problem, config, tensors)


def run_backward(problem, tensors, config):
    fence = Fence(KERNEL.plan_workspace(problem, config), torch.device("cpu"))
    KERNEL.backward(problem, config, tensors, fence.tensors)
    fence.check()


def close(name, got, want, tolerance, dead=None):
    """Relative Frobenius error of a tensor that must be finite (but for -inf in both) and exactly 0 in `dead` rows."""
    got, want = got.double(), want.double()
    assert torch.equal(got == -torch.inf, want == -torch.inf), f"{name}: -inf in the wrong rows"
    got, want = got.masked_fill(got == -torch.inf, 0), want.masked_fill(want == -torch.inf, 0)
    assert torch.isfinite(got).all(), f"{name}: {int((~torch.isfinite(got)).sum())} values are not finite"
    if dead is not None:
        assert (got[dead] == 0).all(), f"{name}: rows that must be 0 are not"
    error = float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"


def check(problem, *, gap=0, seed=0, config=None, poison_unseen=True):
    """Forward, then backward from the kernel's own out and lse, both against the reference."""
    problem, tensors = make(problem, gap, seed)
    config = KERNEL.config(problem, CPU, "forward") if config is None else config
    tolerance = TOLERANCE[problem.dtype]
    run_forward(problem, tensors, config)
    want = attention(problem, {n: x for n, x in tensors.items() if n not in ("out", "lse")})
    close("out", to_thd(tensors["out"], problem.layout), want.out, tolerance, (want.out == 0).all(-1))
    close("lse", to_ht(tensors["lse"]), want.lse, 1e-5)
    want = attention(problem, {**tensors, "lse": None})
    if poison_unseen:
        hidden = unseen(problem, tensors)
        by_row = to_ht(tensors["lse"]).masked_fill(hidden, NAN)
        tensors["lse"].copy_(by_row.view(by_row.shape[0], -1, problem.max_seqlen_q).transpose(0, 1)
                             if not problem.is_packed else by_row)  # fmt: skip
        to_thd(tensors["out"], problem.layout).transpose(0, 1)[hidden] = NAN
    run_backward(problem, tensors, config)
    for name, by in {"dq": want.out, "dk": want.dv, "dv": want.dv}.items():
        dead = (by == 0).all(-1)
        close(name, to_thd(tensors[name], problem.layout), getattr(want, name), tolerance, dead)
    if problem.has_sink:
        close("dsink", tensors["dsink"], want.dsink, 1e-5)
    return problem, tensors


SMALL = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 24, "head_dim_v": 16, "dtype": "fp32"}
BANDS = {
    "full": Band(),
    "causal": Band(None, 0),
    "causal_top_left": Band(None, 0, "top_left"),
    "last_8": Band(7, 0),
    "two_sided": Band(3, 4),
    "right_only_top_left": Band(None, 5, "top_left"),
    "future": Band(-2, 9),
}
TILES = [(16, 32), (7, 5), (64, 128)]


def small_tiles(block_m, block_n, heads=1, workers=1):
    return replace(KERNEL.config(Problem.dense(1, 1, 1, **SMALL), CPU, "backward"), block_m=block_m, block_n=block_n,
                   switches=(("heads", heads), ("workers", workers)))  # fmt: skip


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_dense_layouts_and_bands(layout, band):
    for (sq, sk), tiles in zip([(33, 33), (17, 40), (40, 17)], TILES, strict=True):
        problem = Problem.dense(2, sq, sk, band=band, layout=layout, **SMALL)
        check(problem, config=small_tiles(*tiles), seed=sq)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("gap", [0, 3])
def test_packed_segments_with_gaps(gap, band):
    seqlens_q, seqlens_k = (33, 0, 1, 20, 5, 40), (33, 7, 1, 50, 0, 17)
    for tiles, heads in zip(TILES, (2, 1, 2), strict=True):
        problem = Problem.packed(seqlens_q, seqlens_k, band=band, **SMALL)
        check(problem, gap=gap, config=small_tiles(*tiles, heads))


FEATURES = {
    "softcap": {"softcap": 2.0},
    "sink": {"has_sink": True},
    "dlse": {"has_dlse": True},
    "scale": {"softmax_scale": 0.3},
    "all": {"softcap": 3.0, "has_sink": True, "has_dlse": True, "softmax_scale": 0.5},
}


@pytest.mark.parametrize("fields", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_features(dtype, fields):
    fields = SMALL | {"dtype": dtype, "band": Band(9, 0)} | fields
    check(Problem.packed((33, 0, 1, 40), (20, 4, 1, 52), **fields), gap=2, config=small_tiles(16, 16, 2))
    check(Problem.dense(2, 19, 12, layout="sbhd", **fields), config=small_tiles(8, 8, 1))


@pytest.mark.parametrize("dims", [(40, 72), (72, 40), (192, 128), (64, 128), (8, 256), (256, 8)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 1)], ids=str)
def test_head_dims_and_groups(dims, heads):
    fields = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "nheads_q": heads[0], "nheads_kv": heads[1]}
    check(Problem.packed((65, 3), band=Band(None, 0), dtype="fp32", **fields))


def test_default_tiles_span_several_tiles():
    fields = SMALL | {"nheads_kv": 4}
    check(Problem.dense(1, 600, 1100, band=Band(700, 3), **fields))
    check(Problem.dense(1, 3, 1500, **SMALL))


FIELDS = SMALL | {"softcap": 3.0, "has_sink": True, "has_dlse": True}


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_threads_share_the_steps(workers):
    threads = torch.get_num_threads()
    for problem in (Problem.packed((33, 0, 1, 20), (33, 7, 1, 50), band=Band(9, 0), **FIELDS),
                    Problem.dense(2, 40, 17, band=CAUSAL, **FIELDS)):  # fmt: skip
        check(problem, gap=2, config=small_tiles(16, 16, 1, workers))
    assert torch.get_num_threads() == threads


def test_any_number_of_threads_gives_the_same_bits():
    problem = Problem.packed((130, 70, 9), band=CAUSAL, **(FIELDS | {"dtype": "bf16"}))
    runs = [check(problem, config=small_tiles(32, 64, 1, workers))[1] for workers in (1, 2, 4)]
    for name in ("out", "lse", "dq", "dk", "dv", "dsink"):
        assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:])


def test_threads_write_inference_tensors_and_pass_errors_on():
    config = small_tiles(16, 16, 1, 2)
    with torch.inference_mode():
        check(Problem.dense(1, 40, 40, band=CAUSAL, **SMALL), config=config)
    problem, tensors = make(Problem.dense(1, 40, 40, **SMALL))
    with pytest.raises(RuntimeError):
        run_forward(problem, tensors | {"v": tensors["v"][..., :8]}, config)
    assert torch.get_num_threads() == 1


def test_threads_where_the_work_fills_them():
    two = replace(CPU, num_cus=2)
    large = {"head_dim_qk": 128, "head_dim_v": 128, "dtype": "fp32"}

    def chosen(problem, target=two):
        config = KERNEL.config(problem, target, "backward")
        return config.switch("workers"), config.switch("heads")

    assert chosen(Problem.dense(1, 2048, 2048, nheads_q=4, nheads_kv=4, **large)) == (2, 1)
    assert chosen(Problem.dense(1, 4096, 4096, nheads_q=1, nheads_kv=1, **large)) == (1, 1)  # one pair, two threads
    assert chosen(Problem.dense(1, 2048, 2048, nheads_q=3, nheads_kv=3, **large))[0] == 2  # 3 of 4 turns filled
    assert chosen(Problem.dense(1, 128, 128, nheads_q=4, nheads_kv=4, **large))[0] == 1  # too little work
    assert chosen(Problem.dense(1, 2048, 2048, nheads_q=4, nheads_kv=4, **large), H100)[0] == 1


@pytest.mark.parametrize("has_dlse", [False, True])
def test_given_delta_replaces_out(has_dlse):
    problem = Problem.packed((33, 12), (20, 30), band=Band(None, 0), has_dlse=has_dlse, has_delta=True, **SMALL)
    problem, tensors = make(problem, gap=2)
    config = small_tiles(16, 16)
    run_forward(problem, tensors, config)
    want = attention(problem, {**tensors, "lse": None})
    rowsum = (tensors["dout"].double() * tensors["out"].double()).sum(-1).T.float()
    tensors["delta"] = rowsum.masked_fill(unseen(problem, tensors), NAN)
    tensors["out"] = torch.full_like(tensors["out"], NAN)
    run_backward(problem, tensors, config)
    for name in ("dq", "dk", "dv"):
        close(name, tensors[name], getattr(want, name), 1e-5)


def test_dense_lengths_may_be_shorter_than_the_tensor():
    problem, tensors = make(Problem.dense(2, 20, 24, band=Band(None, 0), **SMALL))
    used = {f"seqused_{side}": torch.tensor(n, dtype=torch.int32) for side, n in {"q": [20, 7], "k": [3, 24]}.items()}
    for name in (*INPUTS, "out"):
        side = "seqused_k" if name in "kv" else "seqused_q"
        for b, length in enumerate(used[side].tolist()):
            tensors[name][b, length:] = NAN
    run_forward(problem, tensors | used, small_tiles(16, 16))
    run_backward(problem, tensors | used, small_tiles(16, 16))
    for b, (sq, sk) in enumerate([(20, 3), (7, 24)]):
        cut = {n: tensors[n][b : b + 1, : sk if n in "kv" else sq] for n in INPUTS}
        want = attention(Problem.dense(1, sq, sk, band=problem.band, **SMALL), cut)
        for name, length in {"dq": sq, "out": sq, "dk": sk, "dv": sk}.items():
            close(name, tensors[name][b, :length], getattr(want, name), 1e-5)
            assert (tensors[name][b, length:] == 0).all()


def test_scores_that_overflow_exp_where_hidden():
    """Scores above the diagonal are 4000 greater than any visible one: exp of them is inf and must not leak."""
    problem, tensors = make(Problem.dense(1, 64, 64, band=Band(None, 0), **SMALL))
    tensors["k"] *= torch.linspace(1, 400, 64)[None, :, None, None]
    config = small_tiles(16, 32)
    run_forward(problem, tensors, config)
    want = attention(problem, {n: tensors[n] for n in INPUTS})
    run_backward(problem, tensors, config)
    for name in ("out", "dq", "dk", "dv"):
        close(name, to_thd(tensors[name], "bshd"), getattr(want, name), 1e-3)


def test_two_runs_agree_bit_for_bit():
    problem = Problem.packed((130, 70), band=Band(None, 0), **(SMALL | {"dtype": "bf16"}))
    (_, first), (_, second) = check(problem), check(problem)
    assert all(torch.equal(first[name], second[name]) for name in ("dq", "dk", "dv"))


def test_ambient_autocast_precision_and_grad_mode_change_nothing():
    problem = Problem.dense(1, 40, 40, band=Band(None, 0), **SMALL)
    _, plain = check(problem)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            problem, tensors = make(problem)
            config = KERNEL.config(problem, CPU, "backward")
            run_forward(problem, tensors, config)
            run_backward(problem, tensors, config)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(plain[name], tensors[name]) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("backend", ["", ".mkldnn.matmul", ".cuda.matmul"])
def test_a_caller_may_set_the_precision_of_one_backend(backend):
    """torch then refuses to name one precision for all, in that process for good: hence a process of its own."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from test_torch_tiled import CAUSAL, SMALL, Problem, check
torch.backends{backend}.fp32_precision = "tf32"
check(Problem.dense(1, 40, 40, band=CAUSAL, **SMALL))
assert torch.backends{backend}.fp32_precision == "tf32"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_keys_at_all_and_no_queries_at_all():
    for lengths in (((5, 3), (0, 0)), ((0, 0), (5, 3)), ((0,), (0,))):
        check(Problem.packed(*lengths, has_sink=True, has_dlse=True, **SMALL), gap=1)


def test_workspace_grows_linearly_and_the_plan_is_all_there_is():
    problem = Problem.dense(1, 4096, 4096, **SMALL)
    lengths = [Problem.dense(1, n, n, **SMALL) for n in (4096, 8192, 16384)]
    sizes = [KERNEL.plan_workspace(p, KERNEL.config(p, CPU, "backward")).nbytes for p in lengths]
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 4096
    assert forward_workspace(problem, KERNEL.config(problem, CPU, "forward")).nbytes < sizes[0]
    assert scratch(KERNEL.plan_workspace(problem, KERNEL.config(problem, CPU, "backward")), torch.device("cpu"))


def test_import_needs_no_torch():
    code = "import sys, undertow.kernels.torch_tiled as m; assert m.KERNEL.name; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_has_no_limits():
    problem = Problem.packed((5, 0), softcap=1.0, has_sink=True, has_dlse=True, deterministic=True, **SMALL)
    for which in ("forward", "backward"):
        assert all(KERNEL.unsupported(problem, target, which) == () for target in TARGETS.values())
