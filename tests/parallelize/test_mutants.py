"""Wrong emitted sources are refused: by their types, or by their values beside one process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parallelize.mutants import Emitted, emitted, mutants, noticed
from tests.support.reviewed import assert_reviewed

program = cache(emitted)


def replaced(pattern: str, text: str) -> Callable[[str], str]:
    """An edit of the first line that a pattern matches."""

    def edit(source: str) -> str:
        changed, count = re.subn(pattern, text, source, count=1, flags=re.MULTILINE)
        assert count, f"no line matches {pattern}"
        return changed

    return edit


OPERATOR = r"= spmd\.{}\((\w+), (.*)\)  #"
RANK = "self._index"

# The bugs that TrainVerify (SOSP 2025) injects, but for those of pipelines (wrong peers of messages: tests/pipeline) and
# of the reducer (launched before the last microbatch: test_optimizer.py). Name: program, edit, by what it is noticed.
BUGS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "no all-reduce behind a product": ("mlp", replaced(OPERATOR.format("all_reduce"), r"= \1  #"), "types"),
    "no all-reduce of the loss": ("gpt", replaced(r"= spmd\.all_reduce\((\w+), .*dst=I\)  # \[\] I", r"= \1  # "), "types"),
    "all-reduce in place of all-gather": (
        "rotary", replaced(r"= spmd\.all_gather\((\w+), \"tp\", src=S\(\d\),", r'= spmd.all_reduce(\1, "tp", src=P,'), "types",
    ),
    "all-gather in place of all-reduce": (
        "mlp", replaced(r"= spmd\.all_reduce\((\w+), \"tp\", src=P,", r'= spmd.all_gather(\1, "tp", src=S(1),'), "types",
    ),
    "no reduction in backward": ("rotary", replaced(OPERATOR.format("convert") + r" (.*) R$", r"= \1  # \3 R"), "types"),
    "the piece of another rank": (
        "mlp",
        replaced(
            r"= spmd\.convert\((\w+), \"tp\", src=R, dst=S\(0\)\)",
            rf'= spmd.convert(\1.roll(\1.shape[0] // 2, 0), "tp", src=R, dst=S(0))',
        ),
        "values",
    ),
    "an operation changed on one rank": (
        "rotary", replaced(r"= (\w+) \+ (\w+)  #", rf"= (\1 + \2 if {RANK} else \1 - \2)  #"), "types",
    ),
    "an operation changed on all ranks": ("rotary", replaced(r"= (\w+) \+ (\w+)  #", r"= \1 - \2  #"), "values"),
    "another power": ("pair", replaced(r"= torch\.tanh\((.*)\)  #", r"= torch.tanh(\1).pow(1.5)  #"), "values"),
    "the gradient of one consumer lost": ("rotary", replaced(r"= (\w+) \+ (\w+)  #", r"= \1.detach() + \2  #"), "values"),
    "rotary embeddings reversed": ("rotary", replaced(r"torch\.cat\(\[(\w+), (\w+)\], -1\)", r"torch.cat([\2, \1], -1)"), "values"),
    "the loss scaled": ("gpt", replaced(r"^(\s+)return (\w+)$", r"\1return \2 / 2"), "values"),
    "a gradient scaled": (
        "rotary", replaced(r"(\w+) = spmd\.convert\((self[\w.]+), (.*src=I.*)\)  #", r"\1 = 2 * spmd.convert(\2, \3) - spmd.convert(\2, \3).detach()  #"), "values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs(bug: str) -> None:
    name, edit, by = BUGS[bug]
    right = program(name)
    assert noticed(right, edit(right.source)) == by


@pytest.mark.parametrize("name", ["mlp", "pair"])
def test_every_mutant_of_every_collective(name: str) -> None:
    assert not _missed(program(name))


@pytest.mark.slow
def test_every_mutant_of_a_model() -> None:
    assert not [missed for name in ("gpt", "rotary", "conv") for missed in _missed(program(name))]


@pytest.mark.slow
def test_table() -> None:
    """The table in docs/parallelize.md is made of these numbers."""
    texts = {}
    for name in ("gpt", "rotary", "conv"):
        right = program(name)
        counts = Counter((mutant.edit, noticed(right, mutant.source)) for mutant in mutants(right.source))
        lines = [f"{edit} {by or 'missed'} {count}" for (edit, by), count in sorted(counts.items())]
        texts[name] = "\n".join(lines)
    assert_reviewed(Path(__file__).parent / "expected_mutants.txt", texts)


def _missed(right: Emitted) -> list[str]:
    assert not noticed(right, right.source)
    found = list(mutants(right.source))
    assert len(found) > 8
    return [f"{mutant.edit}: {mutant.line}" for mutant in found if not noticed(right, mutant.source)]
