"""Seeds of random generators: which one a draw comes from, and whether it is a number that differs by rank.

While a program is played in place of many ranks, `torch.Generator` keeps a seed that is a RankValue: C code would take
the number of the rank that is played. A seed that the program made a plain number of is compared between the ranks
afterwards (`programs/seeds.py`); what that showed is in `mode.seeds` when the program is played again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....call_site import call_site
from ....comm import context
from ....comm.rank_numbers import concrete
from ....comm.rank_values import RankValue
from ....mesh import part_of
from ....shared_context import Replacement
from ....spmd.random import TENSOR_PARALLEL, streams
from ..session import Session

__all__ = ["OUTSIDE", "Stream", "generator_in", "kept_seeds", "seed_of", "stream"]

OUTSIDE = 0x5EED_0F_7E57  # of the default generator, where the program that is played has not seeded it
_Plain = torch.Generator


class _IsGenerator(type(_Plain)):  # type: ignore[misc]
    """`isinstance(x, torch.Generator)` holds of all generators, those too that were made before."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, _Plain)


class _Generator(_Plain, metaclass=_IsGenerator):
    """A generator that keeps its seed, if that is a RankValue."""

    rank_seed: RankValue | None = None

    def manual_seed(self, seed: int) -> _Generator:
        self.rank_seed = seed if isinstance(seed, RankValue) else None
        super().manual_seed(concrete(seed))
        return self

    def seed(self) -> int:
        self.rank_seed = None
        return super().seed()


kept_seeds = Replacement(torch, Generator=_Generator)
"""Inside, generators that are made keep seeds that differ by rank."""


class Stream(NamedTuple):
    """Where random numbers come from.

    Attributes:
        unseeded: the default generator, as the program found it: seeded alike on the ranks of tp, and nobody knows of
            the other axes.
        differing: axes on which its seed differs.
    """

    unseeded: bool
    differing: frozenset[str]

    def differs(self, axis: str) -> bool:
        return axis in self.differing or (self.unseeded and part_of(axis)[0] != "tp")


def generator_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator among the arguments of a call; None: it draws from the default one."""
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, _Plain)), None)


def seed_of(generator: torch.Generator | None) -> int:
    """The number that a generator was seeded with, last; None: the default one."""
    seed: int | None = getattr(generator, "rank_seed", None)
    return (generator or torch.default_generator).initial_seed() if seed is None else seed


def stream(mode: Session, generator: torch.Generator | None) -> Stream:
    """The stream that random numbers come from now."""
    drawing = streams().drawing if context.is_initialized() else ""
    if generator is None and drawing.startswith(TENSOR_PARALLEL):
        alike = drawing.removeprefix(TENSOR_PARALLEL).strip()  # a part of tp along which ranks draw the same numbers
        return Stream(True, frozenset({"tp", *mode.atoms("tp")} - {alike}))
    seed = seed_of(generator)
    differing = {*mode.atoms("pp")}
    if isinstance(seed, RankValue):
        differing.update(mode.atoms(tuple(seed.axes)))
    if mode.seeds:
        differing.update(mode.seeds.get((call_site(), concrete(seed)), ()))
    unseeded = generator is None and mode.outside_seed in (None, seed)
    return Stream(unseeded, frozenset(differing))
