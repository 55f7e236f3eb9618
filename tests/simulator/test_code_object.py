"""Code objects: the ELF reader, the decoder against LLVM's own text of the same kernels, and a run from the file."""

import random
import re
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from bench import Bench
from kernels import add_kernel, layernorm_kernel, matmul_kernel, softmax_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from undertow import simulator as simulate
from undertow.simulator import Options, asm, disassemble, elf

needs_decoder = pytest.mark.skipif(not pytest.importorskip("tinygrad"), reason="needs the simulator extra (tinygrad)")


def compiled(kernel, signature, constants, target):
    source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton_compile(source, target=GPUTarget("hip", target, 64)).asm


def examples(target):
    matmul = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "m_size": "i32", "n_size": "i32", "k_size": "i32"}
    yield compiled(matmul_kernel, matmul, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, target)
    fp32 = matmul | {"a": "*fp32", "b": "*fp32"}
    yield compiled(matmul_kernel, fp32, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, target)
    yield compiled(softmax_kernel, {"x": "*bf16", "out": "*bf16", "n": "i32"}, {"BLOCK": 1024}, target)
    norm = {"x": "*fp16", "weight": "*fp32", "bias": "*fp32", "out": "*fp16", "n": "i32", "eps": "fp32"}
    yield compiled(layernorm_kernel, norm, {"BLOCK": 1024}, target)


def meaning(x):
    """What an instruction says, whatever way its numbers are written."""
    operands = [
        (o.kind, o.index, o.count, o.negate, o.absolute, o.sign_extend)
        if o.is_register
        else (o.kind, int(o.value) & 0xFFFFFFFF if o.kind == "int" else o.kind)
        for o in x.operands
    ]
    modifiers = {
        k: "0"
        if k == "bound_ctrl"
        else str(int(str(v), 0))
        if str(v).lstrip("-").isalnum() and str(v)[0].isdigit()
        else v
        for k, v in x.modifiers.items()
    }
    if x.opcode == "s_waitcnt":
        modifiers = {
            k: v for k, v in modifiers.items() if (k, v) not in (("vmcnt", "63"), ("expcnt", "7"), ("lgkmcnt", "15"))
        }
    return x.opcode, operands, modifiers


@needs_decoder
@pytest.mark.parametrize("target", ("gfx942", "gfx950"))
def test_decoded_instructions_equal_llvms_text(target):
    for parts in examples(target):
        text, binary = asm.parse(parts["amdgcn"]), disassemble.load(parts["hsaco"])
        kernel, other = text.kernel(), binary.kernel()
        assert other.arguments == kernel.arguments and binary.target == target
        assert {k: kernel.directives.get(k, 0) for k in other.directives} == other.directives
        skip = ("s_nop", "s_code_end")
        left, right = ([x for x in m.instructions if x.opcode not in skip] for m in (text, binary))
        assert len(right) >= len(left) > 100
        for x, y in zip(left, right, strict=False):
            assert meaning(x) == meaning(y), (x.text, y.text)
            if x.target is not None:
                # the same place, counted without padding
                place = lambda m, i, skip=skip: sum(z.opcode not in skip for z in m.instructions[:i])
                assert place(text, x.target) == place(binary, y.target)


@needs_decoder
def test_run_from_a_file(tmp_path):
    parts = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")
    path = tmp_path / "add.hsaco"
    path.write_bytes(parts["hsaco"])
    x, y, out = np.arange(500, dtype=np.float32), np.ones(500, np.float32), np.zeros(500, np.float32)
    report = simulate.code_object(path, "add_kernel", 2, 256, [x, y, out, 500, None, None])
    assert report.ok and (out == x + 1).all()


def test_run_from_text_by_name_and_by_order():
    text = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx950")[
        "amdgcn"
    ]
    x, y = torch.randn(300), torch.randn(300)
    for args in (
        (x, y, torch.zeros(300), 300, None, None),
        {"x": x, "y": y, "out": torch.zeros(300), "n": np.int32(300), "s0": None, "s1": None},
    ):
        report = simulate.isa(text, None, (2, 1, 1), (256,), args)
        assert report.ok and report.target == "gfx950"
        out = args["out"] if isinstance(args, dict) else args[2]
        assert torch.equal(out, x + y)


@pytest.mark.parametrize(
    "args, message",
    (
        ((1, 2), "2 values for the 6 arguments"),
        ((1.5, None, None, 1, None, None), "a CPU tensor or array is wanted"),
        ((None, None, None, 1 << 40, None, None), "does not fit 4 bytes"),
        ((None, None, None, "n", None, None), "a number or bytes of 4 bytes"),
        ((torch.zeros(4, device="meta"), None, None, 1, None, None), "a tensor on meta"),
        ((None, None, None, torch.zeros(1), None, None), "a tensor for a 4-byte"),
    ),
)
def test_bad_arguments(args, message):
    text = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")[
        "amdgcn"
    ]
    with pytest.raises(ValueError, match=message):
        simulate.isa(text, None, 1, 256, args)


def test_bad_launches():
    text = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")[
        "amdgcn"
    ]
    empty = (None, None, None, 0, None, None)
    for arguments, message in (
        ((text, "other", 1, 256, empty), "the text holds"),
        ((text, None, (1, -1), 256, empty), "grid="),
        ((text, None, 1, 4096, empty), "1 to 1024"),
        ((text, None, 1 << 21, 256, empty), "the limit is"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate.isa(*arguments)
    with pytest.raises(ValueError, match="not a tensor argument"):
        simulate.isa(text, None, 1, 256, empty, options=Options(outputs=("nothing",)))
    with pytest.raises(ValueError, match="read-only"):
        frozen = np.zeros(256, np.float32)
        frozen.flags.writeable = False
        simulate.isa(text, None, 1, 256, (np.ones(256, np.float32), np.ones(256, np.float32), frozen, 256, None, None))
    assert simulate.isa(text, None, 0, 256, empty).wave_instructions == 0


@pytest.mark.parametrize("damage", ("not an ELF", "truncated", "noise"))
def test_hostile_files_end_in_an_error(damage):
    good = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")[
        "hsaco"
    ]
    rng = np.random.default_rng(0)
    if damage == "not an ELF":
        with pytest.raises(ValueError, match="not an ELF"):
            elf.read(b"MZ" + good[2:])
        return
    for _ in range(60):
        if damage == "truncated":
            data = good[: rng.integers(64, len(good) // 2)]
        else:
            data = np.frombuffer(good, np.uint8).copy()
            data[rng.integers(0, len(data), 40)] = rng.integers(0, 256, 40)
            data = data.tobytes()
        try:
            elf.read(data)
        except (ValueError, NotImplementedError):
            continue
        assert damage == "noise"


def test_a_runaway_program_is_stopped():
    text = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")[
        "amdgcn"
    ]
    endless = text.replace("s_endpgm", "s_branch .LBB0_0")
    with pytest.raises(simulate.SimulationError, match=r"line \d+: .*max_steps=3000"):
        simulate.isa(endless, None, 1, 256, (None, None, None, 0, None, None), options=Options(max_steps=3000))
    with pytest.raises(simulate.SimulationError, match="left the code"):
        simulate.isa(text.replace("s_endpgm", "s_nop 0"), None, 1, 256, (None, None, None, 0, None, None))
    with pytest.raises(ValueError, match="the limit is"):
        simulate.isa(
            text,
            None,
            1,
            256,
            (np.zeros(1 << 20, np.float32), None, None, 0, None, None),
            options=Options(max_bytes=1 << 20),
        )


@pytest.mark.parametrize(
    "line",
    (
        "v_add_f32 v300, v0, v1",
        "v_add_f32 v0, #, v1",
        "s_branch .Lnowhere",
        "s_waitcnt nonsense(1)",
        "v_mov_b32 v[3:2], v0",
        "v_mov_b32 v0, v1 frob:1",
    ),
)
def test_text_that_is_not_understood_names_its_line(line):
    with pytest.raises(asm.AsmError, match="line 2: "):
        asm.parse(f"s_nop 0\n{line}\n")


OBJDUMP = """
add.hsaco:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001900 <k>:
	s_mov_b32 s0, 3                                            // 000000001900: BE800083
	s_nop 0                                                    // 000000001904: BF800000
	s_sub_i32 s0, s0, 1                                        // 000000001908: 81808100
	s_cmp_lg_u32 s0, 0                                         // 00000000190C: BF078000
	s_cbranch_scc1 65532                                       // 000000001910: BF85FFFC <k+0x4>
	s_cbranch_scc0 1                                           // 000000001914: BF840001 <k+0x1c>
	v_frobnicate_b32 v0, v1                                    // 000000001918: 00000000
	s_endpgm                                                   // 00000000191C: BF810000
"""


def test_objdump_text_has_branches_by_distance():
    module = asm.parse(OBJDUMP)
    assert module.labels["k"] == 0 and [x.target for x in module.instructions if x.target is not None] == [1, 7]
    state = Bench().run(OBJDUMP)
    assert int(state.s[0, 0]) == 0


def test_without_any_disassembler_both_are_named(monkeypatch):
    good = compiled(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx942")
    monkeypatch.setitem(sys.modules, "tinygrad.renderer.amd", None)
    monkeypatch.setattr(disassemble.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"(?s)undertow\[simulator\].*llvm-objdump 19"):
        disassemble.load(good["hsaco"])


def test_damaged_text_ends_in_a_result_or_a_clean_error():
    """Random edits of a kernel: whatever they make of it, nothing but findings and the documented errors comes out."""
    parts = compiled(softmax_kernel, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 512}, "gfx942")
    lines, rng, ends = parts["amdgcn"].splitlines(), random.Random(0), Counter()
    code = [n for n, line in enumerate(lines) if re.match(r"\t(s|v|ds|buffer|global)_", line)]
    for _ in range(80):
        damaged = list(lines)
        at, kind = rng.choice(code), rng.randrange(3)
        if kind == 0:
            damaged[at] = lines[rng.choice(code)]
        elif kind == 1:
            damaged[at] = re.sub(
                r"\d+", lambda m: str(rng.choice((int(m.group()) + 1, rng.randint(0, 10**9)))), lines[at]
            )
        else:
            cut = rng.randrange(1, max(2, len(lines[at])))
            damaged[at] = lines[at][:cut] + rng.choice("[]:,-|vs0 #") + lines[at][cut + 1 :]
        x, out = np.ones((2, 300), np.float32), np.zeros((2, 300), np.float32)
        arguments = ("\n".join(damaged), None, 2, 256, (x, out, 300, None, None))
        try:
            ends[simulate.isa(*arguments, dynamic_lds=256, options=Options(max_steps=5000)).ok] += 1
        except (ValueError, NotImplementedError, simulate.SimulationError) as error:
            ends[type(error).__name__] += 1
    assert ends[True] > 5 and ends[False] > 1 and ends["AsmError"] + ends["UnsupportedError"] > 5, ends
