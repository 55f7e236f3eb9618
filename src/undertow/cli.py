"""Command line: parse, call an instrument, print. The only module that prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .problem import DTYPES, LAYOUTS, Band, Problem

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Fused attention backward, and the instruments that prove it right.",
)  # fmt: skip

Lengths = Annotated[str, typer.Option(help="segment lengths of q, by comma: a packed problem")]
LengthsK = Annotated[str, typer.Option(help="segment lengths of k, by comma; default as q's")]
Batch = Annotated[int, typer.Option(help="batch of a dense problem")]
Seqlen = Annotated[int, typer.Option(help="query length of a dense problem")]
SeqlenK = Annotated[int, typer.Option(help="key length of a dense problem; default as the queries'")]
Heads = Annotated[int, typer.Option(help="query heads")]
KvHeads = Annotated[int, typer.Option(help="kv heads; default as the query heads")]
Qk = Annotated[int, typer.Option("--qk", help="head dim of q and k")]
V = Annotated[int, typer.Option("--v", help="head dim of v")]
Dtype = Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")]
Layout = Annotated[str, typer.Option(help=f"one of {', '.join(LAYOUTS[:3])}; packed problems are thd")]
Causal = Annotated[bool, typer.Option(help="bottom-right causal mask")]
WindowSize = Annotated[str, typer.Option(help="left,right keys beside the diagonal, -1 unbounded")]
Align = Annotated[str, typer.Option(help="bottom_right or top_left")]
Softcap = Annotated[float, typer.Option(help="0 turns it off")]
Sink = Annotated[bool, typer.Option("--sink", help="a learnable logit a query head")]
Dlse = Annotated[bool, typer.Option("--dlse", help="a gradient through the LSE")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="bitwise reproducible")]
TargetName = Annotated[str, typer.Option(help="gfx942, gfx950, sm_80, sm_90, cpu, ...; default: this machine's best")]
KernelName = Annotated[str, typer.Option(help="one kernel by name; default: what dispatch chooses")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]


def _problem(**options: Any) -> Problem:
    window = tuple(int(x) for x in options["window_size"].split(","))
    band = Band.from_flags(causal=options["causal"], window_size=window, align=options["align"])
    shared = {
        "nheads_q": options["heads"], "nheads_kv": options["kv_heads"] or options["heads"],
        "head_dim_qk": options["qk"], "head_dim_v": options["v"], "dtype": options["dtype"],
        "softcap": options["softcap"], "band": band, "deterministic": options["deterministic"],
        "has_sink": options["sink"], "has_dlse": options["dlse"],
    }  # fmt: skip
    if options["seqlens_q"]:
        given = filter(None, (options["seqlens_q"], options["seqlens_k"]))
        return Problem.packed(*(tuple(int(x) for x in text.split(",")) for text in given), **shared)
    seqlen = options["seqlen"]
    return Problem.dense(options["batch"], seqlen, options["seqlen_k"] or seqlen, layout=options["layout"], **shared)


def _target(name: str) -> Any:
    from .target import Target, detect

    return Target.named(name) if name else detect()


def _show(renderable: Any) -> None:
    from rich.console import Console

    console = Console()
    console.print(renderable) if console.is_terminal else Console(width=160).print(renderable)


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="workloads, or all; default: smoke mla-varlen-13")] = None,
    kernel: Annotated[str, typer.Option(help="one kernel by name; default: the best of ours")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda[:n]; default: the best there is")] = "",
    scale: Annotated[int, typer.Option(help="multiplies lengths; default 1 on a CPU, 8 on a GPU")] = 0,
    only: Annotated[str, typer.Option(help="of the workloads' cases only these, by comma")] = "",
    out: Annotated[str, typer.Option(help="also write a JSON record here")] = "",
    commit: Annotated[str, typer.Option(help="for a tree without git: hash, or hash+dirty")] = "",
    as_json: Json = False,
) -> None:
    """Run real workloads and prove every gradient against the fp64 reference; exit 1 when one is red, or none ran.

    With --kernel, a workload outside that kernel's limits is not run, and the reasons are printed.
    """
    import torch
    from rich.progress import Progress

    from .dispatch import get, ours
    from .instruments import record
    from .instruments.verify import Verified, prove
    from .target import detect

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    target, results, scale = detect(device), [], scale or (8 if device.type == "cuda" else 1)
    with Progress(transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        for workload in progress.track(_cases(names, scale, only)):
            chosen = get(kernel) if kernel else ours(workload.problem, target)
            if reasons := chosen.unsupported(workload.problem, target):
                typer.echo(f"not run {workload.name}: {'; '.join(reasons)}", err=as_json)
                continue
            results.append(prove(workload, device, chosen.name))
            typer.echo(results[-1].line(), err=as_json)
    took = "wall clock of a workload with its reference and what was not in the compiler's cache"
    asked = " ".join((*(names or ()), "--device", str(device), *(("--kernel", kernel) if kernel else ())))
    how = f"undertow verify {asked}; lengths x{scale}; seconds: {took}"
    content = record.verified(results, how, device, commit or None)
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _show(Verified.table(results, device))
    if out:
        record.write(content, out)
    if not results or not all(r.ok for r in results):
        raise typer.Exit(1)


def _cases(names: list[str] | None, scale: int, only: str) -> list[Any]:
    from .instruments.workloads import named

    known = named(scale)
    wanted = list(known) if names == ["all"] else names or ["smoke", "mla-varlen-13"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"workload is {name!r}, wanted all or some of {', '.join(known)}")
    cases = list({case.name: case for name in wanted for case in known[name]}.values())
    chosen = [case for case in cases if not only or case.name in only.split(",")]
    unknown = set(filter(None, only.split(","))) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"only has {', '.join(sorted(unknown))}, wanted of {', '.join(c.name for c in cases)}")
    return chosen


@app.command()
def info(as_json: Json = False) -> None:
    """This machine as undertow sees it: device, versions, kernels, measured records."""
    from importlib import metadata
    from importlib.util import find_spec

    from .dispatch import BY_NAME, KERNELS, records
    from .target import detect

    target = detect()
    packages = ("undertow", "torch", "triton", "numpy", "flydsl", "nvidia-cudnn-frontend", "flash-attn", "amd-aiter")
    known = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    facts = {
        "target": asdict(target),
        "versions": {name: known.get(name, "not installed") for name in packages},
        "simulator": "needs nothing but numpy; code objects " + ("yes" if find_spec("tinygrad") else "need tinygrad"),
        "kernels": {k.name: k.about for k in KERNELS + BY_NAME},
        "records": sum(r["arch"] == target.arch for r in records()),
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts.items():
        lines = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name, "\n".join(lines))
    _show(table)


@app.command()
def explain(
    target: TargetName = "", which: Annotated[str, typer.Option("--pass", help="forward or backward")] = "backward",
    qk: Qk = 128, v: V = 128, heads: Heads = 16, kv_heads: KvHeads = 0, batch: Batch = 1, seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = 0, seqlens_q: Lengths = "", seqlens_k: LengthsK = "", dtype: Dtype = "bf16",
    layout: Layout = "bshd", causal: Causal = True, window_size: WindowSize = "-1,-1", align: Align = "bottom_right",
    softcap: Softcap = 0.0, sink: Sink = False, dlse: Dlse = False, deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say which kernel runs a problem, why the others do not, and what would lift their limits."""
    problem = _problem(**locals())
    from .dispatch import explain, get, select

    if which not in ("forward", "backward"):
        raise ValueError(f"pass is {which!r}, wanted forward or backward")
    machine = _target(target)
    verdicts = explain(problem, machine, which)
    chosen = next((x.kernel for x in verdicts if x.status == "chosen"), None)
    nbytes = None
    if chosen and which == "backward":
        kernel = get(chosen)
        nbytes = kernel.plan_workspace(problem, kernel.config(problem, machine, which)).nbytes
    if as_json:
        kernels = [asdict(x) for x in verdicts]
        typer.echo(json.dumps({"target": machine.arch, "workspace_nbytes": nbytes, "kernels": kernels}))
    else:
        _show(_explain_table(verdicts, f"{which} on {machine.arch}, {problem.dtype} {qk}/{v}", nbytes))
    if chosen is None:
        select(problem, machine, which)


def _explain_table(verdicts: Any, title: str, nbytes: int | None) -> Any:
    from rich.table import Table

    table = Table(title=title if nbytes is None else f"{title}; workspace {nbytes:,} bytes", title_justify="left")
    for column in ("kernel", "verdict", "FLOPs / native", "because", "to lift it"):
        table.add_column(column, overflow="fold")
    for x in verdicts:
        table.add_row(x.kernel, x.status, f"{x.tax:.2f}", "; ".join(x.reasons), "; ".join(x.fixes))
    return table


@app.command()
def bench(
    shapes: Annotated[str, typer.Option(help="names by comma, or all; default: all but the deterministic twins")] = "",
    kernels: Annotated[str, typer.Option(help="names by comma; default: all that are not known to be slow")] = "",
    passes: Annotated[str, typer.Option(help="of forward, backward, both, by comma; both@S1+S2: there")] = "backward",
    rounds: Annotated[int, typer.Option(help="timed calls of every kernel")] = 15,
    sustained: Annotated[float, typer.Option(help="seconds back to back as well, power-limited")] = 0.0,
    jobs: Annotated[int, typer.Option(help="processes that compile first; 0 compiles on the way")] = 0,
    ladder: Annotated[str, typer.Option(help="a shape to time the rungs from naive to tuned of")] = "",
    ladder_kernel: Annotated[str, typer.Option(help="hopper, triton, flydsl, by comma; default: one that runs")] = "",
    without: Annotated[str, typer.Option(help="what not to run, by comma: kernel:shape, or patterns, flex:d*")] = "",
    budget: Annotated[float, typer.Option(help="seconds after which no further shape is begun; 0: no end")] = 0.0,
    resume: Annotated[bool, typer.Option("--resume", help="keep the shapes of the record that is in OUT")] = False,
    commit: Annotated[str, typer.Option(help="for a tree without git: hash, or hash+dirty")] = "",
    out: Annotated[str, typer.Option(help="a folder for record.json, tables and plots")] = "",
) -> None:
    """Time kernels and peers in one interleaved loop, each proven right first."""
    from .instruments import runs

    given = runs.Run(
        tuple(filter(None, shapes.split(","))), tuple(filter(None, kernels.split(","))), tuple(passes.split(",")),
        rounds, sustained, jobs, ladder, commit or None, Path(out) if out else None,
        tuple(filter(None, without.split(","))), budget, resume, ladder_kernel,
    )  # fmt: skip
    for renderable in runs.run(given, typer.echo):
        _show(renderable)


@app.command()
def probe(
    file: Annotated[str, typer.Argument(help="an assembly file, or module:function of a Triton kernel")] = "",
    kernel: Annotated[str, typer.Option(help="triton or flydsl, or the kernel's name inside FILE")] = "triton",
    target: TargetName = "gfx942",
    which: Annotated[str, typer.Option("--pass", help="forward or backward")] = "backward",
    signature: Annotated[str, typer.Option(help='of module:function, such as "*bf16,*fp32:16,i32"')] = "",
    constexprs: Annotated[str, typer.Option(help="of module:function, JSON")] = "{}",
    qk: Qk = 192, v: V = 128, heads: Heads = 2, kv_heads: KvHeads = 0, batch: Batch = 1, seqlen: Seqlen = 512,
    seqlen_k: SeqlenK = 0, seqlens_q: Lengths = "", seqlens_k: LengthsK = "", dtype: Dtype = "bf16",
    layout: Layout = "bshd", causal: Causal = True, window_size: WindowSize = "-1,-1", align: Align = "bottom_right",
    softcap: Softcap = 0.0, sink: Sink = False, dlse: Dlse = False, deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Registers, spills, LDS and matrix instructions of a kernel's hot loops, without running it."""
    problem = _problem(**locals())
    from .instruments import probe

    if ":" in file:
        reports = probe.probe_function(file, signature, target, json.loads(constexprs))
    elif file:
        reports = [probe.probe_file(file, None if kernel == "triton" else kernel)]
    elif kernel == "flydsl":
        reports = probe.probe_flydsl(problem, target)
    else:
        reports = probe.probe(problem, target, which)
    if as_json:
        typer.echo(json.dumps([json.loads(r.to_json()) for r in reports]))
    else:
        _show(probe.table(reports))


@app.command()
def build(
    out: Annotated[str, typer.Option(help="a folder for the objects: what UNDERTOW_HOPPER_OBJECTS names later")],
    dims: Annotated[str, typer.Option(help="head dims of qk/v, by comma")] = "64/64,96/96,128/128,192/128",
    dtypes: Annotated[str, typer.Option(help="of bf16, fp16, by comma")] = "bf16,fp16",
    ladder: Annotated[str, typer.Option(help="a shape of the bench whose ladder's rungs are built as well")] = "",
    as_json: Json = False,
) -> None:
    """Compile the Hopper kernels into objects that load without the DSL. Needs no GPU; about 6 s an object."""
    from rich.progress import Progress

    from .instruments import probe
    from .instruments.shapes import pick
    from .kernels.hopper import build
    from .kernels.hopper.ladder import objects
    from .target import TARGETS

    planned, rows = build.planned(_pairs(dims), dtypes.split(",")), []
    if ladder:
        rungs = objects(pick((ladder,))[0].problem, TARGETS["sm_90"])
        planned += [launch for launch in rungs if launch not in planned]
    with Progress(transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        for kind, geometry in progress.track(planned):
            (path,) = build.export([geometry], out, kind)
            report, seconds = probe.probe_hopper(geometry, kind), build.compiled(geometry, kind).seconds
            rows.append({
                "object": path.name, "bytes": path.stat().st_size, "seconds": round(seconds, 1),
                "registers": report.vgpr, "stack_bytes": report.scratch_bytes, "spilled_bytes": report.vgpr_spills,
                "spills_in_hot_loop": report.hot.counts["spill"], "shared_bytes": report.lds_bytes,
                "warnings": len(report.warnings),
            })  # fmt: skip
    typer.echo(json.dumps(rows)) if as_json else _show(_rows_table(rows, out))


def _pairs(dims: str) -> list[tuple[int, int]]:
    found = [pair.split("/") for pair in dims.split(",")]
    if not all(len(pair) == 2 and all(n.isdecimal() for n in pair) for pair in found):
        raise ValueError(f"dims is {dims!r}, wanted pairs of head dims by comma, such as 128/128,192/128")
    return [(int(qk), int(v)) for qk, v in found]


def _rows_table(rows: list[dict[str, Any]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", justify="right" if name != "object" else "left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


@app.command()
def simulate(
    file: Annotated[str, typer.Argument(help="an assembly file or code object of your own")] = "",
    args: Annotated[list[str] | None, typer.Argument(help="its arguments: 4096, 0.5, null, f32:64x128:randn")] = None,
    kernel: Annotated[str, typer.Option(help="triton or flydsl, or the kernel's name inside FILE")] = "triton",
    target: TargetName = "gfx942",
    grid: Annotated[str, typer.Option(help="workgroups of FILE, x,y,z")] = "1,1,1",
    block: Annotated[str, typer.Option(help="work-items of FILE, x,y,z")] = "256,1,1",
    dynamic_lds: Annotated[int, typer.Option(help="bytes of LDS FILE expects at launch (Triton: metadata.shared)")] = 0,
    seed: Annotated[int, typer.Option(help="random order of waves and workgroups; 0 is lock-step")] = 0,
    qk: Qk = 192, v: V = 128, heads: Heads = 2, kv_heads: KvHeads = 0, batch: Batch = 1, seqlen: Seqlen = 64,
    seqlen_k: SeqlenK = 0, seqlens_q: Lengths = "", seqlens_k: LengthsK = "", dtype: Dtype = "bf16",
    layout: Layout = "bshd", causal: Causal = True, window_size: WindowSize = "-1,-1", align: Align = "bottom_right",
    softcap: Softcap = 0.0, sink: Sink = False, dlse: Dlse = False, deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run a kernel's AMD machine code on this CPU, with checks no hardware makes; exit 1 on any finding."""
    problem = _problem(**locals())
    from .instruments import simulate
    from .simulator import Options

    options = Options(seed=seed or None)
    if file:
        sizes = [tuple(int(x) for x in text.split(",")) for text in (grid, block)]
        name = None if kernel == "triton" else kernel
        report, _ = simulate.simulate_file(file, args or [], grid=sizes[0], block=sizes[1], kernel=name,
                                           dynamic_lds=dynamic_lds, options=options)  # fmt: skip
        typer.echo(report.to_json()) if as_json else _show(report.table())
        raise typer.Exit(0 if report.ok else 1)
    found = simulate.simulate(problem, target, kernel, options=options)
    typer.echo(found.to_json()) if as_json else _show(found.table())
    raise typer.Exit(0 if found.ok else 1)


def main() -> None:
    """Entry point: a refused input, or a compiler's last words, are on stderr with exit code 2, not a traceback."""
    try:
        app()
    except (ValueError, NotImplementedError, RuntimeError, ImportError) as error:
        typer.echo(f"undertow: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
