"""Our Triton kernels for gfx942 and gfx950 as machine code, every tensor through the gates of verify, no finding."""

import numpy as np
import pytest
from kernels import add_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from undertow.instruments.simulate import parse_argument, simulate, simulate_file
from undertow.problem import Band, Problem
from undertow.simulator import Options

CAUSAL = Band(None, 0)
DOCS = ((40, 1, 0, 33), (57, 40, 9, 33))


def packed(lengths=DOCS, heads=(2, 1), **fields):
    return Problem.packed(*lengths, nheads_q=heads[0], nheads_kv=heads[1], **{"band": CAUSAL} | fields)


def dense(sq=40, sk=40, heads=(2, 2), **fields):
    return Problem.dense(1, sq, sk, nheads_q=heads[0], nheads_kv=heads[1], **{"band": CAUSAL} | fields)


def dims(qk, v=None):
    return {"head_dim_qk": qk, "head_dim_v": v or qk}


PROBLEMS = {
    "64 packed gqa, empty segment": packed(**dims(64)),
    "64 window": dense(70, 70, band=Band(17, 0), **dims(64)),
    "64 two-sided window, packed": packed(band=Band(9, 6), **dims(64)),
    "64 bottom-right, more keys": dense(37, 70, heads=(4, 1), **dims(64)),
    "64 bottom-right, more queries": dense(70, 37, **dims(64)),
    "64 full bhsd": dense(33, 65, band=Band(), layout="bhsd", **dims(64)),
    "64 deterministic": packed(deterministic=True, **dims(64)),
    "64 sink": dense(50, 50, has_sink=True, **dims(64)),
    "72": dense(45, 45, **dims(72)),
    "128 gqa sbhd": dense(65, 65, heads=(4, 2), layout="sbhd", **dims(128)),
    "192/128 packed": packed(((70, 37), (90, 77)), **dims(192, 128)),
    "192/128 deterministic fp16": dense(40, 60, heads=(1, 1), dtype="fp16", deterministic=True, **dims(192, 128)),
}
QUICK = (
    ("64 packed gqa, empty segment", "gfx942"),
    ("64 packed gqa, empty segment", "gfx950"),
    ("192/128 packed", "gfx942"),
)


def passes(result):
    findings = [f"{stage}: {finding}" for stage, report in result.reports for finding in report.errors]
    assert not findings, findings[:5]
    assert all(p.ok for p in result.parity), result.parity
    assert {p.tensor for p in result.parity} >= {"lse", "out", "dq", "dk", "dv"}


@pytest.mark.parametrize("name, arch", QUICK)
def test_quick(name, arch):
    result = simulate(PROBLEMS[name], arch)
    passes(result)
    assert sum(report.groups["mfma"] for _, report in result.reports) > 0
    assert '"ok": true' in result.to_json() and result.table() is not None


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("gfx942", "gfx950"))
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem(name, arch):
    passes(simulate(PROBLEMS[name], arch))


@pytest.mark.slow
@pytest.mark.parametrize("seed", (0, 1))
def test_any_order_of_waves(seed):
    passes(simulate(PROBLEMS["64 packed gqa, empty segment"], options=Options(seed=seed)))


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="triton, flydsl"):
        simulate(PROBLEMS["72"], kernel="cuda")
    with pytest.raises(ValueError, match="gfx942 and gfx950"):
        simulate(PROBLEMS["72"], "sm_90")


# ---------------------------------------------------------------- files
def test_a_foreign_file_with_raw_buffers(tmp_path):
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(add_kernel, signature=types, constexprs={"BLOCK": 256})
    asm = triton_compile(source, target=GPUTarget("hip", "gfx942", 64)).asm
    (tmp_path / "add.s").write_text(asm["amdgcn"])
    (tmp_path / "add.hsaco").write_bytes(asm["hsaco"])
    np.save(tmp_path / "x.npy", np.arange(500, dtype=np.float32))
    for name in ("add.s", "add.hsaco"):
        args = [str(tmp_path / "x.npy"), "f32:500:ones", "f32:500", "500", "null", "null"]
        report, values = simulate_file(tmp_path / name, args, grid=(2,), block=(256,))
        assert report.ok and (values[2] == np.arange(1, 501)).all()
        report, _ = simulate_file(tmp_path / name, [*args[:2], "f32:499", *args[3:]], grid=(2,), block=(256,))
        assert [f.kind for f in report.errors] == ["global-bounds"]


@pytest.mark.parametrize(
    "text, want",
    (("7", 7), ("0x10", 16), ("-3", -3), ("0.5", 0.5), ("null", None)),
)
def test_number_arguments(text, want):
    assert parse_argument(text) == want


def test_buffer_arguments():
    assert parse_argument("bf16:2x3:ones").tolist() == [[0x3F80] * 3] * 2
    assert parse_argument("i32:4:arange").tolist() == [0, 1, 2, 3] and parse_argument("u8:3").dtype == np.uint8
    assert np.isnan(parse_argument("f16:2:nan")).all()
    for text in ("f32:4:noise", "f32:ax4", "q32:4", "words"):
        with pytest.raises(ValueError, match="argument"):
            parse_argument(text)
