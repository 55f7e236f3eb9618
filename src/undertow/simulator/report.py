"""Findings and counters of a simulated launch, as a frozen result that prints and serialises."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np

from .asm import Instruction

MAX_FINDINGS = 200
NOTES = frozenset({"barrier-order"})
GROUPS = (
    ("mfma", ("v_mfma", "v_smfma")),
    ("accvgpr", ("v_accvgpr",)),
    ("lds", ("ds_",)),
    ("spill", ("scratch_",)),
    ("atomic", ("global_atomic", "buffer_atomic", "flat_atomic")),
    ("vmem", ("global_", "buffer_", "flat_")),
    ("smem", ("s_load", "s_buffer_load")),
    ("barrier", ("s_barrier",)),
    ("wait", ("s_waitcnt",)),
    ("valu", ("v_",)),
    ("salu", ("s_",)),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with the first place where it happened."""

    kind: str
    message: str
    line: int  # of the assembly text
    text: str  # the instruction
    source: str | None  # "file:line" of the kernel's source
    workgroup: tuple[int, int, int] | None
    wave: int | None  # inside the workgroup
    lane: int | None
    address: int | None
    count: int
    severity: str = "error"

    def __str__(self) -> str:
        """One line for people."""
        place = f" ({self.source})" if self.source else ""
        who = "" if self.workgroup is None else f" workgroup {self.workgroup} wave {self.wave}"
        who += "" if self.lane is None else f" lane {self.lane}"
        what = f"{self.severity} {self.kind}: line {self.line}{place}: {self.text}: {self.message}"
        return f"{what};{who or ' launch'}, {self.count} times"


@dataclass(frozen=True, slots=True)
class Report:
    """What one launch did. Counts are wave-instructions; bytes are summed over lanes."""

    kernel: str
    target: str | None
    grid: tuple[int, int, int]
    block: int
    steps: int
    seconds: float
    findings: tuple[Finding, ...]
    opcodes: dict[str, int]
    groups: dict[str, int]
    by_source: dict[str, dict[str, int]]
    bytes_moved: dict[str, int]
    buffers: dict[str, dict[str, int]]
    bank_conflict_cycles_model: int | None
    resources: dict[str, int] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are not notes."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.errors

    @property
    def wave_instructions(self) -> int:
        """All executed wave-instructions."""
        return sum(self.opcodes.values())

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return json.dumps(asdict(self) | {"ok": self.ok, "wave_instructions": self.wave_instructions}, indent=1)

    def table(self) -> object:
        """A rich renderable: findings, then counters."""
        from rich.console import Group
        from rich.table import Table

        title = f"{self.kernel} on {self.target or 'gfx942'}: grid {self.grid} x {self.block} threads"
        counters = Table()
        counters.add_column("counter")
        counters.add_column("value", justify="right")
        rows = {
            "wave-instructions": self.wave_instructions,
            **self.groups,
            **{f"{k} bytes": v for k, v in self.bytes_moved.items()},
            **self.resources,
        }
        if self.bank_conflict_cycles_model is not None:
            rows["LDS bank conflict cycles (model)"] = self.bank_conflict_cycles_model
        for name, value in rows.items():
            counters.add_row(name, f"{value:,}")
        findings = Table(title=f"{len(self.errors)} findings")
        for column in ("kind", "line", "instruction", "what", "times"):
            findings.add_column(column)
        for item in self.findings:
            findings.add_row(item.kind, str(item.line), item.text, item.message, str(item.count))
        return Group(title, *([findings] if self.findings else []), counters)


@dataclass(slots=True)
class _Draft:
    instruction: Instruction | None
    message: str
    wave: int | None
    lane: int | None
    address: int | None
    count: int
    place: tuple[tuple[int, int, int], int] | None


class Collector:
    """Gathers findings while the machine runs; repeated ones are counted."""

    def __init__(self, allow: frozenset[str]) -> None:
        self.allow = allow
        self.drafts: dict[tuple, _Draft] = {}
        self.place = lambda wave: ((0, 0, 0), wave)

    def add(self, kind: str, x: Instruction | None, waves: np.ndarray, message: str) -> None:
        """A finding of some waves (bool [waves])."""
        wave = int(np.flatnonzero(waves)[0])
        self.add_at(kind, x, wave, text=message, count=int(np.count_nonzero(waves)))

    def add_at(
        self,
        kind: str,
        x: Instruction | None,
        wave: int | None,
        *,
        text: str,
        count: int = 1,
        lane: int | None = None,
        address: int | None = None,
        key: str | None = None,
    ) -> None:
        """A finding at one wave; `key` groups repeats whose texts differ."""
        name = (kind, x.index if x else -1, key or text)
        draft = self.drafts.get(name)
        if draft is not None:
            draft.count += count
        elif len(self.drafts) < MAX_FINDINGS:
            place = None if wave is None else self.place(wave)
            self.drafts[name] = _Draft(x, text, wave, lane, address, count, place)

    def findings(self) -> tuple[Finding, ...]:
        """The findings, in the order in which they first happened."""
        out = []
        for (kind, _, _), d in self.drafts.items():
            severity = "note" if kind in NOTES or kind in self.allow else "error"
            x = d.instruction
            group, wave = d.place if d.place else (None, None)
            line, text, source = (x.line, x.text, x.source) if x else (0, "", None)
            out.append(Finding(kind, d.message, line, text, source, group, wave, d.lane, d.address, d.count, severity))
        return tuple(out)


def group_of(opcode: str) -> str:
    """The counter group of an opcode."""
    return next((name for name, prefixes in GROUPS if opcode.startswith(prefixes)), "other")


def count(instructions: list[Instruction], executed: np.ndarray, traffic: np.ndarray) -> tuple[dict, dict, dict, dict]:
    """Per-opcode, per-group and per-source-line counts, and bytes by memory, from per-instruction arrays."""
    opcodes: Counter[str] = Counter()
    groups: Counter[str] = Counter({name: 0 for name, _ in GROUPS})
    sources: dict[str, Counter[str]] = {}
    moved: Counter[str] = Counter({"global": 0, "lds": 0, "scratch": 0})
    for x, times, nbytes in zip(instructions, executed.tolist(), traffic.tolist(), strict=True):
        if not times:
            continue
        group = group_of(x.opcode)
        opcodes[x.opcode] += times
        groups[group] += times
        moved[{"lds": "lds", "spill": "scratch"}.get(group, "global")] += nbytes
        if x.source:
            line = sources.setdefault(x.source, Counter())
            line[group] += times
            line["bytes"] += nbytes
    return dict(opcodes.most_common()), dict(groups), {k: dict(v) for k, v in sorted(sources.items())}, dict(moved)
