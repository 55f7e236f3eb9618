"""The tile tables: every head dim gets a tile that fits, and the shared memory estimate is the compiler's."""

import itertools
import json
import subprocess
import sys

import pytest

from undertow.kernels.triton import KERNEL, configs
from undertow.problem import Band, Problem
from undertow.target import TARGETS

DIMS = (8, 16, 40, 64, 72, 96, 112, 128, 136, 192, 200, 256)
COMPILE = """
import json, sys
from undertow.kernels.triton import configs, offline
from undertow.problem import Band, Problem
from undertow.target import TARGETS
for qk, v, dtype in json.loads(sys.argv[1]):
    problem = Problem.dense(1, 512, 512, nheads_q=2, nheads_kv=1, head_dim_qk=qk, head_dim_v=v, dtype=dtype,
                            band=Band(None, 0))
    target = TARGETS["sm_90"]
    for which in ("forward", "backward"):
        for launch in offline.launches(problem, target, which):
            if launch.stage in configs.STAGES:
                config = configs.stage_config(problem, target, launch.stage)
                estimate = configs.shared_bytes(problem, config, launch.stage, fused=False)
                print(json.dumps([launch.stage, offline.compile_launch(launch, target).metadata.shared, estimate]))
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_head_dim_has_a_tile_or_a_limit_that_says_why(arch, dtype):
    target = TARGETS[arch]
    for qk, v in itertools.product(DIMS, DIMS):
        problem = Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=qk, head_dim_v=v, dtype=dtype)
        reasons = KERNEL.unsupported(problem, target)
        assert dtype == "fp32" or not reasons
        if not reasons:
            for stage in configs.STAGES:
                assert configs.feasible(problem, configs.stage_config(problem, target, stage), target, stage)


def test_descriptors_only_where_the_hardware_has_them():
    problem = Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=128, head_dim_v=128)
    for arch in ("sm_80", "sm_86", "gfx942", "gfx950"):
        for stage in configs.STAGES:
            assert not configs.stage_config(problem, TARGETS[arch], stage).switch("tma")
    assert configs.stage_config(problem, TARGETS["sm_90"], "dkdv").switch("tma")


def test_the_list_of_tiles_has_room_for_the_worst_lengths():
    for lengths in ((1,) * 7, (64, 64), (65, 1, 0, 0, 129), (0, 0)):
        problem = Problem.packed(lengths, nheads_q=2, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=Band(None, 0))
        stage = configs.Config(64, 64)
        wanted = sum(max(1, -(-n // 64)) for n in lengths)
        assert wanted <= configs.entries(problem, stage, "q") <= wanted + problem.batch


def test_the_workspace_of_many_short_segments_grows_with_tokens_and_heads():
    lengths = (8192,) + (1,) * 8000
    problem = Problem.packed(lengths, nheads_q=8, nheads_kv=8, head_dim_qk=128, head_dim_v=128, band=Band(None, 0))
    plan = KERNEL.plan_workspace(problem, KERNEL.config(problem, TARGETS["sm_90"], "backward"))
    assert plan.nbytes <= 1024 * problem.total_q * problem.nheads_q


def compiled(cases):
    done = subprocess.run([sys.executable, "-c", COMPILE, json.dumps(cases)], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_estimate_is_not_below_the_compilers_figure():
    cases = [(64, 64, "bf16"), (128, 128, "bf16"), (192, 128, "bf16"), (256, 128, "bf16"), (256, 256, "fp16"),
             (72, 40, "bf16"), (64, 64, "fp32"), (256, 256, "fp32")]  # fmt: skip
    rows = compiled(cases)
    assert len(rows) == 3 * len(cases)
    for stage, shared, estimate in rows:
        assert shared <= min(estimate, TARGETS["sm_90"].lds_bytes), (stage, shared, estimate)
