"""Triton kernels that are not ours, compiled offline and run as machine code."""

import io
import json

import numpy as np
import pytest
import torch
from kernels import (
    add_kernel,
    histogram_kernel,
    layernorm_kernel,
    matmul_kernel,
    off_by_one_kernel,
    shifted_kernel,
    softmax_kernel,
    turns_kernel,
)
from rich.console import Console

from undertow import simulator as simulate
from undertow.simulator import Options

TARGETS = ("gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def clean(report):
    assert report.ok, "\n".join(map(str, report.findings))
    return report


@pytest.mark.parametrize("target", TARGETS)
def test_add_is_exact_and_counts_its_bytes(target):
    n = 5000
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), float("nan"))
    report = clean(
        simulate.triton(add_kernel, (5,), (x, y, out, n), target, BLOCK=1024, options=Options(outputs=("out",)))
    )
    assert torch.equal(out, x + y)
    assert report.buffers["x"] == {"bytes": 4 * n, "loaded": 4 * n, "stored": 0}
    assert report.buffers["out"]["stored"] == 4 * n


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nonkdim", (0, 16))
def test_matmul_with_tails(target, dtype, nonkdim):
    m, n, k = 100, 72, 96
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.full((m, n), float("nan"))
    extra = {"matrix_instr_nonkdim": nonkdim} if nonkdim else {}
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    report = clean(
        simulate.triton(
            matmul_kernel, (2, 2), (a, b, c, m, n, k), target, options=Options(outputs=("c",)), **sizes, **extra
        )
    )
    want = a.double() @ b.double()
    # gfx942 computes fp32 dots in its 10-bit-mantissa format unless told otherwise
    bound = 2e-2 if dtype == torch.float32 and target == "gfx942" else 2e-5
    assert (c - want).abs().max() < bound
    assert report.groups["mfma"] > 0


def test_matmul_is_wrong_when_an_operand_is():
    """The comparison above can fail."""
    a, b, c = torch.randn(32, 32), torch.randn(32, 32), torch.zeros(32, 32)
    simulate.triton(matmul_kernel, (1, 1), (a, b + 1, c, 32, 32, 32), BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    assert (c - a @ b).abs().max() > 0.1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(target, dtype):
    x = torch.randn(7, 777).to(dtype)
    out = torch.full_like(x, float("nan"))
    clean(simulate.triton(softmax_kernel, (7,), (x, out, 777), target, BLOCK=1024, options=Options(outputs=("out",))))
    torch.testing.assert_close(
        out.float(), x.float().softmax(1), atol=2e-4 if dtype != torch.float32 else 1e-7, rtol=1e-2
    )


@pytest.mark.parametrize("target", TARGETS)
def test_layernorm_binds_floats_and_numpy(target):
    x = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    weight, bias = np.linspace(1, 2, 300, dtype=np.float32), np.linspace(-1, 1, 300, dtype=np.float32)
    out = np.full_like(x, np.nan)
    clean(simulate.triton(layernorm_kernel, (5,), (x, weight, bias, out, 300, 1e-5), target, BLOCK=512))
    want = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("seed", (None, 0, 1))
def test_integer_atomics_agree_in_any_order(seed):
    values = torch.randint(0, 17, (3000,), dtype=torch.int32)
    counts = torch.zeros(17, dtype=torch.int32)
    clean(simulate.triton(histogram_kernel, (3,), (values, counts, 3000), BLOCK=1024, options=Options(seed=seed)))
    assert torch.equal(counts, torch.bincount(values, minlength=17).int())


@pytest.mark.parametrize("seed", (None, 3))
def test_workgroups_that_wait_for_each_other(seed):
    """A chain through memory needs a fair schedule: the lowest program counter alone would spin for ever."""
    turn, out = torch.zeros(1, dtype=torch.int32), torch.ones(64)
    clean(
        simulate.triton(
            turns_kernel, (6,), (turn, out), BLOCK=64, num_warps=1, options=Options(seed=seed, max_steps=300_000)
        )
    )
    want = 1.0
    for p in range(6):
        want = want * 2 + p
    assert (out == want).all() and int(turn) == 6


def test_one_element_past_the_end_is_reported_with_tensor_and_source_line():
    x, out = torch.randn(300), torch.zeros(300)
    report = simulate.triton(off_by_one_kernel, (3,), (x, out, 300), BLOCK=128)
    found = [f for f in report.findings if f.kind == "global-bounds"]
    assert found and "x +1200 bytes (0 past its 1200 bytes)" in found[0].message
    assert found[0].source.startswith("kernels.py:") and found[0].workgroup == (2, 0, 0)
    assert torch.equal(out, x)


@pytest.mark.parametrize("shift", (1 << 20, 3 << 20))
def test_an_address_inside_another_tensor_is_out_of_bounds(shift):
    """On a GPU the tensors would lie side by side and the read would succeed."""
    x, y, out = torch.ones(1 << 20), torch.full((1 << 22,), 2.0), torch.zeros(64)
    report = simulate.triton(shifted_kernel, (1,), (x, y, out, shift), BLOCK=64, num_warps=1)
    found = [f for f in report.errors if f.kind == "global-bounds"]
    assert found and found[0].message.startswith(f"load of 4 bytes out of bounds: x +{4 * shift} bytes")


def test_an_output_that_is_not_written_whole_is_reported():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    report = simulate.triton(add_kernel, (1,), (x, y, out, 990), BLOCK=1024, options=Options(outputs=("out",)))
    assert [f.kind for f in report.errors] == ["output-unwritten"]
    assert "10 of 1000 elements of out" in report.errors[0].message and "[990]" in report.errors[0].message


@pytest.mark.parametrize(
    "args, keywords, message",
    (
        ((1, 2), {}, "args of add_kernel"),
        ((torch.zeros(4), torch.zeros(4), torch.zeros(4), 4), {"BLOKC": 4}, "args of add_kernel"),
        ((torch.zeros(4), torch.zeros(4), torch.zeros(4), 4), {"BLOCK": 4, "wraps": 4}, "wraps=4: neither a parameter"),
    ),
)
def test_bad_arguments_name_what_is_wrong(args, keywords, message):
    with pytest.raises(ValueError, match=message):
        simulate.triton(add_kernel, (1,), args, **keywords)


def test_targets_and_functions_that_are_not_ours():
    with pytest.raises(ValueError, match="a @triton.jit function is wanted"):
        simulate.triton(print, (1,), ())
    with pytest.raises(NotImplementedError, match="gfx942, gfx950"):
        x = torch.zeros(64)
        simulate.triton(add_kernel, (1,), (x, x, x, 64), "gfx90a", BLOCK=64)
    with pytest.raises(ValueError, match="grid="):
        simulate.triton(add_kernel, (1, 2, 3, 4), (x, x, x, 64), BLOCK=64)


def test_reports_count_by_source_line_and_print():
    """Counters add up, whichever way they are cut."""
    a, b, c = torch.randn(64, 64), torch.randn(64, 64), torch.zeros(64, 64)
    options = Options(bank_model=True)
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    report = clean(simulate.triton(matmul_kernel, (2, 2), (a, b, c, 64, 64, 64), options=options, **sizes))
    assert sum(report.groups.values()) == sum(report.opcodes.values()) == report.wave_instructions
    lines = report.by_source
    assert all(name.startswith("kernels.py:") for name in lines)
    assert sum(line.get("mfma", 0) for line in lines.values()) == report.groups["mfma"]
    assert report.buffers["c"]["stored"] == c.numel() * 4 and report.bytes_moved["lds"] > 0
    assert isinstance(report.bank_conflict_cycles_model, int)
    record = json.loads(report.to_json())
    assert record["ok"] is True and record["wave_instructions"] == report.wave_instructions
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table())
    assert "bank conflict cycles (model)" in console.export_text()
