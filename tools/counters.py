"""Hardware counters of the Hopper kernels at the bench's shapes, by ncu (`make counters`). Usage: counters.py SHAPE...

Prints a Markdown table, a row a kernel. A shape followed by `:fused` or `:apart` takes that plan, not dispatch's.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys

import torch

from undertow.instruments import inputs
from undertow.instruments.shapes import bench_shapes
from undertow.instruments.verify import run
from undertow.kernels import hopper

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = ("wait", "barrier", "long_scoreboard", "short_scoreboard", "dispatch_stall", "mio_throttle", "not_selected")
COLUMNS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "of the launch": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "exp2 %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "issue %": ("sm__inst_issued.avg.per_cycle_active", 25),
    "shared %": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1),
    "L2 hits %": ("lts__t_sector_hit_rate.pct", 1),
    "DRAM read GB": ("dram__bytes_read.sum", 1e-9),
    "written": ("dram__bytes_write.sum", 1e-9),
}
"""What ncu calls each figure, and what makes its base unit ours; four instructions a clock are 100 % issue."""


def table(shapes: list[str]) -> str:
    """Run the shapes under ncu; a row a kernel, its three largest reasons to wait in clocks an instruction."""
    metrics = ",".join([name for name, _ in COLUMNS.values()] + [STALL.format(stall) for stall in STALLS])
    # The clocks are left as they are: shares of a busy chip are wanted, not of one held at its base clock.
    command = ["ncu", "--clock-control", "none", "--print-units", "base", "--csv", "--page", "raw"]
    command += ["--metrics", metrics, "-k", "regex:(main|dq)_device"]
    command += [sys.executable, __file__, "--call", *shapes]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = list(csv.DictReader(io.StringIO(said[said.index('"ID"') :])))[1:]  # the first holds the units
    names = [line.split(" ", 1)[1] for line in said.splitlines() if line.startswith("calls ")]
    head = ("shape", "kernel", *COLUMNS, "waits")
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * len(COLUMNS)}---|"]
    for name, row in zip(names, rows, strict=True):
        figures = [f"{float(row[metric].replace(',', '')) * unit:.3g}" for metric, unit in COLUMNS.values()]
        stalls = {stall: float(row[STALL.format(stall)].replace(",", "")) for stall in STALLS}
        longest = sorted(stalls, key=stalls.get, reverse=True)[:3]
        waits = ", ".join(f"{stall.replace('_', ' ')} {stalls[stall]:.1f}" for stall in longest)
        lines.append(f"| {' | '.join((*name.split(' ', 1), *figures, waits))} |")
    return "\n".join(lines)


def call(shapes: list[str]) -> None:
    """One backward a shape, and a line "calls SHAPE KERNEL" for every launch that will be read."""
    device, known = torch.device("cuda", 0), {w.name: w.problem for w in bench_shapes(deterministic=None)}
    honest = hopper._better_apart
    for shape in shapes:
        name, _, plan = shape.partition(":")
        hopper._better_apart = (lambda _, plan=plan: plan == "apart") if plan else honest
        problem = known[name]
        for kind, geometry in hopper.launches(hopper._geometry(problem)):
            parts = [n for n in ("dq", "dk", "dv") if getattr(geometry, n)]
            print(f"calls {name} {'dq' if kind == 'dq' else ' '.join(parts)}", flush=True)
        run(problem, inputs.make(problem, device), "hopper")
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call(sys.argv[2:])
    elif shutil.which("ncu") is None:
        sys.exit("counters: ncu is not on the PATH")
    else:
        print(table(sys.argv[1:] or ["S1", "S1g", "S2", "S7", "S8", "S5", "S4", "d40"]))
