"""Tiny calls of our GPU kernels, for compute-sanitizer (`make sanitize`). Usage: sanitize.py [KERNEL...]

Every path of the device code once: fused and deterministic, masks that cut tiles, groups of heads, segments that are
empty or end inside a tile, sink and gradient of the LSE. Exit 1 where a result is not finite, or nothing ran.
"""

from __future__ import annotations

import sys

import torch

from undertow.dispatch import get
from undertow.instruments import inputs
from undertow.instruments.verify import run
from undertow.kernels import hopper
from undertow.problem import Band, Problem
from undertow.target import detect

D64 = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64}
MLA = {"nheads_q": 1, "nheads_kv": 1, "head_dim_qk": 192, "head_dim_v": 128}
LENGTHS = ((130, 0, 1, 70), (200, 3, 0, 70))
PROBLEMS = {
    f"{name}{', deterministic' if deterministic else ''}": make(deterministic=deterministic)
    for deterministic in (False, True)
    for name, make in {
        "causal": lambda **d: Problem.dense(1, 150, 200, band=Band(None, 0), **D64, **d),
        "window, packed": lambda **d: Problem.packed(*LENGTHS, band=Band(70, 9), **D64, **d),
        "sink": lambda **d: Problem.packed(*LENGTHS, band=Band(None, 0), has_sink=True, has_dlse=True, **D64, **d),
        "70 segments": lambda **d: Problem.packed(tuple(1 + n % 9 for n in range(70)), **D64, **d),
        "192/128": lambda **d: Problem.dense(1, 150, 200, **MLA, **d),
    }.items()
}


def main(kernels: list[str]) -> int:
    """Run every problem with every kernel that can."""
    device, ran, bad = torch.device("cuda", 0), 0, 0
    hopper.FEW_KEYS = 0  # the fused kernel, too, for calls as short as these
    for kernel in kernels:
        for name, problem in PROBLEMS.items():
            if reasons := get(kernel).unsupported(problem, detect(device)):
                print(f"{kernel}, {name}: not run, {'; '.join(reasons)}")
                continue
            got = run(problem, inputs.make(problem, device), kernel)
            torch.cuda.synchronize()
            wrong = [n for n in ("dq", "dk", "dv") if not torch.isfinite(got[n]).all()]
            ran, bad = ran + 1, bad + bool(wrong)
            print(f"{kernel}, {name}: {'not finite: ' + ' '.join(wrong) if wrong else 'ran'}", flush=True)
    return int(bad > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["hopper", "triton"]))
