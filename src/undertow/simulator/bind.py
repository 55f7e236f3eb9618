"""Bind Python values to kernel arguments: tensors into the arena, scalars into the kernarg segment, results back."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .arena import Arena
from .asm import Argument

FORMATS = {"int": {1: "<b", 2: "<h", 4: "<i", 8: "<q"}, "float": {4: "<f", 8: "<d"}}


@dataclass(slots=True)
class Tensor:
    """A CPU array or torch tensor by its memory: address, shape, byte strides."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    writeable: bool
    first: int = 0  # lowest and one past the highest byte
    last: int = 0
    number: int = -1  # buffer of the arena

    def __post_init__(self) -> None:
        """Find the bytes that the elements cover."""
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        empty = 0 in self.shape
        self.first = self.address + (0 if empty else sum(min(r, 0) for r in reach))
        self.last = self.first if empty else self.address + sum(max(r, 0) for r in reach) + self.itemsize

    def element_offsets(self) -> np.ndarray:
        """Byte offset of every element from `first`, in row-major order."""
        offsets = np.zeros(self.shape, np.int64) + (self.address - self.first)
        for axis, (count, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            view = [1] * len(self.shape)
            view[axis] = count
            offsets += (np.arange(count) * stride).reshape(view)
        return offsets.reshape(-1)


def as_tensor(name: str, value: object) -> Tensor | None:
    """A Tensor for a numpy array or a torch tensor, None for anything else."""
    if isinstance(value, np.ndarray):
        address = value.__array_interface__["data"][0]
        return Tensor(name, address, value.shape, value.strides, value.itemsize, value.flags.writeable)
    if hasattr(value, "data_ptr") and hasattr(value, "element_size"):
        if value.device.type != "cpu":
            raise ValueError(f"argument {name}: a tensor on {value.device}; the simulator runs on CPU tensors")
        size = value.element_size()
        strides = tuple(s * size for s in value.stride())
        return Tensor(name, value.data_ptr(), tuple(value.shape), strides, size, writeable=True)
    return None


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """A u8 view of process memory that a live array or tensor owns."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Binding:
    """All arguments of one launch. Tensors that share memory share a buffer of the arena."""

    def __init__(self, arena: Arena, values: Mapping[str, object]) -> None:
        self.arena, self.values = arena, dict(values)
        self.tensors = {n: t for n, v in values.items() if (t := as_tensor(n, v)) is not None}
        self.ranges: list[tuple[int, int, int]] = []  # first byte, last byte, buffer
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.first, -t.last)):
            if self.ranges and tensor.first < self.ranges[-1][1] and tensor.last > tensor.first:
                first, last, number = self.ranges[-1]
                self.ranges[-1] = (first, max(last, tensor.last), number)
                tensor.number = number
            else:
                tensor.number = len(self.ranges)
                self.ranges.append((tensor.first, tensor.last, tensor.number))
        self.base = {}
        for first, last, number in self.ranges:
            owners = [t for t in self.tensors.values() if t.number == number]
            name = "/".join(t.name for t in owners)
            self.base[number] = arena.add(memory_at(first, last - first), name, owners[0].itemsize, first % 256)

    def pointer(self, tensor: Tensor) -> int:
        """The address that the kernel sees."""
        return self.base[tensor.number] + tensor.address - self.ranges[tensor.number][0]

    def halves(self, tensor: Tensor) -> np.ndarray:
        """Arena 2-byte cells of the elements of a tensor, [elements, cells]."""
        buffer = self.arena.buffers[tensor.number]
        start = buffer.offset + tensor.first - self.ranges[tensor.number][0] + tensor.element_offsets()
        return (start[:, None] >> 1) + np.arange(max(1, tensor.itemsize // 2))

    def write_back(self) -> None:
        """Copy what the launch changed into the caller's memory."""
        for first, last, number in self.ranges:
            content = self.arena.content(number)
            memory = memory_at(first, last - first)
            if np.array_equal(content, memory):
                continue
            locked = [t.name for t in self.tensors.values() if t.number == number and not t.writeable]
            if locked:
                raise ValueError(f"argument {locked[0]}: the kernel wrote to it, but the array is read-only")
            memory[...] = content

    def pack(self, arguments: Sequence[Argument], nbytes: int, hidden: Mapping[str, int]) -> np.ndarray:
        """The kernarg segment, u8."""
        visible = [a for a in arguments if not a.kind.startswith("hidden_")]
        names = list(self.values)
        if len(names) != len(visible):
            raise ValueError(f"args: {len(names)} values ({', '.join(names)}) for {len(visible)} kernel arguments")
        size = max([nbytes, *(a.offset + a.size for a in arguments)], default=0)
        out = bytearray(max(size, 16))
        for name, argument in zip(names, visible, strict=True):
            out[argument.offset : argument.offset + argument.size] = self._encode(name, argument)
        for argument in arguments:
            if argument.kind in hidden:
                value = int(hidden[argument.kind])
                out[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
        return np.frombuffer(bytes(out), np.uint8)

    def _encode(self, name: str, argument: Argument) -> bytes:
        value = self.values[name]
        is_pointer = argument.kind == "global_buffer"
        if name in self.tensors or value is None:
            if argument.size != 8:
                raise ValueError(f"argument {name}: a tensor for a {argument.size}-byte {argument.kind} argument")
            return struct.pack("<Q", 0 if value is None else self.pointer(self.tensors[name]))
        if isinstance(value, bytes) and len(value) == argument.size:
            return value
        if isinstance(value, np.generic) and value.dtype.itemsize == argument.size and not is_pointer:
            return value.tobytes()
        if isinstance(value, bool | int | float | np.integer | np.floating) and not is_pointer:
            kind = "float" if isinstance(value, float | np.floating) else "int"
            code = FORMATS[kind].get(argument.size)
            if code is not None:
                if kind == "int":  # signed or unsigned, as long as it fits
                    bits = 8 * argument.size
                    if not -(1 << (bits - 1)) <= int(value) < 1 << bits:
                        raise ValueError(f"argument {name}: {value} does not fit {argument.size} bytes")
                    return (int(value) & ((1 << bits) - 1)).to_bytes(argument.size, "little")
                return struct.pack(code, value)
        wanted = "a CPU tensor or array" if is_pointer else f"a number or bytes of {argument.size} bytes"
        raise ValueError(f"argument {name}: {type(value).__name__} {value!r:.60}; {wanted} is wanted")
