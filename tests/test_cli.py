"""The command line: exit codes, JSON, errors as one line, and no torch where none is needed."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from undertow.cli import app

runner = CliRunner()
MLA = ["--qk", "192", "--v", "128", "--seqlens-q", "100,37", "--seqlens-k", "130,77", "--heads", "2", "--kv-heads", "1"]


def run(*args):
    return runner.invoke(app, list(args))


def undertow(*args):
    """In a process of its own, where Triton compiles: the tests' own process interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "undertow.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_explain_lists_every_kernel_with_numbers():
    from undertow.dispatch import BY_NAME, KERNELS

    done = run("explain", "--target", "gfx942", "--json", *MLA)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert {k["kernel"] for k in answer["kernels"]} == {k.name for k in KERNELS + BY_NAME}
    assert [k["status"] for k in answer["kernels"]].count("chosen") == 1
    flash = next(k for k in answer["kernels"] if k["kernel"] == "sdpa_flash")
    assert any("192" in reason and "128" in reason for reason in flash["reasons"])
    assert answer["workspace_nbytes"] > 0


def test_explain_says_what_lifts_a_limit():
    answer = json.loads(run("explain", "--target", "sm_90", "--json", "--seqlen", "64", "--seqlen-k", "96").output)
    sdpa = next(k for k in answer["kernels"] if k["kernel"] == "sdpa_efficient")
    assert sdpa["status"] == "cannot run" and any("top_left" in fix for fix in sdpa["fixes"])


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_80", "sm_90", "cpu"])
def test_explain_imports_no_torch(target):
    code = (
        "import sys; sys.argv = ['undertow', 'explain', '--target', %r]\n"
        "from undertow.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code % target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_refused_input_is_one_line_and_exit_code_2():
    done = undertow("explain", "--qk", "100", "--target", "sm_90")
    assert done.returncode == 2
    assert done.stderr.strip() == "undertow: head_dim_qk is 100, wanted a multiple of 8 up to 256"
    done = undertow("explain", "--target", "gfx900")
    assert done.returncode == 2 and "target is 'gfx900', wanted one of" in done.stderr


def test_verify_one_workload_and_its_record(tmp_path):
    record = tmp_path / "verify.json"
    done = run("verify", "--device", "cpu", "--only", "full-bhsd", "--out", str(record))
    assert done.exit_code == 0, done.output
    assert "1 of 1 workloads green" in done.output
    content = json.loads(record.read_text())
    assert {p["tensor"] for p in content["results"][0]["parity"]} == {"out", "lse", "delta", "dq", "dk", "dv"}
    assert content["versions"]["torch"] and content["commit"] and content["date"]


def test_verify_red_is_exit_code_1(monkeypatch):
    from undertow.instruments import verify as instrument

    honest = instrument.run

    def faulty(*args, **kwargs):
        got = honest(*args, **kwargs)
        got["dk"] = got["dk"] * 1.1
        return got

    monkeypatch.setattr(instrument, "run", faulty)
    done = run("verify", "--device", "cpu", "--only", "full-bhsd")
    assert done.exit_code == 1 and "RED" in done.output


def test_verify_unknown_workload_is_named():
    done = undertow("verify", "--only", "nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr and "mla-packed" in done.stderr
    done = undertow("verify", "nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr and "short-docs-64" in done.stderr


def test_verify_says_what_a_named_kernel_cannot_run():
    done = run("verify", "--device", "cpu", "--kernel", "sdpa_cpu_flash", "--only", "mla")
    assert done.exit_code == 1 and "not run mla: head_dim_qk 192 != head_dim_v 128" in done.output


def test_verify_json_carries_the_geometry():
    done = run("verify", "outlier-rows", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert [r["workload"] for r in content["results"]] == ["outliers"]
    assert "block_m=" in content["results"][0]["geometry"]


def test_verify_proves_our_own_kernel_by_default(monkeypatch):
    from undertow import dispatch
    from undertow.problem import Problem
    from undertow.target import TARGETS

    problem = Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=64, head_dim_v=64, dtype="fp32")
    for target in TARGETS.values():
        assert not dispatch.ours(problem, target).vendor


def test_named_workloads_are_those_of_the_help():
    from undertow.instruments.workloads import named

    sets = named()
    assert sum(sets["mla-varlen-13"][0].problem.seqlens_q) == 32768
    assert {w.runs for w in sets["deterministic"]} == {30}
    assert all(w.problem.deterministic for w in sets["deterministic"])
    assert len(sets["odd-dims"]) == 6 and len(sets["short-docs-64"][0].problem.seqlens_q) == 64
    decode = sets["decode-like"][0].problem
    assert decode.max_seqlen_q * 100 < decode.max_seqlen_k


def test_info_names_versions_and_kernels():
    facts = json.loads(run("info", "--json").output)
    assert facts["versions"]["torch"] and "triton" in facts["kernels"] and facts["target"]["arch"]


def test_bench_on_a_cpu(tmp_path):
    done = run("bench", "--kernels", "torch_tiled", "--rounds", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "record.json").read_text())
    assert content["dispatch"] and all(entry["ms"]["torch_tiled"] > 0 for entry in content["dispatch"])
    assert (tmp_path / "backward.png").stat().st_size > 1000


def test_simulate_small():
    done = undertow("simulate", "--kernel", "triton", "--target", "gfx942", "--qk", "64", "--v", "64",
                    "--seqlens-q", "20,7", "--heads", "2", "--kv-heads", "1", "--json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] and all(p["ok"] for p in answer["parity"])
