"""Tables and plots of docs/bench.md, from the record of one run. Usage: bench_tables.py [--plots] [docs/bench.md]

Without a page it prints them; with one it replaces what stands between the markers, and with --plots draws the plots
beside it. A test fails when the page is stale.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from undertow.instruments import plot, record
from undertow.instruments.bench import Bench, Row
from undertow.instruments.shapes import ODD_DIMS, base_name

BEGIN, END = "<!-- bench tables: begin -->", "<!-- bench tables: end -->"
RECORD = Path(__file__).parents[1] / "src" / "undertow" / "measured" / "h200.json"
NONE = "No run of the bench is recorded yet; these tables are made from its record."
QUOTED_YARDSTICK = 810.0
"""TFLOP/s of the 8192^3 bf16 matmul in the loop that the goals and the quoted peers come from."""

_ODD = dict(zip(ODD_DIMS, (301, 376, 362, 428, 508), strict=True))
GOALS: dict[str, tuple[float, float]] = {
    "S1": (565, 640), "S2": (470, 560), "S1g": (565, 640), "S10": (555, 620), "S1-det": (460, 520),
    "S2-det": (390, 450), "X2": (170, 250), "S6": (450, 520), "S8": (525, 580), "S7": (440, 500), "S7-det": (320, 400),
    "d256-128": (400, 460), **{f"d{dim}": (1.03 * best, 1.15 * best) for dim, best in _ODD.items()},
    "S3": (0.9 * 628, 650), "S5": (0.9 * 681, 700),
}  # fmt: skip
"""TFLOP/s that the Hopper kernels must reach and aim at, by shape, beside that yardstick."""

PORTABLE = {"S1": 2, "S2": 2, "S1g": 2, "S10": 2, "X2": 2, "S7": 2, "S3": 1, "S4": 1, "S5": 1, "S6": 1, "S8": 1}
"""How many times flex_attention, the portable bar, the Triton kernels are to reach."""


def tables() -> str:
    """All of them as Markdown, or that there is no record."""
    if not RECORD.is_file():
        return NONE
    bench, source = record.load(RECORD)
    steps = record.load_ladder(RECORD)
    tree = "clean" if source.dirty is False else "dirty" if source.dirty else "not known to be clean"
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    parts = [
        f"{source.device}, driver {source.driver}, {versions}, {source.date[:10]}, "
        f"commit {source.commit[:7]} ({tree}). {source.how[0].upper()}{source.how[1:]}. TFLOP/s of useful work.",
        "### Hopper, against the best of each shape", hopper_table(bench),
        "### Triton, against flex_attention", portable_table(bench),
    ]  # fmt: skip
    for which in dict.fromkeys(r.which for r in bench.rows):
        parts += [*every_kernel(bench, which), *absent(bench, which)]
    if steps:
        parts += [f"### The ladder at {steps[0].row.shape}", plot.ladder_markdown(steps).strip()]
    return "\n\n".join(parts)


def every_kernel(bench: Bench, which: str) -> list[str]:
    """The table of a pass; deterministic twins, which fewer kernels run, in one of their own."""
    parts = []
    for twins, said in ((False, ""), (True, ", deterministic")):
        rows = tuple(r for r in bench.rows if r.which == which and _is_twin(r.shape) == twins)
        if rows:
            parts += [f"### Every kernel, {which}{said}", plot.markdown(replace(bench, rows=rows), which).strip()]
    return parts


def hopper_table(bench: Bench) -> str:
    """A row a shape with a goal: peers, must, aim, ours; then what was lost, in words."""
    head = ("shape", "best peer", "elsewhere, quoted", "must", "aim", "ours", "of yardstick", "ours / peer", "goal")
    lines = [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * (len(head) - 4) + "---|"]
    lost, short = [], []
    for shape, goals in GOALS.items():
        rows = _timed(bench, shape)
        ours = max((r for r in rows if not r.vendor), key=lambda r: r.tflops, default=None)
        peer = max((r for r in rows if r.vendor), key=lambda r: r.tflops, default=None)
        shares = [goal / QUOTED_YARDSTICK for goal in goals]
        told = (f"{goal:.0f} ({share:.0%})" for goal, share in zip(goals, shares, strict=True))
        cells = [shape, _named(peer), _elsewhere(shape), *told]
        if ours is None:
            lines.append(f"| {' | '.join([*cells, 'none', '', '', 'not reached'])} |")
            short.append(shape)
            continue
        ratio = ours.tflops / peer.tflops if peer else None
        goal = "aim" if ours.of_yardstick >= shares[1] else "must" if ours.of_yardstick >= shares[0] else "not reached"
        said = "" if ratio is None else f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"
        lines.append(f"| {' | '.join([*cells, _named(ours), f'{ours.of_yardstick:.1%}', said, goal])} |")
        if ratio is not None and ratio < 1:
            lost.append(f"{shape} ({ratio:.2f} of {peer.label})")
        if goal == "not reached":
            short.append(f"{shape} ({ours.of_yardstick / shares[0]:.2f} of it)")
    return "\n".join(lines) + (
        "\n\nGoals are compared as fractions of the matmul in the same loop. "
        f"Behind the best peer of the run: {', '.join(lost) or 'none'}. Short of must: {', '.join(short) or 'none'}."
    )


def portable_table(bench: Bench) -> str:
    """A row a shape: the Triton kernels, flex in the same loop, flex as quoted; then whether they are fast enough."""
    lines = ["| shape | triton | of yardstick | flex | triton / flex | wanted | flex, quoted |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    reached = 0
    for shape, wanted in PORTABLE.items():
        rows = {r.label: r for r in _timed(bench, shape)}
        ours, flex = rows.get("triton"), rows.get("flex")
        ratio = ours.tflops / flex.tflops if ours and flex else None
        told = "" if ratio is None else f"{ratio:.2f}" if ratio >= wanted else f"**{ratio:.2f}**"
        reached += ratio is not None and ratio >= wanted
        quoted = next((v for peer, v in _quotes(shape) if peer == "flex"), None)
        cells = [f"{ours.tflops:.1f}" if ours else "", f"{ours.of_yardstick:.1%}" if ours else "",
                 f"{flex.tflops:.1f}" if flex else "", told, f"{wanted}", f"{quoted:g}" if quoted else ""]  # fmt: skip
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    short = " Bold: short of it." if reached < len(PORTABLE) else ""
    return "\n".join(lines) + f"\n\nWhat is wanted is reached on {reached} of {len(PORTABLE)} shapes.{short}"


def absent(bench: Bench, which: str) -> list[str]:
    """Why cells are empty, a line a kernel and limit; a shape outside several limits is in several lines."""
    rows = [r for r in bench.rows if r.which == which]
    shapes = tuple(dict.fromkeys(r.shape for r in rows))
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for reason in row.reason.split("; ") if row.status == "cannot" else ():
            found.setdefault((row.label, reason), set()).add(row.shape)
    lines = [f"* {label}, {gathered(found[label, reason], shapes)}: {reason}" for label, reason in sorted(found)]
    return ["Not run:", "\n".join(lines)] if lines else []


def gathered(some: set[str], every: tuple[str, ...]) -> str:
    """The names of `some` of the shapes, in few words: all, all but a few, or those; a twin behind its shape."""
    missing = set(every) - some
    if not missing and len(every) > 1:
        return "every shape"
    return f"all but {_listed(missing, every)}" if 0 < 3 * len(missing) <= len(some) else _listed(some, every)


def _listed(some: set[str], every: tuple[str, ...]) -> str:
    """In the order of `every`; "every twin" and the rest, or pairs first, as "S1, S2 and their twins"."""
    twins = {name for name in every if _is_twin(name)}
    if len(twins) > 1 and twins <= some:
        return ", ".join(["every deterministic twin", *(name for name in every if name in some - twins)])
    both = {base_name(name) for name in some & twins} & some
    pairs = [name for name in every if name in both]
    rest = [name for name in every if name in some and base_name(name) not in both]
    told = f"{', '.join(pairs)} and {'its twin' if len(pairs) == 1 else 'their twins'}" if pairs else ""
    return ", ".join([*([told] if told else []), *rest])


def _is_twin(shape: str) -> bool:
    return base_name(shape) != shape


def _timed(bench: Bench, shape: str) -> list[Row]:
    return [r for r in bench.rows if (r.shape, r.which, r.status) == (shape, "backward", "timed")]


def _named(row: Row | None) -> str:
    return f"{row.tflops:.0f} {row.label}" if row else "none"


def _elsewhere(shape: str) -> str:
    best = max(_quotes(shape), key=lambda x: x[1], default=None)
    return f"{best[1]:.0f} ({best[1] / QUOTED_YARDSTICK:.0%}) {best[0]}" if best else ""


def _quotes(shape: str) -> list[tuple[str, float]]:
    rows = (r for r in record.quoted()["rows"] if (r["shape"], r["pass"]) == (shape, "backward"))
    return [(r["peer"], r["tflops"]) for r in rows if r.get("tflops")]


def replaced(text: str) -> str:
    """`text` with the tables between its markers made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


def draw(folder: Path) -> None:
    """bench_<pass>.png of every pass of the last run."""
    bench, source = record.load(RECORD)
    for which in dict.fromkeys(r.which for r in bench.rows):
        title = f"{source.device}, {which}, {source.date[:10]}"
        plot.plot(bench, folder / f"bench_{which}.png", which=which, title=title, quote=which == "backward")


if __name__ == "__main__":
    page = next((Path(a) for a in sys.argv[1:] if not a.startswith("--")), None)
    if page is None:
        print(tables())
    else:
        page.write_text(replaced(page.read_text()))
        if "--plots" in sys.argv and RECORD.is_file():
            draw(page.parent)
