"""One plan is the source of size, strides and zeroing; the caller may own the memory; a stray write is caught."""

import re
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CAUSAL, DEVICE, OURS, call, make, same

import undertow
from undertow import ops
from undertow.dispatch import KERNELS, get
from undertow.instruments import inputs
from undertow.kernels import alloc
from undertow.problem import Band, Problem
from undertow.target import TARGETS, detect
from undertow.workspace import ALIGNMENT, ITEM_BYTES, Buffer, WorkspacePlan

CPU = torch.device("cpu")
SMALL = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 24, "head_dim_v": 16, "band": CAUSAL}
MLA = {"nheads_q": 16, "nheads_kv": 16, "head_dim_qk": 192, "head_dim_v": 128, "band": CAUSAL}

BUFFERS = st.builds(
    lambda shape, dtype, zeroed: ("", "abcd"[: len(shape)], tuple(shape), dtype, zeroed),
    st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sampled_from(sorted(ITEM_BYTES)), st.booleans(),
)  # fmt: skip
PLANS = st.lists(BUFFERS, max_size=4).map(
    lambda found: WorkspacePlan(tuple(Buffer(f"b{n}", *b[1:], "main", "main") for n, b in enumerate(found)))
)


def plan_of(problem, arch="cpu", kernel="triton"):
    kernel, target = get(kernel), replace(TARGETS[arch], interpreter=True)
    return kernel.plan_workspace(problem, kernel.config(problem, target, "backward"))


# ---- the plan


@given(PLANS)
@settings(max_examples=100)
def test_buffers_are_aligned_apart_and_inside(plan):
    spans = sorted((plan.offset(b.name), plan.offset(b.name) + b.nbytes) for b in plan.buffers if b.nbytes)
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert max((end for _, end in spans), default=0) <= plan.nbytes
    assert plan.zero_init == any(b.zeroed for b in plan.buffers)


@given(PLANS)
@settings(max_examples=100)
def test_tensors_have_the_plans_shape_strides_and_zeroes(plan):
    memory = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    tensors = alloc.scratch(plan, CPU, memory)
    for buffer in plan.buffers:
        x = tensors[buffer.name]
        assert tuple(x.shape) == buffer.shape and x.is_contiguous()
        if prod(buffer.shape):
            assert x.stride() == tuple(buffer.stride(axis) for axis in buffer.axes)
            assert x.data_ptr() - memory.data_ptr() == plan.offset(buffer.name)
            assert buffer.zeroed == bool((x == 0).all())
    assert Buffer("x", "hs", (2, 3), "fp32", False, "a", "b").stride("d") == 0


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_growth_is_linear_in_tokens(kernel, deterministic):
    """DESIGN section 3, and B35: four sizes on one line, for one segment and for many."""
    fields = MLA | {"deterministic": deterministic}
    for segments in (1, 8):
        sizes = [
            plan_of(Problem.packed((n // segments,) * segments, **fields), "sm_90", kernel).nbytes
            for n in (4096, 8192, 16384, 32768)
        ]
        for smaller, larger in zip(sizes, sizes[1:], strict=False):
            assert smaller < larger <= 2 * smaller


@pytest.mark.parametrize("fields", [{}, {"layout": "sbhd"}, {"has_sink": True}], ids=str)
def test_dq_acc_is_sized_by_the_qk_dim(fields):
    """B32: with d_v instead of d_qk it would be two thirds of this."""
    for problem in (Problem.dense(3, 50, 70, **MLA, **fields), Problem.packed((50, 0, 9), (70, 1, 9), **MLA)):
        buffer = plan_of(problem)["dq_acc"]
        assert prod(buffer.shape) == problem.total_q * 16 * 192 and buffer.dtype == "fp32" and buffer.zeroed
        assert plan_of(problem).nbytes >= problem.total_q * 16 * (192 + 1) * 4


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_a_plan_writes_before_it_reads(kernel, arch):
    """Every buffer names its writer and reader stage, and zeroes what its writer adds to."""
    for deterministic in (False, True):
        problem = Problem.packed((50, 0, 9), deterministic=deterministic, has_sink=True, **SMALL)
        plan = plan_of(problem, arch, kernel)
        assert len({b.name for b in plan.buffers}) == len(plan.buffers)
        assert all(b.written_by and b.read_by and len(b.axes) == len(b.shape) for b in plan.buffers)


def test_the_deterministic_triton_plan_owns_its_rows():
    """No accumulator in memory, so nothing has an order to lose."""
    plan = plan_of(Problem.packed((50, 9), deterministic=True, **SMALL))
    assert "dq_acc" not in plan and not plan.zero_init


def test_nbytes_needs_no_device_and_is_the_launchs_own():
    problem = Problem.packed((100, 28), **MLA)
    for target in TARGETS.values():
        chosen, _, plan = ops._plan(problem, target, None)
        assert undertow.workspace_nbytes(problem, target) == plan.nbytes
        assert undertow.workspace_nbytes(problem, target, chosen.name) == plan.nbytes
    with pytest.raises(NotImplementedError, match="fp32"):
        undertow.workspace_nbytes(replace(problem, dtype="fp32"), replace(TARGETS["sm_80"], lds_bytes=100), "triton")


# ---- memory of the caller's


def packed_call(kernel, **backward):
    """(problem, tensors, got) of a packed backward with extra arguments, and its result without them."""
    problem = Problem.packed((37, 0, 5), (20, 3, 9), has_sink=True, **SMALL)
    tensors = make(problem)
    want = call(problem, tensors, kernel)
    positional, keywords = inputs.arguments(problem, tensors)
    q, k, v, *segments = positional

    def again(**more):
        grads = undertow.attention_varlen_backward(
            tensors["dout"], q, k, v, want["out"], want["lse"], *segments, **keywords, kernel=kernel, **more
        )
        return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dsink": grads.dsink}

    return problem, want, again


def need(problem, kernel):
    return undertow.workspace_nbytes(problem, detect(DEVICE), kernel)


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_only_nbytes_of_the_callers_memory_are_touched(kernel, dtype):
    """B32's canary: 4 KiB behind the workspace stay as they were, and NaN before it changes nothing."""
    problem, want, again = packed_call(kernel)
    size = need(problem, kernel)
    memory = torch.full((size + 4096 + ALIGNMENT,), 0xFF, dtype=torch.uint8, device=DEVICE)
    memory = memory[-memory.data_ptr() % ALIGNMENT :]
    memory[size:] = 0x5A
    room = memory[: (size + 2048) // 4 * 4].view(dtype)
    same(again(workspace=room), want, ("dq", "dk", "dv", "dsink"))
    assert (memory[size:] == 0x5A).all()
    assert (memory[:size] != 0xFF).any(), "the caller's memory was not used"
    same(again(workspace=memory[:size]), want, ("dq", "dk", "dv", "dsink"))


@pytest.mark.parametrize("kernel", OURS)
def test_a_callable_is_asked_once_for_exactly_what_is_needed(kernel):
    problem, want, again = packed_call(kernel)
    asked = []

    def workspace(nbytes, zero_init):
        asked.append((nbytes, zero_init))
        return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)

    same(again(workspace=workspace), want, ("dq", "dk", "dv"))
    assert asked == [(need(problem, kernel), kernel == "triton")]


def shifted(size):
    memory = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8, device=DEVICE)
    start = -memory.data_ptr() % ALIGNMENT + 8
    return memory[start : start + size]


@pytest.mark.parametrize(
    "fault, text",
    [
        (lambda n: torch.zeros(n - 1, dtype=torch.uint8, device=DEVICE), r"workspace has {less} bytes, needs {n}"),
        (lambda n: torch.zeros(0, dtype=torch.uint8, device=DEVICE), r"workspace has 0 bytes, needs {n}"),
        (shifted, r"workspace starts at 0x[0-9a-f]+, wanted a multiple of (64|256)"),
        (lambda n: torch.zeros(n, dtype=torch.uint8, device="meta"), r"workspace is on meta, wanted"),
        (lambda n: torch.zeros(n, 2, dtype=torch.uint8, device=DEVICE)[:, 0], r"strides are \(2,\), wanted contiguous"),
        (lambda n: lambda nbytes, zero_init: None, r"workspace gave a NoneType, wanted a tensor of {n} bytes"),
        (lambda n: lambda nbytes, zero_init: torch.zeros(nbytes - 4, dtype=torch.uint8, device=DEVICE), r"needs {n}"),
    ],
)  # fmt: skip
def test_memory_that_does_not_fit_is_refused_before_launch(fault, text, monkeypatch):
    problem, _, again = packed_call("torch_tiled")
    size = need(problem, "torch_tiled")
    monkeypatch.setattr("undertow.kernels.torch_tiled.host.backward", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=text.format(n=size, less=size - 1)):
        again(workspace=fault(size))


# ---- poison and fences


PLAN = WorkspacePlan(tuple(Buffer(n, "s", (size,), d, z, "a", "b") for n, size, d, z in [
    ("first", 5, "fp32", False), ("zeroed", 64, "fp32", True), ("half", 3, "bf16", False), ("turns", 2, "i32", True)
]))  # fmt: skip


def test_the_fence_poisons_what_the_plan_does_not_zero():
    fence = alloc.Fence(PLAN, CPU)
    for buffer in PLAN.buffers:
        x = fence.tensors[buffer.name]
        assert bool((x == 0).all()) if buffer.zeroed else bool(x.isnan().all())
        x.fill_(1)
    fence.check()


@pytest.mark.parametrize("name", [b.name for b in PLAN.buffers])
@pytest.mark.parametrize("where", [0, 1, 4095 // 4])
def test_the_fence_catches_a_planted_overrun(name, where):
    fence = alloc.Fence(PLAN, CPU)
    x = fence.tensors[name]
    x.as_strided((1,), (1,), x.storage_offset() + x.numel() + where).fill_(1)
    at = where * x.element_size()
    with pytest.raises(RuntimeError, match=rf"wrote \d bytes behind {name}, the first {at} bytes in"):
        fence.check()


def test_the_fence_catches_an_underrun_and_takes_an_empty_plan():
    fence = alloc.Fence(PLAN, CPU)
    x = fence.tensors["first"]
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(1)
    with pytest.raises(RuntimeError, match="before the first buffer"):
        fence.check()
    alloc.Fence(WorkspacePlan(), CPU).check()


def planted(monkeypatch, fault):
    """dispatch's torch_tiled with a fault run after its backward."""
    right = get("torch_tiled")

    def backward(problem, config, tensors, scratch):
        right.backward(problem, config, tensors, scratch)
        fault(tensors, scratch)

    wrong = replace(right, backward=backward)
    ops.dispatch.select.cache_clear()
    monkeypatch.setattr(ops.dispatch, "KERNELS", tuple(wrong if k is right else k for k in KERNELS))


@pytest.fixture
def fresh_dispatch():
    ops.dispatch.select.cache_clear()
    yield
    ops.dispatch.select.cache_clear()


def test_checked_mode_fences_a_kernels_scratch(monkeypatch, fresh_dispatch):
    """A kernel that writes one element past its delta is caught by name."""

    def overrun(tensors, scratch):
        x = scratch["delta"]
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1.0)

    planted(monkeypatch, overrun)
    problem = Problem.packed((37, 5), **SMALL)
    with pytest.raises(RuntimeError, match="behind delta"):
        call(problem, make(problem), "torch_tiled")


def test_checked_mode_shows_an_output_nobody_wrote(monkeypatch, fresh_dispatch):
    """Outputs start as NaN, so a row the kernel leaves out is not a lucky zero."""
    seen = {}
    right = get("torch_tiled")

    def backward(problem, config, tensors, scratch):
        seen.update({n: bool(tensors[n].isnan().all()) for n in ("dq", "dk", "dv", "dsink")})
        right.backward(problem, config, tensors, scratch)

    wrong = replace(right, backward=backward)
    monkeypatch.setattr(ops.dispatch, "KERNELS", (wrong,))
    problem = Problem.packed((37, 5), has_sink=True, **SMALL)
    call(problem, make(problem), "torch_tiled")
    assert seen == {"dq": True, "dk": True, "dv": True, "dsink": True}


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e4])
def test_results_do_not_depend_on_what_scratch_held(kernel, fill):
    problem, want, again = packed_call(kernel)
    memory = torch.full((need(problem, kernel) // 4,), fill, device=DEVICE)
    same(again(workspace=memory), want, ("dq", "dk", "dv", "dsink"))


class Recorder:
    """Which scratch each stage has written, by change of content."""

    def __init__(self, scratch):
        self.scratch, self.before, self.writers = scratch, {}, {n: [] for n in scratch}

    def snapshot(self):
        self.before = {n: x.view(torch.uint8).clone() for n, x in self.scratch.items()}

    def note(self, stage):
        for name, x in self.scratch.items():
            if not torch.equal(self.before[name], x.view(torch.uint8)):
                self.writers[name].append(stage)


@pytest.mark.skipif(DEVICE != "cpu", reason="stages are watched one by one in the interpreter")
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_triton_buffer_is_written_by_the_stage_its_plan_names(deterministic):
    """One writer, before the reader: recorded launch by launch."""
    from undertow.kernels.triton import host

    problem = Problem.packed((37, 0, 5), (20, 3, 9), has_sink=True, deterministic=deterministic, **SMALL)
    tensors = make(problem)
    got = call(problem, tensors, "triton")
    kernel, target = get("triton"), detect("cpu")
    config = kernel.config(problem, target, "backward")
    plan = kernel.plan_workspace(problem, config)
    fence = alloc.Fence(plan, CPU)
    outputs = {n: torch.empty_like(got[n]) for n in ("dq", "dk", "dv", "dsink")}
    recorder, order = Recorder(fence.tensors), []
    tensors |= outputs | {"out": got["out"], "lse": got["lse"]}
    for launch in host.backward_launches(problem, config, tensors, fence.tensors):
        recorder.snapshot()
        launch.kernel[(launch.programs,)](*launch.args, **launch.meta)
        recorder.note(launch.stage)
        order.append(launch.stage)
    fence.check()
    for buffer in plan.buffers:
        if buffer.name == "descriptors":  # Triton's, of a GPU's launches: nothing writes it here
            assert recorder.writers[buffer.name] == []
            continue
        assert recorder.writers[buffer.name] == [buffer.written_by], buffer.name
        readers = [r for r in re.split(r", ", buffer.read_by) if r in order]
        assert all(order.index(r) > order.index(buffer.written_by) for r in readers), buffer.name


def test_row_values_have_room_for_whole_tiles():
    """Host and kernels place them by the same padding, a multiple of every query tile of the tables."""
    from undertow.kernels.triton import ROW_PAD, chunks_device, configs

    assert chunks_device.ROW_PAD.value == ROW_PAD
    rows = [c.block_m for t in configs.TABLE.values() for stage in t if stage != "forward" for _, c in t[stage]]
    assert rows and all(ROW_PAD % m == 0 for m in rows)


def test_band_is_part_of_no_size():
    """A plan must not shrink with the mask: max_seqlen bounds it."""
    sizes = {plan_of(Problem.packed((64, 64), **(SMALL | {"band": b}))).nbytes for b in (Band(), CAUSAL, Band(3, 0))}
    assert len(sizes) == 1
