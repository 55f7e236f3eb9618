"""Global memory: every buffer in its own far-away piece of the address space.

Buffers lie 64 GiB apart, so an address computed from one buffer's pointer with a wrong offset (up to 4 GiB either way)
cannot land inside another buffer: it is out of bounds and is reported with the buffer it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BASE = 1 << 44
SHIFT = 36
START = 1 << 32  # room for negative offsets inside a region
MAX_BYTES = 4 << 30
ALIGN = 256


@dataclass(slots=True)
class Buffer:
    """One allocation: where the kernel sees it and where its bytes are."""

    name: str
    address: int  # as the kernel sees it
    offset: int  # in the arena
    nbytes: int
    itemsize: int
    loaded: int = 0  # bytes, counted while running
    stored: int = 0


class Arena:
    """The bytes of all buffers of one launch."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self.buffers: list[Buffer] = []
        self._contents: list[np.ndarray] = []
        self._top = ALIGN

    def add(self, content: np.ndarray, name: str, itemsize: int = 1, skew: int = 0) -> int:
        """Reserve a buffer with this content (u8; copied at `freeze`); returns its address.

        `skew` is how many bytes past an aligned address it starts.
        """
        octets = content.reshape(-1).view(np.uint8)
        address = BASE + (len(self.buffers) << SHIFT) + START + skew
        self.buffers.append(Buffer(name, address, self._top + skew, octets.size, itemsize))
        self._contents.append(octets)
        self._top += -(-(octets.size + skew) // ALIGN) * ALIGN + ALIGN
        if self._top > self.limit or octets.size > START:
            raise ValueError(f"buffers need {self._top} bytes; the limit is {self.limit} (and {START} for one buffer)")
        return address

    def freeze(self) -> None:
        """Lay the bytes out. Nothing can be added afterwards."""
        self.octets = np.zeros(self._top, np.uint8)
        for buffer, content in zip(self.buffers, self._contents, strict=True):
            self.octets[buffer.offset : buffer.offset + buffer.nbytes] = content
        self.halves, self.words = self.octets.view(np.uint16), self.octets.view(np.uint32)
        self.doubles = self.octets.view(np.uint64)
        self.written = np.ones(self._top // 2, bool)
        self.tracked = False
        self._first = np.array([b.address for b in self.buffers] or [0], np.int64)
        self._last = np.array([b.address + b.nbytes for b in self.buffers] or [0], np.int64)
        self._shift = self._first - np.array([b.offset for b in self.buffers] or [0], np.int64)

    def locate(self, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Arena offsets of accesses of `nbytes` at int64 addresses.

        Also a bool array of those inside a buffer (None when all are), and the buffer number when all are in the same
        one, else -1. Offsets of accesses outside are 0.
        """
        lowest, highest = int(addresses.min()), int(addresses.max())
        number = (lowest - BASE) >> SHIFT
        if number == (highest - BASE) >> SHIFT and 0 <= number < len(self.buffers):
            first, last, shift = int(self._first[number]), int(self._last[number]), int(self._shift[number])
            if lowest >= first and highest + nbytes <= last:
                return addresses - shift, None, number
            inside = (addresses >= first) & (addresses <= last - nbytes)
            return np.where(inside, addresses - shift, 0), inside, number
        numbers = (addresses - BASE) >> SHIFT
        known = (numbers >= 0) & (numbers < len(self.buffers))
        numbers = np.where(known, numbers, 0)
        inside = known & (addresses >= self._first[numbers]) & (addresses + nbytes <= self._last[numbers])
        return np.where(inside, addresses - self._shift[numbers], 0), inside, -1

    def describe(self, address: int) -> str:
        """An address in terms of the nearest buffer."""
        number = (address - BASE) >> SHIFT
        if not 0 <= number < len(self.buffers):
            return f"{address:#x}, which belongs to no buffer"
        buffer = self.buffers[number]
        delta = address - buffer.address
        if delta < 0:
            return f"{buffer.name} {delta} bytes (before its start)"
        if delta >= buffer.nbytes:
            return f"{buffer.name} +{delta} bytes ({delta - buffer.nbytes} past its {buffer.nbytes} bytes)"
        return f"{buffer.name} +{delta} bytes (element {delta // buffer.itemsize})"

    def content(self, number: int) -> np.ndarray:
        """The bytes of a buffer, as a view."""
        buffer = self.buffers[number]
        return self.octets[buffer.offset : buffer.offset + buffer.nbytes]

    def expect_writes(self, halves: np.ndarray) -> None:
        """These 2-byte cells hold nothing until the launch writes them."""
        self.written[halves] = False
        self.tracked = True
