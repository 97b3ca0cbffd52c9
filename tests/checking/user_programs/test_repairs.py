"""First repairs of the buggy programs, applied as an editor would: no repaired program may be accepted and wrong.

`NXD_FULL=1` repairs all programs, in two minutes of CPU; `-s` prints the figures and where each repair led.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from neuronx_dist import comm, spmd
from tests.checking.user_programs import support

PROGRAMS = dict(support.load())
BUGGY = [name for name, program in PROGRAMS.items() if program.bug]
ROUNDS = 4  # of repairs, one after another

# Programs whose repairs were wrong, or led to an accepted and wrong program, and one of each way to drop a reduction.
SAMPLE = [
    "balance_loss.counts_of_this_rank",
    "convolutions.bias_on_every_rank",
    "lion_by_hand.own_signs",
    "mean_over_a_named_axis.wrong_axis",
    "mean_over_the_data_ranks.over_the_world",
    "multi_token_heads.head_of_next_not_summed",
    "perplexity_as_a_metric.mean_of_exponentials",
    "seeded_mask.mask_of_the_rank",
    "shared_block.norm_summed_twice",
    "shared_block.sharded_weights_summed",
    "zero1.clipped_before",
]
# Repaired programs that the checker accepts, and that are wrong.
KNOWN = {
    "hardest_samples.own_hardest": "the number of kept samples, equal to the number of local rows, is taken for local",
}


class Repaired(NamedTuple):
    """End of a program's repairs: "right", "accepted and wrong", "in words", "no repair" or "not accepted"."""

    end: str
    repairs: list[str]


@pytest.fixture
def programs() -> Iterator[dict[str, support.Program]]:
    """All registered programs; those that the files of repaired ones register are forgotten afterwards."""
    before = dict(support.PROGRAMS)
    yield before
    support.PROGRAMS.clear()
    support.PROGRAMS.update(before)


def repaired(name: str, folder: Path) -> Repaired:
    """Applies the first repair of each refusal to the source of a program, until it is accepted."""
    file, repairs = "", []
    module = (PROGRAMS[name].step or PROGRAMS[name].model_fn).__module__
    for number in range(ROUNDS + 1):
        found = support.verdict.__wrapped__(name)
        if found.outcome == "accepted":
            is_right = support.execute.__wrapped__(name).difference <= support.EQUAL
            return Repaired("right" if is_right else "accepted and wrong", repairs)
        problem = found.report.problems[0] if found.report is not None and found.report.problems else None
        offered = getattr(problem.error, "repairs", ()) if problem is not None else ()
        if found.outcome != "refused" or not offered or number == ROUNDS:
            return Repaired("no repair" if found.outcome == "refused" and number < ROUNDS else "not accepted", repairs)
        repairs.append(str(offered[0]))
        edits = getattr(offered[0], "edits", ())
        if not edits:
            return Repaired("in words", repairs)
        file = file or edits[0].file
        source = _edited(Path(file), edits)
        file = str(folder / f"{name}_{number}.py")
        Path(file).write_bytes(source)
        support.PROGRAMS.clear()
        names = {"__name__": module, "__file__": file, "spmd": spmd, "comm": comm}
        exec(compile(source, file, "exec"), names)
    raise AssertionError


def _edited(file: Path, edits: Any) -> bytes:
    lines = file.read_bytes().splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        assert edit.file == str(file)
        (line, column), (end_line, end_column) = edit.start, edit.end
        lines[line - 1 : end_line] = [lines[line - 1][:column] + edit.text.encode() + lines[end_line - 1][end_column:]]
    return b"".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_repaired_program_is_accepted_and_wrong(programs, tmp_path):
    names = BUGGY if os.environ.get("NXD_FULL") else SAMPLE
    refused = [name for name in names if support.verdict(name).outcome == "refused"]
    ends = {}
    for name in refused:
        support.PROGRAMS.clear()
        support.PROGRAMS.update(programs)
        ends[name] = repaired(name, tmp_path)
        print(f"{name}: {ends[name].end}", *ends[name].repairs, sep="\n    ")
    counts = Counter(end.end for end in ends.values())
    print(dict(counts))
    assert {name for name, end in ends.items() if end.end == "accepted and wrong"} == set(KNOWN) & set(refused)
    edited = counts["right"] + counts["accepted and wrong"] + counts["not accepted"] + counts["no repair"]
    assert counts["right"] >= 0.9 * edited, counts
    assert len(refused) == len(SAMPLE) or len(refused) > 200


WORDS = {
    "mean_over_a_named_axis.wrong_axis": 'comm.all_reduce(p.grad, "dp"): over dp it is not reduced yet, over tp it is',
    "mean_over_the_data_ranks.over_the_world": 'comm.all_reduce(p.grad * scale, "dp"): over dp it is not reduced yet',
    "seeded_mask.mask_of_the_rank": "one seed on all ranks of tp for the numbers drawn at ",
    "shared_block.norm_summed_twice": "one of both reductions: this gradient is reduced over tp before nxd.reduce_grad",
    "shared_block.sharded_weights_summed": '(p.grad if spmd.spec_of(p).axis == "tp" else comm.all_reduce(p.grad, "tp")',
    "zero1.clipped_before": "nxd.clip_grad_norm(model.parameters(), 0.1) after nxd.reduce_gradients(model)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_first_repair_names_what_is_wrong(name):
    problem = support.verdict(name).report.problems[0]
    assert str(problem.error.repairs[0]).startswith(WORDS[name]), problem.message
