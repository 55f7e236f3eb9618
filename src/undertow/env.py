"""The only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for."""

    checked: bool
    triton_interpret: bool
    hopper_objects: str


def settings() -> Settings:
    """The settings in force now.

    UNDERTOW_CHECKED=1    validate the values of device tensors too, poison and fence scratch (synchronises)
    TRITON_INTERPRET=1    Triton's own switch: its kernels run on CPU tensors, for tests
    UNDERTOW_HOPPER_OBJECTS=folder    what `undertow build` wrote there is loaded instead of compiled
    """
    return Settings(
        checked=os.environ.get("UNDERTOW_CHECKED", "0") == "1",
        triton_interpret=os.environ.get("TRITON_INTERPRET", "0") == "1",
        hopper_objects=os.environ.get("UNDERTOW_HOPPER_OBJECTS", ""),
    )


@contextmanager
def checked() -> Iterator[None]:
    """Calls inside also validate device values (cu_seqlens, max_seqlen), poison and fence memory; they synchronise.

    The whole process sees it, autograd's threads included, as if UNDERTOW_CHECKED=1 were set.
    """
    before = os.environ.get("UNDERTOW_CHECKED")
    os.environ["UNDERTOW_CHECKED"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["UNDERTOW_CHECKED"]
        else:
            os.environ["UNDERTOW_CHECKED"] = before
