"""A division by the size of an axis that is dropped, done twice or turned into a multiplication: `spmd.check` finds it.

At each place where the package multiplies or divides by one, in a small program that comes there.
"""

from __future__ import annotations

import ast

import pytest

from tests.checking.mutation.programs import PROGRAMS
from tests.checking.mutation.scales import EXEMPT, MUTANTS, PROGRAM_OF, SITES, factors_of, refusal

pytestmark = pytest.mark.slow
SCALES = ("N*", "/N", "N^2*", 'P("avg")')  # how types are written that are a power of a size too large, or too small


def test_every_site_has_a_program():
    assert set(SITES) == {*PROGRAM_OF, *EXEMPT}
    assert not set(EXEMPT) & set(PROGRAM_OF)
    assert set(PROGRAM_OF.values()) <= set(PROGRAMS)


def test_factors_are_found_where_they_stand():
    source = """
x = 1 / comm.size("dp")
def outer(total, scale):
    def inner(grads):
        foreach_mul_(grads, scale)
    total /= comm.size("cp")
    return total / self.group.size + total // comm.size("tp") + total * 2

class Layer:
    @torch.no_grad()
    def step(self):
        return self.norm * comm.size(("dp", "cp"))
"""
    found = [(function, ast.unparse(node)) for function, node in factors_of(ast.parse(source))]
    assert found == [
        ("", "comm.size('dp')"),
        ("outer", "scale"),
        ("outer", "comm.size('cp')"),
        ("outer", "self.group.size"),
        ("Layer.step", "comm.size(('dp', 'cp'))"),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", PROGRAM_OF)
def test_scale_mutants_are_seen_by_types(name, mutant):
    said = refusal(name, mutant)
    assert said.startswith("types: ") and any(scale in said for scale in SCALES), said or "not seen"
