"""Tables and a plot of a bench: ours and peers by shape; what was measured elsewhere stands apart and hatched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import record
from .bench import Bench, Row
from .ladder import Step
from .shapes import base_name

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {
    "triton": "#c8102e", "hopper": "#7a0019", "torch_tiled": "#e58a97", "flex": "#1f77b4", "sdpa_cudnn": "#76b900",
    "cudnn_frontend": "#3f6f00", "sdpa_flash": "#ff9f1c", "aten_flash_varlen": "#ffbf69", "sdpa_efficient": "#9d9d9d",
    "sdpa_cpu_flash": "#5f6caf", "sdpa_math": "#b8b8d1", "flash_attn_2": "#e07a00", "flash_attn_3": "#8a4fff",
    "flash_attn_4": "#4b0082", "aiter": "#00a3a3",
}  # fmt: skip
OTHER = "#444444"
LADDER_TEXTS = ("kernel", "step", "about")
LADDER_COLUMNS = (*LADDER_TEXTS, "ms", "TFLOP/s", "ratio", "by schedule", "clk/step", "by the walls", "GHz")
MIB = 1 << 20
PANEL = 9
Figures = dict[tuple[str, str], float]
"""TFLOP/s by shape and label."""


def table(bench: Bench, *, every: bool = False) -> Table:
    """The measured rows; those that could not run only with `every`."""
    from rich.table import Table

    title = f"{bench.target.arch}, TFLOP/s of useful work; yardstick: {bench.yardstick}"
    grid = Table(title=title, title_justify="left")
    for name in ("shape", "pass", "kernel"):
        grid.add_column(name)
    for name in ("ms", "min", "TFLOP/s", "of yardstick", "MiB", "bits"):
        grid.add_column(name, justify="right")
    grid.add_column("")
    for shape, which in dict.fromkeys((r.shape, r.which) for r in bench.rows):
        rows = [r for r in bench.rows if (r.shape, r.which) == (shape, which)]
        for row in sorted(rows, key=lambda r: -r.tflops):
            if row.status != "cannot" or every:
                grid.add_row(*_cells(row))
        grid.add_section()
    return grid


def _cells(row: Row) -> tuple[str, ...]:
    name = row.label if row.vendor else f"[bold]{row.label}[/bold]"
    if row.status != "timed":
        return row.shape, row.which, name, "", "", "", "", "", "", f"{row.status}: {row.reason}"
    used = row.workspace if row.extra_bytes is None else max(row.workspace, row.extra_bytes)
    note = f"adapter's {row.adapter_ms:.3f} ms left out" if row.adapter_ms > 0.01 * row.ms else ""
    if row.sustained_tflops is not None:
        note = f"sustained {row.sustained_tflops:.1f}  {note}".strip()
    bits = {True: "same", False: "differ", None: ""}[row.bitwise]
    speed = f"{row.tflops:.1f}" if row.tflops >= 1 else f"{row.tflops:.4f}"
    times, share = (f"{row.ms:.3f}", f"{row.ms_min:.3f}"), f"{row.of_yardstick:.0%}"
    return row.shape, row.which, name, *times, speed, share, f"{used / MIB:.0f}", bits, note


def quoted_table(shapes: tuple[str, ...], which: str = "backward") -> Table:
    """Peers measured elsewhere, for these shapes, under their source."""
    from rich.table import Table

    content = record.quoted()
    grid = Table(title=f"quoted, not measured in this run: {content['source']}", title_justify="left")
    peers = list(dict.fromkeys(r["peer"] for r in content["rows"] if r["pass"] == which and r["shape"] in shapes))
    for name in ("shape", *peers):
        grid.add_column(name, justify="left" if name == "shape" else "right")
    for shape in shapes:
        by_peer = _quoted(content, shape, which)
        if by_peer:
            grid.add_row(shape, *(f"{by_peer[p]:g}" if p in by_peer else "" for p in peers))
    return grid


def markdown(bench: Bench, which: str = "backward") -> str:
    """TFLOP/s by shape and kernel as a Markdown table, the fastest of a shape in bold, refusals spelled out below."""
    rows = [r for r in bench.rows if r.which == which]
    timed = {(r.shape, r.label): r for r in rows if r.status == "timed"}
    labels = list(dict.fromkeys(label for _, label in timed))
    lines = [f"| shape | {' | '.join(labels)} | {bench.yardstick} |", "|---|" + "---:|" * (len(labels) + 1)]
    yards = {shape: tflops for shape, one, tflops in bench.yardsticks if one == which}
    for shape in dict.fromkeys(r.shape for r in rows):
        best = max((timed[shape, n].tflops for n in labels if (shape, n) in timed), default=0.0)
        cells = (_figure(timed[shape, n].tflops, best) if (shape, n) in timed else "" for n in labels)
        yard = f"{yards[shape]:.4g}" if shape in yards else ""
        lines.append(f"| {shape} | {' | '.join(cells)} | {yard} |")
    refused = [f"* {r.shape}, {r.label}: {r.reason}" for r in rows if r.status == "refused"]
    return "\n".join([*lines, *(["", *refused] if refused else [])]) + "\n"


def _figure(tflops: float, best: float) -> str:
    text = f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.4f}"
    return f"**{text}**" if tflops == best else text


def ladder_table(steps: tuple[Step, ...]) -> Table:
    """Each step of the ladder, its speed, its ratio to the step before, and what the models say of it."""
    from rich.table import Table

    grid = Table(title="ladder, each step against the one before", title_justify="left")
    for name in LADDER_COLUMNS:
        grid.add_column(name, justify="left" if name in LADDER_TEXTS else "right")
    for step in steps:
        grid.add_row(*_ladder_cells(step))
    return grid


def ladder_markdown(steps: tuple[Step, ...]) -> str:
    """The ladder as a Markdown table."""
    rule = "".join("---|" if name in LADDER_TEXTS else "---:|" for name in LADDER_COLUMNS)
    lines = [f"| {' | '.join(LADDER_COLUMNS)} |", f"|{rule}"]
    return "\n".join([*lines, *(f"| {' | '.join(_ladder_cells(step))} |" for step in steps)]) + "\n"


def _ladder_cells(step: Step) -> tuple[str, ...]:
    row = step.row
    speed = (f"{row.ms:.3f}", f"{row.tflops:.1f}") if row.status == "timed" else (row.status, row.reason[:60])
    counted = [f"{x:.0f}" if x else "" for x in (step.clocks, step.walls)] + [f"{step.ghz:.2f}" if step.ghz else ""]
    return step.kernel, step.name, step.about, *speed, _ratio(step.ratio), _ratio(step.predicted), *counted


def plot(bench: Bench, path: Path | str, *, which: str = "backward", title: str = "", quote: bool = False) -> None:
    """Grouped bars of TFLOP/s by shape; with `quote` also hatched bars of peers that were measured elsewhere.

    Deterministic twins stand in panels below those of their shapes, no more than `PANEL` shapes in one.
    """
    from matplotlib.figure import Figure

    rows = [r for r in bench.rows if r.which == which]
    names = list(dict.fromkeys(r.shape for r in rows))
    measured = {(r.shape, r.label): r.tflops for r in sorted(rows, key=lambda r: r.vendor) if r.status == "timed"}
    elsewhere = {(s, p): v for s in names for p, v in _quoted(record.quoted(), s, which).items()} if quote else {}
    ran = {label for _, label in measured}
    elsewhere = {(s, p): v for (s, p), v in elsewhere.items() if p not in ran}
    yard = {shape: tflops for shape, one, tflops in bench.yardsticks if one == which}
    panels = _panels(names)
    size = max(6.0, 2.5 * max(map(len, panels), default=0)), 1.3 + 3.2 * max(1, len(panels))
    figure = Figure(figsize=size, layout="constrained")
    for axes, shapes in zip(figure.subplots(len(panels), squeeze=False)[:, 0] if panels else (), panels, strict=True):
        _bars(axes, shapes, measured, elsewhere)
        for x, shape in enumerate(shapes):
            axes.hlines(yard.get(shape, 0.0), x - 0.46, x + 0.46, color="black", linewidth=0.8, linestyle=":",
                        label=bench.yardstick if x == 0 else None)  # fmt: skip
        _dress(axes, shapes)
    figure.suptitle(title or f"attention {which}, {bench.target.arch}", x=0.01, ha="left", fontsize=10)
    named = {text: bar for axes in figure.axes for bar, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = int(size[0] / 1.9)
    figure.legend(named.values(), named.keys(), fontsize=7, ncols=columns, frameon=False, loc="outside lower left")
    figure.savefig(path, dpi=150)


def _panels(names: list[str]) -> list[list[str]]:
    """The shapes, then the twins, each in rows of even length."""
    found = []
    for group in ([n for n in names if base_name(n) == n], [n for n in names if base_name(n) != n]):
        length = -(-len(group) // max(1, -(-len(group) // PANEL)))
        found += [group[i : i + length] for i in range(0, len(group), max(1, length))]
    return found


def _bars(axes: Any, shapes: list[str], measured: Figures, elsewhere: Figures) -> None:
    """A bar a shape and label, as many to a shape as the panel has labels."""
    kinds = [(values, hatched, label) for values, hatched in ((measured, False), (elsewhere, True))
             for label in dict.fromkeys(p for s, p in values if s in shapes)]  # fmt: skip
    for i, (values, hatched, label) in enumerate(kinds):
        at = [x + (i - (len(kinds) - 1) / 2) * 0.84 / len(kinds) for x in range(len(shapes))]
        heights = [values.get((shape, label), 0.0) for shape in shapes]
        look = {"hatch": "///", "alpha": 0.45, "label": f"{label}, quoted"} if hatched else {"label": label}
        axes.bar(at, heights, 0.8 / len(kinds), color=COLORS.get(label, OTHER), edgecolor="white", linewidth=0, **look)


def _dress(axes: Any, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylabel("TFLOP/s of useful work")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)


def _quoted(content: dict[str, Any], shape: str, which: str) -> dict[str, float]:
    rows = [r for r in content["rows"] if (r["shape"], r["pass"]) == (shape, which) and r.get("tflops")]
    return {r["peer"]: r["tflops"] for r in rows}


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}x"
