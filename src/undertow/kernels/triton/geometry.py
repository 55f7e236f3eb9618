"""Whether what was compiled and launched is what the tables resolved."""

from __future__ import annotations

from typing import Any

from ...cost import split_dim
from ...problem import Problem
from .. import watch
from ..spec import Built, Config
from .configs import STAGES, shared_bytes


def built(problem: Problem, config: Config, launches: list[tuple[str, Any]]) -> Built:
    """The figures of a forward's and a backward's launches, and how the stages with a tile differ from the config."""
    from .host import loops

    order = ["forward", "dkdv"] if config.switch("fused") else ["forward", "dq", "dkdv"]
    ran = [stage for stage, _ in launches if stage in STAGES]
    found = [] if ran == order else [f"launched {' '.join(ran) or 'nothing'}, wanted {' '.join(order)}"]
    stages = {stage: watch.figures(compiled) for stage, compiled in launches}
    for stage in filter(stages.get, STAGES):
        own, have = config.switch(stage), stages[stage]
        wanted = _resolved(problem, own) | ({} if stage == "forward" else {"LOOPS": loops(own)})
        wrong = {name: value for name, value in wanted.items() if have.get(name) != value}
        found += [f"{stage} has {name} {have.get(name)}, wanted {value}" for name, value in wrong.items()]
        most = shared_bytes(problem, own, stage, fused=config.switch("fused"))
        if have["shared"] > most:
            found.append(f"{stage} has {have['shared']} bytes of shared memory, planned at most {most}")
    return Built(stages, tuple(found))


def _resolved(problem: Problem, stage: Config) -> dict[str, int | bool]:
    qk, v = split_dim(problem.head_dim_qk), split_dim(problem.head_dim_v)
    return {
        "BLOCK_M": stage.block_m, "BLOCK_N": stage.block_n, "num_warps": stage.num_warps,
        "num_stages": stage.num_stages, "QK_LO": qk[0], "QK_HI": qk[1], "V_LO": v[0], "V_HI": v[1],
        "TMA": bool(stage.switch("tma")),
    }  # fmt: skip
