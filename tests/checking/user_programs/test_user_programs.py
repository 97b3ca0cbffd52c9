"""Programs that no rule was written for: what each is, shown by running it, and what the checker says of it.

`python -m tests.checking.user_programs` prints the figures.
"""

from dataclasses import replace
from zlib import crc32

import pytest

from tests.checking.user_programs.support import execute, load, verdict

PROGRAMS = load()

LOCAL = "a part of this rank's own shard of what a layer gives is refused: spmd.local_map is offered"
OFFSET = "which positions or heads are this rank's own is not judged"
SIZE = "a literal size, or a number of groups, is taken for a local one: assumed, at its line"

# Where the checker is wrong today, and why. It is exact: what the checker learns is taken out.
KNOWN = {
    "mean_over_the_data_ranks": "1.0 / comm.size() is a plain number: Python does not ask the int on the right",
    "accumulation_by_split_and_sums.not_cleared": "what a step leaves to the next one is not seen",
    "own_rows_of_a_whole_batch.same_part": "which part of what all ranks have is taken: assumed, at its line",
    "broadcast_of_first_weights.not_the_biases": "first values of weights are not seen: spmd.verify compares them",
    "zero1_on_a_flat_slice.wrong_slice": "that the slice is that of the rank's number: assumed, at its line",
    "weights_averaged_after_the_step": "a step with gradients that are not reduced is refused, though SGD is linear",
    "loop_over_experts.gates_of_the_first": "what belongs to which expert is not judged",
    "capacity_dispatch": LOCAL,
    "convolutions.groups_of_the_whole": SIZE,
    "fused_qkv.heads_of_all_ranks": SIZE,
    "kv_head_of_rank.round_robin": OFFSET,
    "ring_attention": "a ring of permuted pieces has no type",
    "ulysses.whole_sequences_before": OFFSET,
    "local_windows.number_of_windows": SIZE,
    "short_convolution": LOCAL,
    "linear_attention": LOCAL,
    "greedy_feedback": LOCAL,
    "top_logits": LOCAL,
    # Of the programs of untuned_*.py, on which no rule was tuned.
    "rotary_grouped_query.scaled_by_local_width": "math.sqrt of a local size is a plain number",
    "rotary_grouped_query.width_over_all_heads": "a local size as the inner part of a sharded dim is not judged",
    "labels_shifted_over_the_border": LOCAL,
    "focal_loss": "a count divided by the size of dp is clamped: right but where the bound takes hold",
    "mean_assigned_to_all_positions": "x[:] = y keeps the type of x, P, as if it wrote to a part of it",
}


def one_in(count):
    """Names of programs, of which `make test` runs one in `count`, the same each time, and what is in KNOWN."""
    names = {name for name in PROGRAMS if name in KNOWN or crc32(name.encode()) % count == 0}
    return [pytest.param(name, marks=[] if name in names else pytest.mark.full) for name in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(8))
def test_execution_confirms_what_the_program_is(name):
    ran = execute(name)
    assert ran.confirms(PROGRAMS[name]), f"{PROGRAMS[name].bug or 'right'}: {ran}"


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(4))
def test_verdict(name):
    found = verdict(name)
    expected = "accepted" if PROGRAMS[name].right else "refused"
    if name in KNOWN:
        assert found.outcome != expected, f"{name} is {expected} now: take it out of KNOWN ({KNOWN[name]})"
    else:
        assert found.outcome == expected, f"{PROGRAMS[name].bug or 'right'}: {found.report or found.message}"


def test_a_wrong_label_is_not_confirmed():
    right, buggy = PROGRAMS["all_reduce_by_hand"], PROGRAMS["all_reduce_by_hand.not_divided"]
    assert not execute(right.name).confirms(replace(right, bug="it has one"))
    assert not execute(buggy.name).confirms(replace(buggy, bug=""))


def test_there_are_enough_programs():
    buggy = [program for program in PROGRAMS.values() if program.bug]
    assert len(buggy) >= 73 and len(PROGRAMS) - len(buggy) >= 67
    assert set(KNOWN) <= set(PROGRAMS)
