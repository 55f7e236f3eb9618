"""The geometry gate: what was compiled and launched against the config, planted differences included."""

import json
import subprocess
import sys

import pytest
from support import CAUSAL, DEVICE, call, make

from undertow.kernels import watch
from undertow.problem import Problem

D64 = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64, "band": CAUSAL}
COMPILE = """
import json
from dataclasses import replace
from undertow.kernels.triton import KERNEL, offline
from undertow.problem import Band, Problem
from undertow.target import TARGETS
problem = Problem.dense(1, 512, 512, nheads_q=2, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=Band(None, 0))
target = TARGETS["sm_90"]
config = KERNEL.config(problem, target, "backward")
launches = [
    (launch.stage, offline.compile_launch(launch, target))
    for which in ("forward", "backward") for launch in offline.launches(problem, target, which)
]

def say(name, launches=launches, problem=problem, **fields):
    dq = replace(config.switch("dq"), **fields)
    other = replace(config, switches=tuple((n, dq if n == "dq" else v) for n, v in config.switches))
    built = KERNEL.built(problem, other, launches)
    print(json.dumps([name, built.differences, built.stages.get("dq")]))

say("right")
say("num_warps", num_warps=8)
say("num_stages", num_stages=4)
say("BLOCK_M", block_m=128)
say("BLOCK_N", block_n=128)
say("TMA", switches=())
say("LOOPS", switches=(*config.switch("dq").switches, ("one_sweep", True)))
say("shared", num_stages=1)
say("QK_LO", problem=replace(problem, head_dim_qk=128))
say("lost", launches[:-1])
say("none", [])
say("twice", launches + launches[-1:])
"""


@pytest.fixture(scope="module")
def said():
    """What the gate says of launches compiled for sm_90, by planted difference."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env={}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (differences, dq) for name, differences, dq in map(json.loads, done.stdout.splitlines())}


def test_what_the_tables_resolve_is_what_is_compiled(said):
    differences, dq = said["right"]
    assert differences == []
    assert (dq["BLOCK_M"], dq["BLOCK_N"], dq["num_warps"], dq["num_stages"], dq["TMA"]) == (64, 64, 4, 3, True)
    assert 0 < dq["shared"] <= 227 * 1024


@pytest.mark.parametrize("name", ["num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "TMA", "LOOPS", "QK_LO"])
def test_a_planted_difference_is_named(said, name):
    differences, dq = said[name]
    assert any(f"dq has {name} {dq[name]}, wanted " in text for text in differences), differences


def test_more_shared_memory_than_planned_is_named(said):
    assert any("bytes of shared memory, planned at most" in text for text in said["shared"][0])


@pytest.mark.parametrize("name", ["lost", "none", "twice"])
def test_other_launches_than_planned_are_named(said, name):
    ran = {"lost": "forward dq", "none": "nothing", "twice": "forward dq dkdv dkdv"}[name]
    assert said[name][0] == [f"launched {ran}, wanted forward dq dkdv"]


def test_every_launch_of_a_call_is_seen():
    problem = Problem.packed((20, 9), **D64)
    with watch.watch() as seen:
        call(problem, make(problem), "triton")
    stages = [stage for stage, _ in seen.launches]
    assert [s for s in stages if s != "list_tiles"][:3] == ["forward", "delta", "dkdv"]
    assert seen.scratch["delta"].device.type == DEVICE
    call(problem, make(problem), "triton")
    assert [stage for stage, _ in seen.launches] == stages
