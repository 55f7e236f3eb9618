"""What a call really did: kernels report what they launched, checked calls their scratch, to whoever watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Seen:
    """(stage, compiled kernel) of every launch, in order, and the scratch of the last backward by buffer name."""

    launches: list[tuple[str, Any]] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)


_WATCHER: ContextVar[Seen | None] = ContextVar("undertow_watcher", default=None)


@contextmanager
def watch() -> Iterator[Seen]:
    """Collect what the calls inside report, in this thread."""
    seen = Seen()
    token = _WATCHER.set(seen)
    try:
        yield seen
    finally:
        _WATCHER.reset(token)


def launched(stage: str, compiled: Any) -> None:
    """Report a launch and what was compiled for it; free where nobody watches."""
    if (seen := _WATCHER.get()) is not None:
        seen.launches.append((stage, compiled))


def figures(compiled: Any) -> dict[str, Any]:
    """A Triton kernel's own figures, from its metadata and its compile-time arguments, not from ours.

    Registers and spills are known once the driver has loaded it, None before.
    """
    meta, source = compiled.metadata, compiled.src
    names = [source.fn.arg_names[path[0]] if len(path) == 1 else "" for path in source.constants]
    own = {name: value for name, value in zip(names, source.constants.values(), strict=True) if name.isupper()}
    own |= {name: getattr(meta, name) for name in ("num_warps", "num_stages", "shared")}
    return own | {name: getattr(compiled, name, None) for name in ("n_regs", "n_spills")}


def used(scratch: dict[str, Any]) -> None:
    """Report the scratch of a backward that has run."""
    if (seen := _WATCHER.get()) is not None:
        seen.scratch.clear()
        seen.scratch.update(scratch)
