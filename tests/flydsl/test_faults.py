"""The faults that upstream kernels shipped, planted here by name: each must be caught, and only where it shows."""

from dataclasses import replace

import pytest
import simulated
import torch

from undertow.kernels import alloc
from undertow.kernels.flydsl import compiler, launch, plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.layout import View
from undertow.problem import Band, Problem

CAUSAL = Band(None, 0)
SIZES = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 64, "head_dim_v": 64, "band": CAUSAL}
BF16 = plan.config_of(Geometry(64, 64, accumulate="bf16", dq_groups=2))
# Argument positions of the main kernel, as its signature lists them.
LSE, DELTA, DQ_ACC = 4, 5, 6


def with_args(step, **changes):
    """The step with some arguments replaced, given as {position: function of the old one}."""
    args = list(step.args)
    for at, change in changes.items():
        args[int(at[1:])] = change(args[int(at[1:])])
    return step._replace(args=tuple(args))


def broken(done):
    """Tensors that a gate refuses."""
    return {found.tensor for found in done.parity if not found.ok}


def by_batch_stride_of_q(layout, head_dim=64):
    """LSE and D found at b * (stride_b of Q / head_dim), as if every layout were bshd."""

    def mutate(step):
        if step.builder != "build":
            return step
        stride = step.args[0].stride_b // head_dim
        return with_args(step, **{f"_{n}": lambda v: v._replace(stride_b=stride) for n in (LSE, DELTA)})

    problem = Problem.dense(2, 40, 40, layout=layout, **SIZES)
    return simulated.run(problem, mutate=mutate)


def test_lse_base_from_a_batch_stride_of_q_is_right_in_bshd_and_caught_in_sbhd():
    assert broken(by_batch_stride_of_q("bshd")) == set()
    assert {"dk", "dv"} <= broken(by_batch_stride_of_q("sbhd"))


def converted_as_packed(lengths):
    """dQ accumulated per segment, padded to 16 rows, and read back as if segments were packed (one head)."""
    problem = Problem.packed(lengths, **(SIZES | {"nheads_q": 1}))

    def mutate(step):
        if step.builder != "build_convert":
            return step
        return with_args(step, _0=lambda v: v._replace(stride_b=lengths[0] * 64))

    return simulated.run(problem, BF16, mutate=mutate)


def test_packed_against_padded_accumulator_is_right_for_the_first_segment_only():
    done = converted_as_packed((45, 45, 45))
    assert broken(done) == {"dq"}
    right = simulated.run(done.problem, BF16, tensors=done.tensors)
    assert torch.equal(done.tensors["dq"][:45], right.tensors["dq"][:45])
    assert not torch.equal(done.tensors["dq"][45:90], right.tensors["dq"][45:90])


@pytest.mark.parametrize(("length", "caught"), [(48, set()), (45, {"dq"})])
def test_rows_rounded_to_16_by_one_kernel_only_show_where_the_length_is_no_multiple(length, caught):
    """The main kernel's heads lie max_seqlen_q rows apart, the convert kernel's pad16(max_seqlen_q)."""
    problem = Problem.packed((length, length), **SIZES)

    def mutate(step):
        if step.builder != "build":
            return step
        return with_args(step, **{f"_{DQ_ACC}": lambda v: v._replace(stride_h=length * 64)})

    assert broken(simulated.run(problem, BF16, mutate=mutate)) == caught


def test_an_accumulator_sized_with_d_v_is_caught_by_name():
    problem = Problem.packed((45, 33), **(SIZES | {"head_dim_qk": 128}))
    config = plan.config_of(plan.default_geometry(problem, "gfx942"))
    small = torch.zeros(problem.nheads_q, problem.total_q, problem.head_dim_v)

    def mutate(step):
        def shrink(v):
            return v._replace(ptr=small) if isinstance(v, View) and v.ptr is not None and v.ptr.shape == (2, 78, 128) \
                and v.ptr.dtype == torch.float32 else v  # fmt: skip

        return step._replace(args=tuple(shrink(a) for a in step.args))

    done = simulated.run(problem, config, mutate=mutate)
    outside = [f for f in done.findings if "bound" in f.lower() or "outside" in f.lower()]
    assert {f.split(":")[0] for f in outside} == {"build_preprocess", "build", "build_convert"}, done.findings[:4]


def test_an_accumulator_that_nobody_zeroed_is_caught():
    problem = Problem.packed((45, 33), **SIZES)

    def mutate(step):
        return step._replace(features=step.features - {"zero"})

    assert "dq" in broken(simulated.run(problem, mutate=mutate))


def in_main(**changes):
    """A fault in arguments of the main kernel."""
    return lambda step: with_args(step, **changes) if step.builder == "build" else step


def one_off(at, change):
    """A fault in one field of the main kernel's segments argument."""
    return in_main(_11=lambda segments: segments._replace(**{at: change(getattr(segments, at))}))


@pytest.mark.parametrize(
    ("fault", "mutate"),
    [
        ("a window one key too wide on the left", one_off("left", lambda left: left + 1)),
        ("a diagonal one key off", one_off("right", lambda right: right + 1)),
        ("top-left where bottom-right was asked", one_off("align", lambda align: 1 - align)),
        ("D without the dLSE term", lambda step: step._replace(features=step.features - {"dlse"})),
        ("the heads of a group counted as one", in_main(_12=lambda group: 1)),
        ("dQ scaled twice", lambda s: with_args(s, _5=lambda x: x * x) if s.builder == "build_convert" else s),
        ("dK of a wrong scale", in_main(_13=lambda scales: scales._replace(softmax=0.9 * scales.softmax))),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_a_wrong_formula_is_caught(fault, mutate):
    problem = Problem.packed((45, 20), (60, 30), **(SIZES | {"band": Band(9, 0), "has_dlse": True}))
    tensors = simulated.call(problem)
    assert not broken(simulated.run(problem, tensors=tensors))
    assert broken(simulated.run(problem, tensors=tensors, mutate=mutate)), fault


def test_what_a_step_writes_stays_inside_its_buffers():
    """Guard bands around every scratch buffer: `simulated.run` checks them; a write behind one is seen."""
    problem = Problem.packed((45, 33), **SIZES)
    config = plan.config_of(plan.default_geometry(problem, "gfx942"))
    fence = alloc.Fence(plan.plan_workspace(problem, config), torch.device("cpu"))
    fence.check()
    fence.tensors["delta"].view(-1).as_strided((1,), (1,), fence.tensors["delta"].storage_offset() + 2 * 78).fill_(0)
    with pytest.raises(RuntimeError, match="behind delta"):
        fence.check()


class TestDeterminism:
    problem = Problem.packed((70, 33), (140, 33), nheads_q=2, nheads_kv=1, head_dim_qk=64, head_dim_v=64,
                             band=CAUSAL, deterministic=True)  # fmt: skip

    def test_bits_do_not_depend_on_the_order_of_waves(self):
        tensors = simulated.call(self.problem)
        runs = [simulated.run(self.problem, tensors=tensors, wave_seed=seed) for seed in (None, 1, 2)]
        for name in ("dq", "dk", "dv"):
            assert all(torch.equal(runs[0].tensors[name], other.tensors[name]) for other in runs[1:]), name

    def test_no_launch_of_the_plan_has_an_atomic(self):
        done = simulated.run(self.problem)
        builders = [step.builder for step, _ in done.reports]
        assert builders == ["build_preprocess", "build", "build", "build_gaps", "build_gaps"]
        assert not [op for _, report in done.reports for op in report.opcodes if "atomic" in op]

    def test_the_other_plan_has_them(self):
        problem = replace(self.problem, deterministic=False)
        tensors = simulated.call(problem)
        done = simulated.run(problem, tensors=tensors)
        assert sum(n for _, report in done.reports for op, n in report.opcodes.items() if "atomic_add_f32" in op) > 0

    def test_its_price_in_products_is_what_the_documentation_states(self):
        from undertow.cost import score_flops

        mla = Geometry(accumulate="none")
        main, owner = mla.gemms, plan.owner_of(mla).gemms
        both = score_flops(192, 128, (main[0] + owner[0], main[1] + owner[1]))
        assert both == 2304 and both / score_flops(192, 128) == pytest.approx(1.385, abs=5e-4)


@pytest.mark.slow
def test_bf16_accumulator_costs_accuracy_and_this_much():
    """8 key blocks add to each row of dQ: every addition rounds to 8 bits of mantissa."""
    problem = Problem.dense(1, 32, 1024, nheads_q=1, nheads_kv=1, head_dim_qk=192, head_dim_v=128)
    tensors = simulated.call(problem)
    fp32 = simulated.run(problem, tensors=tensors)
    bf16 = simulated.run(problem, plan.config_of(Geometry(accumulate="bf16", dq_groups=2)), tensors=tensors)
    errors = [next(f.rms for f in done.parity if f.tensor == "dq") for done in (fp32, bf16)]
    assert all(f.ok for f in bf16.parity) and not bf16.findings
    assert errors[0] < 3e-3 < errors[1] < 1e-2, errors


def test_launch_refuses_outputs_it_cannot_write():
    problem = Problem.packed((45, 33), **SIZES)
    tensors = simulated.call(problem)
    tensors |= {f"d{n}": torch.empty_like(tensors[n]) for n in "qkv"}
    tensors["dq"] = torch.empty(78, 64, 2, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(NotImplementedError, match="dq has strides"):
        launch.backward(problem, plan.config_of(Geometry(64, 64)), tensors, {}, run=lambda step: None)


class TestSynchronisation:
    """Nothing is there for nothing: take a barrier or a wait out, and the simulator names the hazard."""

    sizes = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 192, "head_dim_v": 128, "band": CAUSAL}
    problem = Problem.packed((70, 45), (140, 90), **sizes)
    key = ("main_device", "build", Geometry(), frozenset({"packed"}))

    def places(self, opcode):
        return [n for n, line in enumerate(compiler.isa(self.key).splitlines()) if line.strip().startswith(opcode)]

    def caught(self, place):
        """Findings of the main kernel without the instruction at that line."""
        original = compiler.isa

        def mutant(key):
            lines = original(key).splitlines()
            lines[place] = "\ts_nop 0"
            return "\n".join(lines)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "isa", lambda key: mutant(key) if key == self.key else original(key))
            return [f for f in simulated.run(self.problem).findings if f.startswith("build:")]

    @pytest.mark.parametrize("nth", range(3))
    def test_every_barrier_is_needed(self, nth):
        assert len(self.places("s_barrier")) == 3
        assert self.caught(self.places("s_barrier")[nth])

    @pytest.mark.slow
    def test_every_wait_is_needed(self):
        places = self.places("s_waitcnt")
        assert len(places) >= 50
        # The last one stands where both loops were skipped: a kv head without query heads, which no call has.
        assert [place for place in places if not self.caught(place)] in ([], places[-1:])
