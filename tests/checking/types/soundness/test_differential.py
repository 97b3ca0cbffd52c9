"""The same programs in our checker and in the published package `spmd_types` 0.3.1: where they differ, and why.

Where both accept a program their types are equal, S read as V. Every difference is of a kind that is listed here with
its reason; one that is not is a failure. Without shards the published package is asked in its local mode, with shards
in its global mode (which judges matrix products by DTensor, at 2 ms each: fewer programs).
"""

from __future__ import annotations

import logging
import os
import re

import pytest

pytest.importorskip("spmd_types")

import torch

from neuronx_dist.spmd.types import Shard
from tests.checking.types.soundness import peer
from tests.checking.types.soundness.generator import Generator, Rejection, Unsound
from tests.checking.types.soundness.program import Program, Step

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("NXD_FULL"))
FIRST = int(os.environ.get("NXD_SEED", "0"))
LEFT_OUT = ("comm.", "forget(")  # what the published package has not

# What it rejects and we accept: a pattern of its message -> why ours is right.
THEY_REJECT = {
    r"Partial type on axis \S+ cannot propagate through non-linear ops": "a linear function that is registered there "
    "as none (casts, slices, pad, tril, outer, F.linear, zeros_like ...: reference 1.3); the soundness tests run it",
    r"in a linear op requires all operands to be Partial": "P + 0, and expand_as, of whose operand the shape is read",
    r"Partial type on axis \S+ cannot combine with": "written all over (copy_), or a mask of it that decides nothing",
    r"all_reduce input must be contiguous": "a crash of theirs, on expanded and transposed tensors",
    r"in-place/out operation would change SPMD type": "written all over: what it was before does not matter",
    r"expected input type": "memory that was written, or is constant: they keep the type that it had before",
    r"Only sum-Partial is supported": 'a maximum over a sharded dim is P("max") here',
    r"No valid sharding strategy": "an operator that DTensor has no rule for, or knows under another name",
    r"DTensorPropagationError": "a view that merges or splits a sharded dim: S has a stride here",
    r"has Varying type on axis \S+ but no PartitionSpec": "V without a dim does not exist in their global mode",
    r"Invariant type on axis \S+ cannot mix": "constants, and what has no gradient, mix with I here",
    r"RuntimeError|ValueError: .*shard|NotImplementedError|AssertionError": "a crash of theirs",
}

# What we reject and it accepts: our rule -> why ours is right.
WE_REJECT = {
    "scalar": "a Python number made of what varies or is partial (reference 2, unsound there)",
    "inplace": "a write through a view, or under no_grad, that changes the type of what has a gradient",
    "stale": "the same",
    "stride": "S(dim, stride): not theirs to say, so they take the blocks for one",
    "broadcast": "a sharded dim of local size 1 that is broadcast or dropped has another size in one process",
    "whole": "a sharded dim of local size 1 against one that is whole: no dims of size 1 in one process",
    "shards": "strides again: they take both for shards of the same dim",
    "source": "a write changed what it is; or all_to_all along one dim, which mixes the order up",
    "partial_max": 'P("max")',
    "reduced_twice": "constants",
    "reduced": "the mean over a sharded dim, and any, are no sums",
}


def _letter(program: Program, name: str) -> str:
    kind = program.claims[name].get("tp")
    return "V" if isinstance(kind, Shard) else kind.letter


def _programs(count: int, level: str):
    """Programs with what was rejected on the way."""
    for seed in range(FIRST, FIRST + count):
        generator = Generator(seed, {"tp": 2}, level)
        generator.letters = "RIVP" if level == "L" else "RIPS"
        try:
            program = generator.make(6)
        except Unsound:
            continue  # test_soundness says so
        yield program, generator.rejections


def _comparable(steps: list[Step]) -> bool:
    return not any(word in step.text for step in steps for word in LEFT_OUT)


def _written(program: Program) -> bool:
    """Whether types may differ: something was written in place, or is a constant of the shape of what varies."""
    return any(
        not step.targets or "_like" in step.text or "zeros" in step.text or "_(" in step.text for step in program.steps
    )


def _equal(program: Program, letters: set[str]) -> bool:
    """Returns whether types are I and R of a tensor that may be either: it has a constant in it, or no gradient."""
    return letters == {"R", "I"} and (
        "torch.ones" in str(program) or "no_grad" in str(program) or "expand_as" in str(program)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200 if FULL else 120)
@pytest.mark.parametrize("level", ["L", "G"])
def test_differences_from_the_published_checker_are_the_known_ones(level):
    count = {"L": 3000 if FULL else 250, "G": 600 if FULL else 40}[level]
    compared = same = 0
    unknown: list[str] = []
    logging.disable(logging.CRITICAL)
    try:
        with peer.world(2) as mesh:
            for program, rejections in _programs(count, level):
                if _comparable(program.steps):
                    compared += 1
                    found = _accepted(program, mesh, level == "L")
                    same += not found
                    unknown += found if found and not found[0].startswith("known") else []
                for rejection in rejections:
                    if _comparable([*rejection.program.steps, rejection.step]):
                        unknown += _rejected(rejection, mesh, level == "L")
    finally:
        logging.disable(logging.NOTSET)
    assert not unknown, "\n\n".join(unknown[:5])
    assert compared > count * 0.6 and same > compared * 0.5, (compared, same)
    print(f"{compared} programs from seed {FIRST}: in {same} nothing differs")


def _accepted(program: Program, mesh, local: bool) -> list[str]:
    """Returns the differences in a program that we accept; a known difference starts with "known"."""
    types: dict[str, str] = {}
    for step, error, types in peer.judge(program, None, mesh, local):  # noqa: B007
        if error:
            known = [why for pattern, why in THEY_REJECT.items() if re.search(pattern, error)]
            return [f"known: {known[0]}"] if known else [f"they reject\n{program}\nat\n{step.text}\n{error}"]
    for name, theirs in types.items():
        if name in program.claims and not program.claims[name].constant and _letter(program, name) != theirs:
            if _equal(program, {_letter(program, name), theirs}):
                return ["known: a constant with what is I and has no gradient: I and R are one then"]
            if "expand_as" in str(program):
                return ["known: of the operand of expand_as only the shape is read"]
            if _written(program):  # they do not follow writes through views, nor what a write makes of a type
                return ["known: memory was written, or a constant is like what varies"]
            return [f"{name} is {_letter(program, name)}, they say {theirs}\n{program}"]
    return []


def _rejected(rejection: Rejection, mesh, local: bool) -> list[str]:
    """Returns the differences in a step that we reject."""
    if rejection.step.text.startswith("torch.autograd") or rejection.rule in WE_REJECT:
        return []
    for step, error, _ in peer.judge(rejection.program, rejection.step, mesh, local):
        if error:
            return []
        if step is rejection.step:
            return [f"we reject\n{rejection.program}\nat\n{step.text}\n{rejection.message}"]
    return []


def test_they_know_the_types_that_we_compare():
    with peer.world(2) as mesh:
        generator = Generator(3, {"tp": 2}, "L")
        generator.letters = "RIVP"
        program = generator.make(0)
        program.steps = [Step("v9 = v0.detach() * 1.0", None, ("v9",), "test")]
        ((_, error, types),) = peer.judge(program, None, mesh, True)
    assert not error
    assert {*types} == {"v9", *(x.name for x in program.inputs)}
    assert all(types[x.name] == _letter(program, x.name) for x in program.inputs)
    assert torch.distributed.is_initialized() is False
