"""What a kernel declares of itself: its limits, configs, scratch and launches. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..problem import Problem
from ..target import Target
from ..workspace import WorkspacePlan

Tensors = Mapping[str, Any]
"""Tensors of a call by argument name: q, k, v, out, lse, dout, dlse, delta, sink, cu_seqlens_q, ..., dq, dk, dv, dsink.
An optional input that was not given is None; outputs are allocated before the launch."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing a kernel cannot do: `holds` is true where it can.

    `why` and `fix` are format strings over the problem `p` and the target `t`: the failing numbers, and the nearest
    change to the call that lifts the limit (empty where there is none). `only` is "forward" or "backward" for a limit
    of one pass.
    """

    why: str
    holds: Callable[[Problem, Target], bool]
    fix: str = ""
    only: str = ""

    def text(self, problem: Problem, target: Target) -> str:
        """`why` with the numbers of this call."""
        return self.why.format(p=problem, t=target)

    def remedy(self, problem: Problem, target: Target) -> str:
        """`fix` with the numbers of this call."""
        return self.fix.format(p=problem, t=target)


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and switches of one build. Frozen and hashable: it is the compile key.

    `block_m` query rows by `block_n` keys; `num_warps`, `num_stages` as in Triton; `switches` holds a kernel's own.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    switches: tuple[tuple[str, Any], ...] = ()

    def echo(self) -> str:
        """The resolved geometry in one line, stages in brackets."""
        own = {n: getattr(self, n) for n in ("block_m", "block_n", "num_warps", "num_stages")}
        parts = [f"{n}={v}" for n, v in own.items()]
        parts += [f"{n}=({v.echo()})" if isinstance(v, Config) else f"{n}={v}" for n, v in self.switches]
        return " ".join(parts)

    def switch(self, name: str, default: Any = None) -> Any:
        """The value of a kernel's own switch."""
        return dict(self.switches).get(name, default)


@dataclass(frozen=True, slots=True)
class Built:
    """What was compiled for a call's launches: its figures by stage, and where they differ from the config."""

    stages: dict[str, dict[str, Any]]
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel as the rest of the library sees it.

    `forward(problem, config, tensors)` fills out and lse; `backward(problem, config, tensors, scratch)` fills dq, dk,
    dv (and dsink). Either may be None. `archs` empty means any. `executed_dims` gives the head dims the kernel really
    multiplies, from which the padding tax follows; `gemms` how many products over (qk, v) dims a backward does.
    `built(problem, config, launches)` compares what was compiled for the launches of a forward and backward, as
    `watch` saw them, with the config; None where a kernel compiles nothing or cannot say.
    """

    name: str
    about: str
    archs: frozenset[str]
    limits: tuple[Limit, ...]
    config: Callable[[Problem, Target, str], Config]
    plan_workspace: Callable[[Problem, Config], WorkspacePlan]
    forward: Callable[[Problem, Config, Tensors], None] | None = None
    backward: Callable[[Problem, Config, Tensors, Tensors], None] | None = None
    executed_dims: Callable[[Problem], tuple[int, int]] = field(default=lambda p: (p.head_dim_qk, p.head_dim_v))
    gemms: Callable[[Problem, Target], tuple[int, int]] = field(default=lambda p, t: (3, 2))
    vendor: bool = False
    built: Callable[[Problem, Config, list[tuple[str, Any]]], Built] | None = None

    def failing(self, problem: Problem, target: Target, which: str = "backward") -> tuple[Limit, ...]:
        """Every limit this problem breaks in the pass `which`; empty when the kernel can run."""
        if getattr(self, which) is None:
            return (Limit(f"{self.name} has no {which}", lambda p, t: False),)
        found = [] if not self.archs or target.arch in self.archs else [_arch_limit(self.archs)]
        return tuple(found) + tuple(
            lim for lim in self.limits if lim.only in ("", which) and not lim.holds(problem, target)
        )

    def unsupported(self, problem: Problem, target: Target, which: str = "backward") -> tuple[str, ...]:
        """The reasons this kernel cannot run the problem, with its numbers; empty when it can."""
        return tuple(lim.text(problem, target) for lim in self.failing(problem, target, which))


def _arch_limit(archs: frozenset[str]) -> Limit:
    return Limit(f"arch is {{t.arch}}, built for {', '.join(sorted(archs))}", lambda p, t: False)


def no_config(problem: Problem, target: Target, which: str) -> Config:
    """The config of a kernel that has nothing to choose."""
    return Config()


def no_workspace(problem: Problem, config: Config) -> WorkspacePlan:
    """The plan of a kernel that needs no scratch of ours."""
    return WorkspacePlan()
