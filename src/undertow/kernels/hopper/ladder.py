"""The ladder of the Hopper kernels: the fused backward from naive to tuned, a switch a rung, and the plan beside it."""

from __future__ import annotations

from dataclasses import replace

from ...problem import Problem
from ...target import Target
from ..spec import Config
from .geometry import Geometry, choose, launches
from .model import clocks

ALL = 1 << 20


def ladder(problem: Problem, target: Target) -> tuple[tuple[str, str, Config], ...]:
    """(name, about, Config) of every rung for a problem: the fused kernel to its tuned state, then the plan apart."""
    from . import config

    tuned = config(replace(problem, deterministic=False), target, "backward")
    dims = (problem.head_dim_qk, problem.head_dim_v, problem.dtype)
    fused, apart = choose(*dims), choose(*dims, dq=False)
    rungs = []
    if fused:
        plain = replace(fused, late=False, do_stages=1, turning=False)
        ring = replace(plain, do_stages=fused.do_stages)
        rungs = [
            ("last first", "last key tiles first", replace(plain, reverse=True), ALL),
            ("plain", "all heads in flight, first key tiles first, the longest; one stage of dO", plain, ALL),
            ("heads", "as few heads in flight as give every block two key tiles", plain, 0),
            ("ring", "the tuned depth of the ring of dO", ring, 0),
            ("late", "dQ handed to the copy engine once the next products are issued", replace(ring, late=True), 0),
            ("turning", "every other round of blocks walks upward: the tuned kernel", fused, 0),
        ]
    rungs.append(("apart", "dQ in a kernel of its own: no sums in memory, seven products for five", apart, 0))
    return tuple((name, about, _with(tuned, g, together)) for name, about, g, together in rungs if g)


def _with(tuned: Config, geometry: Geometry, together: int) -> Config:
    """The tuned config with another geometry, and other heads in flight unless 0."""
    given = {"geometry": geometry} | ({"together": together} if together else {})
    switches = tuple((name, given.get(name, value)) for name, value in tuned.switches)
    return replace(tuned, block_m=geometry.tile_q, block_n=geometry.tile_kv, switches=switches)


def objects(problem: Problem, target: Target) -> tuple[tuple[str, Geometry], ...]:
    """(kind, geometry) of every kernel that the rungs launch, to be built ahead of time."""
    rungs = ladder(problem, target)
    return tuple(dict.fromkeys(launch for *_, config in rungs for launch in launches(config.switch("geometry"))))


def predicted_clocks(problem: Problem, config: Config, ghz: float, sms: int) -> float:
    """Clocks a step by the model, from what the config keeps in flight of dQ."""
    geometry: Geometry = config.switch("geometry")
    heads = min(config.switch("together"), problem.nheads_kv * (1 if problem.is_packed else problem.batch))
    rows = 2 * geometry.tile_q if geometry.turning else problem.max_seqlen_q  # a tile a round, upward and downward
    live = heads * problem.group * rows * geometry.d_qk * 4
    return clocks(geometry, live=live, ghz=ghz, sms=sms)["step"]
