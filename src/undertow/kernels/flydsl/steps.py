"""What a backward launches, in order: for each kernel its build, grid and arguments. Nothing here needs a device.

The launch path, the recorded launcher of the tests, the simulator and the probe all read the same steps, so that none
of them can disagree with another about a tile, a stride or a size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...layout import AXES, View, lse_axes, view
from ...problem import Problem
from ...workspace import WorkspacePlan
from ..spec import Config, Tensors
from .geometry import Geometry, RowGeometry
from .plan import geometry_of, owner_of, plan_workspace

UNBOUNDED = 1 << 29
LOG2E = 1.4426950408889634
NOTHING = View(None, 0, 0, 0)


class Segs(NamedTuple):
    """The `Segments` argument of the device code, in its order."""

    used_q: Any
    used_k: Any
    batch: int
    seqlen_q: int
    seqlen_k: int
    align: int
    left: int
    right: int


class Scales(NamedTuple):
    """The `Scales` argument of the device code, in its order; the last two are used with a softcap only."""

    softmax: float
    to_cap: float
    cap_log2: float


class Step(NamedTuple):
    """One launch: which builder of which module, its key (geometry, features), the grid, and the arguments."""

    module: str
    builder: str
    geometry: Geometry | RowGeometry
    features: frozenset[str]
    grid: tuple[int, int, int]
    args: tuple[Any, ...]

    @property
    def key(self) -> tuple[str, str, Geometry | RowGeometry, frozenset[str]]:
        """What this step compiles from."""
        return self[:4]

    @property
    def stage(self) -> str:
        """What the step does: preprocess, main, dq, convert or gaps."""
        return self.module.removesuffix("_device") if self.builder == "build" else self.builder.removeprefix("build_")

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads along x, y, z."""
        return (self.geometry.threads, 1, 1)

    def flat(self) -> list[Any]:
        """The kernel's arguments one by one, as its metadata lists them."""
        found: list[Any] = []
        for arg in self.args:
            found.extend(arg if isinstance(arg, View | Segs | Scales) else [arg])
        return found


def backward_steps(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> list[Step]:
    """Preprocess, main, then convert (or the kernel that owns dQ), and the zeroing of gaps where there can be any."""
    call = _Call(problem, config, tensors, scratch)
    steps = [call.preprocess(), call.main()]
    steps.append(call.own_dq() if config.switch("accumulate") == "none" else call.convert())
    return steps + call.gaps()


class _Call:
    """The views and scalars that the steps of one call share."""

    def __init__(self, problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
        self.p, self.t = problem, tensors
        self.geometry = geometry_of(problem, config)
        self.plan = plan_workspace(problem, config)
        self.scratch = scratch
        self.rows = RowGeometry(problem.head_dim_qk, problem.head_dim_v, self.geometry.arch, problem.dtype)
        used = {f"used_{s}" for s in "qk" if tensors.get(f"seqused_{s}") is not None}
        self.features = frozenset(used | ({"packed"} if problem.is_packed else set()))
        band = problem.band
        self.sides = tuple(
            UNBOUNDED if s is None else max(-UNBOUNDED, min(UNBOUNDED, s)) for s in (band.left, band.right)
        )
        self.search = problem.batch.bit_length()

    def tensor(self, name: str) -> View:
        """A tensor of the call with the problem's layout."""
        return view(self.t[name], AXES[self.p.layout])

    def side(self, name: str) -> View:
        """LSE, dLSE or delta as given; nothing where it was not."""
        given = self.t.get(name)
        return NOTHING if given is None else view(given, lse_axes(self.p))

    def buffer(self, name: str) -> View:
        """A scratch buffer, its strides from the plan; nothing where the plan has none."""
        return buffer_view(self.plan, name, self.scratch)

    def segments(self, *, all_rows: bool) -> Segs:
        """The segments; `all_rows` for the kernels that walk every row of a packed tensor."""
        p, t = self.p, self.t
        sq, sk = (p.total_q, p.total_k) if all_rows and p.is_packed else (p.max_seqlen_q, p.max_seqlen_k)
        align = int(p.band.align == "bottom_right")
        return Segs(t.get("seqused_q"), t.get("seqused_k"), p.batch, sq, sk, align, *self.sides)

    def scales(self) -> Scales:
        """The softmax scale and what a softcap needs."""
        p = self.p
        cap = (2 * LOG2E * p.scale / p.softcap, LOG2E * p.softcap) if p.softcap else (0.0, 0.0)
        return Scales(float(p.scale), *cap)

    def row_grid(self, rows: int, heads: int) -> tuple[int, int, int]:
        """Workgroups of a row kernel with `rows` rows each."""
        count = self.p.total_q if self.p.is_packed else self.p.max_seqlen_q
        return (-(-count // rows), heads, 1 if self.p.is_packed else self.p.batch)

    def preprocess(self) -> Step:
        p, t = self.p, self.t
        extra = {"dlse": p.has_dlse, "delta": p.has_delta, "sink": p.has_sink}
        features = self.features | {name for name, given in extra.items() if given}
        features |= {"zero"} if "dq_acc" in self.plan and self.plan["dq_acc"].dtype == "fp32" else frozenset()
        args = (
            self.tensor("dout"), self.tensor("out"), self.side("lse"), self.side("dlse"), self.side("delta"),
            self.buffer("lse_log2"), self.buffer("delta"), self.buffer("dq_acc"), self.buffer("dsink_rows"),
            t.get("sink"), t.get("cu_seqlens_q"), t.get("cu_seqlens_k"), self.segments(all_rows=True), self.search,
        )  # fmt: skip
        grid = self.row_grid(self.rows.rows(p.head_dim_v), p.nheads_q)
        return Step("rows_device", "build_preprocess", self.rows, features, grid, args)

    def main(self) -> Step:
        p, g = self.p, self.geometry
        if "dq_acc" in self.plan and self.plan["dq_acc"].stride("s") != p.head_dim_qk:
            pitch = self.plan["dq_acc"].stride("s")
            raise ValueError(f"dq_acc has rows {pitch} elements apart, the kernel adds at head_dim_qk={p.head_dim_qk}")
        features = self.features | ({"softcap"} if p.softcap else frozenset())
        args = (
            self.tensor("q"), self.tensor("k"), self.tensor("v"), self.tensor("dout"), self.buffer("lse_log2"),
            self.buffer("delta"), self.buffer("dq_acc"), self.tensor("dk"), self.tensor("dv"),
            self.t.get("cu_seqlens_q"), self.t.get("cu_seqlens_k"), self.segments(all_rows=False), p.group,
            self.scales(),
        )  # fmt: skip
        return Step("main_device", "build", g, features, g.grid(p.batch, p.nheads_kv, p.max_seqlen_k), args)

    def own_dq(self) -> Step:
        p, g = self.p, owner_of(self.geometry)
        features = self.features | ({"softcap"} if p.softcap else frozenset())
        args = (
            self.tensor("q"), self.tensor("k"), self.tensor("v"), self.tensor("dout"), self.buffer("lse_log2"),
            self.buffer("delta"), self.tensor("dq"), self.t.get("cu_seqlens_q"), self.t.get("cu_seqlens_k"),
            self.segments(all_rows=False), p.group, self.scales(),
        )  # fmt: skip
        grid = (p.nheads_q, p.batch, -(-p.max_seqlen_q // g.block_n))
        return Step("dq_device", "build", g, features, grid, args)

    def convert(self) -> Step:
        p = self.p
        bf16 = self.plan["dq_acc"].dtype == "bf16"
        args = (
            self.buffer("dq_acc"), self.tensor("dq"), self.t.get("cu_seqlens_q"), self.segments(all_rows=True),
            self.search, float(p.scale),
        )  # fmt: skip
        features = self.features | {"bf16"} if bf16 else frozenset()
        grid = self.row_grid(self.rows.rows(p.head_dim_qk), p.nheads_q)
        return Step("rows_device", "build_convert", self.rows, features, grid, args)

    def gaps(self) -> list[Step]:
        """Rows outside the segments: dK and dV always, dQ where no accumulator was zeroed for it."""
        p, steps = self.p, []
        if not self.features:
            return steps
        owned = "dq_acc" not in self.plan
        sides = [("k", p.total_k, p.max_seqlen_k, p.nheads_kv, ("dk", "dv"))]
        sides += [("q", p.total_q, p.max_seqlen_q, p.nheads_q, ("dq",))] if owned else []
        for name, total, longest, heads, outputs in sides:
            features = self.features | ({"queries"} if name == "q" else frozenset())
            wide = max(p.head_dim_qk, p.head_dim_v) if name == "k" else p.head_dim_qk
            count = total if p.is_packed else longest
            grid = (-(-count // self.rows.rows(wide)), heads, 1 if p.is_packed else p.batch)
            views = [self.tensor(n) for n in outputs] + [NOTHING] * (2 - len(outputs))
            args = (*views, self.t.get(f"cu_seqlens_{name}"), self.segments(all_rows=True), self.search)
            steps.append(Step("rows_device", "build_gaps", self.rows, features, grid, args))
        return steps


def buffer_view(plan: WorkspacePlan, name: str, scratch: Tensors) -> View:
    """A scratch buffer as a View whose strides are the plan's; nothing where the plan has no such buffer."""
    if name not in plan:
        return NOTHING
    b, s, h = (plan[name].stride(axis) for axis in "bsh")
    return View(scratch[name], b, s, h)
