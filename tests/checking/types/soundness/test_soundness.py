"""Soundness by execution: what the checker accepts means on the ranks what its types say.

Random programs, of operations that the checker accepts one after the other, run on ranks as threads; what they must be
equal to is in `execution.py`. Not decided, and left out: the sum over the ranks of a constant (`ones` are added up to
count), values that a program draws, and inputs that are not what they are declared to be.
"""

from __future__ import annotations

import os

import pytest
import torch

from neuronx_dist.comm.errors import CommError
from neuronx_dist.spmd import I, P, R, S, V
from tests.checking.types.soundness.completeness import measure
from tests.checking.types.soundness.execution import verify
from tests.checking.types.soundness.generator import Generator, Unsound
from tests.checking.types.soundness.minimise import minimise, wrong
from tests.checking.types.soundness.program import Input, Program, Step

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("NXD_FULL"))
PROGRAMS = 2500 if FULL else 75  # 1 s of CPU a case; seeds that the whole run covers, too
FIRST = int(os.environ.get("NXD_SEED", "0"))
GRIDS = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "dp2-tp2": {"dp": 2, "tp": 2}}
BATCH = 50


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800 if FULL else 120)
@pytest.mark.parametrize("level", ["G", "L"])
@pytest.mark.parametrize("grid", GRIDS)
def test_accepted_programs_mean_what_their_types_say(grid, level):
    count = PROGRAMS if level == "G" else PROGRAMS // 2
    batch: list[Program] = []
    steps = gradients = 0
    for seed in range(FIRST, FIRST + count):
        generator = Generator(seed, GRIDS[grid], level)
        try:
            batch.append(generator.make(generator.rng.randint(3, 10)))
        except Unsound:
            _fail(generator.program)
        steps += len(batch[-1].steps)
        gradients += bool(batch[-1].losses)
        if len(batch) == BATCH or seed == FIRST + count - 1:
            _verify(batch)
            batch = []
    assert steps > 6 * count and gradients > count // 3, "the generator makes programs that do too little"
    print(f"{count} programs of {steps} steps from seed {FIRST}, {gradients} with gradients")


class Dealing(Generator):
    dealt = True


@pytest.mark.filterwarnings("ignore")
def test_shards_in_another_order_mean_what_their_types_say():
    batch = [Dealing(seed, GRIDS["tp2"], "G").make(8) for seed in range(FIRST, FIRST + (500 if FULL else 50))]
    assert sum(step.op == "ordered" for program in batch for step in program.steps) > len(batch) // 10
    _verify(batch)


def _verify(batch: list[Program]) -> None:
    try:
        found = verify(batch)
    except (CommError, RuntimeError) as error:  # on one rank alone: which program is it?
        found = [(program, why) for program in batch for _, why in [wrong(program)] if why] or [(batch[0], str(error))]
    for program, _ in found:
        _fail(program)


def _fail(program: Program) -> None:
    shortest, why = minimise(program)
    pytest.fail(f"{why}\n\n{shortest}\n\nfrom\n\n{program}", pytrace=False)


@pytest.mark.filterwarnings("ignore")
def test_few_steps_that_are_right_are_rejected():
    """Few rejected steps have a meaning on the ranks; the commonest are printed (`completeness.py`)."""
    accepted, rejected, found, _ = measure(range(FIRST, FIRST + (2000 if FULL else 60)))
    print(
        f"{accepted} steps accepted, {rejected} rejected, {sum(found.values())} of them right: {found.most_common(8)}"
    )
    assert rejected > 50 and sum(found.values()) < 0.06 * rejected, found.most_common(12)


# --- the machinery itself: programs that are wrong are found to be ---


def _x(number: int, shape: tuple[int, ...], kind, grad: bool = True) -> Input:
    from tests.checking.types.soundness.denotation import Claim

    return Input(f"v{number}", shape, Claim((("tp", kind),)), "float", grad)


def _line(text: str, whole: str | None = "") -> Step:
    targets = (text.split(" = ")[0],) if " = " in text else ()
    return Step(text, text if whole == "" else whole, targets, "test")


WRONG = {
    "a value": ([_x(0, (4, 2), S(0))], [_line("v1 = v0 * 2.0", "v1 = v0 * 3.0")]),
    "a shape": ([_x(0, (4, 2), S(0))], [_line("v1 = v0 * 2.0", "v1 = v0.flatten()")]),
    "what is not equal": ([_x(0, (4,), V)], [_line("v1 = spmd.trust(v0.detach() * 1.0, 'tp', R)", None)]),
    "a gradient": (
        [_x(0, (2,), R)],
        [_line("v1 = (v0 * v0).sum()", "v1 = (v0.detach() * v0).sum()"),
         _line("v2 = spmd.convert(v1, 'tp', src=R, dst=P)", "v2 = v1.clone()")],
    ),
    "a gradient without a whole": (
        [_x(0, (2,), V)],
        [_line("v1 = (v0 * v0).sum()", None),
         _line("v2 = spmd.reinterpret(v1, 'tp', src=V, dst=P) + torch.zeros(())", None),
         _line("v2.register_hook(lambda g: g * 2.0)", None)],
    ),
    "how a sum is split": (
        [_x(0, (2, 3), P)],
        [Step("with spmd.no_typecheck(): v1 = v0.detach().abs()", None, ("v1",), "test"),
         _line("spmd.assert_type(v1, {'tp': V})", None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_program_that_is_wrong_is_found_and_made_short(what):
    inputs, steps = WRONG[what]
    steps = [_line("v8 = torch.ones(2).double()"), *steps]
    program = Program({"tp": 2}, "G", 3, inputs, steps, losses=["v2"] if "gradient" in what else [])
    shortest, why = minimise(program)
    assert "right when run alone" not in why, what
    assert len(shortest.steps) < len(steps), "the first step has nothing to do with it"


def test_a_program_is_printed_as_python():
    program = Generator(5, {"tp": 2}, "G").make(5)
    names = {"torch": torch}
    text = str(program)
    assert text.startswith("# seed 5, mesh {'tp': 2}, level G")
    compile(text, "<program>", "exec", dont_inherit=True)
    assert all(step.text in text for step in program.steps), names


def test_the_same_seed_gives_the_same_program():
    assert str(Generator(11, {"tp": 2}, "G").make(6)) == str(Generator(11, {"tp": 2}, "G").make(6))


def test_types_of_inputs_are_drawn_from_all():
    letters = "".join(x.claim.letters for seed in range(40) for x in _inputs(seed))
    assert {*letters} == {*"RIVPS"} and I.letter in letters


def _inputs(seed: int) -> list[Input]:
    generator = Generator(seed, {"dp": 2, "tp": 2}, "G")
    return generator.inputs()
