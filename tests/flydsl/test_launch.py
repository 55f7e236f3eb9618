"""The launch path up to the driver call: FlyDSL's own argument packing, with a recorder where the driver would be."""

import ctypes
import random
from contextlib import contextmanager
from itertools import product

import pytest
import simulated
import torch

from undertow.kernels.flydsl import KERNEL, LOW_MEMORY, launch, plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.kernels.flydsl.steps import backward_steps
from undertow.problem import Band, Problem
from undertow.target import TARGETS

STREAM = 0x5EED
SIZES = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 192, "head_dim_v": 128, "band": Band(None, 0)}


class Driver:
    """Compiles nothing; packs every call with FlyDSL's ABI code and records what the driver would read."""

    def __init__(self):
        self.compiled, self.calls = [], []

    def compile(self, jit, key):
        self.compiled.append(key)
        state = None

        def call(*args):
            nonlocal state
            from flydsl.compiler.jit_executor import CallState
            from flydsl.compiler.jit_function import _build_call_spec

            if state is None:
                jit._ensure_sig()
                spec = _build_call_spec(jit._sig, args)
                state = CallState(spec, lambda packed: self.calls.append((key, self.read(packed, spec))))
            state(args)

        return call

    @staticmethod
    def read(packed, spec):
        pointers = ctypes.cast(packed, ctypes.POINTER(ctypes.c_void_p))
        return [ctypes.cast(pointers[n], ctypes.POINTER(ctype))[0] for n, (_, ctype, _) in enumerate(spec)]


@pytest.fixture
def driver(monkeypatch):
    @contextmanager
    def stream(device):
        yield STREAM

    recorder = Driver()
    monkeypatch.setattr(launch, "compile_launcher", recorder.compile)
    monkeypatch.setattr(launch, "current_stream", stream)
    launch._compiled.cache_clear()
    yield recorder
    launch._compiled.cache_clear()


def prepared(problem):
    tensors = simulated.call(problem)
    tensors |= {f"d{n}": torch.empty_like(tensors[n]) for n in "qkv"}
    config = plan.config(problem, TARGETS["gfx942"], "backward")
    buffers = plan.plan_workspace(problem, config).buffers
    scratch = {b.name: torch.empty(b.shape, dtype=torch.float32) for b in buffers}
    return config, tensors, scratch


def bits(value):
    """An argument as the driver reads it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "problem",
    [
        Problem.packed((45, 60), (45, 90), **SIZES),
        Problem.dense(2, 40, 70, layout="sbhd", **SIZES),
        Problem.packed((45, 60), **SIZES, deterministic=True),
    ],
    ids=["packed", "sbhd", "deterministic"],
)
def test_the_driver_reads_exactly_the_steps(driver, problem):
    config, tensors, scratch = prepared(problem)
    launch.backward(problem, config, tensors, scratch)
    steps = backward_steps(problem, config, tensors, scratch)
    assert [key for key, _ in driver.calls] == [step.key for step in steps]
    for step, (_, seen) in zip(steps, driver.calls, strict=True):
        wanted = [*map(bits, step.flat()), *step.grid, STREAM]
        # A null pointer reads as None through ctypes.
        assert [0 if x is None else x for x in seen] == [0 if x is None else x for x in wanted]


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_offline_steps_have_the_keys_of_a_call(kind):
    extra = {"has_sink": True, "has_dlse": True, **SIZES}
    problem = Problem.packed((45, 60), (45, 90), **extra) if kind == "packed" else Problem.dense(2, 40, 70, **extra)
    config, tensors, scratch = prepared(problem)
    offline = launch.offline_steps(problem, config)
    steps = backward_steps(problem, config, tensors, scratch)
    assert [step.key for step in offline] == [step.key for step in steps]
    stages = ["preprocess", "main", "convert", "gaps"] if kind == "packed" else ["preprocess", "main", "convert"]
    assert [step.stage for step in offline] == stages and [s.grid for s in offline] == [s.grid for s in steps]


def test_a_problem_without_a_limit_always_has_steps():
    rng = random.Random(0)
    ran = 0
    for _ in range(300):
        heads = rng.choice((1, 2, 3))
        problem = Problem.dense(
            rng.randrange(1, 4), rng.randrange(1, 300), rng.randrange(1, 300), nheads_q=heads * rng.choice((1, 4)),
            nheads_kv=heads, head_dim_qk=rng.choice((8, 32, 32)) * rng.randrange(1, 9),
            head_dim_v=rng.choice((8, 32, 32)) * rng.randrange(1, 9),
            dtype=rng.choice(("bf16", "fp16", "fp32")), layout=rng.choice(("bshd", "sbhd", "bhsd")),
            deterministic=rng.random() < 0.5, softcap=rng.choice((0.0, 5.0)), has_sink=rng.random() < 0.5,
        )  # fmt: skip
        for arch, kernel in product(("gfx942", "gfx950"), (KERNEL, LOW_MEMORY)):
            target = TARGETS[arch]
            if kernel.unsupported(problem, target):
                continue
            steps = launch.offline_steps(problem, kernel.config(problem, target, "backward"))
            assert [s.stage for s in steps] == ["preprocess", "main", "dq" if problem.deterministic else "convert"]
            assert all(0 < n <= 65535 for step in steps for n in step.grid[1:])
            ran += 1
    assert ran > 100


def test_a_second_call_compiles_nothing_and_carries_its_own_pointers(driver):
    problem = Problem.packed((45, 60), (45, 90), **SIZES)
    calls = [prepared(problem) for _ in range(2)]  # both alive: the second may not reuse the first one's memory
    for prepared_call in calls:
        launch.backward(problem, *prepared_call)
    assert len(driver.compiled) == len(set(driver.compiled)) == 4
    assert len(driver.calls) == 8
    first, second = driver.calls[1][1], driver.calls[5][1]
    assert first[0] != second[0] and first[-1] == second[-1] == STREAM


def test_other_lengths_do_not_compile_again(driver):
    for lengths in ((45, 60), (1, 2, 3), (300,)):
        problem = Problem.packed(lengths, **SIZES)
        launch.backward(problem, *prepared(problem))
    assert len(driver.compiled) == 4


def test_empty_calls_launch_nothing(driver):
    problem = Problem.packed((), **SIZES)
    config, tensors, scratch = prepared(Problem.packed((4,), **SIZES))
    tensors |= {n: tensors[n][:0] for n in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
    launch.backward(problem, config, tensors, scratch)
    assert not driver.calls


def test_keys_without_queries_get_zero_gradients(driver):
    problem = Problem.packed((0, 0), (5, 6), **SIZES)
    config = plan.config(problem, TARGETS["gfx942"], "backward")
    wide, slim = {"dtype": torch.bfloat16, "size": (0, 4, 192)}, {"dtype": torch.bfloat16, "size": (0, 4, 128)}
    tensors = {"q": torch.zeros(**wide), "dq": torch.zeros(**wide)}
    tensors |= {"out": torch.zeros(**slim), "dout": torch.zeros(**slim)}
    for name, dim in (("k", 192), ("dk", 192), ("v", 128), ("dv", 128)):
        tensors[name] = torch.full((11, 2, dim), 7.0, dtype=torch.bfloat16)
    launch.backward(problem, config, tensors, {})
    assert not driver.calls and not tensors["dk"].any() and not tensors["dv"].any()


def test_inputs_with_odd_strides_are_copied_and_far_rows_refused(driver):
    problem = Problem.packed((45, 60), (45, 90), **SIZES)
    config, tensors, scratch = prepared(problem)
    odd = torch.zeros(105, 4, 193, dtype=torch.bfloat16)[..., :192]
    launch.backward(problem, config, tensors | {"q": odd}, scratch)
    (_, seen) = driver.calls[1]
    assert seen[0] != odd.data_ptr() and seen[1:4] == [0, 4 * 192, 192]
    broad = meta((105, 4, 192), (launch.FARTHEST + 2, 192, 1))
    with pytest.raises(NotImplementedError, match="dq has strides"):
        launch.backward(problem, config, tensors | {"dq": broad}, scratch)


def meta(shape, strides, dtype=torch.bfloat16):
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "strides", "axis", "fits"),
    [
        ((8, 8192, 16, 192), (8192 * 16 * 192, 16 * 192, 192, 1), 1, True),  # bshd: a batch may lie as far as it likes
        ((8192, 8, 16, 192), (8 * 16 * 192, 16 * 192, 192, 1), 0, True),
        ((8, 16, 8192, 192), (16 * 8192 * 192, 8192 * 192, 192, 1), 2, True),
        ((64, 4096, 128, 192), (192, 64 * 128 * 192, 64 * 192, 1), 1, True),
        ((64, 4096, 128, 512), (512, 64 * 128 * 512, 64 * 512, 1), 1, False),  # tokens 4 M elements apart
        ((2, 64, 4, 192), (64 * 4 * 192, 0, 192, 1), 1, False),  # tokens on top of each other
        ((2, 64, 4, 192), (0, 4 * 192, 192, 1), 1, True),
        ((2, 64, 4, 192), (64 * 4 * 193, 4 * 193, 193, 1), 1, False),
        ((2, 64, 4, 192), (64 * 4 * 384, 4 * 384, 384, 2), 1, False),
    ],
)
def test_which_strides_the_kernels_read_in_place(shape, strides, axis, fits):
    assert launch._fits(meta(shape, strides), axis) is fits


def test_missing_flydsl_is_named_with_the_extra(monkeypatch):
    import sys

    from undertow.kernels.flydsl import compiler

    monkeypatch.setitem(sys.modules, "undertow.kernels.flydsl.main_device", None)
    with pytest.raises(ImportError, match=r"undertow\[amd\]"):
        compiler.launcher(("main_device", "build", Geometry(), frozenset()))


def test_importing_the_kernel_needs_neither_torch_nor_flydsl():
    import subprocess
    import sys

    code = "import sys, undertow.kernels.flydsl as f, undertow.kernels.flydsl.geometry; f.KERNEL; " \
        "assert not {'torch', 'flydsl'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_stock_route_links_a_code_object(arch, tmp_path):
    """What a ROCm machine does: assemble and link. Triton's in-process linker stands where ROCm has ld.lld."""
    import subprocess
    import sys

    linker = tmp_path / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text(f"#!{sys.executable}\nimport sys\nfrom triton._C.libtriton import amd\n"
                      "amd.link_hsaco(sys.argv[2], sys.argv[4])\n")  # fmt: skip
    linker.chmod(0o755)
    code = (
        "from undertow.kernels.flydsl import compiler; from undertow.kernels.flydsl.geometry import *\n"
        f"rows = RowGeometry(192, 128, {arch!r})\n"
        f"keys = [('main_device', 'build', Geometry(arch={arch!r}), frozenset({{'packed'}}))]\n"
        "keys += [('rows_device', 'build_preprocess', rows, frozenset({'packed', 'zero'}))]\n"
        "for key in keys:\n"
        "    compiled = compiler.compile_launcher(compiler.launcher(key), key)\n"
        "    assert 'gpu.binary' in compiled._keepalive.ir and '\\\\7FELF' in compiled._keepalive.ir\n"
    )
    names = [f"FLYDSL_GPU_ARCH={arch}", f"ARCH={arch}", "FLYDSL_RUNTIME_ENABLE_CACHE=0", f"ROCM_PATH={tmp_path}"]
    done = subprocess.run(["env", *names, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
