"""Records of a bench: on what, with what, from which commit; and, apart from them, facts measured elsewhere."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..problem import Band, Problem
from ..target import Target, detect
from .bench import Bench, Row
from .clock import Pace
from .ladder import Step
from .verify import Parity, Verified

PACKAGES = ("triton", "nvidia-cudnn-frontend", "flash-attn", "flash-attn-4", "amd-aiter", "flydsl")
QUOTED = "peers_quoted.json"
MEASURED_KIND, QUOTED_KIND = "measured", "quoted"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where numbers come from. `dirty` is None where no git checkout says."""

    arch: str
    device: str
    driver: str
    versions: dict[str, str]
    commit: str
    dirty: bool | None
    date: str
    how: str


def provenance(bench: Bench, device: torch.device | str | None = None, commit: str | None = None) -> Provenance:
    """Of a run that just ended here. `commit` is for a tree without git: "hash" or "hash+dirty"."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return _taken(bench.target.arch, how(bench, device), device, commit)


def verified(results: list[Verified], how: str, device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """The record of a `verify` that just ended here; `commit` as in `provenance`."""
    source = _taken(detect(device).arch, how, device, commit)
    return {"kind": "verified", **asdict(source), "results": [asdict(r) for r in results]}


def _taken(arch: str, method: str, device: torch.device, commit: str | None) -> Provenance:
    found, dirty = _git() if commit is None else (commit.removesuffix("+dirty"), commit.endswith("+dirty"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return Provenance(
        arch, name, _driver(device), _versions(device), found, dirty,
        datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), method,
    )  # fmt: skip


def how(bench: Bench, device: torch.device) -> str:
    """The method in a sentence, as it goes into the record."""
    pace = bench.pace
    timer = f"device events behind a spin of at least {pace.spin_ms} ms" if device.type == "cuda" else "wall clock"
    return (
        f"median of {pace.rounds} rounds after {pace.warmup} warm-ups, {timer}, kernels and a {bench.yardstick} in "
        f"turn in one process, idle {pace.idle}x the measured time; outputs poisoned, parity with an fp32 reference"
    )


def save(bench: Bench, source: Provenance, path: Path | str, steps: tuple[Step, ...] = ()) -> dict[str, Any]:
    """Write the bench's record as JSON and return it. Refused and impossible rows are kept, with their reasons."""
    content = {"kind": MEASURED_KIND, **asdict(source), "dispatch": dispatch_entries(bench), **asdict(bench)}
    if steps:
        content["ladder"] = [asdict(step) for step in steps]
    write(content, path)
    return content


def write(content: dict[str, Any], path: Path | str) -> None:
    """Write a record as JSON: one line a field, and one a row of a list, so that a difference can be read."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(_json(content))


def load(path: Path | str) -> tuple[Bench, Provenance]:
    """A measured record as it was saved.

    Raises:
        ValueError: the file holds quoted facts, or is no record of a bench.
    """
    content = json.loads(Path(path).read_text())
    if content.get("kind") != MEASURED_KIND:
        raise ValueError(f"{Path(path).name} is {content.get('kind', 'no record')!r}, wanted {MEASURED_KIND!r}")
    source = Provenance(**{name: content[name] for name in Provenance.__slots__})
    yards = tuple(tuple(y) for y in content["yardsticks"])
    rows = tuple(_row(r) for r in content["rows"])
    return Bench(Target(**content["target"]), content["yardstick"], yards, Pace(**content["pace"]), rows), source


def load_ladder(path: Path | str) -> tuple[Step, ...]:
    """The ladder of a measured record; empty where there is none."""
    steps = json.loads(Path(path).read_text()).get("ladder", ())
    return tuple(Step(**step | {"row": _row(step["row"])}) for step in steps)


def quoted() -> dict[str, Any]:
    """Facts about peers that were measured elsewhere, with their source and date; never part of a record."""
    content = json.loads((files("undertow") / "measured" / QUOTED).read_text())
    if content.get("kind") != QUOTED_KIND or "dispatch" in content:
        raise ValueError(f"{QUOTED} must be {QUOTED_KIND!r} and hold no dispatch entries")
    return content


def dispatch_entries(bench: Bench) -> list[dict[str, Any]]:
    """Milliseconds by kernel of every shape and pass, as dispatch reads them; what our adapters copy is included."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in bench.rows:
        if row.status == "timed" and row.which in ("forward", "backward"):
            entry = {"pass": row.which, "problem": _key(row.problem), "shape": row.shape, "ms": {}}
            found.setdefault((row.shape, row.which), entry)["ms"][row.label] = row.ms
    return list(found.values())


def _json(content: dict[str, Any]) -> str:
    fields = []
    for name, value in content.items():
        lines = [json.dumps(v) for v in value] if isinstance(value, list | tuple) else []
        text = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else json.dumps(value)
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _key(problem: Problem) -> dict[str, Any]:
    names = ("head_dim_qk", "head_dim_v", "dtype", "layout", "deterministic", "max_seqlen_q", "max_seqlen_k")
    band = {"left": problem.band.left, "right": problem.band.right, "group": problem.group}
    return {name: getattr(problem, name) for name in names} | band


def _row(content: Mapping[str, Any]) -> Row:
    problem = dict(content["problem"])
    problem["band"] = Band(**problem["band"])
    for side in ("seqlens_q", "seqlens_k"):
        problem[side] = None if problem[side] is None else tuple(problem[side])
    parts = {"problem": Problem(**problem), "parity": tuple(Parity(**p) for p in content["parity"])}
    parts["launches"] = tuple((name, us) for name, us in content["launches"])
    return Row(**dict(content) | parts)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda" if torch.version.cuda else "hip"] = torch.version.cuda or torch.version.hip
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    said = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0].strip() if said else "unknown"


def _git() -> tuple[str, bool | None]:
    here = str(Path(__file__).parent)
    commit = _run("git", "-C", here, "rev-parse", "HEAD")
    if not commit:
        return "unknown", None
    return commit.strip(), bool(_run("git", "-C", here, "status", "--porcelain").strip())


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
