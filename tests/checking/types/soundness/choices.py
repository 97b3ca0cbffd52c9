"""Random choices of a program: inputs and their types, and operands that fit into a template."""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch import Tensor

from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.types import Dealt
from tests.checking.types.soundness.denotation import Claim
from tests.checking.types.soundness.program import Input


class Choices:
    """Draws for one program; what there is to draw from the generator keeps up to date."""

    rng: random.Random
    grid: dict[str, int]
    level: str
    width: int  # the longest axis
    dealt = False  # shards in another order than the ranks' are among the inputs
    letters: str  # types of inputs; M: a partial maximum, A: a partial mean
    local: dict[str, Tensor]
    claims: dict[str, Claim]

    def axis(self) -> str:
        return self.rng.choice(list(self.grid))

    def float(self, dims: int = 0) -> str | None:
        found = [n for n, x in self.local.items() if x.is_floating_point() and x.dim() >= dims and n in self.claims]
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found) if found else None

    def fill(self, template: str) -> dict[str, Any] | None:
        """Values for the fields of a template; None: nothing fits."""
        wanted = set(re.findall(r"{(\w+)}", template))
        names: dict[str, Any] = {}
        x = self.float(1 if "d" in wanted else 0)
        if x is None:
            return None
        names["x"], shape = x, self.local[x].shape
        if "size" in wanted:
            names["size"] = self.rng.choice([1, 2, 3, self.width])
        if "d" in wanted:
            d, e = self.rng.randrange(len(shape)), self.rng.randrange(len(shape))
            names.update(d=min(d, e), e=max(d, e))
            if shape[names["d"]] == 0:
                return None
            names["k"] = self.rng.randrange(shape[names["d"]])
        for letter in "yzmns":
            if letter in wanted:
                mask = letter in "mn"
                found = [n for n, v in self.local.items()
                         if n in self.claims and (v.dtype is torch.bool if mask else v.is_floating_point())
                         and (v.shape == shape if letter == "s" else _broadcasts(v.shape, shape))]  # fmt: skip
                if not found:
                    return None
                names[letter] = self.rng.choice(found)
        if "j" in wanted:
            found = [n for n, v in self.local.items() if v.dtype is torch.int64 and v.dim() == 1 and n in self.claims]
            if not found or 1 in shape:
                return None
            names["j"] = self.rng.choice(found)
        if "w" in wanted:
            found = [n for n, v in self.local.items() if shape and v.dim() == 2 and v.shape[0] == shape[-1]
                     and v.is_floating_point() and n in self.claims]  # fmt: skip
            if not found:
                return None
            names["w"] = self.rng.choice(found)
        return names

    def inputs(self) -> list[Input]:
        rng, width = self.rng, self.width
        sizes = rng.sample(sorted({1, 2, 4, width, 2 * width, 2 * width, 3}), 3) + [2 * width]
        found = []
        for number in range(rng.randint(2, 5)):
            kind = rng.choices(["float", "index", "mask"], [8, 1, 1])[0]
            shape = [rng.choice(sizes) for _ in range(1 if kind == "index" else rng.choice([1, 2, 2, 2, 3, 3, 4]))]
            types: list[Any] = []
            left = list(shape)
            for axis, size in self.grid.items():
                letter = rng.choices("RIVPASM", [4, 3, 1, 1.5 * (kind == "float"), 0.5 * (kind == "float"), 5,
                                                0.2 * (kind == "float")])[0]  # fmt: skip
                if types and (letter == "M" or types[0][1].reduction == "max"):
                    letter = "R"  # a sum of maxima is no maximum of sums
                if letter not in self.letters:
                    letter = "S"
                dims = [d for d, n in enumerate(left) if n and n % size == 0]
                if letter == "S" and self.level == "G" and dims:
                    dim = rng.choice(dims)
                    stride = 2 if rng.random() < 0.2 and left[dim] % (2 * size) == 0 and left[dim] == shape[dim] else 1
                    left[dim] = left[dim] // size if stride == 1 else 0
                    order = None
                    if (
                        self.dealt
                        and stride == 1
                        and rng.random() < 0.4
                        and left[dim] * size == shape[dim]
                        and left[dim] % 2 == 0
                    ):
                        order = Dealt(2 * size, tuple((rank, 2 * size - 1 - rank) for rank in range(size)))
                        left[dim] = 0
                    types.append((axis, S(dim, stride, order=order)))
                else:
                    types.append((axis, {"R": R, "I": I, "V": V, "P": P, "A": P("avg"), "M": P("max"),
                                         "S": V if self.level == "L" else R}[letter]))  # fmt: skip
            grad = kind == "float" and rng.random() < 0.8 and not any(k.reduction == "max" for _, k in types)
            found.append(Input(f"v{number}", tuple(shape), Claim(tuple(types)), kind, grad))
        return found


def _broadcasts(shape: Any, other: Any) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(shape), reversed(other)))
