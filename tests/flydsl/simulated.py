"""One backward of the FlyDSL kernels as gfx942 or gfx950 machine code on a CPU, through the gates of verify."""

from dataclasses import dataclass, replace

import torch

from undertow import cost, reference, simulator
from undertow.instruments import inputs, verify
from undertow.kernels import alloc
from undertow.kernels.flydsl import compiler, launch, plan
from undertow.mask import k_range
from undertow.target import TARGETS

CPU = torch.device("cpu")
COSINE = 0.99999  # on normal inputs; the bf16 accumulator states its own


@dataclass
class Run:
    """What one backward left: the call's tensors, scratch, one (step, report) a launch, parity by tensor."""

    problem: object
    config: object
    tensors: dict
    scratch: dict
    reports: list
    parity: list

    @property
    def mfma(self):
        return sum(n for _, report in self.reports for op, n in report.opcodes.items() if op.startswith("v_mfma"))

    @property
    def findings(self):
        return [f"{step.builder}: {finding}" for step, report in self.reports for finding in report.errors]


def call(problem, *, seed=0, outliers=False, gap=0, wide=0):
    """Inputs with the reference's forward; `gap` rows of NaN behind packed segments, `wide` columns behind rows."""
    tensors = inputs.make(problem, seed=seed, outliers=outliers)
    tensors = inputs.with_gaps(problem, tensors, gap, fill=torch.nan) if gap else tensors
    clean = {n: torch.nan_to_num(x) if n in ("q", "k", "v", "dout") else x for n, x in tensors.items()}
    exact = reference.attention(problem, clean)
    dtype = alloc.DTYPE[problem.dtype]
    tensors["out"] = reference.from_thd(exact.out, problem.layout, problem.batch).to(dtype)
    if problem.has_delta:
        given = exact.delta if tensors["dlse"] is None else exact.delta + reference.to_ht(tensors["dlse"])
        tensors["delta"] = by_batch(problem, given)
    for name in ("q", "k", "v", "dout", "out") if wide else ():
        rows = torch.full((*tensors[name].shape[:-1], tensors[name].shape[-1] + wide), torch.nan, dtype=dtype)
        tensors[name] = rows[..., :-wide].copy_(tensors[name])
    # Input out and lse of rows that see no key are ignored, whatever they hold.
    lse = by_batch(problem, exact.lse)
    tensors["lse"] = torch.where(lse.isinf(), torch.nan, lse)
    return tensors


def by_batch(problem, rows):
    """(nheads_q, tokens) as the problem lays LSE out, fp32."""
    rows = rows.float()
    return rows if problem.is_packed else rows.unflatten(1, (problem.batch, -1)).transpose(0, 1).contiguous()


def run(problem, config=None, *, arch="gfx942", tensors=None, wave_seed=None, mutate=None):
    """Every launch under the simulator, scratch and outputs poisoned, scratch fenced; `mutate` plants a fault."""
    config = plan.config(problem, TARGETS[arch], "backward") if config is None else config
    tensors = call(problem) if tensors is None else dict(tensors)
    if problem.is_packed:
        problem = replace(problem, total_q=tensors["q"].shape[0], total_k=tensors["k"].shape[0])
    scratch = alloc.Fence(plan.plan_workspace(problem, config), CPU)
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        tensors[name] = torch.full_like(tensors[like], float("nan"))
    tensors["dsink"] = torch.full((problem.nheads_q,), float("nan")) if problem.has_sink else None
    reports = []
    if mutate is None and tensors.get("seqused_q") is None:
        compiler.isa_many([step.key for step in launch.offline_steps(problem, config)])  # one child for all of them

    def on_simulator(step):
        step = step if mutate is None else mutate(step)
        text = compiler.isa(step.key)
        compiler.confirm(step.key, text)
        options = simulator.Options(seed=wave_seed)
        report = simulator.isa(text, None, step.grid, step.block, step.flat(), target=arch, options=options)
        reports.append((step, report))

    launch.backward(problem, config, tensors, scratch.tensors, run=on_simulator)
    if mutate is None:
        scratch.check()
    got = {n: tensors[n] for n in ("dq", "dk", "dv", *(("dsink",) if problem.has_sink else ()))}
    parity = verify.compare(problem, tensors, got | {"out": tensors["out"], "lse": tensors["lse"]})
    parity = [p for p in parity if p.tensor in got]
    return Run(problem, config, tensors, scratch.tensors, reports, parity)


def check(done, *, cosine=COSINE):
    """Every gate green, no finding of the simulator, and MFMA counts as predicted exactly."""
    assert not done.findings, done.findings[:5]
    for found in done.parity:
        assert found.ok, found
        assert found.cosine >= cosine, found
    assert done.mfma == predicted(done)


def predicted(done):
    """MFMA of the launches, from cost.py's decomposition."""
    g = plan.geometry_of(done.problem, done.config)
    count = cost.mfma_count(done.problem, g.block_m, g.block_n, g.mfma_k, g.gemms)
    if g.accumulate == "none":
        count += owner_count(done.problem, plan.owner_of(g))
    return count


def owner_count(problem, g):
    """The same for the kernel that streams keys past its own query rows."""
    tiles = 0
    for sq, sk in problem.segments:
        for i0 in range(0, sq, g.block_n):
            lo, hi = k_range((i0, min(i0 + g.block_n, sq)), sq, sk, problem.band)
            tiles += len(range(lo // g.block_m, -(-hi // g.block_m))) if lo < hi else 0
    return tiles * problem.nheads_q * cost.mfma_per_tile(problem, g.block_m, g.block_n, g.mfma_k, g.gemms)
