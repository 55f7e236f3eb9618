"""The gates of verify: each planted fault turns them red and says where; a right kernel stays green."""

from dataclasses import replace

import pytest
import torch
from support import CAUSAL, DEVICE, OURS, call, gates, make, prove, red

from undertow import reference
from undertow.instruments import inputs
from undertow.instruments.verify import compare, verify
from undertow.instruments.workloads import Workload, verify_workloads
from undertow.kernels.alloc import DTYPE
from undertow.problem import Band, Problem
from undertow.target import TARGETS

BASE = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "band": Band(20, 0)}
LENGTHS = (50, 1, 32, 0, 70)  # rows 0-49, 50, 51-82, 83-152


def emulated(problem, tensors, **given):
    """A right kernel of the problem's dtype: rounded operands, fp32 sums, D from the out it returns."""
    cast = DTYPE[problem.dtype]

    def stages(more):
        return reference.attention(problem, tensors | more, torch.float32, cast)

    got = {"out": stages(given).out.to(cast)}
    found = stages({"out": got["out"]} | given)
    got |= {n: getattr(found, n).to(cast) for n in ("dq", "dk", "dv")} | {"lse": found.lse}
    return got | ({} if found.dsink is None else {"dsink": found.dsink})


@pytest.fixture(scope="module")
def right():
    problem = Problem.packed(LENGTHS, **BASE)
    tensors = make(problem)
    return problem, tensors, emulated(problem, tensors)


def judged(right, **changed):
    """Names of the tensors whose gate is red once some results are replaced, and what they say."""
    problem, tensors, got = right
    results = compare(problem, tensors, got | changed)
    return {r.tensor: r.where or f"{r.rows} rows" for r in results if not r.ok}


def test_a_right_kernel_is_green(right):
    assert judged(right) == {}


@pytest.mark.parametrize("dtype, outliers", [("bf16", False), ("bf16", True), ("fp16", True), ("fp32", False)])
def test_right_kernels_are_green_on_outlier_rows(dtype, outliers):
    """The row bound must not fail rows that cancel: outlier columns make them by the dozen."""
    problem = Problem.packed(LENGTHS, dtype=dtype, **(BASE | {"band": CAUSAL}))
    prove(problem, "torch_tiled", outliers=outliers)
    if dtype == "fp32":
        return
    tensors = make(problem, outliers=outliers, seed=1)
    gates(problem, tensors, emulated(problem, tensors))


def wrong(right, **fields):
    """Results of the right kernel for another problem, such as a window one wider."""
    problem, tensors, _ = right
    return emulated(replace(problem, **fields), tensors)


@pytest.mark.parametrize("band", [Band(21, 0), Band(19, 0), Band(20, 1)], ids=str)
def test_a_window_off_by_one_is_red(right, band):
    for name in ("out", "dq", "dk", "dv"):
        found = judged(right, **{name: wrong(right, band=band)[name]})
        assert name in found, f"{name} of {band} passed"


def test_a_mask_of_the_wrong_alignment_is_red():
    """Lengths differ, as they must for the two to differ."""
    problem = Problem.packed((40, 9), (56, 9), **(BASE | {"band": CAUSAL}))
    tensors = make(problem)
    case = problem, tensors, emulated(problem, tensors)
    assert judged(case) == {}
    found = judged(case, **wrong(case, band=Band(None, 0, "top_left")))
    assert set(found) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("factor", [1.1, 0.9])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_ten_percent_error_of_scale_is_red(right, name, factor):
    """Cosine is 1 here."""
    _, _, got = right
    found = judged(right, **{name: (got[name].float() * factor).to(got[name].dtype)})
    assert name in found and set(found) <= {name, "dq", "dk"}  # D follows the kernel's own out


@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_a_softmax_scale_off_by_ten_percent_is_red(right, factor):
    found = judged(right, **wrong(right, softmax_scale=factor * 64**-0.5))
    assert set(found) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("row", [0, 25, 50, 152])
def test_one_lost_row_is_red_and_named(right, name, row):
    """Row 50 is a segment of one token: its dq and dk are 0, which is right."""
    _, _, got = right
    lost = got[name].clone()
    lost[row, 1] = 0
    found = judged(right, **{name: lost})
    if torch.equal(lost, got[name]):
        assert found == {}
    elif got[name][row, 1].norm() > 1e-2 * got[name].norm(dim=-1).max():
        assert f"row {row}, head 1" == found[name]


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_the_last_rows_of_a_tile_lost_are_red(right, name):
    _, _, got = right
    lost = got[name].clone()
    lost[45:50] = 0
    assert judged(right, **{name: lost})[name].startswith("row 45, head 0")


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_nan_and_inf_are_red(right, name):
    _, _, got = right
    for value in (float("nan"), float("inf")):
        broken = got[name].clone()
        broken[100, 1, 3] = value
        assert name in judged(right, **{name: broken})


def test_lse_of_swapped_strides_is_red(right):
    """(rows, heads) memory read as (heads, rows): in the gate of LSE, and in the gradients computed with it."""
    problem, tensors, got = right
    swapped = got["lse"].t().reshape(got["lse"].shape)
    assert "lse" in judged(right, lse=swapped)
    used = emulated(problem, tensors, lse=swapped)
    found = judged(right, **{n: used[n] for n in ("dq", "dk", "dv")})
    assert set(found) == {"dq", "dk", "dv"}


def test_delta_of_the_wrong_head_or_stride_is_red(right):
    """D = rowsum(dO * O) of the neighbour's out: dQ and dK are wrong, dV does not use D."""
    problem, tensors, got = right
    for out in (got["out"].roll(1, 1), got["out"].transpose(0, 1).reshape(got["out"].shape)):
        used = emulated(problem, tensors, out=out)
        found = judged(right, **{n: used[n] for n in ("dq", "dk", "dv")})
        assert set(found) == {"dq", "dk"}


def test_a_wrong_d_in_the_scratch_is_red():
    """Of the wrong head, without dLSE, one row lost, NaN; what rows that see no key hold is nobody's business."""
    problem = Problem.packed((6, 70, 9), (4, 70, 9), has_dlse=True, **BASE)
    tensors = make(problem)
    got = emulated(problem, tensors)
    exact = reference.attention(problem, tensors | {"out": got["out"]}).delta
    case, right_d = (problem, tensors, got), exact.float()
    assert judged(case, delta=right_d) == {}
    dead, lost, broken = right_d.clone(), right_d.clone(), right_d.clone()
    dead[:, :2], lost[2, 40], broken[3, 80] = float("nan"), 0.0, float("nan")
    assert judged(case, delta=dead) == {}
    assert judged(case, delta=lost) == {"delta": "head 2, row 40"}
    assert judged(case, delta=broken) == {"delta": "head 3, row 80"}
    for wrong_d in (right_d.roll(1, 0), right_d + tensors["dlse"], right_d * 1.001):
        assert set(judged(case, delta=wrong_d)) == {"delta"}


@pytest.mark.parametrize("kernel", OURS)
def test_d_is_read_from_the_scratch_of_the_call(kernel):
    workload = Workload("test", "", Problem.packed((20, 9), has_dlse=True, **BASE))
    assert [p.ok for p in verify(workload, DEVICE, kernel) if p.tensor == "delta"] == [True]


def test_a_kernel_whose_d_is_wrong_is_red(monkeypatch):
    from undertow.kernels import watch

    honest = watch.used
    monkeypatch.setattr(watch, "used", lambda scratch: honest(scratch | {"delta": scratch["delta"].roll(1, 0)}))
    workload = Workload("test", "", Problem.packed((20, 9), **BASE))
    assert [p.tensor for p in verify(workload, DEVICE, "torch_tiled") if not p.ok] == ["delta"]


def test_geometry_that_differs_from_the_config_is_red(monkeypatch):
    """The gate's wiring; what it compares is in test_compiled_geometry."""
    from undertow.instruments import verify as module
    from undertow.kernels.spec import Built
    from undertow.kernels.torch_tiled import KERNEL

    def other(problem, config, launches):
        return Built({"dq": {"num_warps": 4}}, ("dq has num_warps 4, wanted 8",))

    gpu = replace(TARGETS["sm_90"], num_cus=2)
    monkeypatch.setattr(module, "detect", lambda device: gpu)
    monkeypatch.setattr(module.dispatch, "select", lambda *args: replace(KERNEL, built=other))
    done = module.prove(Workload("test", "", Problem.packed((20, 9), **BASE)), DEVICE, "torch_tiled")
    assert not done.ok and done.compiled == {"dq": {"num_warps": 4}}
    assert "geometry dq has num_warps 4, wanted 8" in done.line()


def test_dq_right_only_for_the_first_segment_is_red(right):
    """B31: two kernels that disagree where the next segment starts."""
    _, _, got = right
    shifted = got["dq"].clone()
    shifted[51:] = got["dq"][51:].roll(8, 0)
    assert int(judged(right, dq=shifted)["dq"].split()[1].strip(",")) >= 51


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_a_gradient_of_the_wrong_head_is_red(right, name):
    _, _, got = right
    assert name in judged(right, **{name: got[name].roll(1, 1)})


def test_kv_head_off_by_one_for_some_query_heads_is_red(right):
    """h % nheads_kv in place of h // group."""
    problem, tensors, _ = right
    order = [0, 2, 1, 3]
    mixed = tensors | {n: tensors[n][:, order] for n in ("q", "dout")}
    used = emulated(problem, mixed)
    used = {n: used[n][:, order] if n in ("dq", "out") else used[n] for n in ("out", "dq", "dk", "dv")}
    assert set(judged(right, **used)) >= {"out", "dq", "dk", "dv"}


def test_a_group_summed_in_16_bits_is_red():
    """MQA of 32 query heads, dO of one sign: 32 roundings instead of one."""
    problem = Problem.packed((70,), nheads_q=32, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=CAUSAL)
    tensors = make(problem)
    tensors["dout"] = tensors["dout"].abs() * 10
    got = emulated(problem, tensors)
    case = problem, tensors, got
    assert judged(case) == {}
    alone = replace(problem, nheads_kv=32)
    each = reference.attention(alone, tensors | {n: tensors[n].expand(-1, 32, -1) for n in "kv"}, torch.float32)
    total = torch.zeros_like(got["dv"])
    for h in range(32):
        total = (total + each.dv[:, h : h + 1].bfloat16()).bfloat16()
    assert "dv" in judged(case, dv=total)


@pytest.mark.parametrize("columns", [slice(48, 64), slice(0, 8)])
@pytest.mark.parametrize("name", ["dq", "dv"])
def test_a_wrong_column_block_is_red(right, name, columns):
    """B39, B41: few columns, so the cosine of the whole tensor hardly moves."""
    _, _, got = right
    broken = got[name].clone()
    broken[..., columns] = broken[..., columns].roll(1, -1)
    assert name in judged(right, **{name: broken})


def test_rows_that_must_be_zero_must_be_exactly_zero():
    problem = Problem.packed((6,), (4,), **(BASE | {"band": CAUSAL}))
    tensors = make(problem)
    case = problem, tensors, emulated(problem, tensors)
    assert judged(case) == {}
    for name in ("out", "dq"):
        broken = case[2][name].clone()
        broken[1, 3, 0] = 1e-30
        assert judged(case, **{name: broken})[name] == "row 1, head 3"
    lse = case[2]["lse"].clone()
    lse[3, 1] = 0.0
    assert "lse" in judged(case, lse=lse)


def test_a_wrong_dsink_is_red():
    problem = Problem.packed((60, 9), has_sink=True, **BASE)
    tensors = make(problem)
    case = problem, tensors, emulated(problem, tensors)
    assert judged(case) == {}
    assert "dsink" in judged(case, dsink=case[2]["dsink"].roll(1))
    assert "dsink" in judged(case, dsink=case[2]["dsink"] * 1.01)


def test_tf32_in_fp32_is_red():
    """B50: ten bits of mantissa in the operands."""
    problem = Problem.packed((64, 30), dtype="fp32", **BASE)
    tensors = make(problem)
    case = problem, tensors, call(problem, tensors, "torch_tiled")
    assert judged(case) == {}

    def short(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    rounded = tensors | {n: short(tensors[n]) for n in ("q", "k", "v", "dout")}
    used = call(problem, rounded, "torch_tiled")
    assert {"dq", "dk", "dv"} <= set(judged(case, **{n: used[n] for n in ("dq", "dk", "dv")}))


def test_a_deterministic_kernel_that_is_not_is_red(monkeypatch):
    """verify runs a deterministic problem three times and compares bits."""
    from undertow.instruments import verify as module

    runs = iter(range(99))
    honest = module.run

    def jitter(*args):
        got = honest(*args)
        if next(runs) == 2:
            got["dq"][0, 0, 0] += got["dq"].abs().max() * 2**-8
        return got

    monkeypatch.setattr(module, "run", jitter)
    workload = Workload("test", "", Problem.packed((40, 9), deterministic=True, **BASE))
    assert red(verify(workload, "cpu", "torch_tiled")) and red(verify(workload, "cpu", "torch_tiled")) == []


# ---- the workloads themselves


WORKLOADS = {w.name: w for w in verify_workloads()}


QUICK = ("mla-packed", "cross", "padded", "window-packed", "top-left", "sink-dlse", "outliers", "d72-72", "d64-128")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS if n not in QUICK)]
)
def test_workloads_are_green(name):
    """What `undertow verify` proves on a CPU, at its own sizes."""
    workload = WORKLOADS[name]
    prove(workload.problem, "torch_tiled", gap=workload.gap, outliers=workload.outliers)


def test_workloads_cover_every_row_of_the_semantics():
    """House rule 30: lengths off the tile, length 1, empty, queries longer than keys, GQA, unequal dims."""
    problems = [w.problem for w in WORKLOADS.values()]
    lengths = [s for p in problems for s in p.segments]
    assert any(q % 16 for q, _ in lengths) and (1, 1) in lengths and any(q == 0 for q, _ in lengths)
    assert any(q > k > 0 for q, k in lengths) and any(q < k for q, k in lengths)
    assert {p.layout for p in problems} == {"bshd", "sbhd", "bhsd", "thd"}
    assert {p.dtype for p in problems} == {"bf16", "fp16", "fp32"}
    assert any(p.head_dim_qk > p.head_dim_v for p in problems) and any(p.head_dim_qk < p.head_dim_v for p in problems)
    for field in ("softcap", "has_sink", "has_dlse", "deterministic"):
        assert any(getattr(p, field) for p in problems), field
    assert any(p.band.align == "top_left" for p in problems) and any(p.band.left for p in problems)
    assert any(w.gap for w in WORKLOADS.values()) and any(w.outliers for w in WORKLOADS.values())


def test_inputs_are_seeded_and_differ_per_head_and_row():
    problem = Problem.packed((20, 5), **BASE)
    first, again, other = inputs.make(problem), inputs.make(problem), inputs.make(problem, seed=1)
    assert torch.equal(first["q"], again["q"]) and not torch.equal(first["q"], other["q"])
    rows = first["q"].reshape(-1, 64)
    assert len({tuple(r.tolist()) for r in rows}) == len(rows)
