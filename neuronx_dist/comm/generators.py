"""The state of a device's default random generator, whatever the device: CPU, the current GPU, an XLA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import context
from .backends import xla

__all__ = ["State", "as_they_were", "autocast", "device_has_own_program", "get_state", "seed", "set_state"]

State = list[torch.Tensor]  # of the CPU generator and, where one is in use, of the current GPU's or XLA device's


def device_has_own_program() -> bool:
    """Whether the current rank is an XLA device: its backward runs in another thread, on a generator torch does not
    know.
    """
    return context.is_initialized() and isinstance(context.current().backend, xla.XlaBackend)


def seed(value: int) -> None:
    """Seeds the default generators."""
    torch.manual_seed(value)
    if device_has_own_program():
        xla.set_rng_state(torch.tensor([value]))


def get_state() -> State:
    state = [torch.get_rng_state()]
    if device_has_own_program():
        state.append(xla.rng_state())
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        state.append(torch.cuda.get_rng_state())
    return state


def set_state(state: State) -> None:
    """Sets what `get_state` gave.

    Raises:
        ValueError: it was taken on an XLA device, and this is none, or the other way round.
    """
    own_program, of_xla = device_has_own_program(), len(state) > 1 and state[1].dtype == torch.int64
    if own_program != of_xla:
        kinds = {True: "an XLA device", False: "another device than XLA"}
        raise ValueError(
            f"a random state of {kinds[of_xla]} on {kinds[own_program]}: their random numbers differ anyway, so seed "
            "anew by model_parallel_manual_seed(seed)"
        )
    torch.set_rng_state(state[0])
    if own_program:
        xla.set_rng_state(state[1])
    elif len(state) > 1:
        torch.cuda.set_rng_state(state[1])


def autocast() -> tuple[bool, torch.dtype]:
    """Whether, and to what, operations on an XLA device are cast."""
    return torch.is_autocast_enabled(xla.DEVICE), torch.get_autocast_dtype(xla.DEVICE)


@contextmanager
def as_they_were(state: State, cast: tuple[bool, torch.dtype]) -> Iterator[None]:
    """The default generators and an XLA device's autocast as they were."""
    now = get_state()
    set_state(state)
    try:
        with torch.autocast(xla.DEVICE, dtype=cast[1], enabled=cast[0]):
            yield
    finally:
        set_state(now)
