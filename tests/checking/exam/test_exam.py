"""The exam of the checker: pairs of programs, right and wrong, the truth by execution, the verdict by `spmd.check`.

`python -m tests.checking.exam` prints all of them. A program is expected to be accepted if it is right and refused if
it is wrong; `OFFERED` and `LISTED` are the exceptions, and `KNOWN` has verdicts that are wrong today.

    3 reductions      maxima, norms, quotients, histories, auxiliary losses, counts as Python numbers
    4 by hand         FSDP, recomputation, accumulation, the norm's filter by rank
    5 local code      rings, capacity, top-k, sampling, numbers that are read
    6 returned        what a step returns      7 means of means      8 a tied table in a norm over stages
    9 own rows among gathered ones             10 order of pieces    11 plain numbers that equal the size of an axis
"""

import pytest

from tests.checking.exam.support import CLASSES, load
from tests.checking.user_programs.support import execute, verdict

PROGRAMS = load()

# Right programs that are refused, and the words with which the message makes them pass.
OFFERED = {
    "ring": 'spmd.local_map(function, out_types={"cp": ...}',
    "capacity_by_cumsum": "spmd.local_map(lambda x: x.cumsum(0)",
    "top": "spmd.local_map(lambda x: x.topk(4, dim=-1)",
}

# Wrong programs that are accepted, and the assumption at the user's line that says what may be wrong.
LISTED = {
    "labels_that_count.own_labels": "that as many targets count on every rank",
    "learning_rate_by_a_literal.twice": "that 2 is a number of the program",
}

# Wrong verdicts, and why. It is exact: what the checker learns is taken out.
KNOWN: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_execution_confirms_what_the_program_is(name):
    ran = execute(name)
    assert ran.confirms(PROGRAMS[name]), f"{PROGRAMS[name].bug or 'right'}: {ran}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_verdict(name):
    said = verdict(name)
    expected = "accepted" if PROGRAMS[name].right else "refused"
    if name in OFFERED:
        assert said.outcome == "refused" and OFFERED[name] in said.message
    elif name in LISTED:
        assert said.outcome == "accepted" and any(LISTED[name] in text and "exam" in text for text in said.assumed)
    elif name in KNOWN:
        assert said.outcome != expected, f"{name} is {expected} now: take it out of KNOWN ({KNOWN[name]})"
    else:
        assert said.outcome == expected, f"{PROGRAMS[name].bug or 'right'}: {said.report or said.message}"


SAMPLE = (
    "clipped_by_largest_entry clipped_by_squared_norms count_as_python_number accuracy norm_filter early_stop "
    "mean_in_the_backward_of_the_gather learning_rate_by_a_literal rows_by_parts"
).split()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.partition(".")[0] in SAMPLE])
def test_verdict_of_a_sample(name):
    test_verdict(name)


def test_there_are_enough_pairs_of_every_class():
    pairs = {name.partition(".")[0] for name, program in PROGRAMS.items() if program.bug}
    assert len(pairs) >= 55
    assert {class_.partition(" ")[0] for class_ in CLASSES.values()} == {str(item) for item in range(3, 12)}
    assert {*OFFERED, *LISTED, *KNOWN} <= set(PROGRAMS)
