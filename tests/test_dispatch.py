"""Dispatch: by records, never by hope; a vendor that is faster is chosen; a named kernel never falls back."""

import json
from importlib.resources import files

import pytest

import undertow.kernels.hopper
from undertow import dispatch
from undertow.problem import Band, Problem
from undertow.target import TARGETS

CAUSAL = Band(None, 0)
SM90 = TARGETS["sm_90"]


def problem(**fields):
    base = {"nheads_q": 16, "nheads_kv": 16, "head_dim_qk": 128, "head_dim_v": 128, "band": CAUSAL}
    return Problem.dense(2, 4096, 4096, **(base | fields))


def entry(ms, **fields):
    key = {
        "head_dim_qk": 128, "head_dim_v": 128, "dtype": "bf16", "layout": "bshd", "deterministic": False,
        "max_seqlen_q": 4096, "max_seqlen_k": 4096, "left": None, "right": 0, "group": 1,
    }  # fmt: skip
    return {"arch": "sm_90", "pass": "backward", "problem": key | fields, "ms": ms}


@pytest.fixture
def measured(monkeypatch):
    def use(*entries, hopper="not installed"):
        monkeypatch.setattr(dispatch, "records", lambda: entries)
        monkeypatch.setattr(undertow.kernels.hopper, "_missing", lambda problem: hopper)
        dispatch.select.cache_clear()

    yield use
    monkeypatch.undo()
    dispatch.select.cache_clear()


def chosen(p, target=SM90):
    return dispatch.select(p, target).name


def test_nothing_measured_takes_ours(measured):
    """The Hopper kernels where they can be had, the portable ones where not, or where they have no softcap."""
    measured()
    assert chosen(problem()) == "triton"
    measured(hopper="")
    assert chosen(problem()) == "hopper"
    assert chosen(problem(softcap=30.0)) == "triton"


@pytest.mark.parametrize(
    ("ours", "vendor", "winner"), [(1.0, 1.2, "triton"), (1.0, 1.02, "sdpa_flash"), (1.2, 1.0, "sdpa_flash")]
)
def test_ours_must_win_by_three_percent(measured, ours, vendor, winner):
    measured(entry({"triton": ours, "sdpa_flash": vendor}))
    assert chosen(problem()) == winner


def test_a_faster_vendor_that_cannot_run_the_problem_is_not_chosen(measured):
    measured(entry({"triton": 2.0, "sdpa_flash": 1.0}, left=64))
    assert chosen(problem(band=Band(64, 0))) == "triton"


def test_a_record_far_away_decides_nothing(measured):
    measured(entry({"triton": 2.0, "sdpa_flash": 1.0}, head_dim_qk=16, head_dim_v=16))
    assert chosen(problem()) == "triton"
    measured(entry({"triton": 2.0, "sdpa_flash": 1.0}, dtype="fp32"))
    assert chosen(problem()) == "triton"


def test_the_nearest_record_decides(measured):
    measured(
        entry({"triton": 2.0, "sdpa_flash": 1.0}),
        entry({"triton": 1.0, "sdpa_flash": 2.0}, head_dim_qk=64, head_dim_v=64),
    )
    assert chosen(problem()) == "sdpa_flash"
    assert chosen(problem(head_dim_qk=64, head_dim_v=64)) == "triton"


def test_a_kernel_without_a_time_is_not_preferred(measured):
    measured(entry({"torch_tiled": 9.0}))
    assert chosen(problem()) == "torch_tiled"


def test_a_named_kernel_never_falls_back():
    with pytest.raises(NotImplementedError, match=r"(?s)'sdpa_flash' cannot run.*head_dim_qk 192 != head_dim_v 128"):
        dispatch.select(problem(head_dim_qk=192), SM90, "backward", "sdpa_flash")
    with pytest.raises(ValueError, match="kernel is 'nonsense', wanted one of .*triton"):
        dispatch.select(problem(), SM90, "backward", "nonsense")


def test_no_kernel_says_why_of_each(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", tuple(k for k in dispatch.KERNELS if k.vendor))
    with pytest.raises(NotImplementedError) as caught:
        dispatch.select.__wrapped__(problem(softcap=3.0, head_dim_qk=192), SM90)
    assert all(f"  {k.name}: " in str(caught.value) for k in dispatch.KERNELS)


def test_explain_orders_and_prices():
    verdicts = dispatch.explain(problem(head_dim_qk=192), SM90)
    assert [v.status for v in verdicts] == sorted(
        (v.status for v in verdicts), key=("chosen", "can run", "cannot run").index
    )
    by_name = {v.kernel: v for v in verdicts}
    assert by_name["triton"].tax == pytest.approx(2304 / 1664)
    assert all(v.reasons for v in verdicts)
    wide = {v.kernel: v.tax for v in dispatch.explain(problem(head_dim_qk=256, head_dim_v=256), SM90)}
    assert wide["triton"] == wide["hopper"] == pytest.approx(8 / 5)  # dv and dk apart: S three times, dP twice


@pytest.mark.parametrize("which", ["backward", "forward"])
def test_the_shipped_run_of_a_shape_decides_for_it(which):
    entries = json.loads((files("undertow") / "measured" / "h200.json").read_text())["dispatch"]
    found = next(e["ms"] for e in entries if (e["pass"], e["shape"]) == (which, "S1"))
    dims = {"nheads_q": 16, "nheads_kv": 16, "head_dim_qk": 192, "head_dim_v": 128}
    assert dispatch._times(Problem.dense(2, 8192, 8192, band=CAUSAL, **dims), SM90, which) == found


def test_every_shipped_record_is_of_a_kernel_we_have():
    names = {k.name for k in dispatch.KERNELS}
    for found in dispatch.records():
        assert found["ms"] and all(ms > 0 for ms in found["ms"].values())
        assert names & set(found["ms"])


def test_what_runs_only_by_name_is_never_chosen(measured):
    measured(entry({"flydsl_bf16_dq": 0.1, "triton": 5.0}) | {"arch": "gfx942"})
    p, target = problem(), TARGETS["gfx942"]
    assert chosen(p, target) == "triton"
    assert dispatch.select(p, target, "backward", "flydsl_bf16_dq").name == "flydsl_bf16_dq"
    verdict = next(v for v in dispatch.explain(p, target) if v.kernel == "flydsl_bf16_dq")
    assert verdict.status == "can run" and verdict.reasons == ("only as kernel='flydsl_bf16_dq'",)


def with_aiter(monkeypatch):
    from undertow.kernels.vendor import aiter

    monkeypatch.setattr(aiter, "_importable", lambda: True)
    dispatch.select.cache_clear()


AITER = [
    ("gfx942", {}, "aiter_asm"),
    ("gfx942", {"head_dim_qk": 192}, "triton"),
    ("gfx942", {"head_dim_qk": 192, "head_dim_v": 192, "nheads_kv": 4}, "aiter_asm"),
    ("gfx950", {"head_dim_qk": 192}, "aiter_asm"),
    ("gfx950", {"head_dim_qk": 192, "head_dim_v": 192}, "triton"),
    ("gfx942", {"band": Band(64, 0)}, "aiter_asm"),
    ("gfx950", {"band": Band(64, 0)}, "triton"),
    ("gfx942", {"deterministic": True}, "triton"),
    ("gfx942", {"softcap": 30.0}, "triton"),
    ("gfx942", {"has_sink": True}, "triton"),
]


@pytest.mark.parametrize(("arch", "fields", "winner"), AITER)
def test_on_amd_the_vendors_assembly_goes_first_where_it_is_native(monkeypatch, measured, arch, fields, winner):
    measured()
    with_aiter(monkeypatch)
    assert chosen(problem(**fields), TARGETS[arch]) == winner


def test_packed_mla_on_gfx950_says_why_no_assembly(monkeypatch, measured):
    measured()
    with_aiter(monkeypatch)
    packed = Problem.packed((512, 64), nheads_q=4, nheads_kv=4, head_dim_qk=192, head_dim_v=128, band=CAUSAL)
    verdicts = {v.kernel: v for v in dispatch.explain(packed, TARGETS["gfx950"])}
    assert verdicts["triton"].status == "chosen" and verdicts["flydsl"].status == "can run"
    assert "no packed 192/128" in verdicts["aiter_asm"].reasons[0] and "flydsl" in verdicts["aiter_asm"].fixes[0]
    assert verdicts["aiter_ck"].tax == pytest.approx(2560 / 1664)
    assert not dispatch.get("aiter_flydsl").unsupported(packed, TARGETS["gfx942"])


def test_without_aiter_the_limit_names_the_package(measured):
    measured()
    verdict = next(v for v in dispatch.explain(problem(), TARGETS["gfx942"]) if v.kernel == "aiter_asm")
    assert verdict.status == "cannot run" and "not importable" in verdict.reasons[0] and "amd-aiter" in verdict.fixes[0]
