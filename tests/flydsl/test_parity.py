"""Every knob, mask, layout, plan and arch as machine code in the simulator, through the gates of verify."""

from dataclasses import replace
from pathlib import Path

import pytest
import simulated
import torch

from undertow.kernels.flydsl import compiler, plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.kernels.flydsl.steps import backward_steps
from undertow.problem import Band, Problem

CAUSAL = Band(None, 0)
MLA = (192, 128)
slow = pytest.mark.slow


def packed(q, k=None, dims=MLA, h=2, hk=1, **fields):
    return Problem.packed(q, k, nheads_q=h, nheads_kv=hk, head_dim_qk=dims[0], head_dim_v=dims[1], **fields)


def dense(sq, sk, dims=MLA, batch=2, h=2, hk=1, **fields):
    sizes = {"nheads_q": h, "nheads_kv": hk, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
    return Problem.dense(batch, sq, sk, **sizes, **fields)


CHUNKS = ((45, 60, 1), (45, 90, 30))
DEAD = ((70, 0, 33), (40, 20, 0))
SINK = {"has_sink": True, "has_dlse": True}

# name: (problem, knobs or None for the default, arch, what the inputs get)
CASES = {
    "mla-chunks": (packed(*CHUNKS, band=CAUSAL), None, "gfx942", {}),
    "mla-no-keys-mha": (packed(*DEAD, hk=2, band=CAUSAL), None, "gfx942", {}),
    "mla-window-sbhd-sink": (dense(50, 133, band=Band(20, 5), layout="sbhd", **SINK), None, "gfx942", {}),
    "mla-nan-gaps": (packed((33, 0, 50), (33, 20, 140), band=CAUSAL), None, "gfx942", {"gap": 7}),
    "mla-deterministic-nan-gaps": (packed((33, 140), band=CAUSAL, deterministic=True), None, "gfx942", {"gap": 5}),
    "mla-outliers": (dense(64, 130, batch=1, band=CAUSAL), None, "gfx942", {"outliers": True}),
    "mla-fp16": (packed(*CHUNKS, band=CAUSAL, dtype="fp16"), None, "gfx942", {}),
    "mla-bf16-accumulator": (packed(*CHUNKS, band=CAUSAL), {"accumulate": "bf16", "dq_groups": 2}, "gfx942", {}),
    "d128-window-gqa4": (packed((70, 33), (90, 33), (128, 128), h=4, band=Band(20, 0)), None, "gfx942", {}),
    "d64-mqa": (dense(50, 40, (64, 64), h=4), None, "gfx942", {}),
    "d256": (dense(40, 70, (256, 256), batch=1, band=CAUSAL), None, "gfx942", {}),
    "ablation-transposed": (packed(*CHUNKS, band=CAUSAL), {"transposed_tiles": True, "pipeline": False}, "gfx942", {}),
    "ablation-no-pipeline": (packed(*CHUNKS, band=CAUSAL), {"pipeline": False}, "gfx942", {}),
    "ablation-kv-minor": (packed(*CHUNKS, band=CAUSAL), {"kv_major": False}, "gfx942", {}),
    "knob-dq-groups": (packed(*CHUNKS, band=CAUSAL), {"dq_groups": 2}, "gfx942", {}),
    "950-mla-chunks": (packed(*CHUNKS, band=CAUSAL), None, "gfx950", {}),
    "950-mla-deterministic": (packed(*DEAD, band=CAUSAL, deterministic=True), None, "gfx950", {}),
    "950-d96-fp16": (dense(50, 70, (96, 96), batch=1, band=CAUSAL, dtype="fp16"), None, "gfx950", {}),
}
SLOW = {
    "d96": (dense(50, 140, (96, 96), band=CAUSAL), None, "gfx942", {}),
    "knob-4-waves": (packed(*CHUNKS, band=CAUSAL), {"num_waves": 4, "block_n": 64}, "gfx942", {}),
    "950-mla-window-sbhd-sink": (dense(50, 133, band=Band(20, 5), layout="sbhd", **SINK), None, "gfx950", {}),
    "mla-full-bshd": (dense(40, 70, batch=1), None, "gfx942", {}),
    "mla-top-left-bhsd": (dense(70, 100, band=Band(None, 0, "top_left"), layout="bhsd"), None, "gfx942", {}),
    "mla-deterministic": (packed(*DEAD, band=CAUSAL, deterministic=True), None, "gfx942", {}),
    "mla-sink-no-keys": (packed(*DEAD, band=CAUSAL, **SINK), None, "gfx942", {}),
    "d128-softcap": (dense(40, 60, (128, 128), batch=1, softcap=5.0, band=CAUSAL), None, "gfx942", {}),
    "d128-64": (dense(50, 70, (128, 64), band=Band(None, 7)), None, "gfx942", {}),
    "d256-deterministic": (dense(40, 70, (256, 256), batch=1, band=CAUSAL, deterministic=True), None, "gfx942", {}),
    "d160-behind-the-diagonal": (dense(50, 90, (160, 160), batch=1, band=Band(-2, 30)), None, "gfx942", {}),
    "knob-interleave": (packed(*CHUNKS, band=CAUSAL), {"schedule": "interleave", "sched_steps": 4}, "gfx942", {}),
    "knob-16-rows": (packed(*CHUNKS, band=CAUSAL), {"block_m": 16, "dq_groups": 2}, "gfx942", {}),
    "950-mla-nan-gaps": (packed((33, 0, 50), (33, 20, 140), band=CAUSAL), None, "gfx950", {"gap": 7}),
    "950-ablation-transposed": (packed(*CHUNKS, band=CAUSAL), {"transposed_tiles": True}, "gfx950", {}),
    "d64-delta-given": (packed(*CHUNKS, (64, 64), band=CAUSAL, has_delta=True, has_dlse=True), None, "gfx942", {}),
    "mla-wide-rows": (dense(50, 70, batch=1, band=CAUSAL), None, "gfx942", {"wide": 6}),
    "d32": (dense(50, 40, (32, 32)), None, "gfx942", {}),
    "d64-256": (dense(50, 140, (64, 256), band=CAUSAL), None, "gfx942", {}),
    "d256-128": (dense(50, 140, (256, 128), batch=1, band=CAUSAL), None, "gfx942", {}),
    "d224-96": (dense(50, 70, (224, 96), batch=1, band=CAUSAL), None, "gfx942", {}),
    "d192": (dense(50, 140, (192, 192), batch=1, band=CAUSAL), None, "gfx942", {}),
    "d64-fp16-softcap": (dense(50, 70, (64, 64), softcap=3.0, dtype="fp16"), None, "gfx942", {}),
    "d128-dlse-packed": (packed(*CHUNKS, (128, 128), band=CAUSAL, has_dlse=True), None, "gfx942", {}),
    "knob-64-rows": (packed(*CHUNKS, band=CAUSAL), {"block_m": 64, "pipeline": False}, "gfx942", {}),
    "knob-256-keys": (packed(*CHUNKS, band=CAUSAL), {"block_n": 256}, "gfx942", {}),
    "knob-4-waves-128-keys": (packed(*CHUNKS, band=CAUSAL), {"num_waves": 4}, "gfx942", {}),
    "mla-long": (packed((300, 140), (300, 400), h=4, hk=2, band=CAUSAL), None, "gfx942", {}),
    "mla-long-deterministic": (packed((300, 140), (300, 400), band=CAUSAL, deterministic=True), None, "gfx942", {}),
    "950-d256": (dense(40, 70, (256, 256), batch=1, band=CAUSAL), None, "gfx950", {}),
    "950-d128-softcap": (dense(40, 60, (128, 128), batch=1, softcap=5.0, band=CAUSAL), None, "gfx950", {}),
    "950-bf16-accumulator": (packed(*CHUNKS, band=CAUSAL), {"accumulate": "bf16", "dq_groups": 2}, "gfx950", {}),
    "950-interleave": (packed(*CHUNKS, band=CAUSAL), {"schedule": "interleave", "sched_steps": 2}, "gfx950", {}),
    "950-no-pipeline": (packed(*CHUNKS, band=CAUSAL), {"pipeline": False}, "gfx950", {}),
    "950-64-rows": (packed(*CHUNKS, band=CAUSAL), {"block_m": 64}, "gfx950", {}),
    "950-outliers": (dense(64, 130, batch=1, band=CAUSAL), None, "gfx950", {"outliers": True}),
}  # fmt: skip
ALL = CASES | SLOW
NAMES = [*CASES, *(pytest.param(name, marks=slow) for name in SLOW)]


def config_of(problem, knobs, arch):
    if knobs is None:
        return plan.config_of(plan.default_geometry(problem, arch))
    dims = (problem.head_dim_qk, problem.head_dim_v)
    return plan.config_of(replace(Geometry(*dims, arch=arch, dtype=problem.dtype), **knobs))


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """All builds of the selected cases, compiled by one child process before the first case."""
    chosen = {item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")
              and "name" in item.callspec.params and item.module.__name__ == __name__}  # fmt: skip
    keys = []
    for name in sorted(chosen):
        problem, knobs, arch, extras = ALL[name]
        tensors = simulated.call(problem, **extras) | {n: torch.empty(0) for n in ("dsink",)}
        tensors |= {f"d{n}": tensors[n] for n in "qkv"}
        config = config_of(problem, knobs, arch)
        scratch = {b.name: None for b in plan.plan_workspace(problem, config).buffers}
        keys += [step.key for step in backward_steps(problem, config, tensors, scratch)]
    compiler.isa_many(list(dict.fromkeys(keys)))


def test_there_are_as_many_problems_as_the_manual_says():
    manual = (Path(__file__).parents[2] / "docs" / "amd.md").read_text()
    assert f"**Parity** of {len(ALL)} problems" in manual
    assert len({(str(p), str(k), a) for p, k, a, _ in ALL.values()}) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_parity(name):
    problem, knobs, arch, extras = ALL[name]
    order = sorted(ALL).index(name)
    done = simulated.run(
        problem, config_of(problem, knobs, arch), arch=arch, tensors=simulated.call(problem, seed=order, **extras),
        wave_seed=order,
    )  # fmt: skip
    plain = not extras.get("outliers") and (knobs or {}).get("accumulate") != "bf16"
    simulated.check(done, cosine=simulated.COSINE if plain else 0.9999)
