"""Parse AMDGPU assembly text into instructions with typed operands.

Two dialects are read by the same parser: what LLVM writes (`.s` files of Triton, FlyDSL, hipcc) and what
`llvm-objdump -d` prints. Kernel facts come from the `.amdhsa_*` directives, argument layout from `.amdgpu_metadata`.
Nothing is guessed: an operand or a modifier that is not understood raises `AsmError` with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_TEXT_BYTES = 64 << 20
MAX_INSTRUCTIONS = 2_000_000

# Scalar registers that have names. The numbers are those of the machine encoding.
NAMED_SGPRS = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
    "src_scc": (253, 1),
    "scc": (253, 1),
    "src_vccz": (251, 1),
    "src_execz": (252, 1),
}
VCC, M0, EXEC, SCC = 106, 124, 126, 253

VALUED_MODIFIERS = frozenset(
    ["offset", "offset0", "offset1", "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "mul", "div", "bitop3"]
    + ["cbsz", "abid", "blgp", "dst_sel", "dst_unused", "src0_sel", "src1_sel"]
    + ["quad_perm", "row_shl", "row_shr", "row_ror", "row_newbcast", "row_bcast", "row_mask", "bank_mask", "bound_ctrl"]
    + ["wave_shl", "wave_shr", "wave_rol", "wave_ror"]
)
FLAG_MODIFIERS = frozenset(
    ["offen", "idxen", "glc", "slc", "lds", "sc0", "sc1", "nt", "gds", "clamp", "row_mirror", "row_half_mirror", "tfe"]
)
ENCODING_SUFFIXES = ("_e32", "_e64", "_sdwa", "_dpp")

_INSTRUCTION = re.compile(r"(?:s|v|ds|buffer|global|flat|scratch|tbuffer|image|exp)_[a-z0-9_]+(?=\s|$)")
_LABEL = re.compile(r"(?:[0-9a-f]{8,16} )?<?([\w.$@]+)>?:")
_REGISTER = re.compile(r"([vsa]|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_FLOAT = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)$")
_SYMBOL = re.compile(r"[\w.$@]+$|hwreg\(.*\)$|sendmsg\(.*\)$")
_MODIFIER = re.compile(r"([a-z_0-9]+):(.+)$", re.S)
_ADDRESS = re.compile(r"//\s*([0-9A-F]{8,16}):")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_ARGUMENT_KEY = re.compile(r"(?:- )?\.(offset|size|value_kind|name|value_type|type_name|address_space):\s+(\S+)\s*$")


class AsmError(ValueError):
    """Text that this parser does not understand; the message carries the line."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand. `kind` is v, a, s (registers), int, float, off, or symbol (a label or a hwreg expression)."""

    kind: str
    index: int = 0  # first register
    count: int = 1  # how many 32-bit registers
    value: int | float | str = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False

    @property
    def is_register(self) -> bool:
        """True for v, a and s operands."""
        return self.kind in "vas"


@dataclass(slots=True)
class Instruction:
    """One machine instruction of the text, before any meaning is attached to it."""

    index: int
    line: int  # 1-based line of the assembly text
    text: str
    opcode: str  # without the encoding suffix
    encoding: str  # "e32", "e64", "sdwa", "dpp" or ""
    operands: tuple[Operand, ...]
    modifiers: dict[str, str | bool]
    target: int | None = None  # instruction index of a branch target
    source: str | None = None  # "file:line" of the last .loc

    def where(self) -> str:
        """The instruction with its line, for messages."""
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument as the compiler laid it out (bytes)."""

    offset: int
    size: int
    kind: str
    name: str | None = None


@dataclass(slots=True)
class Kernel:
    """What the text says about one kernel: entry, `.amdhsa_*` directives, arguments."""

    name: str
    entry: int | None = None
    directives: dict[str, int] = field(default_factory=dict)
    arguments: tuple[Argument, ...] = ()
    metadata: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Module:
    """A parsed file."""

    instructions: list[Instruction]
    labels: dict[str, int]
    kernels: dict[str, Kernel]
    target: str | None  # "gfx942" when the text names it

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel called `name`; the only one when `name` is None."""
        runnable = {k: v for k, v in self.kernels.items() if v.entry is not None}
        if name is None and len(runnable) == 1:
            return next(iter(runnable.values()))
        if name not in runnable:
            raise ValueError(f"kernel={name!r}: the text holds {sorted(runnable) or 'no kernel'}; name one of them")
        return runnable[name]


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at `separator` (one character, or " " for any blank) outside brackets and quotes."""
    parts, depth, quoted, current = [], 0, False, []
    for ch in text:
        if ch == '"':
            quoted = not quoted
        elif not quoted and ch in "[(":
            depth += 1
        elif not quoted and ch in "])":
            depth -= 1
        if depth == 0 and not quoted and (ch.isspace() if separator == " " else ch == separator):
            parts.append("".join(current))
            current = []
        else:
            current.append(ch)
    parts.append("".join(current))
    return [p.strip() for p in parts if p.strip()]


def parse_operand(text: str) -> Operand:
    """One operand of a VALU, SALU or memory instruction."""
    text, flags = _strip_source_modifiers(text)
    register = _parse_register(text, flags)
    if register is not None:
        return register
    if text == "off":
        return Operand("off")
    if _FLOAT.match(text):
        return Operand("float", value=float(text), **flags)
    if _INTEGER.match(text):
        return Operand("int", value=int(text, 0), **flags)
    if _SYMBOL.match(text):
        return Operand("symbol", value=text)
    raise AsmError(f"operand {text!r} is not understood")


def _strip_source_modifiers(text: str) -> tuple[str, dict[str, bool]]:
    negate = absolute = sign_extend = False
    if text.startswith("sext(") and text.endswith(")"):
        text, sign_extend = text[5:-1], True
    if text.startswith("neg(") and text.endswith(")"):
        text, negate = text[4:-1], True
    elif text.startswith("-") and not _INTEGER.match(text) and not _FLOAT.match(text):
        text, negate = text[1:], True
    if text.startswith("|") and text.endswith("|"):
        text, absolute = text[1:-1], True
    elif text.startswith("abs(") and text.endswith(")"):
        text, absolute = text[4:-1], True
    return text, {"negate": negate, "absolute": absolute, "sign_extend": sign_extend}


def _parse_register(text: str, flags: dict[str, bool]) -> Operand | None:
    if text in NAMED_SGPRS:
        index, count = NAMED_SGPRS[text]
        return Operand("s", index, count, **flags)
    match = _REGISTER.match(text)
    if not match:
        return None
    kind, single, first, last = match.groups()
    index = int(single if single is not None else first)
    count = int(last) - index + 1 if last is not None else 1
    if kind == "ttmp":
        kind, index = "s", index + 108
    if count < 1 or index + count > (128 if kind == "s" else 256):
        raise AsmError(f"register {text!r} is outside the register file")
    return Operand(kind, index, count, **flags)


def _parse_body(opcode: str, rest: str) -> tuple[tuple[Operand, ...], dict[str, str | bool]]:
    if opcode == "s_waitcnt":
        return (), _parse_waitcnt(rest)
    operands, modifiers = [], {}
    for piece in split_top_level(rest, ","):
        for position, word in enumerate(split_top_level(piece, " ")):
            match = _MODIFIER.match(word)
            if word in FLAG_MODIFIERS:
                modifiers[word] = True
            elif match and match.group(1) in VALUED_MODIFIERS:
                modifiers[match.group(1)] = match.group(2)
            elif position == 0:
                operands.append(parse_operand(word))
            else:
                raise AsmError(f"modifier {word!r} is not understood")
    return tuple(operands), modifiers


def _parse_waitcnt(rest: str) -> dict[str, str | bool]:
    """Counters of s_waitcnt, from the symbolic form or from the gfx9 immediate."""
    if _INTEGER.match(rest.strip()):
        imm = int(rest, 0)
        counters = {"vmcnt": (imm & 15) | ((imm >> 10) & 0x30), "expcnt": (imm >> 4) & 7, "lgkmcnt": (imm >> 8) & 15}
        idle = {"vmcnt": 63, "expcnt": 7, "lgkmcnt": 15}
        return {k: str(v) for k, v in counters.items() if v != idle[k]}
    found = dict(re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", rest))
    if re.sub(r"(vmcnt|lgkmcnt|expcnt)\(\d+\)|[&\s]", "", rest):
        raise AsmError(f"s_waitcnt {rest!r} is not understood")
    return found


def _split_opcode(mnemonic: str) -> tuple[str, str]:
    for suffix in ENCODING_SUFFIXES:
        if mnemonic.endswith(suffix):
            return mnemonic[: -len(suffix)], suffix[1:]
    return mnemonic, ""


def parse(text: str) -> Module:
    """Parse assembly text. Raises AsmError with the line for anything that is not understood."""
    if len(text) > MAX_TEXT_BYTES:
        raise AsmError(f"text of {len(text)} bytes; the limit is {MAX_TEXT_BYTES}")
    reader = _Reader()
    for number, raw in enumerate(text.splitlines(), 1):
        reader.line(number, raw)
    return reader.finish(text)


class _Reader:
    """State of one pass over the lines."""

    def __init__(self) -> None:
        self.module = Module([], {}, {}, None)
        self.by_address: dict[int, int] = {}
        self.branches: list[tuple[Instruction, int | None]] = []
        self.files: dict[str, str] = {}
        self.source: str | None = None
        self.current: Kernel | None = None

    def line(self, number: int, raw: str) -> None:
        """Take in one line."""
        line = _strip_comment(raw)
        if not line or (line[0] == "." and self._directive(line)):
            return
        label = _LABEL.match(line)
        if label:
            self.module.labels[label.group(1)] = len(self.module.instructions)
            return
        match = _INSTRUCTION.match(line)
        if match:
            self._instruction(number, line, match.group(0), _ADDRESS.search(raw))

    def _directive(self, line: str) -> bool:
        """Handle a directive; False when the line may be a label such as .LBB0_1."""
        key, *rest = line.split(None, 1)
        value = rest[0].strip() if rest else ""
        if key == ".loc":
            match = _LOC.match(line)
            known = match and match.group(2) != "0"
            self.source = f"{self.files.get(match.group(1), '?')}:{match.group(2)}" if known else None
        elif key == ".file":
            match = _FILE.match(line)
            if match:
                self.files[match.group(1)] = match.group(3)
        elif key == ".amdgcn_target":
            self.module.target = (re.findall(r"gfx[0-9a-f]+", line) or [None])[-1]
        elif key == ".amdhsa_kernel":
            self.current = self.module.kernels.setdefault(value, Kernel(value))
        elif key.startswith(".amdhsa_") and self.current is not None and _INTEGER.match(value):
            self.current.directives[key[8:]] = int(value, 0)
        return not line.endswith(":")

    def _instruction(self, number: int, line: str, mnemonic: str, address: re.Match | None) -> None:
        index = len(self.module.instructions)
        if index >= MAX_INSTRUCTIONS:
            raise AsmError(f"line {number}: more than {MAX_INSTRUCTIONS} instructions")
        opcode, encoding = _split_opcode(mnemonic)
        try:
            operands, modifiers = _parse_body(opcode, line[len(mnemonic) :].strip())
        except ValueError as error:
            raise AsmError(f"line {number}: {line}: {error}") from None
        item = Instruction(index, number, line, opcode, encoding, operands, modifiers, source=self.source)
        place = int(address.group(1), 16) if address else None
        if place is not None:
            self.by_address[place] = index
        if opcode.startswith(("s_cbranch", "s_branch")):
            self.branches.append((item, place))
        self.module.instructions.append(item)

    def finish(self, text: str) -> Module:
        """Resolve branches and read the metadata block."""
        for item, address in self.branches:
            item.target = _branch_target(item, address, self.module.labels, self.by_address)
        for kernel in self.module.kernels.values():
            kernel.entry = self.module.labels.get(kernel.name)
        _read_metadata(text, self.module.kernels)
        return self.module


def _strip_comment(raw: str) -> str:
    for mark in (";", "//"):
        at = raw.find(mark)
        if at >= 0:
            raw = raw[:at]
    return raw.strip()


def _branch_target(item: Instruction, address: int | None, labels: dict[str, int], by_address: dict[int, int]) -> int:
    operand = item.operands[0] if item.operands else Operand("off")
    if operand.kind == "symbol" and operand.value in labels:
        return labels[operand.value]
    if operand.kind == "int" and address is not None:
        simm = int(operand.value) & 0xFFFF
        where = address + 4 + 4 * (simm - 0x10000 if simm & 0x8000 else simm)
        if where in by_address:
            return by_address[where]
    raise AsmError(f"{item.where()}: branch target is not in the text")


def _read_metadata(text: str, kernels: dict[str, Kernel]) -> None:
    """Arguments and counts of every kernel in `.amdgpu_metadata` (the YAML that LLVM writes, one key a line)."""
    block = re.search(r"\.amdgpu_metadata\n(.*?)\.end_amdgpu_metadata", text, re.S)
    for entry in re.split(r"\n {2}- (?=\.)", "\n" + block.group(1)) if block else ():
        name = re.search(r"^ {4}\.name:\s+(\S+)\s*$", entry, re.M)
        if not name or name.group(1).strip("'\"") not in kernels:
            continue
        kernel = kernels[name.group(1).strip("'\"")]
        pairs = re.findall(r"^(?: {4})?\.(\w+):\s+(\d+)\s*$", entry, re.M)
        kernel.metadata = {k: int(v) for k, v in pairs}
        arguments: list[dict[str, str]] = []
        for line in entry.splitlines():
            if line.startswith("      - "):
                arguments.append({})
            if line.startswith("      ") and arguments and (match := _ARGUMENT_KEY.match(line.strip())):
                arguments[-1][match.group(1)] = match.group(2)
        kernel.arguments = tuple(
            Argument(int(a["offset"]), int(a["size"]), a.get("value_kind", "by_value"), a.get("name"))
            for a in arguments
            if "offset" in a and "size" in a
        )
