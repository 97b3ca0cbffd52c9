"""A collective or conversion that is deleted, done twice or swapped for another: `spmd.check` finds it, in one process.

Every call site of the layers, of the reduction of gradients, of the optimizer and of the pipeline, in a small program
that uses it. What types cannot see is listed, with the reason, in `mutants.UNSEEN`. A usual run takes one mutant of
each kind at each site; NXD_FULL=1 takes all, and compares with what numbers show.

    python -m tests.checking.mutation.mutants --values        # the table
"""

from __future__ import annotations

import os

import pytest

from tests.checking.mutation.mutants import (
    EQUIVALENT,
    EXEMPT,
    HANGS,
    OUTSIDE,
    PROGRAM_OF,
    SITES,
    UNSEEN,
    checked,
    edits_at,
    some,
    values_differ,
)
from tests.checking.mutation.programs import PROGRAMS

pytestmark = pytest.mark.slow

FULL = os.environ.get("NXD_FULL") == "1"
NOT_SEEN = {**UNSEEN, **EQUIVALENT}
SHARE = 0.95


def mutants_of(name):
    """Every second kind of mutant, by turns; all with NXD_FULL=1."""
    return edits_at(name) if FULL else some(edits_at(name))[[*PROGRAM_OF].index(name) % 2 :: 2]


def test_every_site_has_a_program():
    sites = {name for name, site in SITES.items() if not site.is_in(*OUTSIDE) and not name.startswith(tuple(EXEMPT))}
    assert sites == set(PROGRAM_OF)
    assert set(PROGRAM_OF.values()) <= set(PROGRAMS)
    assert not set(UNSEEN) & set(EQUIVALENT)
    for name, edit in NOT_SEEN:
        assert edit in {found.name for found in edits_at(name)}, (name, edit)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_are_clean(name):
    report = PROGRAMS[name].check()
    assert report.ok, str(report)


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_mutants_are_seen(name):
    wrong = []
    for edit in mutants_of(name):
        verdict = checked(name, edit)
        assert verdict.reached, f"{edit.name}: {PROGRAM_OF[name]!r} does not come there"
        if bool(verdict.kind) == ((name, edit.name) in NOT_SEEN):
            wrong.append(f"{edit.kind}: {edit.name} is {'seen and listed as not' if verdict.kind else 'not seen'}")
    assert not wrong, wrong


def test_most_are_seen_by_types():
    """Not because they crash on shapes, which no checker is needed for."""
    verdicts = [(name, edit, checked(name, edit)) for name in PROGRAM_OF for edit in mutants_of(name)]
    wrong = [verdict for name, edit, verdict in verdicts if (name, edit.name) not in EQUIVALENT]
    assert sum(verdict.kind == "types" for verdict in wrong) > 0.85 * len(wrong)
    assert sum(bool(verdict.kind) for verdict in wrong) >= SHARE * len(wrong)
    assert len(wrong) > (200 if FULL else 100)


@pytest.mark.parametrize(
    "name",
    [name for name, program in PROGRAMS.items() if program.values is None and "zero" not in name.split(", ")],
)
def test_values_of_right_programs_are_right(name):
    """Without this `values_differ` would take any error of its program for a mutant's."""
    assert PROGRAMS[name].values_are_right()


@pytest.mark.parametrize(("site", "name"), [*NOT_SEEN][:: 1 if FULL else 3])
def test_what_is_not_seen_is_listed_for_what_it_is(site, name):
    (edit,) = [edit for edit in edits_at(site) if edit.name == name]
    assert not checked(site, edit).kind
    assert values_differ(site, edit) == ((site, name) in UNSEEN)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_numbers_agree():
    """At least 95 % of the mutants that numbers show are seen."""
    shown = seen = 0
    for name in PROGRAM_OF:
        for edit in edits_at(name):
            if values_differ(name, edit, HANGS):
                shown += 1
                seen += bool(checked(name, edit).kind)
            else:
                assert (name, edit.name) not in UNSEEN
    assert seen >= SHARE * shown, (seen, shown)
