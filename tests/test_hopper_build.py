"""The Hopper kernel as machine code: what the assembler made of it, and the ways to have it. No GPU is needed."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from undertow.cli import app, main
from undertow.kernels.hopper import build
from undertow.kernels.hopper.geometry import SHARED_BYTES, choose

dsl = pytest.mark.skipif(bool(build._missing()), reason=f"not installed: {', '.join(build._missing())}")
QUICK = ((192, 128), (128, 128), (64, 64))
SLOW = (
    (8, 8), (16, 256), (32, 32), (40, 104), (64, 128), (72, 72), (80, 80), (96, 96), (112, 112), (128, 64), (144, 144),
    (160, 128), (160, 160), (192, 64), (256, 16),
)  # fmt: skip
CLAIMED = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
SPILL_BYTES = 16
"""Allowed outside the loop over query tiles, once a key tile: 112/112, 144/144 and 40/104 spill 4, others none."""


def probed(geometry, ptxas=""):
    from undertow.instruments.probe import probe_hopper

    return probe_hopper(geometry, "main", ptxas)


def products(geometry):
    """(in the loop, before it) wgmma instructions of one consumer: a k-block of 16 each; S^T is one tile ahead."""
    s, dp = geometry.d_qk // 16, geometry.d_v // 16
    dv = dk = geometry.tile_q // 16
    dq = geometry.tile_kv // 16 if geometry.dq else 0
    return s + dp + dv + dk + dq, s


def faults(report, geometry):
    """The gates that this machine code fails, by name."""
    loop, before = products(geometry)
    gates = {
        "serialised": not report.warnings,  # C7510 to C7520: wgmma made synchronous, or fenced by the assembler
        "spill in the loop": report.hot.counts["spill"] == 0,  # an accumulator that leaves registers comes back a turn
        "spill": report.vgpr_spills <= SPILL_BYTES,
        "products in the loop": report.hot.counts["hgmma"] == loop,
        "products": report.counts["hgmma"] == loop + before,
        "shared memory": report.lds_bytes <= min(SHARED_BYTES, geometry.shared_bytes),
    }
    return {name for name, holds in gates.items() if not holds}


# ---------------------------------------------------------------- machine code
@dsl
@pytest.mark.parametrize(("qk", "v"), CLAIMED)
def test_machine_code_is_what_the_geometry_says(qk, v):
    geometry = choose(qk, v)
    report = probed(geometry)
    assert not faults(report, geometry), report
    assert report.hot.counts["wgmma_wait"] == 5 and report.vgpr == 168


@dsl
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dq"), [("fp16", True), ("bf16", False)])
def test_machine_code_of_the_other_builds(dtype, dq):
    geometry = choose(192, 128, dtype, dq=dq)
    assert not faults(probed(geometry), geometry)


@dsl
def test_every_gate_can_fail():
    deep = replace(choose(64, 64), q_stages=6)
    report = probed(deep, "--opt-level 0")
    assert report.lds_bytes > SHARED_BYTES and report.hot.counts["spill"] > 100
    assert any("serialized" in text for text in report.warnings)
    assert faults(report, deep) == {
        "serialised", "spill in the loop", "spill", "products in the loop", "products", "shared memory",
    }  # fmt: skip


@dsl
def test_another_geometry_s_code_is_not_taken_for_it():
    report = probed(choose(64, 64))
    assert faults(report, replace(choose(64, 64), head_dim_v=96)) == {"products in the loop", "products"}
    assert faults(report, replace(choose(64, 64), tile_kv=64)) >= {"products in the loop", "shared memory"}


# ---------------------------------------------------------------- objects
@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A folder with the object of 64/64, and its path."""
    folder = tmp_path_factory.mktemp("objects")
    (path,) = build.export([choose(64, 64)], folder)
    return folder, path


@pytest.fixture
def without_dsl(monkeypatch):
    """A machine that has tvm_ffi and not the DSL."""
    monkeypatch.setattr(build, "_missing", lambda: ("nvidia_cutlass_dsl", "cutlass"))
    build._entry.cache_clear()


@dsl
def test_an_object_loads_by_its_name_and_takes_the_arguments_of_the_kernel(objects):
    import inspect
    import re

    import tvm_ffi

    from undertow.kernels.hopper.main_device import Backward

    folder, path = objects
    assert [p.name for p in folder.iterdir()] == [path.name] == [build.object_name(choose(64, 64)) + ".so"]
    function = tvm_ffi.load_module(str(path))[path.stem]
    with pytest.raises(TypeError) as error:
        function()
    named = re.findall(r"(\w+): (?:Tensor|int32|float32)", str(error.value))
    assert [*named, "stream"] == list(inspect.signature(Backward.__call__).parameters)[1:]


@dsl
def test_an_object_needs_nothing_of_the_dsl(objects):
    done = subprocess.run(["nm", "-D", "--undefined-only", str(objects[1])], capture_output=True, text=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert "cudaLaunchKernelExC" in names
    foreign = {
        n for n in names if "@GLIBC" not in n and not n.startswith(("cuda", "TVMFFI", "_ITM", "__gmon", "__cxa"))
    }
    assert not foreign and not any(n.startswith("cuda_") for n in names)


@dsl
def test_an_object_of_the_folder_is_loaded(objects, without_dsl, monkeypatch):
    folder, path = objects
    monkeypatch.setenv(build.SETTING, str(folder))
    monkeypatch.setattr(build, "_load", lambda found: found)
    assert build.available() == build.available(choose(64, 64)) == ""
    assert build.entry(choose(64, 64)) == build.entry(choose(64, 64), "main") == path


@dsl
def test_a_stale_object_is_not_loaded(objects, without_dsl, monkeypatch):
    monkeypatch.setenv(build.SETTING, str(objects[0]))
    monkeypatch.setattr(build, "_sources", lambda: "other sources")
    assert build.object_path(choose(64, 64)) is None
    with pytest.raises(ImportError, match=f"holds no {build.object_name(choose(64, 64))}"):
        build.entry(choose(64, 64))


def test_neither_an_object_nor_the_dsl_is_an_error_that_says_what_to_do(tmp_path, without_dsl, monkeypatch):
    for folder in (None, tmp_path, tmp_path / "nowhere"):
        monkeypatch.delenv(build.SETTING, raising=False)
        if folder:
            monkeypatch.setenv(build.SETTING, str(folder))
        with pytest.raises(ImportError) as error:
            build.entry(choose(192, 128))
        for word in ("undertow[hopper]", build.SETTING, build.object_name(choose(192, 128)), "nvidia_cutlass_dsl"):
            assert word in str(error.value)
        assert "main_*.so" in build.available()
    with pytest.raises(ImportError, match=r"undertow\[hopper\]"):
        build.compiled(choose(192, 128))


def test_an_object_without_tvm_ffi_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_missing", lambda: ("nvidia_cutlass_dsl", "cutlass", "tvm_ffi"))
    monkeypatch.setenv(build.SETTING, str(tmp_path))
    (tmp_path / f"{build.object_name(choose(64, 64))}.so").touch()
    assert "tvm_ffi" in build.available(choose(64, 64)) and "holds no" in build.available(choose(128, 128))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings a CUDA runtime")
def test_an_object_needs_a_cuda_runtime(tmp_path):
    with pytest.raises(RuntimeError, match="CUDA build of torch"):
        build._load(tmp_path / "main.so")


def test_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match="kind is 'dk', wanted one of main"):
        build.entry(choose(64, 64), "dk")


@dsl
@pytest.mark.parametrize(("compiler", "words"), [(None, "no cc or gcc"), ("false", "could not link main_64_64_bf16")])
def test_export_without_a_working_linker(tmp_path, monkeypatch, compiler, words):
    monkeypatch.setattr(build.shutil, "which", lambda name: compiler)
    with pytest.raises(RuntimeError, match=words):
        build.export([choose(64, 64)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_whether_it_is_available_is_asked_without_heavy_imports():
    code = (
        "import sys\n"
        "from undertow.kernels.hopper import build\n"
        "build.available()\n"
        "assert not {'torch', 'cutlass', 'tvm_ffi', 'triton'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- command
@dsl
def test_the_command_builds_and_says_what(tmp_path):
    done = CliRunner().invoke(app, ["build", "--out", str(tmp_path), "--dims", "64/64", "--dtypes", "bf16", "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["object"] == build.object_name(choose(64, 64)) + ".so" and row["bytes"] > 10_000
    assert (tmp_path / row["object"]).stat().st_size == row["bytes"]
    assert (row["registers"], row["spills_in_hot_loop"], row["warnings"]) == (168, 0, 0)


@pytest.mark.parametrize("arguments", [("256/256", "bf16"), ("64/64", "fp32"), ("64", "bf16"), ("a/b", "bf16")])
def test_what_no_kernel_holds_is_refused_before_anything_is_built(tmp_path, arguments):
    dims, dtypes = arguments
    done = CliRunner().invoke(app, ["build", "--out", str(tmp_path / "o"), "--dims", dims, "--dtypes", dtypes])
    assert isinstance(done.exception, ValueError) and dims in str(done.exception)
    assert not (tmp_path / "o").exists()


def test_the_command_without_the_dsl_is_one_line(tmp_path, without_dsl, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["undertow", "build", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said.startswith("undertow: nvidia_cutlass_dsl and cutlass not installed (pip")
