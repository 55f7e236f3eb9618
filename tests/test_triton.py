"""Triton kernels against the oracle, every row of the semantics, in the interpreter (or on a GPU where there is one).

Sizes are tiny, around one 32 x 32 tile and its tails, and every call is poisoned and fenced.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support import CAUSAL, DEVICE, call, gates, make, prove, same

import undertow
from undertow.dispatch import get
from undertow.instruments import inputs
from undertow.kernels.spec import Config
from undertow.kernels.triton import config, host
from undertow.problem import Band, Problem
from undertow.target import TARGETS

SMALL = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 24, "head_dim_v": 16}
BANDS = {
    "full": Band(),
    "causal": CAUSAL,
    "top_left": Band(None, 0, "top_left"),
    "last_8": Band(7, 0),
    "two_sided": Band(20, 5),
    "two_sided_top_left": Band(9, 12, "top_left"),
}
SEGMENTS = ((33, 0, 1, 5), (7, 3, 36, 0))  # queries without keys, no queries, one query, no keys


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_dense_bands(band):
    prove(Problem.dense(1, 33, 41, band=band, **SMALL), "triton")


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_dense_layouts(layout):
    """Batch, row and head strides in every order; a band that cuts on both sides."""
    prove(Problem.dense(2, 33, 41, layout=layout, band=BANDS["two_sided"], **SMALL), "triton")


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_packed_with_nan_gaps(band):
    prove(Problem.packed(*SEGMENTS, band=band, **SMALL), "triton", gap=2)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_deterministic_plan(band):
    problem = Problem.packed(*SEGMENTS, band=band, deterministic=True, **SMALL)
    tensors = inputs.with_gaps(problem, make(problem), 2, fill=float("nan"))
    gates(problem, tensors, call(problem, tensors, "triton"))


SWITCHES = {
    "flat": ("flat",), "one_sweep": ("flat", "one_sweep"), "apart": ("apart",), "all": ("flat", "one_sweep", "apart"),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("band", ["full", "causal", "two_sided"])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_switches_of_the_tables(monkeypatch, switches, band, deterministic):
    """The loops that only GPU rows of the tables choose, by descriptors and by pointers, with rows that see no key."""
    for tma in (True, False):
        stage = Config(32, 32, 4, 1, (("tma", tma), ("columns", 0), *((name, True) for name in switches)))
        monkeypatch.setattr("undertow.kernels.triton.stage_config", lambda *_, stage=stage: stage)
        fields = SMALL | {"nheads_q": 6, "nheads_kv": 2, "band": BANDS[band], "deterministic": deterministic}
        problem = Problem.packed((33, 0, 70, 5), (70, 3, 36, 0), **fields)
        tensors = inputs.with_gaps(problem, make(problem), 2, fill=float("nan"))
        gates(problem, tensors, call(problem, tensors, "triton"))


DIMS = [(40, 40), (72, 72), (80, 80), (112, 112), (192, 128), (64, 128), (256, 128), (8, 8), (16, 256), (128, 96)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims):
    """Chunks of two powers of two, an odd tail of columns, and dims that differ; the fused plan and the exact one."""
    fields = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": dims[0], "head_dim_v": dims[1], "band": CAUSAL}
    problem = Problem.dense(1, 20, 35, **fields)
    prove(problem, "triton")
    exact = replace(problem, deterministic=True)
    tensors = make(exact)
    gates(exact, tensors, call(exact, tensors, "triton"))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 63, 64, 65])
def test_lengths_around_a_tile(length):
    prove(Problem.dense(1, length, length, band=CAUSAL, **SMALL), "triton")


@pytest.mark.parametrize("lengths", [(1, 70), (70, 1), (3, 40), (40, 3), (64, 32), (0, 5), (5, 0)], ids=str)
def test_unequal_lengths(lengths):
    """Bottom-right: queries before the first key see nothing and get exact zeros."""
    prove(Problem.packed((lengths[0],), (lengths[1],), band=CAUSAL, **SMALL), "triton")


FEATURES = {
    "softcap": {"softcap": 2.0},
    "sink": {"has_sink": True},
    "dlse": {"has_dlse": True},
    "scale": {"softmax_scale": 0.5},
    "negative_scale": {"softmax_scale": -0.3},
    "all": {"softcap": 3.0, "has_sink": True, "has_dlse": True, "softmax_scale": 0.5, "band": Band(20, 0)},
    "all_exact": {"softcap": 3.0, "has_sink": True, "has_dlse": True, "deterministic": True},
}


@pytest.mark.parametrize("fields", FEATURES.values(), ids=FEATURES.keys())
def test_features(fields):
    fields = SMALL | {"band": CAUSAL} | fields
    dense = Problem.dense(2, 20, 35, **fields)
    tensors = make(dense)
    gates(dense, tensors, call(dense, tensors, "triton"))


@pytest.mark.parametrize("name", ["sink", "dlse", "all", "all_exact"])
def test_features_of_packed_rows_with_nan_gaps(name):
    """Per-row scalars (lse, delta, dlse, the sink's rows) have strides of their own, and gaps."""
    packed = Problem.packed(*SEGMENTS, **(SMALL | {"band": CAUSAL} | FEATURES[name]))
    tensors = inputs.with_gaps(packed, make(packed), 1, fill=float("nan"))
    gates(packed, tensors, call(packed, tensors, "triton"))


def test_sink_is_the_lse_of_a_row_without_keys():
    problem = Problem.packed((5,), (2,), band=CAUSAL, has_sink=True, **SMALL)
    tensors = make(problem)
    got = call(problem, tensors, "triton")
    assert torch.equal(got["lse"][:, :3], tensors["sink"][:, None].expand(2, 3))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_dtypes(dtype):
    """bf16 is everywhere else; fp32 has a bound of 1e-5, so TF32 anywhere fails."""
    for deterministic in (False, True):
        problem = Problem.dense(2, 33, 41, dtype=dtype, band=CAUSAL, deterministic=deterministic, **SMALL)
        tensors = make(problem)
        gates(problem, tensors, call(problem, tensors, "triton"))


@pytest.mark.parametrize("seqused", [None, (2, 0)], ids=["cu_seqlens", "seqused"])
def test_every_entry_behind_the_last_tile_is_empty(seqused):
    """Tensors with far more rows than tokens: the list is as long as the rows ask, and memory holds anything."""
    from undertow.kernels.triton.chunks_device import Seqs
    from undertow.kernels.triton.preprocess_device import list_tiles_kernel

    first = torch.tensor([0, 40, 45] if seqused is None else [0, 6000, 9000], dtype=torch.int32, device=DEVICE)
    used = None if seqused is None else torch.tensor(seqused, dtype=torch.int32, device=DEVICE)
    seqs, entries = Seqs(first, used, None, 10000), 10000 // 16 + 2
    lists = torch.full((2, 2, entries), 77, dtype=torch.int32, device=DEVICE)
    list_tiles_kernel[(2,)](seqs, lists[0], entries, seqs, lists[1], entries, 2, ROWS=16, OTHER_ROWS=32, CHUNK=128)
    for found, want in zip(lists, ([0, 0, 0, 1], [0, 0, 1]) if seqused is None else ([0, 1], [0, 1]), strict=True):
        assert found[0].tolist() == want + [-1] * (entries - len(want))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)], ids=str)
def test_groups(heads):
    """dK and dV are summed over the group in fp32 and rounded once."""
    prove(Problem.packed((20, 13), band=CAUSAL, **(SMALL | {"nheads_q": heads[0], "nheads_kv": heads[1]})), "triton")


def test_outlier_columns():
    prove(Problem.dense(1, 65, 65, band=CAUSAL, **SMALL), "triton", outliers=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_given_delta_is_used_and_out_is_not_read(packed, has_dlse):
    fields = SMALL | {"band": CAUSAL, "has_dlse": has_dlse}
    problem = Problem.packed((20, 7), (13, 9), **fields) if packed else Problem.dense(2, 20, 13, **fields)
    tensors = make(problem)
    got = call(problem, tensors, "triton")
    rowsum = (tensors["dout"].float() * got["out"].float()).sum(-1)
    delta = rowsum.t() if packed else rowsum.transpose(1, 2)
    delta = torch.where(got["lse"] == -torch.inf, float("nan"), delta)
    positional, keywords = inputs.arguments(problem, tensors)
    q, k, v, *segments = positional
    backward = undertow.attention_varlen_backward if packed else undertow.attention_backward
    with undertow.checked():
        grads = backward(
            tensors["dout"], q, k, v, torch.full_like(got["out"], float("nan")), got["lse"], *segments, **keywords,
            delta=delta, dlse=tensors["dlse"], kernel="triton",
        )  # fmt: skip
    gates(problem, tensors, got | {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv})


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_rows_without_keys_hold_is_ignored(deterministic):
    """lse, out and dout of a row that sees no key may be anything, NaN too: the mask decides."""
    problem = Problem.packed((20, 7), (13, 9), band=CAUSAL, has_sink=True, deterministic=deterministic, **SMALL)
    tensors = make(problem)
    got = call(problem, tensors, "triton")
    dead = torch.zeros(27, dtype=torch.bool)
    dead[:7] = True
    out, lse = got["out"].clone(), got["lse"].clone()
    out[dead], lse[:, dead], tensors["dout"][dead] = float("nan"), float("inf"), float("nan")
    positional, keywords = inputs.arguments(problem, tensors)
    q, k, v, *segments = positional
    grads = undertow.attention_varlen_backward(
        tensors["dout"], q, k, v, out, lse, *segments, **keywords, kernel="triton"
    )
    same({"dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dsink": grads.dsink}, got, ("dq", "dk", "dv", "dsink"))


def test_two_deterministic_runs_agree_and_ignore_the_launch_order():
    problem = Problem.packed((33, 0, 20), band=CAUSAL, deterministic=True, **SMALL)
    tensors = make(problem)
    same(call(problem, tensors, "triton"), call(problem, tensors, "triton"))


def test_every_row_of_the_semantics_is_within_its_limits():
    """Issue 2: its limits may name only architecture, head dim > 256 and shared memory at fp32."""
    for arch, target in TARGETS.items():
        for dtype in ("bf16", "fp16"):
            for dims in (*DIMS, (256, 256)):
                problem = Problem.packed(
                    (9, 0), (3, 4), nheads_q=4, nheads_kv=2, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=dtype,
                    softcap=2.0, has_sink=True, has_dlse=True, has_delta=True, deterministic=True, band=Band(3, 1),
                )  # fmt: skip
                reasons = get("triton").unsupported(problem, replace(target, interpreter=True))
                assert reasons == (), f"{arch} {dims}: {reasons}"


def test_without_the_interpreter_the_cpu_is_refused_with_the_fix():
    problem = Problem.packed((9, 3), **SMALL)
    assert get("triton").unsupported(problem, TARGETS["cpu"]) == (
        "arch is cpu, where Triton only interprets, for tests",
    )
    (limit,) = get("triton").failing(problem, TARGETS["cpu"])
    assert "TRITON_INTERPRET=1" in limit.remedy(problem, TARGETS["cpu"])


def test_launch_grids_are_one_dimensional_and_below_two_to_the_31():
    """B22, B23: 65538 segments, 65536 heads and 16500 segments of 8 heads; grid y and z would end at 65535."""
    from undertow.kernels.triton import offline

    d64 = {"head_dim_qk": 64, "head_dim_v": 64}
    d128 = {"head_dim_qk": 128, "head_dim_v": 128}
    for problem in (
        Problem.packed((1,) * 65537, nheads_q=1, nheads_kv=1, **d64),
        Problem.dense(1, 2, 2, nheads_q=65536, nheads_kv=65536, **d64),
        Problem.packed((1,) * 16500, nheads_q=8, nheads_kv=8, **d128),
    ):
        for deterministic in (False, True):
            for which in ("forward", "backward"):
                found = offline.launches(replace(problem, deterministic=deterministic), TARGETS["sm_90"], which)
                for launch in found:
                    rows = 1 if problem.is_packed else 2
                    assert problem.nheads_q * max(1, problem.batch // 64) <= launch.programs < 2**31
                    assert launch.programs <= problem.nheads_q * problem.batch * rows


def test_config_is_hashable_and_feasible_for_every_target():
    for arch, target in TARGETS.items():
        for dims in DIMS:
            fields = {"nheads_q": 4, "nheads_kv": 1, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
            for deterministic in (False, True):
                problem = Problem.packed((500, 3), deterministic=deterministic, **fields)
                chosen = config(problem, target, "backward")
                assert hash(chosen) == hash(config(problem, target, "backward")), arch
                assert not (deterministic and chosen.switch("fused"))


# ---- the compiled kernels, without their hardware

COMPILE = """
import json, sys
from undertow.kernels.triton import offline
from undertow.problem import Band, Problem
from undertow.target import TARGETS

arch, which, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
left, right = fields.pop("band")
problem = Problem.packed((500, 0, 300), (500, 4, 300), band=Band(left, right), **fields)
for launch in offline.launches(problem, TARGETS[arch], which):
    built = offline.compile_launch(launch, TARGETS[arch])
    text = built.asm.get("amdgcn") or built.asm["ptx"]
    found = {"stage": launch.stage, "shared": built.metadata.shared}
    found["mma"] = sum(map(text.count, ("v_mfma_", "wgmma.mma_async", "mma.sync", "tcgen05.mma")))
    found["fp64"] = text.count(".f64") + text.count("_f64")
    print(json.dumps(found))
"""

MLA = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 192, "head_dim_v": 128, "band": [None, 0]}
WIDE = {"nheads_q": 4, "nheads_kv": 1, "head_dim_qk": 256, "head_dim_v": 256, "band": [None, 0]}
RICH = {"nheads_q": 4, "nheads_kv": 1, "head_dim_qk": 72, "head_dim_v": 40, "band": [30, 0], "softcap": 20.0,
        "has_sink": True, "has_dlse": True}  # fmt: skip
BUILDS = [("sm_90", "backward", MLA), ("gfx942", "backward", MLA), ("gfx950", "forward", MLA)]
SLOW_BUILDS = [
    *((arch, "backward", MLA | {"deterministic": True}) for arch in ("sm_90", "gfx942", "gfx950")),
    *((arch, which, RICH) for arch in ("sm_80", "sm_90", "gfx942", "gfx950") for which in ("forward", "backward")),
    *((arch, which, WIDE) for arch in ("sm_80", "sm_86", "sm_90", "gfx942") for which in ("forward", "backward")),
    *(("sm_100", which, WIDE) for which in ("forward", "backward")),
    *((arch, "backward", WIDE | {"dtype": "fp32"}) for arch in ("sm_90", "gfx942")),
    ("gfx950", "backward", MLA),
    ("gfx942", "forward", MLA),
    ("sm_90", "forward", MLA),
]


def name(build):
    arch, which, fields = build
    kind = "exact" if "deterministic" in fields else fields.get("dtype", "bf16")
    return f"{arch}-{which}-{fields['head_dim_qk']}-{kind}"


@pytest.mark.parametrize("build", [*BUILDS, *(pytest.param(b, marks=pytest.mark.slow) for b in SLOW_BUILDS)], ids=name)
def test_kernels_compile_for_their_targets(build):
    """What runs in the interpreter also compiles: within shared memory, on the matrix units, with no fp64."""
    arch, which, fields = build
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, arch, which, json.dumps(fields)], env=environment, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    stages = [f["stage"] for f in found if f["stage"] != "list_tiles"]
    if which == "forward":
        assert stages == ["forward"]
    else:
        assert stages in (["dq", "dkdv"], ["delta", "dkdv", "round_dq"])
        assert stages[0] == "dq" or not fields.get("deterministic")
    for stage in found:
        assert stage["shared"] <= TARGETS[arch].lds_bytes, stage
        assert stage["fp64"] == 0, stage
        if stage["stage"] in ("forward", "dkdv", "dq") and fields.get("dtype") != "fp32":
            assert stage["mma"] > 0, stage


def test_tma_is_not_asked_for_what_it_cannot_read():
    """Rows off 16 bytes, bases off 16 bytes, and a gradient that is one head expanded to all."""
    whole = {n: torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16) for n in ("q", "k", "v", "dout")}
    assert host._tma_can_read(whole)
    assert not host._tma_can_read(whole | {"dout": whole["dout"][:, :, :1].expand(2, 5, 4, 64)})
    assert not host._tma_can_read(whole | {"q": torch.zeros(2, 5, 4, 68, dtype=torch.bfloat16)[..., :64]})
    off = torch.zeros(whole["v"].numel() + 1, dtype=torch.bfloat16)[1:].view_as(whole["v"])
    assert not host._tma_can_read(whole | {"v": off})
