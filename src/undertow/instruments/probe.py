"""Registers, spills and matrix instructions of compiled kernels, loop by loop, without a GPU and without running them.

Every compile happens in a subprocess: LLVM aborts the process on an instruction that it cannot select.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..problem import Band, Problem
from ..simulator import asm
from ..simulator.static import Loop, count_groups, find_loops, natural_loops

COMPILE_TIMEOUT_S = 900
SASS_GROUPS = (
    ("hgmma", ("HGMMA",)),
    ("hmma", ("HMMA", "IMMA", "DMMA")),
    ("spill", ("STL", "LDL")),
    ("shared", ("LDS", "STS", "LDSM", "STSM")),
    ("global", ("LDG", "STG", "LDGSTS", "UTMALDG", "UTMASTG")),
    ("atomic", ("ATOM", "RED", "UTMAREDG")),
    ("barrier", ("BAR", "SYNCS")),
    ("wgmma_wait", ("WARPGROUP.DEPBAR",)),
)
SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(WARPGROUP\.DEPBAR|[A-Z][A-Z0-9]*)([^;]*);")
WAIT_LOOP = 8
WARNING = re.compile(r"\(C75\d\d\)|Potential Performance Loss")


@dataclass(frozen=True, slots=True)
class IsaReport:
    """What the compiler made of one kernel. Bytes and registers a lane (AMD: arch VGPRs and AGPRs apart)."""

    stage: str
    kernel: str
    target: str
    vgpr: int
    agpr: int
    sgpr: int
    lds_bytes: int
    scratch_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    counts: dict[str, int]
    loops: tuple[Loop, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def inner(self) -> tuple[Loop, ...]:
        """The innermost loops."""
        return tuple(loop for loop in self.loops if loop.innermost)

    @property
    def hot(self) -> Loop | None:
        """The innermost loop with the most matrix instructions."""
        weight = lambda loop: loop.counts.get("mfma", 0) + loop.counts.get("hgmma", 0) + loop.counts.get("hmma", 0)
        return max(self.inner, key=weight, default=None)

    def in_loops(self, group: str) -> int:
        """Static instructions of a group inside the innermost loops."""
        return sum(loop.counts.get(group, 0) for loop in self.inner)

    def row(self) -> dict[str, int | str]:
        """One line of the register table."""
        hot = self.hot.counts if self.hot else {}
        matrix = {g: hot[g] for g in ("mfma", "hgmma", "hmma") if g in hot}
        return {
            "stage": self.stage,
            "target": self.target,
            "vgpr": self.vgpr,
            "agpr": self.agpr,
            "sgpr": self.sgpr,
            "lds_bytes": self.lds_bytes,
            "scratch_bytes": self.scratch_bytes,
            "spills": self.vgpr_spills,
            "loops": len(self.inner),
            **matrix,
            "accvgpr_in_loops": self.in_loops("accvgpr"),
            "spill_in_loops": self.in_loops("spill"),
            "barriers_in_hot_loop": hot.get("barrier", 0),
            "cas_loops": sum(loop.compare_and_swap for loop in self.loops),
        }

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(asdict(self) | {"row": self.row()}, indent=1)


def table(reports: list[IsaReport]) -> object:
    """A rich table of several reports."""
    from rich.table import Table

    rows = [r.row() for r in reports]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = Table(title="registers and hot loops (static)")
    for name in names:
        out.add_column(name.replace("_", " "))
    for row in rows:
        out.add_row(*(str(row.get(name, "")) for name in names))
    return out


# ---------------------------------------------------------------------- AMD
def probe_text(text: str, kernel: str | None = None, *, stage: str = "", dynamic_lds: int = 0) -> IsaReport:
    """Inspect AMD assembly text (Triton, FlyDSL, hipcc). Raises AsmError with the line for text it cannot read."""
    module = asm.parse(text)
    chosen = module.kernel(kernel)
    m, d = chosen.metadata, chosen.directives
    total, agpr = m.get("vgpr_count", d.get("next_free_vgpr", 0)), m.get("agpr_count", 0)
    reachable = module.instructions
    return IsaReport(
        stage or chosen.name,
        chosen.name,
        module.target or "unknown",
        min(total - agpr, 256),
        agpr,
        m.get("sgpr_count", d.get("next_free_sgpr", 0)),
        d.get("group_segment_fixed_size", 0) + dynamic_lds,
        d.get("private_segment_fixed_size", 0),
        m.get("vgpr_spill_count", 0),
        m.get("sgpr_spill_count", 0),
        count_groups(reachable),
        find_loops(module, chosen.entry),
    )


# ---------------------------------------------------------------------- NVIDIA
def probe_sass(sass: str, usage: str, log: str, *, stage: str, kernel: str, target: str, shared: int) -> IsaReport:
    """Inspect nvdisasm text; `usage` is cuobjdump's resource line, `log` what ptxas said."""
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    loops, counts = sass_loops(sass)
    warnings = tuple(
        dict.fromkeys(line.split(": ", 1)[-1].strip() for line in log.splitlines() if WARNING.search(line))
    )
    return IsaReport(
        stage,
        kernel,
        target,
        numbers.get("REG", 0),
        0,
        0,
        max(shared, numbers.get("SHARED", 0)),
        numbers.get("STACK", 0),
        max(spills, default=0),
        0,
        counts,
        loops,
        warnings,
    )


def sass_loops(sass: str) -> tuple[tuple[Loop, ...], dict[str, int]]:
    """Loops of a SASS listing and counts of the whole of it.

    A loop with matrix instructions is innermost when no loop inside it has any: it may hold waits and copies.
    """
    items, labels = [], {}
    for number, line in enumerate(sass.splitlines(), 1):
        label = re.match(r"\s*(\.L_x_\d+|\.text\.\w+):", line)
        if label:
            labels[label.group(1)] = len(items)
        match = SASS_LINE.search(line)
        if match:
            target = re.search(r"`\((\.L_x_\d+)\)", match.group(2)) if match.group(1) in ("BRA", "BSSY") else None
            items.append(
                (number, match.group(1), target.group(1) if target and match.group(1) == "BRA" else None, "@" in line)
            )
    starts = sorted(
        {0, *labels.values(), *(n + 1 for n, x in enumerate(items) if x[1] in ("BRA", "EXIT", "RET"))}
        & set(range(len(items)))
    )
    number = {start: n for n, start in enumerate(starts)}
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(items)], strict=True)]
    edges = []
    for block in blocks:
        _, name, target, guarded = items[block[-1]]
        out = [number[labels[target]]] if target in labels and labels[target] in number else []
        if (name not in ("BRA", "EXIT", "RET") or guarded) and block[-1] + 1 in number:
            out.append(number[block[-1] + 1])
        edges.append(out)
    found = natural_loops(edges) if edges else []
    bodies = {header: [items[i] for b in sorted(body) for i in blocks[b]] for header, body in found}
    headers = {header for header, inside in bodies.items() if not _only_waits(inside)}
    loops = []
    for header, body in found:
        inside = bodies[header]
        if header not in headers:
            continue
        rivals = (headers & body) - {header}
        if _matrix(inside):
            rivals = {other for other in rivals if _matrix(bodies[other])}
        cas = any(x[1].startswith("ATOM") and "CAS" in sass.splitlines()[x[0] - 1] for x in inside)
        loops.append(Loop(inside[0][0], inside[-1][0], not rivals, _sass_counts(inside), None, cas))
    return tuple(loops), _sass_counts(items)


def _matrix(items: list[tuple]) -> int:
    counts = _sass_counts(items)
    return counts["hgmma"] + counts["hmma"]


def _only_waits(items: list[tuple]) -> bool:
    """A spin on an mbarrier: it is part of the loop around it."""
    counts = _sass_counts(items)
    return len(items) <= WAIT_LOOP and counts["barrier"] > 0 and counts["barrier"] + counts["other"] == len(items)


def _sass_counts(items: list[tuple]) -> dict[str, int]:
    counts: Counter[str] = Counter({name: 0 for name, _ in SASS_GROUPS})
    for _, opcode, _, _ in items:
        group = next(
            (name for name, stems in SASS_GROUPS if opcode in stems or (name == "atomic" and opcode.startswith(stems))),
            "other",
        )
        counts[group] += 1
    return dict(counts)


# ---------------------------------------------------------------------- front doors
def probe(problem: Problem, arch: str, which: str = "backward") -> list[IsaReport]:
    """Compile our Triton kernels of a problem for gfx942, gfx950 or sm_80/sm_90 and inspect every launch.

    Raises RuntimeError with the compiler's last words when it fails or aborts.
    """
    spec = {"problem": _problem_fields(problem), "arch": arch, "which": which}
    return [_report(item, arch) for item in compile_in_subprocess(spec)]


def probe_flydsl(problem: Problem, arch: str) -> list[IsaReport]:
    """Compile our FlyDSL kernels of a problem for gfx942 or gfx950 and inspect every launch of the backward.

    Raises NotImplementedError with the failing limits when the kernels cannot run the problem on that target.
    """
    from importlib.metadata import version

    import torch

    from ..kernels import alloc
    from ..kernels import flydsl as family
    from ..kernels.flydsl import compiler, steps
    from ..layout import shapes
    from ..target import TARGETS

    target = TARGETS[arch]
    reasons = family.KERNEL.unsupported(problem, target)
    if reasons:
        raise NotImplementedError("; ".join(reasons))
    meta = torch.device("meta")
    tensors = {
        n: alloc.output(shape, torch.float32, meta) for n, shape in shapes(problem).items() if _given(problem, n)
    }
    config = family.config(problem, target, "backward")
    scratch = alloc.scratch(family.plan_workspace(problem, config), meta)
    planned = steps.backward_steps(problem, config, tensors, scratch)
    texts = compiler.isa_many([step.key for step in planned])
    versions = {"flydsl": version("flydsl")}
    return [
        replace(probe_text(text, stage=step.stage), versions=versions)
        for step, text in zip(planned, texts, strict=True)
    ]


def probe_hopper(geometry: Any, kind: str = "main", ptxas: str = "") -> IsaReport:
    """Compile our kernel for Hopper of one `kernels.hopper.geometry.Geometry` and inspect it.

    Registers, stack and spills are the assembler's own figures, `warnings` all that it says of `wgmma` that it had to
    serialise or fence (C75xx), `lds_bytes` what a launch asks for; `hot` is the loop over query tiles. ptxas: more
    options of the assembler, by space. Raises ImportError where the DSL is not installed.
    """
    from importlib.metadata import version

    from ..kernels.hopper import build

    made = build.compiled(geometry, kind, ptxas)
    report = probe_sass(
        **_disassemble(made.cubin),
        log=made.log,
        stage=kind,
        kernel=build.object_name(geometry, kind),
        target="sm_90",
        shared=made.shared_bytes,
    )
    return replace(report, versions={"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl")})


def _given(problem: Problem, name: str) -> bool:
    """Whether a call of this problem has the tensor: optional ones by flag, lengths when packed, no seqused."""
    optional = {
        "dlse": problem.has_dlse,
        "delta": problem.has_delta,
        "sink": problem.has_sink,
        "dsink": problem.has_sink,
    }
    if name.startswith("cu_seqlens"):
        return problem.is_packed
    return optional.get(name, not name.startswith("seqused"))


def probe_function(name: str, signature: str, arch: str, constexprs: dict[str, Any] | None = None) -> list[IsaReport]:
    """Compile someone's Triton kernel `module:function` and inspect it.

    signature: one type a run-time parameter, such as "*bf16,*fp32:16,i32"; a pointer or integer followed by :16 is
    divisible by 16. constexprs: tl.constexpr parameters and compiler options such as num_warps.
    """
    spec = {"function": name, "signature": signature, "arch": arch, "constexprs": constexprs or {}}
    return [_report(item, arch) for item in compile_in_subprocess(spec)]


def probe_file(path: str | Path, kernel: str | None = None) -> IsaReport:
    """Inspect an assembly file."""
    return probe_text(Path(path).read_text(), kernel)


def _problem_fields(problem: Problem) -> dict[str, Any]:
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    return values | {"band": [problem.band.left, problem.band.right, problem.band.align]}


def compile_in_subprocess(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """What the compiler made of `spec`, one dict a kernel. An abort of the compiler is an error message here."""
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-m", "undertow.instruments.probe"]
    done = subprocess.run(
        command, input=json.dumps(spec), capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode:
        how = (
            f"aborted with signal {-done.returncode}"
            if done.returncode < 0
            else f"failed with exit code {done.returncode}"
        )
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"compiling for {spec['arch']} {how}:\n{last}")
    return json.loads(done.stdout.splitlines()[-1])


def _report(item: dict[str, Any], arch: str) -> IsaReport:
    versions = item["versions"]
    if "amdgcn" in item:
        report = probe_text(item["amdgcn"], item["kernel"], stage=item["stage"], dynamic_lds=item["shared"])
    else:
        report = probe_sass(
            item["sass"],
            item["usage"],
            item["log"],
            stage=item["stage"],
            kernel=item["kernel"],
            target=arch,
            shared=item["shared"],
        )
    return replace(report, versions=versions)


# ---------------------------------------------------------------------- the subprocess
def _child(spec: dict[str, Any]) -> list[dict[str, Any]]:
    compiled = _compile_function(spec) if "function" in spec else _compile_problem(spec)
    return [_pack(stage, kernel, spec["arch"]) for stage, kernel in compiled]


def _compile_problem(spec: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from ..kernels.triton import offline
    from ..target import TARGETS

    values = dict(spec["problem"])
    values["band"] = Band(*values["band"])
    problem = Problem(**{k: _tuples(v) for k, v in values.items()})
    target = TARGETS[spec["arch"]]
    for launch in offline.launches(problem, target, spec["which"]):
        yield launch.stage, offline.compile_launch(launch, target)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _compile_function(spec: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    sys.path.insert(0, "")
    module, _, name = spec["function"].partition(":")
    fn = getattr(importlib.import_module(module), name)
    constants = {k: v for k, v in spec["constexprs"].items() if k in fn.arg_names}
    options = {k: v for k, v in spec["constexprs"].items() if k not in fn.arg_names}
    runtime = [n for n in fn.arg_names if n not in constants]
    types = [t.strip() for t in spec["signature"].split(",") if t.strip()]
    if len(types) != len(runtime):
        raise ValueError(f"signature={spec['signature']!r}: {len(types)} types for the parameters {', '.join(runtime)}")
    signature = dict.fromkeys(fn.arg_names, "constexpr") | {
        n: t.partition(":")[0] for n, t in zip(runtime, types, strict=True)
    }
    attrs = {
        (fn.arg_names.index(n),): [["tt.divisibility", 16]]
        for n, t in zip(runtime, types, strict=True)
        if t.endswith(":16")
    }
    arch = spec["arch"]
    gpu = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    yield name, triton_compile(ASTSource(fn, signature, constants, attrs), target=gpu, options=options)


def _pack(stage: str, compiled: Any, arch: str) -> dict[str, Any]:
    import triton

    out = {
        "stage": stage,
        "kernel": compiled.metadata.name,
        "shared": compiled.metadata.shared,
        "versions": {"triton": triton.__version__},
    }
    if "amdgcn" in compiled.asm:
        return out | {"amdgcn": compiled.asm["amdgcn"]}
    return out | _nvidia_tools(compiled.asm["ptx"], compiled.asm["cubin"], arch)


def _nvidia_tools(ptx: str, cubin: bytes, arch: str) -> dict[str, str]:
    """SASS, resource usage and the assembler's warnings, by the tools of the triton wheel."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    capability = int(arch.removeprefix("sm_"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "k.ptx")
        source.write_text(ptx)
        log = _tool(
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(capability)}",
            str(source),
            "-o",
            str(Path(folder, "out")),
        )
    return _disassemble(cubin) | {"log": log.stderr + log.stdout}


def _disassemble(cubin: bytes) -> dict[str, str]:
    """SASS and resource usage, by the tools of the triton wheel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "k.cubin")
        binary.write_bytes(cubin)
        sass = _tool(knobs.nvidia.nvdisasm.path, "-c", str(binary))
        usage = _tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
    return {"sass": sass.stdout, "usage": usage.stdout}


def _tool(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_child(json.load(sys.stdin))))


__all__ = ["IsaReport", "probe", "probe_file", "probe_function", "probe_sass", "probe_text", "table"]
