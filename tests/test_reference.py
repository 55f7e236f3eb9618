"""The oracle against torch autograd of a plain softmax, and against finite differences, in fp64."""

import math
from dataclasses import replace

import pytest
import torch

from undertow import reference
from undertow.instruments import inputs
from undertow.problem import Band, Problem

SMALL = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 16, "head_dim_v": 8, "dtype": "fp32"}
BANDS = {
    "full": Band(),
    "causal": Band(None, 0),
    "top_left": Band(None, 0, "top_left"),
    "window": Band(3, 1),
    "window_top_left": Band(2, 0, "top_left"),
    "past_only": Band(9, -2),
}
FEATURES = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sink": {"has_sink": True},
    "dlse": {"has_dlse": True},
    "all": {"softcap": 2.0, "has_sink": True, "has_dlse": True, "softmax_scale": 0.4},
}
SEGMENTS = ((7, 0, 1, 9, 3), (7, 2, 1, 4, 0))  # equal, no query, one token, queries without keys, no key


def plain(problem, tensors):
    """(out, lse) of every segment by torch.softmax over one matrix of all tokens, differentiable, written apart."""
    q, k, v = (tensors[n] for n in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = problem.softmax_scale or 1 / math.sqrt(problem.head_dim_qk)
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    if problem.softcap:
        s = problem.softcap * (s / problem.softcap).tanh()
    hidden = torch.ones(s.shape[1:], dtype=torch.bool)
    at_q = at_k = 0
    for sq, sk in problem.segments:
        for i in range(sq):
            for j in range(sk):
                d = j - i - (0 if problem.band.align == "top_left" else sk - sq)
                right = problem.band.right is None or d <= problem.band.right
                left = problem.band.left is None or d >= -problem.band.left
                hidden[at_q + i, at_k + j] = not (left and right)
        at_q, at_k = at_q + sq, at_k + sk
    s = s.masked_fill(hidden, -1e30)  # finite, so that autograd of a row without keys stays finite
    if tensors["sink"] is not None:
        s = torch.cat([s, tensors["sink"][:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[0]]
    p = p * ~hidden
    lse = torch.logsumexp(s, -1)
    sees = ~hidden.all(-1)
    if tensors["sink"] is None:
        lse = torch.where(sees, lse, 0.0)  # the constant -inf has no gradient
    return torch.einsum("hij,jhd->ihd", p, v), lse, sees


def doubled(problem, seed=0):
    tensors = inputs.make(problem, seed=seed)
    return {n: x.double() if x is not None and x.is_floating_point() else x for n, x in tensors.items()}


def autograd(problem, tensors):
    leaves = {n: tensors[n].clone().requires_grad_() for n in ("q", "k", "v", "sink") if tensors[n] is not None}
    out, lse, sees = plain(problem, tensors | leaves)
    loss = (out * tensors["dout"]).sum()
    if tensors["dlse"] is not None:
        counts = torch.ones_like(sees) if problem.has_sink else sees
        loss = loss + (lse * tensors["dlse"] * counts).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return out.detach(), lse.detach(), sees, dict(zip((f"d{n}" for n in leaves), grads, strict=True))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("fields", FEATURES.values(), ids=FEATURES.keys())
def test_against_autograd(band, fields):
    problem = Problem.packed(*SEGMENTS, band=band, **SMALL, **fields)
    tensors = doubled(problem)
    got = reference.attention(problem, tensors)
    out, lse, sees, grads = autograd(problem, tensors)
    torch.testing.assert_close(got.out, out, rtol=1e-10, atol=1e-12)
    if problem.has_sink:
        torch.testing.assert_close(got.lse, lse, rtol=1e-12, atol=1e-12)
        assert torch.equal(got.lse[:, ~sees], tensors["sink"][:, None].expand(-1, int((~sees).sum())))
    else:
        torch.testing.assert_close(got.lse[:, sees], lse[:, sees], rtol=1e-12, atol=1e-12)
        assert (got.lse[:, ~sees] == -torch.inf).all()
    for name, want in grads.items():
        torch.testing.assert_close(getattr(got, name), want, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert (got.dq[~sees] == 0).all() and (got.out[~sees] == 0).all()


@pytest.mark.parametrize("fields", FEATURES.values(), ids=FEATURES.keys())
def test_against_finite_differences(fields):
    """The loss of the reference's own forward, moved along random directions by a step of 1e-6."""
    problem = Problem.packed((5, 4), (3, 6), band=Band(4, 0), **SMALL, **fields)
    tensors = doubled(problem, seed=3)
    got = reference.attention(problem, tensors)

    def loss(moved):
        stages = reference.attention(problem, tensors | moved | {"out": None, "lse": None})
        value = (stages.out * tensors["dout"]).sum()
        if tensors["dlse"] is None:
            return value
        live = stages.lse.isfinite()
        return value + (torch.where(live, stages.lse, 0.0) * tensors["dlse"]).sum()

    for name in ("q", "k", "v", "sink"):
        if tensors[name] is None:
            continue
        torch.manual_seed(5)
        for _ in range(3):
            direction, step = torch.randn_like(tensors[name]), 1e-6
            up = loss({name: tensors[name] + step * direction})
            down = loss({name: tensors[name] - step * direction})
            slope = (up - down) / (2 * step)
            torch.testing.assert_close((getattr(got, f"d{name}") * direction).sum(), slope, rtol=1e-6, atol=1e-7)


def test_rows_of_p_sum_to_one_and_to_less_with_a_sink():
    s = torch.randn(2, 5, 7, dtype=torch.float64)
    visible = reference.keep(5, 7, Band(3, 0))
    v = torch.randn(2, 7, 4, dtype=torch.float64)
    for sink in (None, torch.tensor([0.3, -2.0], dtype=torch.float64)):
        out, lse = reference.forward(s, v, visible, sink)
        p = reference.probabilities(s, lse, visible)
        share = 0 if sink is None else torch.exp(sink[:, None] - lse)
        torch.testing.assert_close(p.sum(-1) + share, torch.ones(2, 5, dtype=torch.float64))
        assert (p[:, ~visible] == 0).all() and (p[:, visible] > 0).all()
        torch.testing.assert_close(out, p @ v)


def test_stages_are_the_formulas_of_the_design():
    """Each stage alone, by loops over i and j."""
    torch.manual_seed(0)
    p, dout, v = (torch.randn(n, dtype=torch.float64) for n in ((2, 3, 4), (2, 3, 5), (1, 4, 5)))
    q, k, out = (torch.randn(n, dtype=torch.float64) for n in ((2, 3, 6), (1, 4, 6), (2, 3, 5)))
    sees, dlse = torch.tensor([True, False, True]), torch.randn(2, 3, dtype=torch.float64)
    d = reference.delta(dout, out, sees, dlse)
    dp = reference.dp(dout, v)
    ds = reference.ds(p, dp, d, torch.tensor(0.5))
    for h in range(2):
        for i in range(3):
            row = float(dout[h, i] @ out[h, i]) if sees[i] else 0.0
            assert float(d[h, i]) == pytest.approx(row - float(dlse[h, i]))
            for j in range(4):
                assert float(dp[h, i, j]) == pytest.approx(float(dout[h, i] @ v[0, j]))
                assert float(ds[h, i, j]) == pytest.approx(0.5 * float(p[h, i, j] * (dp[h, i, j] - d[h, i])))
    dv, dk, dq = reference.dv(p, dout, 2), reference.dk(ds, q, 0.3, 2), reference.dq(ds, k, 0.3)
    for j in range(4):
        torch.testing.assert_close(dv[0, j], sum(p[h, i, j] * dout[h, i] for h in range(2) for i in range(3)))
        torch.testing.assert_close(dk[0, j], 0.3 * sum(ds[h, i, j] * q[h, i] for h in range(2) for i in range(3)))
    for h in range(2):
        for i in range(3):
            torch.testing.assert_close(dq[h, i], 0.3 * sum(ds[h, i, j] * k[0, j] for j in range(4)))


def test_dsink_is_the_formula_of_the_design():
    problem = Problem.packed((5, 4), (3, 6), band=Band(None, 0), has_sink=True, has_dlse=True, **SMALL)
    tensors = doubled(problem)
    got = reference.attention(problem, tensors)
    rowsum = (tensors["dout"] * got.out).sum(-1).T
    want = (torch.exp(tensors["sink"][:, None] - got.lse) * (tensors["dlse"] - rowsum)).sum(-1)
    torch.testing.assert_close(got.dsink, want)


def test_a_row_without_keys_gives_its_dlse_to_the_sink():
    problem = Problem.packed((3,), (0,), has_sink=True, has_dlse=True, **SMALL)
    tensors = doubled(problem)
    got = reference.attention(problem, tensors)
    torch.testing.assert_close(got.dsink, tensors["dlse"].sum(-1))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_layouts_hold_the_same_numbers(layout):
    """Every dense layout is the packed call of its batch entries."""
    problem = Problem.dense(2, 5, 7, layout=layout, band=Band(None, 0), has_dlse=True, **SMALL)
    tensors = doubled(problem)
    got = reference.attention(problem, tensors)
    packed = Problem.packed((5, 5), (7, 7), band=Band(None, 0), has_dlse=True, **SMALL)
    rows = {n: reference.to_thd(tensors[n], layout) for n in ("q", "k", "v", "dout")}
    order = {n: "bshd".index(n) for n in "bshd"}
    by_hand = tensors["q"].permute([layout.index(a) for a in sorted("bshd", key=order.get)]).reshape(10, 4, 16)
    assert torch.equal(rows["q"], by_hand)
    want = reference.attention(packed, tensors | rows | {"dlse": reference.to_ht(tensors["dlse"])})
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    back = reference.from_thd(rows["q"], layout, 2)
    assert torch.equal(back, tensors["q"])


def test_query_head_reads_its_own_kv_head():
    """B36's map: head h reads kv head h // group, for groups that are no power of two."""
    for heads, kv_heads in ((6, 3), (6, 2), (9, 3), (21, 7), (5, 1)):
        problem = Problem.packed((6,), band=Band(None, 0), **(SMALL | {"nheads_q": heads, "nheads_kv": kv_heads}))
        tensors = doubled(problem)
        for h in range(heads):
            one = torch.zeros_like(tensors["dout"])
            one[:, h] = tensors["dout"][:, h]
            got = reference.attention(problem, tensors | {"dout": one})
            hit = [x for x in range(kv_heads) if got.dk[:, x].abs().max() > 0 or got.dv[:, x].abs().max() > 0]
            assert hit == [h // (heads // kv_heads)]


def test_padding_is_never_read():
    problem = Problem.packed((5, 0, 4), (3, 2, 6), band=Band(None, 0), has_dlse=True, has_sink=True, **SMALL)
    tensors = inputs.make(problem)
    want = reference.attention(problem, tensors)
    spread = inputs.with_gaps(problem, tensors, 3, fill=float("nan"))
    got = reference.attention(problem, spread)
    for name in ("out", "dq", "dk", "dv"):
        side = "k" if name in ("dk", "dv") else "q"
        starts = spread[f"cu_seqlens_{side}"].tolist()
        rows = [
            s + i
            for s, n in zip(starts, problem.seqlens_k if side == "k" else problem.seqlens_q, strict=False)
            for i in range(n)
        ]
        x = getattr(got, name)
        assert torch.equal(x[rows], getattr(want, name)), name
        rest = [r for r in range(x.shape[0]) if r not in rows]
        assert len(rest) == 4 * 3 and (x[rest] == 0).all(), name
    torch.testing.assert_close(got.dsink, want.dsink)


def test_given_out_and_lse_are_used_where_a_row_sees_keys():
    """The oracle follows the kernel's own 16-bit out (gate 1), and ignores both where the mask hides every key."""
    problem = Problem.packed((6,), (4,), band=Band(None, 0), **SMALL)  # rows 0 and 1 see nothing
    tensors = doubled(problem)
    own = reference.attention(problem, tensors)
    out, lse = own.out.clone(), own.lse.clone()
    out[:2], lse[:, :2] = float("nan"), float("nan")
    got = reference.attention(problem, tensors | {"out": out, "lse": lse})
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(own, name))
    moved = reference.attention(problem, tensors | {"out": own.out + 1.0})
    assert not torch.allclose(moved.dq, own.dq)
    moved = reference.attention(problem, tensors | {"lse": own.lse + 1.0})
    torch.testing.assert_close(moved.dv, own.dv / math.e)


def test_emulation_rounds_operands_and_results():
    problem = Problem.dense(1, 40, 40, band=Band(None, 0), **SMALL)
    tensors = inputs.make(replace(problem, dtype="bf16"))
    exact = reference.attention(problem, tensors)
    rounded = reference.attention(problem, tensors, torch.float32, torch.bfloat16)
    for name in ("out", "dq", "dk", "dv"):
        x = getattr(rounded, name)
        assert torch.equal(x, x.bfloat16().float())
        error = float((x - getattr(exact, name)).norm() / getattr(exact, name).norm())
        assert 1e-4 < error < 1e-2, name


def test_head_chunks_change_nothing(monkeypatch):
    """Long segments are computed a few kv heads at a time."""
    problem = Problem.packed((9, 5), band=Band(None, 0), has_sink=True, **SMALL)
    tensors = doubled(problem)
    want = reference.attention(problem, tensors)
    chunks = reference._head_chunks
    monkeypatch.setattr(reference, "_head_chunks", lambda p, pairs: chunks(p, pairs, budget=1))
    assert len(reference._head_chunks(problem, 81)) == 2
    got = reference.attention(problem, tensors)
    for name in ("out", "lse", "delta", "dq", "dk", "dv", "dsink"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
