"""Tiled attention in plain torch operators: every row of the semantics, O(tokens) memory, any torch device."""

from __future__ import annotations

from ...problem import Problem
from ..spec import Config, Kernel, Tensors
from .plan import backward_workspace, config


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """Fill out and lse; see `host.forward`."""
    from . import host

    host.forward(problem, config, tensors)


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv and dsink; see `host.backward`."""
    from . import host

    host.backward(problem, config, tensors, scratch)


KERNEL = Kernel(
    name="torch_tiled",
    about="fp32 tiles of torch GEMMs, key-outer, five products; packed lengths on a GPU are copied to the host",
    archs=frozenset(),
    limits=(),
    config=config,
    plan_workspace=backward_workspace,
    forward=forward,
    backward=backward,
)
