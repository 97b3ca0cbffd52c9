"""Right programs that are refused, and the `local_map` that the message offers: with its text they pass, and are right.

The text goes in the place of the call that is refused (a ring's is around the loop, with the function and the types
filled in). Where one text does not suffice, the next message has the next.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checking.exam import local
from tests.checking.exam.support import CLASSES, load
from tests.checking.user_programs import support

OFFER = re.compile(r"(?:repair|    or): (spmd\.local_map\(.*?\)\(\w+\)|spmd\.local_map\(function, .*?\)(?= around))")


def offered(message: str) -> str:
    found = OFFER.search(message)
    assert found is not None, message
    return found[1]


@pytest.fixture
def edited(tmp_path):
    """`edited(name, source)`: the verdict on a program of an edited file, and whether its values are right."""
    load()
    programs, classes = dict(support.PROGRAMS), dict(CLASSES)

    def judge(name: str, source: str) -> tuple[support.Verdict, bool]:
        file = tmp_path / "edited.py"
        file.write_text(source)
        support.PROGRAMS.clear()
        exec(compile(source, str(file), "exec"), {"__name__": local.__name__, "__file__": str(file)})
        found = support.verdict.__wrapped__(name)
        return found, support.execute.__wrapped__(name).difference <= support.EQUAL

    yield judge
    for registry, before in ((support.PROGRAMS, programs), (CLASSES, classes)):
        registry.clear()
        registry.update(before)


SOURCE = Path(local.__file__).read_text()
# Calls in the place of which the offered text goes, one after another; the function, and the types that it leaves open.
CALLS = {
    "top": [('logits.topk(4 // comm.size("tp") if self.bug else 4, dim=-1)', "", "")],
    "capacity_by_cumsum": [
        ("chosen.cumsum(0)", "", ""),
        ("self.dispatched(dispatch, tokens)", "self.dispatched", ""),
        (
            "self.combined(dispatch, y, gates)",
            "self.combined",
            '[{"ep": spmd.S(0)}, {"ep": spmd.S(1)}, {"ep": spmd.S(0)}]',
        ),
    ],
}

WRONG = {"top": ["fewer"], "capacity_by_cumsum": ["not_sent_back"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_program_with_the_offered_text_passes_and_is_right(edited, name):
    source = SOURCE
    said, right = edited(name, source)
    for call, function, types in CALLS[name]:
        assert said.outcome == "refused" and right, said.message
        text = offered(said.message)
        if function:
            text = (
                text.replace("function", function, 1)
                .replace('{"ep": ...}', '{"ep": spmd.S(0)}')
                .replace("[...]", types)
                + call[len(function) :]
            )
        assert source.count(call) == 1
        said, right = edited(name, source := source.replace(call, text))
    assert said.outcome == "accepted" and right, said.message
    for bug in WRONG[name]:  # the text of `top` replaces what is wrong
        said, right = edited(f"{name}.{bug}", source)
        assert said.outcome == ("accepted" if right else "refused"), said.message


@pytest.mark.slow
def test_a_ring_in_the_offered_local_map_passes_and_is_right(edited):
    said, _ = edited("ring", SOURCE)
    text = offered(said.message).replace("function", "self.parts").replace("...", "S(2)")
    source = SOURCE.replace("self.loss(x, self.parts(q, k, v))", f"self.loss(x, {text}(q, k, v))", 1)
    assert source != SOURCE
    for name, outcome in (("ring", "accepted"), ("ring.gradient_goes_on", "refused")):
        said, right = edited(name, source)
        assert said.outcome == outcome and right == (outcome == "accepted"), said.message
