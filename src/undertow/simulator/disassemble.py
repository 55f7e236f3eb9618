"""Code objects to assembly text: by the decoder of the tinygrad wheel, or by llvm-objdump 19 or later."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable

from . import asm, elf
from .asm import Module
from .matrix import REGISTERS_PER_ELEMENT, SHAPES

NEEDED = (
    "a code object needs a disassembler: install the extra `pip install 'undertow[simulator]'` (the decoder of the"
    " tinygrad wheel) or have llvm-objdump 19 or later on PATH (20 for gfx950)"
)
SPECIAL = {102: "flat_scratch", 104: "xnack_mask", 106: "vcc", 126: "exec"}
SINGLE = {
    103: "flat_scratch_hi",
    105: "xnack_mask_hi",
    107: "vcc_hi",
    124: "m0",
    127: "exec_hi",
    251: "src_vccz",
    252: "src_execz",
    253: "src_scc",
}
FLOATS = {
    240: "0.5",
    241: "-0.5",
    242: "1.0",
    243: "-1.0",
    244: "2.0",
    245: "-2.0",
    246: "4.0",
    247: "-4.0",
    248: "0.15915494",
}
LITERAL = 255
SDWA_NAMES = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
UNUSED_NAMES = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
RENAMED = {
    "v_readfirstlane_b32_e32": "v_readfirstlane_b32",
    "v_accvgpr_mov_b32_e32": "v_accvgpr_mov_b32",
    "v_accvgpr_write": "v_accvgpr_write_b32",
    "v_accvgpr_read": "v_accvgpr_read_b32",
}
RENAMED |= {
    f"v_mad_mix{part}": f"v_fma_mix{part}" for part in ("_f32", "lo_f16", "hi_f16")
}  # gfx9's names of the encodings
NO_OPERANDS = ("s_barrier", "s_endpgm", "s_dcache_wb", "s_dcache_inv", "s_icache_inv")


def load(data: bytes) -> Module:
    """A parsed module of an ELF code object. Raises RuntimeError naming both tools when neither is there."""
    parts = elf.read(data)
    try:
        from tinygrad.renderer.amd import decode_inst
    except ImportError:
        text = _objdump(data, parts.target)
    else:
        text = decode(parts, decode_inst)
    module = asm.parse(text)
    for kernel in parts.kernels.values():
        kernel.entry = module.labels.get(kernel.name)
    module.kernels, module.target = parts.kernels, parts.target
    return module


def _objdump(data: bytes, target: str) -> str:
    tools = [f"llvm-objdump-{n}" for n in range(30, 18, -1)] + ["llvm-objdump"]
    for tool in tools:
        path = shutil.which(tool)
        if path is None or (tool == "llvm-objdump" and _version(path) < 19):
            continue
        with tempfile.NamedTemporaryFile(suffix=".co") as file:
            file.write(data)
            file.flush()
            done = subprocess.run(
                [path, "-d", f"--mcpu={target}", file.name], capture_output=True, text=True, timeout=120, check=False
            )
        if done.returncode == 0 and "<unknown>" not in done.stdout:
            return done.stdout
    raise RuntimeError(NEEDED)


def _version(path: str) -> int:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    found = re.search(r"LLVM version (\d+)", done.stdout)
    return int(found.group(1)) if found else 0


def decode(parts: elf.CodeObject, decode_inst: Callable) -> str:
    """`.text` as LLVM assembly text, with a label at every function and branch target."""
    lines: dict[int, str] = {}
    at = 0
    while at < len(parts.code):
        try:
            x = decode_inst(parts.code[at : at + 20], "cdna")
            lines[at] = Decoded(x, at).text()
        except (ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise asm.AsmError(f"code object: byte {at:#x} of .text does not decode: {error}") from None
        at += x.size()
    labels = {address - parts.address: name for name, address in parts.symbols.items()}
    targets = {int(t, 16) for line in lines.values() for t in re.findall(r"\bL_([0-9a-f]+)$", line)}
    out = []
    for at, line in lines.items():
        if at in labels:
            out.append(f"{labels[at]}:")
        if at in targets:
            out.append(f"L_{at:x}:")
        out.append(f"\t{line}")
    return "\n".join(out)


class Decoded:
    """One decoded instruction, to be written in LLVM's syntax."""

    def __init__(self, x: object, at: int) -> None:
        self.x, self.at = x, at
        parts = type(x).__name__.split("_")
        self.family, self.forms = parts[0], parts[1:]
        name = x.op_name.lower()
        self.sdwa, self.dpp = "SDWA" in self.forms, "DPP16" in self.forms
        if self.sdwa or self.dpp:
            name = re.sub(r"_e(32|64)$", "", name) + ("_sdwa" if self.sdwa else "_dpp")
        self.name = RENAMED.get(name, name)
        self.sizes = {k: v[1] for k, v in x.operands.items()}

    def get(self, field: str, default: int = 0) -> int:
        """A plain field of the encoding."""
        return getattr(self.x, field, default)

    def text(self) -> str:
        """The instruction."""
        writer = {
            "SOP1": self._scalar,
            "SOP2": self._scalar,
            "SOPC": self._scalar,
            "SOPK": self._sopk,
            "SOPP": self._sopp,
            "SMEM": self._smem,
            "VOP1": self._vop,
            "VOP2": self._vop,
            "VOPC": self._vop,
            "VOP3": self._vop3,
            "VOP3SD": self._vop3,
            "VOP3P": self._vop3p,
            "DS": self._ds,
            "GLOBAL": self._flat,
            "FLAT": self._flat,
            "SCRATCH": self._scratch,
            "MUBUF": self._mubuf,
        }.get(self.family)
        if writer is None:
            raise ValueError(f"encoding {self.family} of {self.name}")
        operands, modifiers = writer()
        return f"{self.name} {', '.join(operands)} {' '.join(modifiers)}".strip()

    # ------------------------------------------------------------------ operands
    def register(self, field: str, bits: int | None = None, accumulator: bool = False) -> str:
        """A register or constant field in text."""
        value = getattr(self.x, field)
        return _encoded(self, field, value, bits, accumulator) if hasattr(value, "offset") else str(value)

    def _signed(self, text: str, negate: int, absolute: int) -> str:
        text = f"|{text}|" if absolute else text
        return f"-{text}" if negate and not text.startswith("-") else f"neg({text})" if negate else text

    # ------------------------------------------------------------------ scalar
    def _scalar(self) -> tuple[list[str], list[str]]:
        return [self.register(f) for f in ("sdst", "ssrc0", "ssrc1") if f in self.sizes], []

    def _sopk(self) -> tuple[list[str], list[str]]:
        value = self.get("simm16")
        if self.name.startswith(("s_setreg", "s_getreg")):
            name = "HW_REG_MODE" if value & 63 == 1 else f"HW_REG_{value & 63}"
            place = f"hwreg({name}, {value >> 6 & 31}, {(value >> 11) + 1})"
            if self.name == "s_setreg_imm32_b32":
                return [place, f"{self.get('literal'):#x}"], []
            return (
                [place, self.register("sdst")] if self.name.startswith("s_set") else [self.register("sdst"), place]
            ), []
        return [self.register("sdst"), f"{value & 0xFFFF:#x}"], []

    def _sopp(self) -> tuple[list[str], list[str]]:
        value = self.get("simm16") & 0xFFFF
        if self.name.startswith(("s_branch", "s_cbranch")):
            return [f"L_{self.at + 4 + 4 * (value - 0x10000 if value & 0x8000 else value):x}"], []
        return ([] if self.name in NO_OPERANDS else [f"{value:#x}"]), []

    def _smem(self) -> tuple[list[str], list[str]]:
        if self.name in NO_OPERANDS:
            return [], []
        if self.name.startswith(("s_memtime", "s_memrealtime")):
            return [self.register("sdata", 64)], []
        base = self.register("sbase", 128 if "buffer" in self.name else 64)
        offset = self.get("offset")
        offset -= 1 << 21 if offset & 1 << 20 else 0
        if self.get("soffset_en"):
            return [self.register("sdata"), base, self.register("soffset")], [f"offset:{offset:#x}"] if self.get(
                "imm"
            ) else []
        return [self.register("sdata"), base, f"{offset:#x}" if self.get("imm") else self.register("soffset")], []

    # ------------------------------------------------------------------ vector
    def _vop(self) -> tuple[list[str], list[str]]:
        first = "vsrc0" if self.sdwa or self.dpp else "src0"
        if self.name.startswith("v_accvgpr_mov"):
            return [self.register(field, 32, accumulator=True) for field in ("vdst", "src0")], []
        head = [self.register("vdst")] if "vdst" in self.sizes else []
        if self.family == "VOPC":
            head = [self.register("sdst", 64) if hasattr(self.x, "sdst") and self.get("sd") else "vcc"]
        if re.match(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32", self.name):
            head.append("vcc")
        sources = [self.register(first, self.sizes.get("src0", 32))]
        if "vsrc1" in self.sizes:
            sources.append(self.register("vsrc1"))
        if self.sdwa or self.dpp:
            for n in range(len(sources)):
                sources[n] = self._signed(sources[n], self.get(f"src{n}_neg"), self.get(f"src{n}_abs"))
                sources[n] = f"sext({sources[n]})" if self.get(f"src{n}_sext") else sources[n]
        if re.match(r"v_(fma|mad)(ak|mk)_f", self.name):
            sources.insert(2 if "ak" in self.name else 1, f"{self.get('literal') & 0xFFFFFFFF:#x}")
        if re.match(r"v_(cndmask|addc|subb|subbrev)", self.name):
            sources.append("vcc")
        return head + sources, self._sdwa_text(len(sources)) if self.sdwa else self._dpp_text() if self.dpp else []

    def _sdwa_text(self, count: int) -> list[str]:
        out = []
        if self.family != "VOPC":
            out += [f"dst_sel:{SDWA_NAMES[self.get('dst_sel')]}", f"dst_unused:{UNUSED_NAMES[self.get('dst_unused')]}"]
        out.append(f"src0_sel:{SDWA_NAMES[self.get('src0_sel')]}")
        if "vsrc1" in self.sizes:
            out.append(f"src1_sel:{SDWA_NAMES[self.get('src1_sel')]}")
        return out + (["clamp"] if self.get("clmp") else [])

    def _dpp_text(self) -> list[str]:
        code = self.get("dpp")
        names = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror", 0x15: "row_newbcast"}
        single = {
            0x130: "wave_shl:1",
            0x134: "wave_rol:1",
            0x138: "wave_shr:1",
            0x13C: "wave_ror:1",
            0x140: "row_mirror",
            0x141: "row_half_mirror",
            0x142: "row_bcast:15",
            0x143: "row_bcast:31",
        }
        if code < 0x100:
            pattern = f"quad_perm:[{','.join(str(code >> 2 * n & 3) for n in range(4))}]"
        elif code in single:
            pattern = single[code]
        else:
            pattern = f"{names[code >> 4]}:{code & 15}"
        tail = [f"row_mask:{self.get('row_mask'):#x}", f"bank_mask:{self.get('bank_mask'):#x}"]
        return [pattern, *tail, *(["bound_ctrl:0"] if self.get("bc") else [])]

    def _vop3(self) -> tuple[list[str], list[str]]:
        fields = [f for f in ("vdst", "sdst", "src0", "src1", "src2") if f in self.sizes]
        bitop = self.name.startswith("v_bitop3")
        neg, absolute = (0, 0) if bitop else (self.get("neg"), self.get("abs"))
        out = []
        for field in fields:
            text = self.register(field)
            if field.startswith("src"):
                bit = int(field[3])
                text = self._signed(text, neg >> bit & 1, absolute >> bit & 1)
            out.append(text)
        if bitop:
            return out, [f"bitop3:{self.get('omod') << 6 | self.get('abs') << 3 | self.get('neg'):#x}"]
        modifiers = []
        if self.get("opsel"):
            places = len([f for f in fields if f.startswith("src")])
            bits = [self.get("opsel") >> n & 1 for n in range(places)] + [self.get("opsel") >> 3 & 1]
            modifiers.append(f"op_sel:[{','.join(map(str, bits))}]")
        modifiers += ["clamp"] if self.get("clmp") else []
        modifiers += {0: [], 1: ["mul:2"], 2: ["mul:4"], 3: ["div:2"]}[self.get("omod")]
        return out, modifiers

    def _vop3p(self) -> tuple[list[str], list[str]]:
        if self.name.startswith("v_mfma"):
            return self._mfma()
        sources = [f for f in ("src0", "src1", "src2") if f in self.sizes]
        if self.name.startswith("v_accvgpr"):
            reads = "read" in self.name
            return [self.register("vdst", 32, not reads), self.register("src0", 32, reads)], []
        low, high = self.get("opsel"), self.get("opsel_hi") | self.get("opsel_hi2") << 2
        neg, neg_hi = self.get("neg"), self.get("neg_hi")
        mixed = "_mix" in self.name
        texts = [self.register(f) for f in sources]
        if mixed:
            texts = [self._signed(t, neg >> n & 1, neg_hi >> n & 1) for n, t in enumerate(texts)]
        show = lambda name, bits: f"{name}:[{','.join(str(bits >> n & 1) for n in range(len(sources)))}]"
        plain = (1 << len(sources)) - 1
        modifiers = [show("op_sel", low)] if low & plain else []
        modifiers += [show("op_sel_hi", high)] if (high & plain) != (0 if mixed else plain) else []
        if not mixed:
            modifiers += [show(n, v) for n, v in (("neg_lo", neg), ("neg_hi", neg_hi)) if v]
        return [self.register("vdst"), *texts], modifiers + (["clamp"] if self.get("clmp") else [])

    def _mfma(self) -> tuple[list[str], list[str]]:
        raw = int.from_bytes(self.x.to_bytes()[:8], "little")  # the wheel has no fields for some shapes
        acc, result = raw >> 59 & 3, bool(raw >> 15 & 1)
        extra = {"cbsz": raw >> 8 & 7, "abid": raw >> 11 & 15, "blgp": raw >> 61 & 7}
        if self.name not in SHAPES:
            raise ValueError(f"shape of {self.name}")
        rows, depth, kind = SHAPES[self.name]
        wide, narrow = rows * rows // 2, int(depth * rows // 64 * REGISTERS_PER_ELEMENT[kind]) * 32
        operands = [
            self.register("vdst", wide, result),
            self.register("src0", narrow, bool(acc & 1)),
            self.register("src1", narrow, bool(acc >> 1 & 1)),
            self.register("src2", wide, result),
        ]
        return operands, [f"{n}:{v}" for n, v in extra.items() if v]

    # ------------------------------------------------------------------ memory
    def _ds(self) -> tuple[list[str], list[str]]:
        acc = bool(self.get("acc"))
        out = [
            self.register(f, None, acc and f != "addr") for f in ("vdst", "addr", "data0", "data1") if f in self.sizes
        ]
        if re.match(r"ds_(read|write)2", self.name):
            return out, [f"{n}:{self.get(n)}" for n in ("offset0", "offset1") if self.get(n)]
        offset = self.get("offset0") | self.get("offset1") << 8
        text = f"offset:{offset:#x}" if "swizzle" in self.name else f"offset:{offset}"
        return out, ([text] if offset else []) + (["gds"] if self.get("gds") else [])

    def _cache(self) -> list[str]:
        return [n for n in ("sc0", "nt", "sc1") if self.get(n)]

    def _immediate(self, bits: int) -> list[str]:
        value = self.get("offset")
        value = value - (1 << bits) if bits and value >> (bits - 1) & 1 else value
        return [f"offset:{value}"] if value else []

    def _flat(self) -> tuple[list[str], list[str]]:
        acc = bool(self.get("acc"))
        off = getattr(self.x, "saddr", None) is None or self.x.saddr.offset == 127
        address = self.register("addr", 64 if off else 32)
        saddr = [] if self.family == "FLAT" else ["off"] if off else [self.register("saddr", 64)]
        if "_lds_" in self.name:
            return [address, *saddr], self._immediate(13) + self._cache()
        data = [self.register("data", None, acc)] if "data" in self.sizes else []
        returns = "_load_" in self.name or ("_atomic_" in self.name and self.get("sc0"))
        out = [self.register("vdst", None, acc)] if returns else []
        return [*out, address, *data, *saddr], self._immediate(13 if self.family != "FLAT" else 0) + self._cache()

    def _scratch(self) -> tuple[list[str], list[str]]:
        acc = bool(self.get("acc"))
        address = self.register("addr", 32) if self.get("sve") else "off"
        saddr = "off" if self.x.saddr.offset == 127 else self.register("saddr", 32)
        if "_load_" in self.name:
            return [self.register("vdst", None, acc), address, saddr], self._immediate(13) + self._cache()
        return [address, self.register("data", None, acc), saddr], self._immediate(13) + self._cache()

    def _mubuf(self) -> tuple[list[str], list[str]]:
        if self.name.startswith(("buffer_wbl2", "buffer_inv")):
            return [], self._cache()
        words = self.get("offen") + self.get("idxen")
        address = self.register("vaddr", 32 * words) if words else "off"
        place = [address, self.register("srsrc", 128), self.register("soffset", 32)]
        flags = [n for n in ("offen", "idxen") if self.get(n)] + self._immediate(0)
        if self.get("lds"):
            return place, [*flags, *self._cache(), "lds"]
        return [self.register("vdata", None, bool(self.get("acc"))), *place], flags + self._cache()


def _encoded(x: Decoded, field: str, value: object, bits: int | None, accumulator: bool) -> str:
    """A register or constant by its 9-bit source code."""
    number = value.offset
    words = max(1, (bits if bits is not None else x.sizes.get(field, 32)) // 32)
    if 256 <= number < 512:
        kind = "s" if field == "vdst" and x.name.startswith(("v_readlane", "v_readfirstlane")) else "v"
        return _span("a" if accumulator else kind, number - 256, words)
    if number == LITERAL:
        return f"{x.get('literal') & 0xFFFFFFFF:#x}"
    if 128 <= number <= 208:
        return str(number - 128 if number <= 192 else 192 - number)
    if number in SPECIAL:
        return SPECIAL[number] if words == 2 else SPECIAL[number] + "_lo"
    return FLOATS.get(number) or SINGLE.get(number) or _span("s", number, words)


def _span(kind: str, first: int, count: int) -> str:
    return f"{kind}{first}" if count == 1 else f"{kind}[{first}:{first + count - 1}]"
