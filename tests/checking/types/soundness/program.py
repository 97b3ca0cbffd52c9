"""A program as data: inputs with types, and steps, each a line of python for a rank and one for the unsharded
program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.types import Shard, SpmdType
from tests.checking.types.soundness.denotation import Claim, Grid, coordinates, distribute

BUILTINS: dict[str, Any] = {"torch": torch, "F": F, "spmd": spmd, "comm": comm, "I": I, "P": P, "R": R, "S": S, "V": V,
                            "math": math}  # fmt: skip


@dataclass(frozen=True)
class Input:
    """`kind`: "float", "index" (0 or 1) or "mask"; `shape` of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    claim: Claim
    kind: str = "float"
    grad: bool = True

    def whole(self, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed * 1000 + int(self.name[1:]))
        if self.kind == "index":
            return torch.randint(0, 2, self.shape, generator=random)
        x = torch.randn(self.shape, generator=random, dtype=torch.float64)
        return x > 0 if self.kind == "mask" else x

    def pieces(self, whole: Tensor, grid: Grid, split: int) -> list[Tensor]:
        """Returns the pieces of all ranks; `split` seeds how sums are split, and what varies."""
        random = torch.Generator().manual_seed(split * 1000 + int(self.name[1:]))
        return distribute(
            whole, self.claim, grid, lambda x: torch.randn(x.shape, generator=random, dtype=torch.float64)
        )


@dataclass(frozen=True)
class Step:
    """One line.

    Attributes:
        text: for a rank.
        whole: for the unsharded program; None: it has no meaning there (values that vary).
        targets: names that it binds.
        op: what it is, for statistics.
    """

    text: str
    whole: str | None
    targets: tuple[str, ...]
    op: str

    @property
    def names(self) -> set[str]:
        return set(re.findall(r"\bv\d+\b", self.text))


@dataclass
class Program:
    grid: dict[str, int]
    level: str
    seed: int
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    claims: dict[str, Claim] = field(default_factory=dict)  # of all names, after the last step
    losses: list[str] = field(default_factory=list)
    known: set[str] = field(
        default_factory=set
    )  # names that mean something in the unsharded program, after the last step

    @property
    def mesh(self) -> Mesh:
        sizes = {axis: size for axis, size in self.grid.items() if axis != "dp"}
        return Mesh(math.prod(self.grid.values()), **sizes)

    def __str__(self) -> str:
        """Returns the program as Python, for one rank of a mesh."""
        lines = [f"# seed {self.seed}, mesh {self.grid}, level {self.level}"]
        for x in self.inputs:
            local = list(x.shape)
            for axis, kind in x.claim.types:
                if kind.letter == "S":
                    local[kind.dim] //= self.grid[axis]  # type: ignore[union-attr]
            value = {"float": f"torch.randn({local}, dtype=torch.float64)", "index": f"torch.randint(0, 2, {local})",
                    "mask": f"torch.randn({local}) > 0"}[x.kind]  # fmt: skip
            types = ", ".join(f"{axis!r}: {_written(kind)}" for axis, kind in x.claim.types)
            grad = ".requires_grad_()" if x.grad else ""
            lines.append(f"{x.name} = spmd.assert_type({value}{grad}, {{{types}}})")
        for step in self.steps:
            last = [f"{name}: " + ", ".join(f"{a} {k}" for a, k in self.claims[name].types)
                    for name in step.targets if name in self.claims]  # fmt: skip
            differs = [] if step.whole == step.text else [f"whole: {step.whole}"]
            lines.append(step.text + ("  # " + "; ".join(last + differs) if last or differs else ""))
        if self.losses:
            lines.append(f"torch.autograd.backward([{', '.join(self.losses)}])")
        return "\n".join(lines)


_compiled: dict[str, Any] = {}


def run_line(text: str, names: dict[str, Any]) -> None:
    code = _compiled.get(text)
    if code is None:
        if len(_compiled) > 20_000:
            _compiled.clear()
        code = _compiled[text] = compile(text, "<program>", "exec")
    exec(code, BUILTINS, names)


def sized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A constant with another shape: what `ones(n)` is in the unsharded program depends on what it meets."""
    if list(x.shape) == list(shape):
        return x
    for dim, size in enumerate(shape):
        if x.shape[dim] != size:
            x = x.narrow(dim, 0, 1)
    return x.expand(tuple(shape)).clone()


BUILTINS["sized"] = sized


def local_inputs(program: Program, seed: int, split: int, wholes: Mapping[str, Tensor] | None = None) -> list[Any]:
    """For each rank its inputs by name."""
    ranks: list[dict[str, Tensor]] = [{} for _ in coordinates(program.grid)]
    for x in program.inputs:
        whole = wholes[x.name] if wholes is not None else x.whole(seed)
        for rank, piece in zip(ranks, x.pieces(whole, program.grid, split)):
            rank[x.name] = piece
    return ranks


def _written(kind: SpmdType) -> str:
    order = kind.order if isinstance(kind, Shard) else None
    return str(kind) if order is None else f"S({kind.dim}, order=Dealt({order.total}, {order.held}))"  # type: ignore[union-attr]
