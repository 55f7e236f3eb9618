"""The probe: loops and counts of known code, golden register tables, and compilers that fail in their own process.

`python tests/test_probe.py` rewrites golden_probe.json; the reason for every change belongs in the commit.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from undertow.instruments import probe as module
from undertow.instruments.probe import probe, probe_file, probe_flydsl, probe_function, probe_sass, probe_text, table
from undertow.problem import Band, Problem
from undertow.simulator import AsmError
from undertow.simulator.static import natural_loops

GOLDEN = Path(__file__).with_name("golden_probe.json")
PROBLEMS = {
    "64/64": {"head_dim_qk": 64, "head_dim_v": 64},
    "128/128": {"head_dim_qk": 128, "head_dim_v": 128},
    "192/128": {"head_dim_qk": 192, "head_dim_v": 128},
}
CASES = [(name, arch) for name in PROBLEMS for arch in ("gfx942", "gfx950", "sm_90")]
QUICK = [("64/64", "gfx942"), ("64/64", "sm_90")]


def problem(name):
    return Problem.dense(1, 1024, 1024, nheads_q=2, nheads_kv=2, band=Band(None, 0), **PROBLEMS[name])


def rows(name, arch):
    return {r.stage: r.row() for r in probe(problem(name), arch)}


# ---------------------------------------------------------------- loops
@pytest.mark.parametrize(
    "edges, want",
    (
        ([[1], [2], [1, 3], []], [(1, {1, 2})]),
        ([[1], [2], [2, 3], [1, 4], []], [(1, {1, 2, 3}), (2, {2})]),  # nested
        ([[1, 2], [3], [3], [0, 4], []], [(0, {0, 1, 2, 3})]),  # a branch inside
        ([[1], [2, 3], [1], [1, 4], []], [(1, {1, 2, 3})]),  # two latches, one loop
        ([[1, 2], [2], [1]], []),  # two entries: not a natural loop
        ([[1], []], []),
    ),
)
def test_natural_loops(edges, want):
    assert natural_loops(edges) == want


AMD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
k:
	s_mov_b32 s0, 4
	scratch_store_dword off, v0, off
.Louter:
	s_mov_b32 s1, 4
.Linner:
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_accvgpr_read_b32 v8, a0
	s_cbranch_vccz .Lskip
	scratch_load_dword v9, off, off
.Lskip:
	s_barrier
	s_sub_i32 s1, s1, 1
	s_cmp_lg_u32 s1, 0
	s_cbranch_scc1 .Linner
	s_sub_i32 s0, s0, 1
	s_cbranch_scc1 .Louter
.Lcas:
	global_atomic_cmpswap v0, v[2:3], v[4:5], off sc0
	s_cbranch_execnz .Lcas
	s_endpgm
	.amdhsa_kernel k
		.amdhsa_group_segment_fixed_size 1024
		.amdhsa_private_segment_fixed_size 16
		.amdhsa_user_sgpr_count 2
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .name:           k
    .sgpr_count:     10
    .vgpr_count:     20
    .vgpr_spill_count: 1
...
	.end_amdgpu_metadata
"""


def test_amd_text_by_loop(tmp_path):
    report = probe_text(AMD, dynamic_lds=512)
    assert [(loop.innermost, loop.compare_and_swap) for loop in report.loops] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    row = report.row()
    want = {
        "vgpr": 16,
        "agpr": 4,
        "sgpr": 10,
        "lds_bytes": 1536,
        "scratch_bytes": 16,
        "spills": 1,
        "loops": 2,
        "mfma": 2,
    }
    want |= {"accvgpr_in_loops": 1, "spill_in_loops": 1, "barriers_in_hot_loop": 1, "cas_loops": 1}
    assert {k: row[k] for k in want} == want
    assert report.counts["spill"] == 2, "the store outside the loop counts in the whole, not in the loop"
    (tmp_path / "k.s").write_text(AMD)
    assert probe_file(tmp_path / "k.s").row() == row | {"lds_bytes": 1024}
    assert table([report]).row_count == 1 and json.loads(report.to_json())["row"] == row


def test_amd_text_that_is_broken():
    with pytest.raises(AsmError, match="line 4"):
        probe_text(AMD.replace("s_mov_b32 s0, 4", "s_mov_b32 s0, #"))
    with pytest.raises(ValueError, match="kernel='other'"):
        probe_text(AMD, "other")


SASS = """
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R4 ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R28, gdesc[UR16], R28 ;
        /*0030*/                   LDL R19, [R1+0x4] ;
        /*0040*/               @P4 BRA `(.L_x_2) ;
        /*0050*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR36][R16.64], R32 ;
.L_x_2:
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_sass_by_loop():
    usage = " Function k:\n  REG:168 STACK:16 SHARED:1024 LOCAL:0"
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x\n"
        "    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads"
    )
    report = probe_sass(SASS, usage, log, stage="main", kernel="k", target="sm_90", shared=2048)
    (loop,) = report.loops
    want = {"hgmma": 1, "spill": 1, "atomic": 1, "barrier": 1, "other": 2}
    assert loop.innermost and {k: v for k, v in loop.counts.items() if v} == want
    assert (report.vgpr, report.scratch_bytes, report.vgpr_spills, report.lds_bytes) == (168, 16, 12, 2048)
    assert len(report.warnings) == 1 and "serialized" in report.warnings[0]


def test_a_spin_on_a_barrier_is_no_loop_of_its_own():
    spin = """.L_x_9:
        /*0024*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR16], R24 ;
        /*0028*/              @!P4 BRA `(.L_x_9) ;
"""
    at = SASS.index("        /*0040*/")
    report = probe_sass(SASS[:at] + spin + SASS[at:], "", "", stage="", kernel="k", target="sm_90", shared=0)
    (loop,) = report.loops
    assert loop.innermost and loop.counts["hgmma"] == 1 and loop.counts["barrier"] == 2


def test_a_copy_loop_inside_does_not_hide_the_loop_of_the_products():
    inner = """        /*0024*/                   WARPGROUP.ARRIVE ;
.L_x_9:
        /*0028*/                   LDS R5, [R6] ;
        /*002a*/                   STS [R7], R5 ;
        /*002c*/              @!P4 BRA `(.L_x_9) ;
        /*002e*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
"""
    at = SASS.index("        /*0040*/")
    log = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 8 by compiler"
    report = probe_sass(SASS[:at] + inner + SASS[at:], "", log, stage="", kernel="k", target="sm_90", shared=0)
    assert [loop.innermost for loop in report.loops] == [True, True]
    assert report.hot.counts["hgmma"] == 1 and report.hot.counts["shared"] == 2
    assert report.hot.counts["wgmma_wait"] == 1 and len(report.warnings) == 1


# ---------------------------------------------------------------- compilers
def check(name, arch):
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != version("triton"):
        pytest.skip(f"the golden table holds for triton {golden['triton']}")
    assert rows(name, arch) == golden["rows"][f"{name} {arch}"], "kernels changed? python tests/test_probe.py"


@pytest.mark.parametrize("name, arch", QUICK)
def test_golden_rows(name, arch):
    check(name, arch)


@pytest.mark.slow
@pytest.mark.parametrize("name, arch", [case for case in CASES if case not in QUICK])
def test_every_golden_row(name, arch):
    check(name, arch)


def test_flydsl_192_128_is_the_published_loop():
    """104 MFMA a wave and q tile, two barriers, nothing spilled inside the loop, 256 registers at 512 threads."""
    pytest.importorskip("flydsl")
    reports = {r.stage: r for r in probe_flydsl(problem("192/128"), "gfx942")}
    row = reports["main"].row()
    want = {
        "mfma": 104,
        "barriers_in_hot_loop": 2,
        "accvgpr_in_loops": 0,
        "spill_in_loops": 0,
        "vgpr": 256,
        "agpr": 0,
        "cas_loops": 0,
    }
    assert {k: row[k] for k in want} == want and set(reports) == {"preprocess", "main", "convert"}
    with pytest.raises(NotImplementedError, match="head_dim_qk=40"):
        probe_flydsl(Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=40, head_dim_v=40), "gfx942")


FOREIGN = """
import triton, triton.language as tl

@triton.jit
def scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)
"""


def test_someone_elses_function(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    wide, narrow = (
        probe_function("theirs:scale_kernel", types, "gfx942", {"BLOCK": 1024, "num_warps": 4})[0]
        for types in ("*fp32:16,*fp32:16,i32:16,fp32", "*fp32,*fp32,i32,fp32")
    )
    assert wide.kernel == "scale_kernel" and wide.versions == {"triton": version("triton")}
    assert wide.counts["vmem"] < narrow.counts["vmem"], "divisible by 16 means wide loads"
    with pytest.raises(RuntimeError, match="2 types for the parameters x, out, n, factor"):
        probe_function("theirs:scale_kernel", "*fp32,*fp32", "gfx942", {"BLOCK": 64})


def test_an_abort_of_the_compiler_is_a_message(monkeypatch):
    class Python:
        def __call__(self, command, **keywords):
            import subprocess

            return subprocess.CompletedProcess(command, -6, "", "LLVM ERROR: Cannot select: intrinsic %llvm.amdgcn.x\n")

    monkeypatch.setattr(module.subprocess, "run", Python())
    with pytest.raises(RuntimeError, match=r"(?s)gfx942 aborted with signal 6.*Cannot select"):
        probe(problem("64/64"), "gfx942")


if __name__ == "__main__":
    table_rows = {f"{name} {arch}": rows(name, arch) for name, arch in CASES}
    GOLDEN.write_text(json.dumps({"triton": version("triton"), "rows": table_rows}, indent=1) + "\n")
