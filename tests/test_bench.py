"""The bench: no speed without proof, records that come back as they went, and quoted facts kept apart."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from undertow import dispatch, schedule
from undertow.instruments import bench as harness
from undertow.instruments import clock, plot, proof, record, runs
from undertow.instruments.bench import Variant, bench, named_kernels
from undertow.instruments.clock import Pace, Participant
from undertow.instruments.ladder import ladder, launch_order, predicted_ratio
from undertow.instruments.shapes import bench_shapes, pick, short_documents, tiny_shapes
from undertow.kernels.spec import Config
from undertow.kernels.torch_tiled import KERNEL as TILED
from undertow.kernels.vendor import aiter, cudnn_frontend, flash_attn, flex
from undertow.target import TARGETS

CPU = torch.device("cpu")
QUICK = Pace(rounds=2, warmup=1, idle=0.0)
TINY = {w.name: w for w in tiny_shapes()}
(SDPA,) = named_kernels(("sdpa_cpu_flash",))
H200 = TARGETS["sm_90"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(one_thread):
    """Two kernels, two shapes, two passes, on a CPU."""
    return bench((TINY["gqa"], TINY["d40"]), (TILED, SDPA), device="cpu", passes=("forward", "backward"), pace=QUICK)


def only(kernel, shape="gqa", which="backward", **fields):
    shape = replace(TINY[shape], problem=replace(TINY[shape].problem, **fields))
    return bench((shape,), (kernel,), device="cpu", passes=(which,), pace=QUICK).rows[0]


# ---- named shapes


def test_shapes_are_those_of_the_docs():
    shapes = {w.name: w.problem for w in bench_shapes(deterministic=None)}
    assert len(shapes) == 36
    assert sum(p.deterministic for p in shapes.values()) == 18
    assert shapes["S2"].seqlens_q == (4096, 3000, 2500, 2048, 1700, 1400, 1000, 640)
    assert sum(shapes["S2"].seqlens_q) == sum(shapes["X2"].seqlens_q) == 16384
    assert short_documents()[:4] == (64, 221, 378, 150)
    assert len(short_documents()) == 64
    assert (shapes["S6"].band.left, shapes["S6"].band.right, shapes["S6"].group) == (1024, 0, 8)
    assert (shapes["S10"].max_seqlen_q, shapes["S10"].max_seqlen_k) == (2048, 8192)
    assert shapes["S5"].band.right is None
    assert all(p.dtype == "bf16" for p in shapes.values())


def test_useful_work_of_s1_is_the_published_figure():
    (s1,) = pick(("S1",))
    assert harness.useful_flops(s1.problem, "backward") / 3.43e-3 / 1e12 == pytest.approx(521, abs=0.1)


def test_an_unknown_shape_names_the_known():
    with pytest.raises(ValueError, match="wanted one of S1, S1-det, S2"):
        pick(("S9",))


# ---- proofs


def test_right_kernels_are_timed(measured):
    assert {r.status for r in measured.rows} == {"timed"}
    for row in measured.rows:
        assert row.ms >= row.ms_min > 0
        assert row.tflops == pytest.approx(harness.useful_flops(row.problem, row.which) / row.ms / 1e9)
        assert row.of_yardstick > 0
        assert all(p.ok for p in row.parity)
        assert row.bitwise
    tiled = next(r for r in measured.rows if r.label == "torch_tiled" and r.which == "backward")
    assert tiled.workspace > 0
    assert "block_m" in tiled.config


def zeros(problem, config, tensors, scratch):
    TILED.backward(problem, config, tensors, scratch)
    for name in ("dq", "dk", "dv"):
        tensors[name].zero_()


def lost_row(problem, config, tensors, scratch):
    TILED.backward(problem, config, tensors, scratch)
    tensors["dk"][0, 200] = 0


def half_written(problem, config, tensors, scratch):
    TILED.backward(problem, config, tensors | {"dv": torch.empty_like(tensors["dv"])}, scratch)


def wrong_scale(problem, config, tensors, scratch):
    TILED.backward(problem, config, tensors, scratch)
    tensors["dq"].mul_(1.02)


@pytest.mark.parametrize(
    ("broken", "said"),
    [(zeros, "wrong dq"), (lost_row, "wrong dk"), (half_written, "wrong dv"), (wrong_scale, "wrong dq")],
)
def test_wrong_gradients_get_no_speed(broken, said):
    row = only(replace(TILED, backward=broken))
    assert row.status == "refused"
    assert said in row.reason
    assert row.ms == row.tflops == 0


def test_what_the_kernel_before_left_behind_is_no_result():
    """Without the poison, dv would be right: it is the one that the first kernel wrote."""
    silent = replace(TILED, backward=half_written)
    rows = bench((TINY["gqa"],), (SDPA, silent), device="cpu", pace=QUICK).rows
    assert [r.status for r in rows] == ["timed", "refused"]
    assert "wrong dv" in rows[1].reason


def test_a_wrong_forward_gets_no_speed():
    def shifted(problem, config, tensors):
        TILED.forward(problem, config, tensors)
        tensors["lse"].add_(0.01)

    assert "wrong lse" in only(replace(TILED, forward=shifted), which="forward").reason


def test_the_gates_of_big_shapes_find_them_too(monkeypatch):
    monkeypatch.setattr(proof, "SMALL", 0)
    assert only(TILED).status == "timed"
    for broken, said in ((zeros, "dq"), (lost_row, "dk"), (half_written, "dv"), (wrong_scale, "dq")):
        assert f"wrong {said}" in only(replace(TILED, backward=broken)).reason


def test_another_kernel_under_a_peers_name_is_found_out():
    imposter = replace(SDPA, backward=TILED.backward, config=TILED.config, plan_workspace=TILED.plan_workspace)
    row = only(imposter)
    assert row.status == "refused"
    assert "not the kernel it claims" in row.reason
    assert row.ms == 0
    assert only(SDPA).status == "timed"


def test_a_kernel_without_a_claim_must_launch_its_own_name():
    assert "not the kernel it claims" in only(replace(TILED, name="hopper")).reason


def test_the_claimed_kernel_must_take_its_share_of_the_time():
    seen = proof.Seen((("some_gemm", 900.0), ("flash_bwd_kernel", 50.0), ("Memcpy DtoD", 50.0)), 50.0)
    assert "5% of its time" in proof.disproof("sdpa_flash", seen, "backward", shares=True)
    seen = proof.Seen((("flash_bwd_kernel", 900.0), ("reduce", 100.0)), 0.0)
    assert proof.disproof("sdpa_flash", seen, "backward", shares=True) == ""
    assert "nothing run" in proof.disproof("sdpa_flash", proof.Seen((), 0.0), "backward", shares=True)


def test_a_forward_takes_less_of_both_passes():
    """A fifth is what it takes on a GPU; a twentieth is another kernel's work."""
    for forward, refused in ((200.0, False), (40.0, True)):
        seen = proof.Seen((("flash_fwd_kernel", forward), ("flash_bwd_kernel", 1000.0 - forward)), 0.0)
        assert bool(proof.disproof("sdpa_flash", seen, "forward", shares=True, in_both=True)) is refused
        assert proof.disproof("sdpa_flash", seen, "forward", shares=True) != ""
        assert proof.disproof("sdpa_flash", seen, "backward", shares=True, in_both=True) == ""


def test_the_bench_asks_a_forward_less_where_both_passes_run(monkeypatch):
    asked = []
    said = lambda name, seen, which, *, shares, in_both: asked.append((which, in_both)) or ""
    monkeypatch.setattr(proof, "disproof", said)
    bench((TINY["gqa"],), (TILED,), device="cpu", passes=("backward", "both"), pace=QUICK)
    assert set(asked) == {("backward", False), ("forward", True), ("backward", True)}


def test_a_cache_of_gradients_is_found_after_the_timed_calls():
    calls = []

    def lazy(problem, config, tensors, scratch):
        calls.append(None)
        if len(calls) <= 2 + harness.REPEATS:
            TILED.backward(problem, config, tensors, scratch)

    row = only(replace(TILED, backward=lazy))
    assert row.status == "refused"
    assert "last timed call" in row.reason
    assert row.ms == 0


def test_deterministic_shapes_want_equal_bits():
    calls = []

    def jitter(problem, config, tensors, scratch):
        TILED.backward(problem, config, tensors, scratch)
        calls.append(None)
        tensors["dq"].view(torch.int16)[0, 100, 0, 3] ^= len(calls) % 2  # the last bit of one element

    shaky = replace(TILED, backward=jitter)
    assert "differ in bits" in only(shaky, deterministic=True).reason
    row = only(shaky)
    assert (row.status, row.bitwise) == ("timed", False)
    assert only(TILED, deterministic=True).bitwise


def test_a_kernel_that_raises_is_a_row_and_a_bug_is_not():
    def unable(problem, config, tensors, scratch):
        raise RuntimeError("no engine")

    row = only(replace(TILED, backward=unable))
    assert (row.status, row.reason) == ("cannot", "raised RuntimeError: no engine")

    def buggy(problem, config, tensors, scratch):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        only(replace(TILED, backward=buggy))


def test_a_deterministic_twin_shares_inputs_and_reference(monkeypatch):
    made = []
    real = proof.oracle
    monkeypatch.setattr(proof, "oracle", lambda *a: made.append(None) or real(*a))
    base = TINY["d40"]
    twin = replace(base, name="d40-det", problem=replace(base.problem, deterministic=True))
    found = bench((base, twin, TINY["gqa"]), (TILED,), device="cpu", passes=("forward", "backward"), pace=QUICK)
    assert [(r.shape, r.which, r.problem.deterministic) for r in found.rows] == [
        ("d40", "forward", False), ("d40", "backward", False), ("d40-det", "backward", True),
        ("gqa", "forward", False), ("gqa", "backward", False),
    ]  # fmt: skip
    assert len(made) == 2


# ---- time


def test_round_robin_poisons_before_every_call_and_rotates():
    order = []
    loop = {
        name: Participant(lambda name=name: order.append(name), lambda name=name: order.append(f"-{name}"))
        for name in "ab"
    }
    samples = clock.round_robin(loop, CPU, Pace(rounds=2, warmup=1, idle=0.0))
    assert order == ["-a", "a", "-b", "b", "-a", "a", "-b", "b", "-b", "b", "-a", "a"]
    assert all(len(s.ms) == 2 and s.minimum <= s.median for s in samples.values())


def test_sustained_and_both():
    row = bench((TINY["d40"],), (TILED,), device="cpu", passes=("both",), pace=replace(QUICK, sustained_s=0.02)).rows[0]
    assert row.status == "timed"
    assert row.sustained_tflops > 0
    assert {p.tensor for p in row.parity} == {"out", "lse", "dq", "dk", "dv"}


def test_compiling_ahead_runs_each_kernel_once_and_says_what_could_not(monkeypatch):
    ran = []

    def spy(problem, config, tensors, scratch):
        ran.append(problem.head_dim_qk)
        TILED.backward(problem, config, tensors, scratch)

    monkeypatch.setattr(harness, "pick", lambda names: tuple(TINY[n] for n in names))
    monkeypatch.setattr(harness, "named_kernels", lambda names: (replace(TILED, backward=spy),))
    monkeypatch.setattr(harness, "torch_device", lambda device: CPU)
    assert harness._compile_one(("d40", "torch_tiled", ("backward",))) == ""
    assert ran == [40]

    def unable(problem, config, tensors, scratch):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(harness, "named_kernels", lambda names: (replace(TILED, backward=unable),))
    assert "no compiler" in harness._compile_one(("d40", "torch_tiled", ("backward",)))


# ---- ladder


def test_the_ladder_puts_the_prediction_beside_the_launch_order_step():
    before, after = Config(64, 64, switches=(("kv_major", False),)), Config(64, 64, switches=(("kv_major", True),))
    problem = TINY["mla-packed"].problem
    spans = [
        schedule.predict(schedule.block_tiles(problem, 64, 64, kv_major=order), TARGETS["gfx942"])
        for order in (False, True)
    ]
    assert predicted_ratio(problem, before, after, TARGETS["gfx942"]) == spans[0] / spans[1]
    assert predicted_ratio(problem, before, replace(after, block_m=32, switches=before.switches), H200) is None
    nested = Config(switches=(("dkdv", before),)), Config(switches=(("dkdv", after),))
    assert predicted_ratio(problem, *nested, TARGETS["gfx942"]) == spans[0] / spans[1]


def test_launch_orders_are_those_of_the_schedule_model():
    problem = replace(TINY["mla-packed"].problem)
    for order, columns in ((True, 0), (False, 1)):
        model = schedule.block_tiles(problem, 64, 32, kv_major=order)
        for switch in (("kv_major", order), ("columns", columns)):
            assert launch_order(problem, Config(64, 32, switches=(switch,))) == model
    pairs = launch_order(problem, Config(64, 32, switches=(("columns", 3),)))
    grid = schedule.block_tiles(problem, 64, 32, kv_major=False)
    tiles = len(grid) // (problem.batch * problem.nheads_kv)
    assert pairs[:3] == tuple(grid[c * tiles] for c in range(3))
    assert sorted(pairs) == sorted(grid)


def test_the_ladder_times_every_step_of_one_kernel():
    base = TILED.config(TINY["gqa"].problem, TARGETS["cpu"], "backward")
    rungs = (("small", "", replace(base, block_m=64)), ("table", "", base))
    steps = ladder(TINY["gqa"], TILED, rungs, device="cpu", pace=QUICK)
    assert [s.row.status for s in steps] == ["timed", "timed"]
    assert steps[0].ratio is None
    assert steps[1].ratio == steps[0].row.ms / steps[1].row.ms
    assert [s.row.label for s in steps] == ["small", "table"]


# ---- records


def test_a_record_comes_back_as_it_went(measured, tmp_path):
    source = record.provenance(measured, "cpu", commit="abc+dirty")
    assert (source.commit, source.dirty, source.arch) == ("abc", True, "cpu")
    assert source.versions["torch"]
    record.save(measured, source, tmp_path / "r.json")
    assert record.load(tmp_path / "r.json") == (measured, source)


def test_dispatch_reads_a_record(measured, tmp_path, monkeypatch):
    record.save(measured, record.provenance(measured, "cpu"), tmp_path / "measured" / "r.json")
    monkeypatch.setattr(dispatch, "files", lambda package: tmp_path)
    dispatch.records.cache_clear()
    try:
        times = dispatch._times(TINY["gqa"].problem, TARGETS["cpu"], "backward")
        row = next(r for r in measured.rows if (r.shape, r.which, r.label) == ("gqa", "backward", "torch_tiled"))
        assert times["torch_tiled"] == row.ms
        assert set(times) == {"torch_tiled", "sdpa_cpu_flash"}
    finally:
        dispatch.records.cache_clear()


def test_runs_are_merged_on_like_terms_only(measured):
    twice = harness.merged(measured, measured)
    assert twice.rows == measured.rows * 2
    assert twice.yardsticks == measured.yardsticks * 2
    with pytest.raises(ValueError, match="pace is"):
        harness.merged(measured, replace(measured, pace=Pace()))


def test_refused_rows_never_reach_dispatch(tmp_path):
    found = bench((TINY["gqa"],), (replace(TILED, backward=zeros), SDPA), device="cpu", pace=QUICK)
    (entry,) = record.dispatch_entries(found)
    assert set(entry["ms"]) == {"sdpa_cpu_flash"}


def test_quoted_facts_are_not_measurements():
    content = record.quoted()
    known = {w.name for w in bench_shapes(deterministic=None)}
    assert {r["shape"] for r in content["rows"]} <= known
    assert {r["peer"] for r in content["rows"]} <= {k.name for k in harness.all_kernels()}
    assert "2026-11-29" in content["source"]
    assert "4.0.0b36" in content["source"]
    assert not [e for e in dispatch.records() if "tflops" in e]
    path = next(p for p in record.files("undertow").joinpath("measured").iterdir() if p.name == record.QUOTED)
    with pytest.raises(ValueError, match="'quoted', wanted 'measured'"):
        record.load(path)


def test_a_quoted_file_with_dispatch_entries_is_refused(tmp_path, monkeypatch):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / record.QUOTED).write_text(json.dumps({"kind": "quoted", "dispatch": []}))
    monkeypatch.setattr(record, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="no dispatch"):
        record.quoted()


def test_tables_and_plot(measured, tmp_path):
    from rich.console import Console

    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bad = replace(measured.rows[0], status="refused", reason="wrong dq", tflops=0.0)
    console.print(plot.table(replace(measured, rows=(*measured.rows, bad))))
    console.print(plot.quoted_table(("S1", "S2")))
    text = console.export_text()
    assert "wrong dq" in text
    assert "quoted, not measured in this run" in text
    assert "521" in text.split("quoted, not measured")[1]
    assert "521" not in text.split("quoted, not measured")[0]
    lines = plot.markdown(replace(measured, rows=(*measured.rows, replace(bad, which="backward")))).splitlines()
    assert lines[0] == "| shape | torch_tiled | sdpa_cpu_flash | matmul 512^3 float32 |"
    assert lines[2].startswith("| gqa |")
    assert lines[2].count("**") == 2
    assert lines[-1] == "* gqa, torch_tiled: wrong dq"
    plot.plot(measured, tmp_path / "p.png", quote=True)
    assert (tmp_path / "p.png").stat().st_size > 5000


@pytest.mark.parametrize(("shapes", "twins", "lengths"), [(17, 17, [9, 8, 9, 8]), (19, 1, [7, 7, 5, 1]), (0, 0, [])])
def test_a_plot_has_rows_of_shapes_and_below_them_of_twins(shapes, twins, lengths):
    names = [f"S{i}" for i in range(shapes)]
    mixed = [n for pair in zip(names, [f"{n}-det" for n in names], strict=True) for n in pair][: 2 * twins]
    panels = plot._panels([*mixed, *names[twins:]])
    assert [len(panel) for panel in panels] == lengths
    assert [n for panel in panels for n in panel] == names + [f"{n}-det" for n in names[:twins]]


# ---- peers that are not installed here


@pytest.mark.parametrize(
    ("kernel", "target", "said"),
    [
        (cudnn_frontend.KERNEL, "sm_90", "nvidia-cudnn-frontend"),
        *((k, "sm_90", "not importable") for k in flash_attn.KERNELS),
        (aiter.KERNEL, "gfx942", "aiter"),
    ],
)
def test_missing_packages_are_limits_that_say_so(kernel, target, said):
    problem = TINY["gqa"].problem
    missing = [lim for lim in kernel.failing(problem, TARGETS[target]) if "importable" in lim.why]
    if not missing:
        pytest.skip(f"{kernel.name} is installed")
    assert said in missing[0].text(problem, TARGETS[target])
    assert missing[0].remedy(problem, TARGETS[target])


def test_limits_of_peers_name_their_numbers():
    fa4 = next(k for k in flash_attn.KERNELS if k.name == "flash_attn_4")
    for name, said in (("d40", "dq is wrong"), ("S1g", "GQA")):
        (shape,) = pick((name,))
        assert said in " ".join(fa4.unsupported(shape.problem, H200))
    assert not [t for t in fa4.unsupported(pick(("S8",))[0].problem, H200) if "dq" in t]
    fa3 = next(k for k in flash_attn.KERNELS if k.name == "flash_attn_3")
    assert "256" in " ".join(fa3.unsupported(pick(("S7-det",))[0].problem, H200))


def test_flex_takes_every_named_shape():
    for w in bench_shapes(deterministic=None):
        assert flex.KERNEL.unsupported(w.problem, H200) == ()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", ["mla-packed", "gqa", "window", "chunk", "full"])
def test_flex_masks_uncompiled(name, monkeypatch):
    """torch cannot compile its backward for a CPU; the eager forward shows that masks and layouts are right."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def eager(problem):
        def attend(q, k, v, mask):
            options = {"scale": problem.scale, "enable_gqa": problem.group > 1, "return_aux": AuxRequest(lse=True)}
            out, aux = flex_attention(q, k, v, block_mask=mask, **options)
            return out, aux.lse

        return attend

    monkeypatch.setattr(flex, "_compiled", eager)
    flex._block_mask.cache_clear()
    shape = harness.Shape(TINY[name], CPU, 0)
    shape.ready("forward")
    flex.KERNEL.forward(shape.problem, Config(), shape.tensors)
    flex._block_mask.cache_clear()
    assert all(p.ok for p in proof.parity(shape.problem, shape.tensors, shape.truth, "forward"))


class Recorder:
    """A stand-in package: it takes what the real functions of these names take, and keeps it."""

    def __init__(self, names):
        self.names, self.got = names.split(), {}

    def __call__(self, *positional, **named):
        self.got = dict(zip(self.names, positional, strict=False)) | named
        assert set(self.got) <= set(self.names), set(self.got) - set(self.names)
        shapes = ("out", "softmax_lse") if "return_softmax" in self.names else ()
        return tuple(self.got.get(n) for n in shapes)


FA2_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left window_size_right softcap alibi_slopes deterministic rng_state"
)
AITER_BACKWARD = FA2_BACKWARD.replace("softcap ", "") + " is_v3_atomic_fp32 how_v3_bf16_cvt"


def stand_in(monkeypatch, module, functions):
    import sys

    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace())
    for i in range(1, len(parts)):
        setattr(sys.modules[".".join(parts[:i])], parts[i], sys.modules[".".join(parts[: i + 1])])
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)


def call_with(problem):
    shape = harness.Shape(replace(TINY["mla-packed"], problem=problem), CPU, 0, judged=False)
    return shape.tensors


def test_flash_attn_2_gets_the_band_as_its_window(monkeypatch):
    varlen = Recorder(FA2_BACKWARD)
    stand_in(monkeypatch, "flash_attn.flash_attn_interface", {"_flash_attn_varlen_backward": varlen})
    problem = replace(TINY["mla-packed"].problem, band=TINY["window"].problem.band, deterministic=True)
    flash_attn.fa2_backward(problem, Config(), call_with(problem), {})
    got = varlen.got
    assert (got["causal"], got["window_size_left"], got["window_size_right"]) == (False, 64, 0)
    assert got["deterministic"] is True
    assert got["max_seqlen_q"] == 100
    causal = replace(TINY["mla-packed"].problem)
    flash_attn.fa2_backward(causal, Config(), call_with(causal), {})
    assert (varlen.got["causal"], varlen.got["window_size_left"]) == (True, -1)


def test_aiter_traps_are_closed(monkeypatch):
    varlen = Recorder(AITER_BACKWARD)
    stand_in(monkeypatch, "aiter.ops.mha", {"_flash_attn_varlen_backward": varlen})
    problem = TINY["mla-packed"].problem
    tensors = call_with(problem)
    assert tensors["cu_seqlens_q"] is not tensors["cu_seqlens_k"]
    aiter.backward(problem, Config(), tensors, {})
    assert varlen.got["deterministic"] is False
    assert varlen.got["cu_seqlens_q"].data_ptr() == varlen.got["cu_seqlens_k"].data_ptr()
    other = replace(problem, seqlens_k=None)
    aiter.backward(other, Config(), tensors, {})
    assert varlen.got["cu_seqlens_q"].data_ptr() != varlen.got["cu_seqlens_k"].data_ptr()


@pytest.mark.parametrize(
    ("shape", "corner"),
    [("mla", "TOP_LEFT"), ("window", "TOP_LEFT"), ("mla-packed", "TOP_LEFT"), ("chunk", "BOTTOM_RIGHT")],
)
def test_cudnn_is_asked_for_its_fast_engine_where_the_mask_allows(shape, corner):
    """A square band is the same mask from either corner, and only one of them is fast."""
    cudnn = SimpleNamespace(diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"))
    lengths = {"seqlens_q": None, "seqlens_k": None}
    problem = TINY[shape].problem
    options = cudnn_frontend._options(cudnn, problem, lengths)
    assert options["diagonal_alignment"] == corner
    assert options.get("diagonal_band_left_bound") == (None if problem.band.left is None else problem.band.left + 1)
    if problem.is_packed:
        unknown = replace(problem, **lengths)
        assert cudnn_frontend._options(cudnn, unknown, lengths)["diagonal_alignment"] == "BOTTOM_RIGHT"


def test_claims_match_the_names_that_our_kernels_have():
    import re

    from undertow.kernels.triton import backward_device, forward_device

    claim = proof.CLAIMS["triton"]
    assert any(re.search(claim.backward, n) for n in vars(backward_device) if n.endswith("_kernel"))
    assert any(re.search(claim.forward, n) for n in vars(forward_device) if n.endswith("_kernel"))


def test_variants_of_one_kernel_keep_their_labels():
    base = TILED.config(TINY["d40"].problem, TARGETS["cpu"], "backward")
    assert Variant("a", TILED, base).label == "a"


# ---- a whole run


def given(tmp_path, **fields):
    plain = {"shapes": (), "kernels": ("torch_tiled",), "passes": ("backward",), "rounds": 1, "out": tmp_path}
    return runs.Run(**plain | fields)


@pytest.fixture
def two_shapes(monkeypatch):
    monkeypatch.setattr(runs, "tiny_shapes", lambda: (TINY["gqa"], TINY["d40"]))


def test_a_run_goes_on_where_it_was_cut_off(tmp_path, two_shapes):
    lines = []
    list(runs.run(given(tmp_path, budget_s=1e-9), lines.append))
    assert [line.split("] ")[1] for line in lines] == [
        "out of time, not run: gqa and its like", "out of time, not run: d40 and its like"
    ]  # fmt: skip
    lost = replace(TILED, backward=lambda *a: (_ for _ in ()).throw(harness.DeviceLost("gone")))
    assert not (tmp_path / "record.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_failures", lambda: (ValueError,))
        patch.setattr(runs, "named_kernels", lambda names: (lost,))
        with pytest.raises(harness.DeviceLost):
            list(runs.run(given(tmp_path), lines.append))
    assert (tmp_path / "running").read_text() == "gqa"
    list(runs.run(given(tmp_path, resume=True), lines.append))
    found, _ = record.load(tmp_path / "record.json")
    assert [r.shape for r in found.rows] == ["d40", "gqa"]
    lines.clear()
    list(runs.run(given(tmp_path, resume=True), lines.append))
    assert lines == []
    assert record.load(tmp_path / "record.json")[0] == found
    assert (tmp_path / "backward.png").exists()


def test_a_lost_device_ends_the_run_and_says_who(monkeypatch):
    def broken(problem, config, tensors, scratch):
        monkeypatch.setattr(clock, "synchronize", broken_clock)
        raise RuntimeError("illegal address")

    def broken_clock(device):
        raise RuntimeError("still illegal")

    with pytest.raises(harness.DeviceLost, match=r"gqa: torch_tiled raised RuntimeError: illegal address"):
        only(replace(TILED, backward=broken))


def test_passes_and_kernels_of_some_shapes_alone(tmp_path, two_shapes):
    said = given(tmp_path, passes=("backward", "forward@gqa"), kernels=("torch_tiled", "sdpa_cpu_flash"),
                 without=("sdpa*:d*",), out=None)  # fmt: skip
    lines = []
    list(runs.run(said, lines.append))
    told = [line.split("] ")[1].split(":")[0] for line in lines]
    assert told == ["gqa backward", "gqa forward", "d40 backward"]
    assert "sdpa_cpu_flash cannot" in lines[-1]
    assert runs._left_out(said)("sdpa_cpu_flash", "d40") == runs.LEFT_OUT
    with pytest.raises(ValueError, match="pass is 'sideways'"):
        list(runs.run(given(tmp_path, passes=("sideways@gqa",), out=None), lines.append))


def test_a_kernel_without_a_forward_begins_with_the_fastest():
    headless = replace(TILED, name="headless", forward=None)
    proof_of = dict(proof.CLAIMS) | {"headless": proof.CLAIMS["torch_tiled"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "CLAIMS", proof_of)
        found = bench((TINY["gqa"],), (headless, SDPA), device="cpu", passes=("forward", "both"), pace=QUICK)
    forward, both = ({r.label: r for r in found.rows if r.which == which} for which in ("forward", "both"))
    assert (forward["headless"].status, forward["headless"].reason) == ("cannot", "headless has no forward")
    assert list(both) == ["headless+sdpa_cpu_flash", "sdpa_cpu_flash"]
    assert {r.status for r in both.values()} == {"timed"}
    assert {p.tensor for p in both["headless+sdpa_cpu_flash"].parity} == {"out", "lse", "dq", "dk", "dv"}
    assert any("flash" in name for name, _ in both["headless+sdpa_cpu_flash"].launches)


def test_the_ladder_of_a_machine(monkeypatch):
    (s1,) = pick(("S1",))
    assert runs._fitting(s1, TARGETS["gfx942"]) == "flydsl"
    for said, name in ((("no objects",), "triton"), ((), "hopper")):
        stand_in_kernel = SimpleNamespace(unsupported=lambda *a, said=said: said)
        monkeypatch.setattr(runs.hopper, "KERNEL", stand_in_kernel)
        assert runs._fitting(s1, H200) == name
    with pytest.raises(ValueError, match="ladder kernel is 'x', wanted one of flydsl, hopper, triton"):
        runs._ladder(given(None, ladder="S1", ladder_kernel="x"), QUICK)


def test_clocks_of_a_step_come_from_time_clock_and_grid(monkeypatch, tmp_path):
    base = TILED.config(TINY["gqa"].problem, TARGETS["cpu"], "backward")
    monkeypatch.setattr(clock, "sm_ghz", lambda *a: 2.0)
    monkeypatch.setattr(proof, "claimed", lambda *a: 0.5)
    (step,) = ladder(TINY["gqa"], TILED, (("one", "", base),), device="cpu", pace=QUICK, walls=lambda *a: a[2])
    tiles = sum(launch_order(TINY["gqa"].problem, base))
    assert step.clocks == pytest.approx(step.row.ms * 0.5 * 2e6 * harness.detect("cpu").num_cus / tiles)
    assert step.walls == 2.0
    found = bench((TINY["gqa"],), (TILED,), device="cpu", pace=QUICK)
    record.save(found, record.provenance(found, "cpu"), tmp_path / "r.json", (step,))
    assert record.load_ladder(tmp_path / "r.json") == (step,)
    assert plot.ladder_markdown((step,)).splitlines()[2].startswith("| torch_tiled | one |")


def test_ladders_of_several_kernels_follow_one_another(monkeypatch):
    """Each begins anew: its first rung has no ratio to the last rung of another kernel."""
    base = TILED.config(TINY["gqa"].problem, TARGETS["cpu"], "backward")
    rungs = lambda problem, target: (("one", "", base), ("two", "", base))
    monkeypatch.setattr(runs, "LADDERS", {"torch_tiled": rungs})
    monkeypatch.setattr(runs, "pick", lambda names: (TINY["gqa"],))
    steps = runs._ladder(given(None, ladder="gqa", ladder_kernel="torch_tiled,torch_tiled"), QUICK)
    assert [(s.kernel, s.name, s.ratio is None) for s in steps] == 2 * [
        ("torch_tiled", "one", True), ("torch_tiled", "two", False),
    ]  # fmt: skip


def test_the_share_of_the_claimed_kernels():
    launches = (("kernel_cutlass__kernel_undertowkernelshoppermain_device", 900.0), ("finish_kernel", 100.0))
    assert proof.claimed("hopper", launches, "backward") == 0.9
    assert proof.claimed("hopper", (), "backward") == 0.0


# ---- the tables of the docs


@pytest.fixture
def tables(monkeypatch, tmp_path):
    import sys
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import bench_tables

    assert "bench_tables" in sys.modules
    monkeypatch.setattr(bench_tables, "RECORD", tmp_path / "r.json")
    return bench_tables


def hopper_run(measured):
    row = next(r for r in measured.rows if r.status == "timed" and r.which == "backward")

    def made(label, shape, tflops, **fields):
        named = {"label": label, "shape": shape, "tflops": tflops, "of_yardstick": tflops / 800, "vendor": "u" in label}
        return replace(row, problem=pick((shape,))[0].problem, **named | fields)

    rows = (
        made("hopper", "S1", 600.0), made("flex", "S1", 140.0, vendor=True), made("triton", "S1", 300.0),
        made("cudnn_frontend", "S1", 490.0), made("hopper", "S3", 500.0), made("cudnn_frontend", "S3", 552.0),
        made("triton", "S3", 300.0), made("flex", "S3", 330.0, vendor=True),
        made("hopper", "S7", 0.0, status="cannot", reason="too wide"), made("sdpa_cudnn", "S7", 350.0),
    )  # fmt: skip
    return replace(measured, rows=rows, yardsticks=(("S1", "backward", 800.0), ("S3", "backward", 800.0)))


def test_the_tables_show_losses_beside_wins(measured, tables, tmp_path):
    found = hopper_run(measured)
    record.save(found, record.provenance(found, "cpu", commit="abcdef0123"), tmp_path / "r.json")
    text = tables.tables()
    lines = {line.split(" | ")[0].strip("| "): line for line in tables.hopper_table(found).splitlines()}
    assert lines["S1"].endswith("| 600 hopper | 75.0% | 1.22 | must |")
    assert "| 490 cudnn_frontend | 521 (64%) flash_attn_4 | 565 (70%) | 640 (79%) |" in lines["S1"]
    assert lines["S3"].endswith("| 500 hopper | 62.5% | **0.91** | not reached |")
    assert "| none |  |  | not reached |" in lines["S7"]
    assert "Behind the best peer of the run: S3 (0.91 of cudnn_frontend)." in text
    assert "S7" in text.split("Short of must: ")[1].split("\n")[0]
    assert "| S1 | 300.0 | 37.5% | 140.0 | 2.14 | 2 | 138.6 |" in text
    assert "**0.91** | 1 | 331.4 |" in text
    assert "* hopper, S7: too wide" in text
    assert "commit abcdef0 (clean)" in text
    page = f"a\n{tables.BEGIN}\nold\n{tables.END}\nb\n"
    assert tables.replaced(tables.replaced(page)) == tables.replaced(page)
    tables.draw(tmp_path)
    assert (tmp_path / "bench_backward.png").exists()


def test_twins_have_a_table_of_their_own(measured, tables):
    found = hopper_run(measured)
    twins = tuple(replace(r, shape=f"{r.shape}-det") for r in found.rows if r.shape == "S1" and r.label != "flex")
    both = tables.every_kernel(replace(found, rows=found.rows + twins), "backward")
    assert both[0::2] == ["### Every kernel, backward", "### Every kernel, backward, deterministic"]
    assert both[1].startswith("| shape | hopper | flex | triton | cudnn_frontend | sdpa_cudnn | matmul 512^3 float32 |")
    assert both[3].startswith("| shape | hopper | triton | cudnn_frontend | matmul 512^3 float32 |")
    assert "-det" not in both[1] and "| S1 |" not in both[3]
    assert len(tables.every_kernel(found, "backward")) == 2


def test_what_is_wanted_of_triton_is_counted(measured, tables):
    found = hopper_run(measured)
    assert tables.portable_table(found).endswith("is reached on 1 of 11 shapes. Bold: short of it.")
    pairs = [(label, shape) for shape in tables.PORTABLE for label in ("triton", "flex")]
    rows = tuple(replace(found.rows[0], label=label, shape=shape) for label, shape in pairs)
    fast = tuple(replace(r, tflops=300.0 if r.label == "triton" else 100.0) for r in rows)
    assert tables.portable_table(replace(found, rows=fast)).endswith("is reached on 11 of 11 shapes.")


def test_cells_that_are_empty_say_why_in_few_lines(measured, tables):
    row = replace(hopper_run(measured).rows[0], status="cannot", label="sdpa_flash", tflops=0.0)
    rows = [replace(row, shape=shape, reason="packed; no order" if "d" in shape else "packed")
            for shape in ("S2", "S2-det", "S3", "S3-det")]  # fmt: skip
    rows += [replace(row, shape=shape, status="refused", reason="wrong dq") for shape in ("S1",)]
    assert tables.absent(replace(measured, rows=tuple(rows)), "backward") == [
        "Not run:", "* sdpa_flash, every deterministic twin: no order\n* sdpa_flash, all but S1: packed",
    ]  # fmt: skip
    assert tables.absent(replace(measured, rows=tuple(rows)), "forward") == []


def test_shapes_are_gathered_in_few_words(tables):
    every = ("S1", "S1-det", "S2", "S2-det", "S3", "S3-det", "S4", "S4-det")
    for some, said in (
        (every, "every shape"), (every[2:], "all but S1 and its twin"), (every[1::2], "every deterministic twin"),
        ((*every[1::2], "S3"), "every deterministic twin, S3"), (every[2:6], "S2, S3 and their twins"),
        (("S4", "S2", "S1-det", "S2-det"), "S2 and its twin, S1-det, S4"), (("S4",), "S4"),
        (set(every) - {"S2-det"}, "all but S2-det"),
    ):  # fmt: skip
        assert tables.gathered(set(some), every) == said
    assert tables.gathered({"S7"}, ("S7",)) == "S7"


def test_without_a_record_the_tables_say_so(tables):
    assert tables.tables() == tables.NONE


def test_goals_are_of_named_shapes(tables):
    pick(tuple(tables.GOALS) + tuple(tables.PORTABLE))
    assert all(must < aim for must, aim in tables.GOALS.values())
