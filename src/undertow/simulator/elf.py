"""Read what a launch needs from an AMD ELF code object: code, kernel descriptors, argument layout. Bounds-checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .asm import Argument, Kernel

MAX_ELF_BYTES = 512 << 20
TARGETS = {0x4C: "gfx942", 0x4F: "gfx950"}  # low byte of e_flags
NT_AMDGPU_METADATA = 32
DESCRIPTOR_FLAGS = (
    "user_sgpr_private_segment_buffer",
    "user_sgpr_dispatch_ptr",
    "user_sgpr_queue_ptr",
    "user_sgpr_kernarg_segment_ptr",
    "user_sgpr_dispatch_id",
    "user_sgpr_flat_scratch_init",
    "user_sgpr_private_segment_size",
)


@dataclass(frozen=True, slots=True)
class CodeObject:
    """The parts of an ELF: `.text` bytes and their address, kernels, function symbols (name to address), target."""

    code: bytes
    address: int
    kernels: dict[str, Kernel]
    symbols: dict[str, int]
    target: str


def read(data: bytes) -> CodeObject:
    """Parse an ELF. Raises ValueError for anything that is not an AMD code object of a known target."""
    if len(data) > MAX_ELF_BYTES or data[:4] != b"\x7fELF":
        raise ValueError("code object: not an ELF file, or too large")
    try:
        return _read(data)
    except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"code object: truncated or malformed ({error})") from None


def _read(data: bytes) -> CodeObject:
    if data[4] != 2 or struct.unpack_from("<H", data, 18)[0] != 224:
        raise ValueError("code object: not a 64-bit AMDGPU ELF")
    flags = struct.unpack_from("<I", data, 48)[0]
    target = TARGETS.get(flags & 0xFF)
    if target is None:
        raise NotImplementedError(
            f"code object: machine flags {flags:#x}; the simulator models {', '.join(TARGETS.values())}"
        )
    sections = _sections(data)
    if ".text" not in sections:
        raise ValueError("code object: no .text section")
    text = sections[".text"]
    symbols = _symbols(data, sections)
    kernels = {}
    for name, (address, kind) in symbols.items():
        if name.endswith(".kd") and kind == 1:
            kernels[name[:-3]] = _descriptor(_at(data, sections, address, 64), name[:-3])
    for entry in _metadata(data, sections).get("amdhsa.kernels", []):
        _apply_metadata(kernels, entry)
    code = data[text[1] : text[1] + text[2]]
    functions = {n: a for n, (a, kind) in symbols.items() if kind == 2}
    return CodeObject(code, text[0], kernels, functions, target)


def _sections(data: bytes) -> dict[str, tuple[int, int, int, int, int]]:
    """Name to (address, file offset, size, type, link)."""
    start = struct.unpack_from("<Q", data, 40)[0]
    size, count, strings = struct.unpack_from("<HHH", data, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * n) for n in range(count)]
    table = raw[strings][4]
    out = {}
    for entry in raw:
        name = data[table + entry[0] : data.index(b"\0", table + entry[0])].decode()
        if entry[1] != 8 and entry[4] + entry[5] > len(data):
            raise ValueError(f"code object: section {name} reaches past the end of the file")
        out[name] = (entry[3], entry[4], entry[5], entry[1], entry[6])
    return out


def _symbols(data: bytes, sections: dict[str, tuple]) -> dict[str, tuple[int, int]]:
    """Name to (address, type) from .symtab, or .dynsym when stripped."""
    out = {}
    for table, strings in ((".dynsym", ".dynstr"), (".symtab", ".strtab")):
        if table not in sections or strings not in sections:
            continue
        base = sections[strings][1]
        for at in range(sections[table][1], sections[table][1] + sections[table][2], 24):
            name, info, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            text = data[base + name : data.index(b"\0", base + name)].decode()
            if text:
                out[text] = (value, info & 15)
    return out


def _at(data: bytes, sections: dict[str, tuple], address: int, size: int) -> bytes:
    for first, offset, length, _, _ in sections.values():
        if first and first <= address and address + size <= first + length:
            return data[offset + address - first : offset + address - first + size]
    raise ValueError(f"code object: address {address:#x} is in no section")


def _descriptor(raw: bytes, name: str) -> Kernel:
    """The 64-byte kernel descriptor as `.amdhsa_*` directives."""
    lds, scratch, kernarg = struct.unpack_from("<III", raw, 0)
    rsrc1, rsrc2, flags, preload = struct.unpack_from("<IIHH", raw, 48)
    directives = {
        "group_segment_fixed_size": lds,
        "private_segment_fixed_size": scratch,
        "kernarg_size": kernarg,
        "float_denorm_mode_32": rsrc1 >> 16 & 3,
        "float_denorm_mode_16_64": rsrc1 >> 18 & 3,
        "user_sgpr_count": rsrc2 >> 1 & 31,
        "system_sgpr_workgroup_id_x": rsrc2 >> 7 & 1,
        "system_sgpr_workgroup_id_y": rsrc2 >> 8 & 1,
        "system_sgpr_workgroup_id_z": rsrc2 >> 9 & 1,
        "system_vgpr_workitem_id": rsrc2 >> 11 & 3,
        "user_sgpr_kernarg_preload_length": preload & 127,
        "user_sgpr_kernarg_preload_offset": preload >> 7,
    }
    directives |= {flag: flags >> bit & 1 for bit, flag in enumerate(DESCRIPTOR_FLAGS)}
    return Kernel(name, directives=directives)


def _metadata(data: bytes, sections: dict[str, tuple]) -> dict:
    for _, offset, size, kind, _ in sections.values():
        at, end = offset, offset + size
        while kind == 7 and at + 12 <= end:
            name_size, size_of, note = struct.unpack_from("<III", data, at)
            body = at + 12 + (name_size + 3 & ~3)
            if note == NT_AMDGPU_METADATA and body + size_of <= end:
                value, _ = unpack(data, body)
                return value if isinstance(value, dict) else {}
            at = body + (size_of + 3 & ~3)
    return {}


def _apply_metadata(kernels: dict[str, Kernel], entry: dict) -> None:
    kernel = kernels.get(entry.get(".name"))
    if kernel is None:
        return
    kernel.metadata = {k[1:]: v for k, v in entry.items() if isinstance(v, int) and not isinstance(v, bool)}
    kernel.arguments = tuple(
        Argument(a[".offset"], a[".size"], a.get(".value_kind", "by_value"), a.get(".name"))
        for a in entry.get(".args", [])
    )


def unpack(data: bytes, at: int) -> tuple[object, int]:
    """One MessagePack value (the types that code object metadata uses) and the offset behind it."""
    tag = data[at]
    at += 1
    if tag <= 0x7F or tag >= 0xE0:
        return tag if tag <= 0x7F else tag - 256, at
    if tag <= 0xBF:
        readers = (_unpack_map, _unpack_list, _unpack_text, _unpack_text)
        return readers[(tag >> 4) - 8](data, at, tag & (31 if tag >= 0xA0 else 15))
    if tag in CONSTANTS:
        return CONSTANTS[tag], at
    layout, reader = SIZED.get(tag, (None, None))
    if layout is None:
        raise ValueError(f"code object: metadata tag {tag:#x}")
    value = struct.unpack_from(layout, data, at)[0]
    at += struct.calcsize(layout)
    return reader(data, at, value) if reader else (value, at)


def _unpack_text(data: bytes, at: int, count: int) -> tuple[str, int]:
    return data[at : at + count].decode(), at + count


def _unpack_list(data: bytes, at: int, count: int) -> tuple[list, int]:
    out = []
    for _ in range(count):
        value, at = unpack(data, at)
        out.append(value)
    return out, at


def _unpack_map(data: bytes, at: int, count: int) -> tuple[dict, int]:
    out = {}
    for _ in range(count):
        key, at = unpack(data, at)
        out[key], at = unpack(data, at)
    return out, at


CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = "B >H >I >Q b >h >i >q"
SIZED = {0xCC + n: (layout, None) for n, layout in enumerate(NUMBERS.split())}
SIZED |= {0xCA: (">f", None), 0xCB: (">d", None)}
for _first, _reader, _layouts in (
    (0xD9, _unpack_text, ("B", ">H", ">I")),
    (0xDC, _unpack_list, (">H", ">I")),
    (0xDE, _unpack_map, (">H", ">I")),
):
    SIZED |= {_first + n: (layout, _reader) for n, layout in enumerate(_layouts)}
