"""Wrong emitted sources are refused: by their types, or by their values beside one process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import EmittedProgramError, build_optimizer, parallelize
from neuronx_dist.parallelize.prove import verify
from neuronx_dist.parallelize.train import pipelined
from tests.parallelize.support.mutants import EAGER, Emitted, emitted, mutants, noticed
from tests.parallelize.support.pipelines import config, module, samples
from tests.support.reviewed import assert_reviewed
from tests.support.source_edits import SourceEdit

pytestmark = pytest.mark.slow

program = cache(emitted)


class Bug(NamedTuple):
    """An edit of the first line of a program that a pattern matches, and by what it is noticed."""

    program: str
    pattern: str
    text: str
    by: str

    def edited(self, source: str) -> str:
        changed, count = re.subn(self.pattern, self.text, source, count=1, flags=re.MULTILINE)
        assert count, f"no line matches {self.pattern}"
        return changed


REDUCED = r"= spmd\.all_reduce\((\w+), "
GATHERED = r"= spmd\.all_gather\((\w+), "
CONVERTED = r"= spmd\.convert\(([\w.]+), "
SUM = r"= (\w+) \+ (\w+)  #"
PARAMETER = r"(\w+) = spmd\.convert\((self[\w.]+), (.*src=I.*)\)  #"

# The bugs that TrainVerify (SOSP 2025) injects in lines of an emitted file; those of what runs it are below.
BUGS = {
    "no all-reduce behind a product": Bug("mlp", REDUCED + r".*\)  #", r"= \1  #", "types"),
    "no all-reduce of the loss": Bug("gpt", REDUCED + r".*dst=I\)  # \[\] I", r"= \1  #", "types"),
    "all-reduce in place of all-gather": Bug(
        "rotary", GATHERED + r'"tp", src=S\(\d\),', r'= spmd.all_reduce(\1, "tp", src=P,', "types"
    ),
    "all-gather in place of all-reduce": Bug(
        "mlp", REDUCED + r'"tp", src=P,', r'= spmd.all_gather(\1, "tp", src=S(1),', "types"
    ),
    "no reduction in backward": Bug("rotary", CONVERTED + r".*\)  # (.*) R$", r"= \1  # \2 R", "types"),
    "the piece of another rank": Bug(
        "mlp",
        CONVERTED + r'"tp", src=R, dst=S\(0\)\)',
        r'= spmd.convert(\1.roll(\1.shape[0] // 2, 0), "tp", src=R, dst=S(0))',
        "values",
    ),
    "an operation changed on one rank": Bug("rotary", SUM, r"= (\1 + \2 if self._index else \1 - \2)  #", "values"),
    "an operation changed on all ranks": Bug("rotary", SUM, r"= \1 - \2  #", "values"),
    "another power": Bug("pair", r"= torch\.tanh\((.*)\)  #", r"= torch.tanh(\1).pow(3)  #", "values"),
    "the gradient of one consumer lost": Bug("rotary", SUM, r"= \1.detach() + \2  #", "values"),
    "rotary embeddings reversed": Bug(
        "rotary", r"torch\.cat\(\[(\w+), (\w+)\], -1\)", r"torch.cat([\2, \1], -1)", "values"
    ),
    "the loss scaled": Bug("gpt", r"^(\s+)return (\w+)$", r"\1return \2 / 2", "values"),
    "a gradient scaled": Bug(
        "rotary", PARAMETER, r"\1 = 2 * spmd.convert(\2, \3) - spmd.convert(\2, \3).detach()  #", "values"
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs(bug: str) -> None:
    right = program(BUGS[bug].program)
    assert noticed(right, BUGS[bug].edited(right.source)) == BUGS[bug].by


def _wrong_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = comm.send

    def send(x: Any, axis: Any, *, dst: int, **options: Any) -> Any:
        return right(x, axis, dst=next(other for other in range(4) if other not in (dst, comm.rank("pp"))), **options)

    monkeypatch.setattr(comm, "send", send)


def _early_reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "paused", lambda params: nullcontext())


# What is edited, and by what it is noticed: the check of the whole job, before it is loaded, or the first step.
BUGS_OF_JOBS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, type[Exception], str]] = {
    "a message to a wrong peer": (_wrong_peer, "whole mesh", EmittedProgramError, "step of the whole job is wrong"),
    "the reducer before the last microbatch": (_early_reducer, "first step", RuntimeError, "may have started"),
}


@pytest.mark.parametrize("bug", BUGS_OF_JOBS)
def test_injected_bugs_of_jobs(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, by, error, text = BUGS_OF_JOBS[bug]
    settings = config(4, 2, reducer=True, pipeline_nstages=4, costs=EAGER)
    monkeypatch.setattr(verify, "check_values", lambda *args: (0.0, ""))  # of the file, which is right
    edit(monkeypatch)
    reached = []

    def rank() -> None:
        parallel: Any = parallelize(
            module("mlp"), {"data": samples("mlp", 1)[0]}, "hybrid", settings, gen_savedir=tmp_path
        )
        optimizer = build_optimizer(parallel, torch.optim.SGD, lr=0.1)
        reached.append("first step")
        parallel.train_step(samples("mlp", 4))
        optimizer.step()

    with pytest.raises((error, RuntimeError), match=text):  # on rank 0, or on another one, which reports it
        threads.run(settings.mesh(4), rank)
    assert bool(reached) == (by == "first step")


@pytest.mark.parametrize("name", ["mlp", "pair"])
def test_every_mutant_of_every_collective(name: str) -> None:
    assert not _missed(program(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary, joined", "pair, joined"])
def test_every_mutant_of_collectives_of_several_tensors(name: str) -> None:
    """Drops, doubles or scales one of them, puts it in the place of another one, drops all, asks for another type."""
    right = program(name)
    assert not noticed(right, right.source)
    found = [mutant for mutant in mutants(right.source) if mutant.operator.startswith("joined")]
    assert len(found) >= 5
    assert not [f"{mutant.operator}: {mutant.line}" for mutant in found if not noticed(right, mutant.edited)]


@pytest.mark.slow
def test_a_sample_of_the_mutants_of_models() -> None:
    assert not [missed for name in ("gpt", "rotary", "conv") for missed in _missed(program(name), every=12)]


@pytest.mark.full
def test_table() -> None:
    """The table in docs/parallelize.md is made of these numbers."""
    texts = {}
    for name in ("gpt", "rotary", "conv"):
        right = program(name)
        counts = Counter((mutant.operator, noticed(right, mutant.edited)) for mutant in _real(right))
        lines = [f"{edit} {by or 'missed'} {count}" for (edit, by), count in sorted(counts.items())]
        texts[name] = "\n".join(lines)
    assert_reviewed(Path(__file__).parent / "expected_mutants.txt", texts)


def test_the_table_of_the_documentation_has_these_numbers() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for line in (Path(__file__).parent / "expected_mutants.txt").read_text().splitlines():
        if line and not line.startswith("==="):
            edit, by, count = line.split()
            counts[edit, by] += int(count)
    page = Path("docs/parallelize.md").read_text()
    names = {
        "drop": "dropped",
        "double": "doubled",
        "retarget": "another destination",
        "exchange": "another collective",
    }
    for edit in {edit for edit, _ in counts}:
        numbers = " | ".join(str(counts[edit, by]) for by in ("types", "values", "missed"))
        assert f"| {names.get(edit, 'scaled by 2')} | {numbers} |" in page


def _missed(right: Emitted, every: int = 1) -> list[str]:
    assert not noticed(right, right.source)
    found = list(_real(right))
    assert len(found) > 8
    return [f"{mutant.operator}: {mutant.line}" for mutant in found[::every] if not noticed(right, mutant.edited)]


def _real(right: Emitted) -> list[SourceEdit]:
    """The mutants that change something: an RMS norm without eps is the same at any scale of its input."""
    return [
        mutant
        for mutant in mutants(right.source)
        if mutant.operator != "scale" or not re.search(rf"rms_norm\({mutant.line.split()[0]},", right.source)
    ]
