"""The only reader of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for."""

    checked: bool
    triton_interpret: bool


def settings() -> Settings:
    """The settings in force now.

    UNDERTOW_CHECKED=1    validate the values of device tensors too, poison and fence scratch (synchronises)
    TRITON_INTERPRET=1    Triton's own switch: its kernels run on CPU tensors, for tests
    """
    return Settings(
        checked=os.environ.get("UNDERTOW_CHECKED", "0") == "1",
        triton_interpret=os.environ.get("TRITON_INTERPRET", "0") == "1",
    )
