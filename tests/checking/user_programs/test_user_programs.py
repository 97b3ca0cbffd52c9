"""Programs that no rule was written for: what each is, shown by running it, and what the checker says of it."""

import pytest

from tests.checking.user_programs.support import execute, load, verdict

PROGRAMS = load()

# Where the checker is wrong today, and why. It is exact: what the checker learns is taken out.
KNOWN: dict[str, str] = {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_execution_confirms_what_the_program_is(name):
    ran = execute(name)
    assert ran.confirms(PROGRAMS[name]), f"{PROGRAMS[name].bug or 'right'}: {ran}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdict(name):
    told = verdict(name)
    expected = "accepted" if PROGRAMS[name].right else "refused"
    if name in KNOWN:
        assert told.outcome != expected, f"{name} is {expected} now: take it out of KNOWN ({KNOWN[name]})"
    else:
        assert told.outcome == expected, f"{PROGRAMS[name].bug or 'right'}: {told.report or told.message}"


def test_known_names_programs():
    assert set(KNOWN) <= set(PROGRAMS)
