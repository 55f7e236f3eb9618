"""How fast the simulator runs the FlyDSL 192/128 backward (8 waves, causal, 256 tokens) with and without checks.

`python tests/simulator/speed.py` measures (two minutes) and rewrites speed_record.json.
"""

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from undertow import simulator
from undertow.instruments import inputs
from undertow.instruments.simulate import run_flydsl
from undertow.problem import Band, Problem
from undertow.simulator import Options

ROUNDS = 3


def measure(heads, checks):
    """Best of a few rounds of the main kernel: wall and processor seconds, wave-instructions, steps."""
    problem = Problem.dense(
        1, 256, 256, nheads_q=heads, nheads_kv=heads, head_dim_qk=192, head_dim_v=128, band=Band(None, 0)
    )
    tensors = inputs.make(problem)
    runs = []

    def timed(*args, **keywords):
        start = time.process_time()
        report = isa(*args, **keywords)
        runs.append((report, time.process_time() - start))
        return report

    isa, simulator.isa = simulator.isa, timed
    try:
        for _ in range(ROUNDS):
            run_flydsl(problem, "gfx942", tensors, Options(checks=checks))
    finally:
        simulator.isa = isa
    main_runs = [run for run in runs if run[0].groups["mfma"]]
    assert len(main_runs) == ROUNDS and all(r.ok and r.block == 512 for r, _ in main_runs)
    best, processor = min(main_runs, key=lambda run: run[1])
    return {
        "heads": heads,
        "checks": checks,
        "wall_s": round(min(r.seconds for r, _ in main_runs), 3),
        "processor_s": round(processor, 3),
        "wave_instructions": best.wave_instructions,
        "mfma": best.groups["mfma"],
        "steps": best.steps,
        "million_wave_instructions_per_processor_s": round(best.wave_instructions / processor / 1e6, 3),
    }


def main():
    rows = [measure(heads, checks) for heads in (1, 8, 32) for checks in (False, True)]
    record = {
        "kernel": "flydsl main kernel, 192/128, bf16, causal, 256 tokens, 8 waves, gfx942",
        "how": f"best of {ROUNDS} rounds in one process; a shared machine: processor seconds are the fair figure",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("numpy", "flydsl", "torch")}
        | {"python": platform.python_version()},
        "rows": rows,
    }
    Path(__file__).with_name("speed_record.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
