"""Seeds of random generators: the seed of each draw, and whether it differs by rank.

While a program is played in place of many ranks, `torch.Generator` keeps a seed that is a RankValue: C code would take
the number of the played rank. A seed that the program turned into a plain number is compared between the ranks later
(`programs/explore.py`); `mode.seeds` has the result when the program is played again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....call_site import call_site
from ....comm import context
from ....comm.ranks.rank_numbers import concrete
from ....comm.ranks.rank_values import RankValue
from ....mesh import part_of
from ....shared_context import Replacement
from ....spmd.random import TENSOR_PARALLEL, streams
from ..session import Session

__all__ = ["OUTSIDE", "Stream", "generator_in", "kept_seeds", "seed_of", "stream"]

OUTSIDE = 0x5EED_0F_7E57  # of the default generator, where the program that is played has not seeded it
_Plain = torch.Generator


class _IsGenerator(type(_Plain)):  # type: ignore[misc]
    """Makes `isinstance(x, torch.Generator)` true of all generators, also of those made before."""

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
    """A source of random numbers.

    Attributes:
        unseeded: the default generator in its first state: equally seeded on the ranks of tp, unknown on the other
            axes.
        differing: axes on which its seed differs.
    """

    unseeded: bool
    differing: frozenset[str]

    def differs(self, axis: str) -> bool:
        return axis in self.differing or (self.unseeded and part_of(axis).axis != "tp")


def generator_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator among the arguments of a call; None: it draws from the default one."""
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, _Plain)), None)


def seed_of(generator: torch.Generator | None) -> int:
    """The last seed of a generator; None: that of the default one."""
    seed: int | None = getattr(generator, "rank_seed", None)
    return (generator or torch.default_generator).initial_seed() if seed is None else seed


def stream(mode: Session, generator: torch.Generator | None) -> Stream:
    """The stream of the random numbers that are drawn now."""
    drawing = streams().drawing if context.is_initialized() else ""
    if generator is None and drawing.startswith(TENSOR_PARALLEL):
        shared = drawing.removeprefix(TENSOR_PARALLEL).strip()  # parts of tp along which ranks draw the same numbers
        equal = mode.atoms(tuple(shared.split(","))) if shared else ()
        return Stream(True, frozenset({"tp", *mode.atoms("tp")}.difference(equal)))
    seed = seed_of(generator)
    differing = {*mode.atoms("pp")}
    if isinstance(seed, RankValue):
        differing.update(mode.atoms(tuple(seed.axes)))
    if mode.seeds:
        differing.update(mode.seeds.get((call_site(), concrete(seed)), ()))
    unseeded = generator is None and mode.outside_seed in (None, seed)
    return Stream(unseeded, frozenset(differing))
