"""The Hopper kernel as machine code: what the assembler made of it, and the ways to have it. No GPU is needed."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import CAUSAL, make
from typer.testing import CliRunner

from undertow.cli import app, main
from undertow.kernels import alloc, hopper, isolate, watch
from undertow.kernels.hopper import build, echo
from undertow.kernels.hopper.geometry import SHARED_BYTES, choose, launches
from undertow.problem import Band, Problem
from undertow.target import TARGETS

dsl = pytest.mark.skipif(bool(build._missing()), reason=f"not installed: {', '.join(build._missing())}")
QUICK = (
    "main_64_64_bf16_fused", "main_64_64_bf16_dk_dv", "dq_64_64_bf16", "main_192_128_bf16_fused", "dq_192_128_bf16",
)  # fmt: skip
DIMS = (
    (64, 64), (192, 128), (8, 8), (16, 256), (32, 32), (40, 40), (40, 104), (48, 48), (64, 128), (72, 72), (80, 80),
    (96, 96), (112, 112), (128, 64), (128, 128), (144, 144), (160, 128), (160, 160), (192, 64), (256, 16), (256, 128),
    (256, 256),
)  # fmt: skip
SPILL_BYTES = 24
"""Allowed outside the loop over tiles, once a tile of a block: 144/144 and 112/112 apart spill 12, most none."""


def called(kind, g):
    """A kernel's name: what it is for, and of a main kernel what it computes."""
    parts = "fused" if g.dq else "_".join(n for n in ("dk", "dv") if getattr(g, n))
    return f"{kind}_{g.head_dim_qk}_{g.head_dim_v}_{g.dtype}" + (f"_{parts}" if kind == "main" else "")


CLAIMED = {
    called(kind, g): (kind, g)
    for dtype, dims in (("bf16", DIMS), ("fp16", [(192, 128)]))
    for kind, g in build.planned(dims, [dtype])
}
"""Every kernel of both plans for the claimed pairs, by name."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CLAIMED if name not in QUICK]


def probed(kind, geometry, ptxas=""):
    from undertow.instruments.probe import probe_hopper

    return probe_hopper(geometry, kind, ptxas)


def products(kind, g):
    """(in the loop, outside) wgmma instructions of one consumer: a k-block of 16 each.

    The main kernel is one S^T ahead; that of dQ has S and dP of its first key tile and dQ of its last outside.
    """
    s, dp, rows = g.d_qk // 16, g.d_v // 16, g.tile_q // 16
    if kind == "dq":
        loop = s + dp + rings(g)[0] // 16
        return loop, loop
    return s + (dp if g.dk else 0) + rows * (g.dk + g.dv) + g.dq * g.tile_kv // 16, s


def rings(g):
    from undertow.kernels.hopper import dq_device

    return dq_device.rings(g.d_qk, g.d_v)


def waits(kind, g):
    """Waits for wgmma a turn: fewer would let products run into what they read, more would run them one by one."""
    return 3 if kind == "dq" else 5 if g.dq else 4 if g.dk else 2


def shared_bytes(kind, g):
    if kind == "main":
        return g.shared_bytes
    keys, k_stages, v_stages = rings(g)
    return 2 * (128 * (g.d_qk + g.d_v) + keys * (k_stages * g.d_qk + v_stages * g.d_v)) + 512


def faults(report, kind, g):
    """The gates that this machine code fails, by name."""
    loop, outside = products(kind, g)
    gates = {
        "serialised": not report.warnings,  # C7510 to C7520: wgmma made synchronous, or fenced by the assembler
        "spill in the loop": report.hot.counts["spill"] == 0,  # an accumulator that leaves registers comes back a turn
        "spill": report.vgpr_spills <= SPILL_BYTES,
        "products in the loop": report.hot.counts["hgmma"] == loop,
        "products": report.counts["hgmma"] == loop + outside,
        "waits": report.hot.counts["wgmma_wait"] == waits(kind, g),
        "registers": report.vgpr == 168,  # 384 threads' share; less, and 240 for the consumers are never there
        "shared memory": report.lds_bytes <= min(SHARED_BYTES, shared_bytes(kind, g)),
    }
    return {name for name, holds in gates.items() if not holds}


# ---------------------------------------------------------------- machine code
@dsl
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_machine_code_is_what_the_geometry_says(name):
    report = probed(*CLAIMED[name])
    assert not faults(report, *CLAIMED[name]), report


@dsl
def test_every_gate_can_fail():
    deep = replace(choose(64, 64), q_stages=6)
    report = probed("main", deep, "--opt-level 0")
    assert report.lds_bytes > SHARED_BYTES and report.hot.counts["spill"] > 100
    assert any("serialized" in text for text in report.warnings)
    assert faults(replace(report, vgpr=160), "main", deep) == {
        "serialised", "spill in the loop", "spill", "products in the loop", "products", "waits", "registers",
        "shared memory",
    }  # fmt: skip


@dsl
def test_another_kernel_s_code_is_not_taken_for_it():
    _, fused = CLAIMED["main_64_64_bf16_fused"]
    report = probed("main", fused)
    counts = {"products in the loop", "products"}
    assert faults(report, "main", replace(fused, head_dim_v=96)) == counts
    assert faults(report, "main", replace(fused, tile_kv=64)) >= counts - {"products"} | {"shared memory"}
    assert faults(report, "main", replace(fused, dq=False)) == counts | {"waits", "shared memory"}
    dq = CLAIMED["dq_64_64_bf16"]
    assert faults(report, *dq) == counts | {"waits", "shared memory"}
    assert faults(probed(*dq), "dq", replace(dq[1], head_dim_qk=96, head_dim_v=32)) >= {"shared memory"}
    assert faults(probed(*dq), "dq", replace(dq[1], head_dim_v=80)) == counts


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("form", ["dense", "full", "window", "packed", "documents"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_dispatch_may_choose_is_built(group, form, deterministic):
    fields = {"nheads_q": 4, "nheads_kv": 4 // group, "deterministic": deterministic}
    for qk, v in DIMS:
        fields |= {"head_dim_qk": qk, "head_dim_v": v}
        problem = {
            "dense": lambda **f: Problem.dense(2, 4096, 4096, band=CAUSAL, **f),
            "full": lambda **f: Problem.dense(2, 1024, 8192, **f),
            "window": lambda **f: Problem.dense(1, 16384, 16384, band=Band(1024, 0), **f),
            "packed": lambda **f: Problem.packed((4096, 3000, 640), band=CAUSAL, **f),
            "documents": lambda **f: Problem.packed((300, 20) * 32, band=CAUSAL, **f),
        }[form](**fields)
        geometry = hopper.config(problem, TARGETS["sm_90"], "backward").switch("geometry")
        missing = set(launches(geometry)) - set(build.planned([(qk, v)], ["bf16"]))
        assert not missing, problem


# ---------------------------------------------------------------- the side kernels
SIDE = """
import json, re, sys
from collections import Counter
import torch
from undertow.kernels import alloc, hopper, watch
from undertow.kernels.hopper import echo, host
from undertow.kernels.triton import offline
from undertow.kernels.triton.host import Launch
from undertow.layout import shapes
from undertow.problem import Band, Problem
from undertow.target import TARGETS

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **meta: offline.compile_launch(Launch("", self.kernel, *grid, args, meta), target)

target = TARGETS["sm_90"]
host.prepare_kernel, host.finish_kernel = Compile(host.prepare_kernel), Compile(host.finish_kernel)
for dim, row in json.loads(sys.argv[1]):
    dims = {"nheads_q": 16, "nheads_kv": 16, "head_dim_qk": dim, "head_dim_v": dim}
    problem = Problem.dense(4, 4096, 4096, band=Band(None, 0), **dims)
    config = hopper.config(problem, target, "backward")
    tensors = {n: offline._placeholder(problem, n, shape) for n, shape in shapes(problem).items()}
    tensors |= {n: tensors[n].new_empty(4, 4096, 16, row)[..., :dim] for n in ("out", "dout", "dq")}
    scratch = alloc.scratch(hopper.plan_workspace(problem, config), torch.device("meta"))
    common = (problem, config.switch("geometry"), tensors, scratch, host._segments(problem, tensors))
    with watch.watch() as seen:
        host._prepare(*common)
        host._finish(*common)
    for stage, compiled in seen.launches:
        widths = Counter(re.findall(r"\\b((?:ld|st)[.]global[.][.a-z0-9]+)", compiled.asm["ptx"]))
        have, wanted = watch.figures(compiled), dict(echo._wanted(problem, config))[stage]
        print(json.dumps([stage, dim, row, widths, [n for n, value in wanted.items() if have[n] != value]]))
"""


@pytest.fixture(scope="module")
def side():
    """(global accesses in PTX by width, what differs from what was resolved) by stage, head dim, elements a row."""
    cases = json.dumps([(72, 72), (40, 40), (80, 80), (72, 76), (72, 73)])
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SIDE, cases], capture_output=True, text=True, env=compiled)
    assert done.returncode == 0, done.stderr[-2000:]
    return {tuple(key): (widths, wrong) for *key, widths, wrong in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("dim", [72, 40, 80])
def test_side_kernels_move_16_bytes_at_a_time(side, dim):
    """out, dout, dq and dq_acc. What `prepare` moves 4 bytes at a time are LSE, stats and the table."""
    prepare, wrong = side["prepare", dim, dim]
    rows, lanes = choose(dim, dim).tile_q, 1 << (dim - 1).bit_length()
    assert prepare["ld.global.v4.b32"] == 2 * rows * lanes // (8 * 128) and wrong == []
    assert set(prepare) == {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b32", "st.global.b32"}
    finish, wrong = side["finish", dim, dim]
    assert set(finish) == {"ld.global.v4.b32", "st.global.v4.b32"} and wrong == []


@pytest.mark.parametrize("row, width", [(76, "v2.b32"), (73, "b16")])
def test_side_kernels_move_what_the_strides_admit(side, row, width):
    for stage, access in (("prepare", "ld"), ("finish", "st")):
        widths, wrong = side[stage, 72, row]
        assert f"{access}.global.{width}" in widths and wrong == ["UNIT"]
        assert stage == "prepare" or "st.global.v4.b32" not in widths


# ---------------------------------------------------------------- what ran is what was resolved
@pytest.fixture(scope="module", params=[False, True], ids=["fused", "deterministic"])
def ran(request):
    """A problem of 64/64, its config, and the launches of a backward that multiplied nothing."""
    fields = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "deterministic": request.param}
    problem = Problem.dense(1, 200, 300, **fields)
    with pytest.MonkeyPatch.context() as patch, watch.watch() as seen:
        patch.setattr(hopper, "FEW_KEYS", 0)  # fused, as long calls are
        config = hopper.config(problem, TARGETS["sm_90"], "backward")
        patch.setattr(build, "entry", fake_entry)
        tensors = make(problem)
        tensors |= {"out": torch.zeros_like(tensors["dout"]), "lse": torch.zeros(1, 4, 200)}
        tensors |= {f"d{n}": torch.zeros_like(tensors[n]) for n in "qkv"}
        hopper.KERNEL.backward(problem, config, tensors, alloc.scratch(hopper.plan_workspace(problem, config), "cpu"))
    mains = [(stage, what) for stage, what in seen.launches if isinstance(what, tuple)]
    side = {stage: (stage, compiled_like(figures)) for stage, figures in echo._wanted(problem, config)}
    return problem, config, [side["prepare"], *mains, *([side["finish"]] if "finish" in side else [])]


def fake_entry(geometry, kind="main"):
    """The kernel's own name and machine code; it launches nothing."""
    return build.Entry(build.object_name(geometry, kind), lambda *a: None, lambda: build.compiled(geometry, kind).cubin)


def compiled_like(figures):
    """What Triton gives back of a launch, as far as it is read."""
    fn = SimpleNamespace(arg_names=list(figures))
    constants = {(n,): value for n, value in enumerate(figures.values())}
    return SimpleNamespace(
        metadata=SimpleNamespace(num_warps=4, num_stages=3, shared=0), src=SimpleNamespace(fn=fn, constants=constants)
    )


@dsl
def test_what_ran_is_what_was_resolved(ran):
    found = echo.built(*ran)
    assert found.differences == ()
    main = found.stages["main"]
    assert (main["head_dim_qk"], main["tile_q"], main["dtype"], main["blocks"]) == (64, 128, "bf16", 6)
    assert (main["threads"], main["registers"], main["stack_bytes"]) == (384, 168, 0)
    assert set(found.stages) == {"prepare", "main", "dq" if ran[0].deterministic else "finish"}


@dsl
def test_an_object_on_disk_says_the_same_of_its_code(objects):
    _, path = objects
    assert echo._machine(path.read_bytes()) == echo._machine(build.compiled(choose(64, 64)).cubin)


def changed(config, **switches):
    return replace(config, switches=tuple((n, switches.get(n, value)) for n, value in config.switches))


@dsl
def test_planted_differences_are_named(ran, monkeypatch):
    problem, config, seen = ran
    geometry, code = config.switch("geometry"), seen[1][1][0].code()

    def differences(config=config, seen=seen):
        return echo.built(problem, config, seen).differences

    def instead(**fields):
        entry, blocks = seen[1][1]
        return [seen[0], ("main", (replace(entry, **fields), blocks)), *seen[2:]]

    assert "main has tile_q 128, wanted 64" in differences(changed(config, geometry=replace(geometry, tile_q=64)))
    other = differences(changed(config, geometry=replace(geometry, late=False)))
    assert other[0].startswith("main has build ")
    assert "main has blocks 6, wanted 2" in differences(changed(config, blocks=2))
    assert "main has threads 384, wanted 256" in differences(replace(config, num_warps=8))
    fp16 = build.object_name(replace(geometry, dtype="fp16"))
    assert "main has dtype fp16, wanted bf16" in differences(seen=instead(name=fp16))
    fewer = re.sub(rb"(?<=\x04\x2f\x08\x00....)\xa8", b"\x80", code, flags=re.DOTALL)
    assert differences(seen=instead(code=lambda: fewer)) == ("main has registers 128, wanted 168",)
    assert differences(seen=seen[:1] + seen[2:])[0].startswith("launched prepare")
    assert differences(seen=[]) and differences(seen=seen + seen[-1:])
    side = dict(echo._wanted(problem, config))["prepare"] | {"TILE_Q": 32}
    assert differences(seen=[("prepare", compiled_like(side)), *seen[1:]]) == ("prepare has TILE_Q 32, wanted 128",)
    monkeypatch.setattr(build, "_sources", lambda: "other sources")
    assert differences()[0].startswith("main has build ")


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
    entry = build.entry(choose(64, 64))
    assert entry is build.entry(choose(64, 64), "main") and (entry.name, entry.function) == (path.stem, path)
    assert entry.code() == path.read_bytes()


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
    rows = json.loads(done.stdout)
    names = [build.object_name(geometry, kind) + ".so" for kind, geometry in build.planned([(64, 64)], ["bf16"])]
    assert [row["object"] for row in rows] == names and len(names) == 3
    for row in rows:
        assert (tmp_path / row["object"]).stat().st_size == row["bytes"] > 10_000
        assert (row["registers"], row["spills_in_hot_loop"], row["warnings"]) == (168, 0, 0)


@pytest.mark.parametrize("arguments", [("512/512", "bf16"), ("64/64", "fp32"), ("64", "bf16"), ("a/b", "bf16")])
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


@pytest.mark.parametrize(("package", "other"), [("flydsl", "cutlass"), ("cutlass", "flydsl")])
def test_two_compilers_in_one_process_are_refused(monkeypatch, package, other):
    """Each brings an MLIR; importing the second would end the process without a word of Python."""
    for name in (package, other):
        monkeypatch.delitem(sys.modules, name, raising=False)
    isolate.claim(package)
    monkeypatch.setitem(sys.modules, other, object())
    with pytest.raises(RuntimeError, match=f"{package} cannot be loaded beside {other}"):
        isolate.claim(package)
    monkeypatch.setitem(sys.modules, package, object())
    isolate.claim(package)
