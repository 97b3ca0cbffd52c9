"""Rejections of programs that are right: the step has a meaning on the ranks, and so have its gradients.

`python -m tests.checking.types.soundness.completeness 2000` prints the commonest.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from neuronx_dist.comm.errors import CommError
from neuronx_dist.spmd import I, P, R, S
from neuronx_dist.spmd.types import SpmdType
from tests.checking.types.soundness.denotation import Claim, Wrong, assemble, difference, whole_shape
from tests.checking.types.soundness.execution import run_all, whole_run
from tests.checking.types.soundness.generator import Generator, Rejection, Unsound
from tests.checking.types.soundness.program import Program, Step, local_inputs

GRID = {"tp": 2}


def meaning(rejection: Rejection) -> str:
    """The type that makes sense of a rejected step, of values and gradients; "" if there is none."""
    prefix, step = rejection.program, rejection.step
    if (
        len(step.targets) != 1
        or step.whole is None
        or any(name not in prefix.claims for name in step.names - set(step.targets))
    ):
        return ""
    for kind in _kinds(prefix, step):
        if _holds(prefix, step, kind):
            return str(kind)
    return ""


def _kinds(prefix: Program, step: Step) -> Iterator[SpmdType]:
    yield from (R, I, P, *(S(dim) for dim in range(4)))


def _holds(prefix: Program, step: Step, kind: SpmdType) -> bool:
    """Whether the step is right if its result is of that type."""
    name = step.targets[0]
    claim = Claim((("tp", kind),))
    steps = [*prefix.steps, step]
    squared = f"({name} * {name}).sum()"
    if kind is P:
        steps.append(Step(f"w0 = spmd.all_reduce({name}, 'tp', src=P, dst=R)", f"w0 = {name}.clone()", ("w0",), "loss"))
        squared = "(w0 * w0).sum()"
    steps.append(Step(f"w1 = {squared}", f"w1 = {squared}", ("w1",), "loss"))
    if kind.letter in "RP":
        steps.append(Step("w2 = spmd.convert(w1, 'tp', src=R, dst=P)", "w2 = w1.clone()", ("w2",), "loss"))
    last = steps[-1].targets[0]
    known = {*prefix.claims, *(name for step in steps for name in step.targets)}
    program = Program(prefix.grid, prefix.level, prefix.seed, prefix.inputs, steps, {name: claim}, [last], known)
    inputs = [local_inputs(program, program.seed, 1)]
    try:
        values, grads = whole_run(program, program.seed)
        (held,) = run_all([program], False, inputs)
        if not grads or all(not g.any() for g in grads.values()) or values[name] is None:
            return False
        expected = values[name].detach()  # type: ignore[union-attr]
        if whole_shape(held[0].values[name].shape, claim, GRID) != list(expected.shape):
            return False
        found = assemble([h.values[name] for h in held], claim, GRID)
        if found is None or difference(found, expected):
            return False
        for x in program.inputs:
            if x.grad:
                dual = Claim((("tp", {"R": P, "P": R}.get(x.claim.get("tp").letter, x.claim.get("tp"))),))
                pieces = [h.grads[x.name] for h in held]
                found = assemble(pieces, dual, GRID, 1e-6)
                if found is None or difference(found, grads[x.name], 1e-6, float(max(p.abs().max() for p in pieces))):
                    return False
    except (Wrong, NameError, RuntimeError, IndexError, TypeError, ValueError, CommError):
        return False
    return True


def measure(seeds: range) -> tuple[int, int, Counter[str], dict[str, Rejection]]:
    """Accepted steps, rejected steps, those of them that are right by rule and operation, and one of each kind."""
    accepted = rejected = 0
    found: Counter[str] = Counter()
    examples: dict[str, Rejection] = {}
    for seed in seeds:
        generator = Generator(seed, GRID, "G")
        generator.letters = "RIPS"
        try:
            program = generator.make(5)
        except Unsound:
            continue
        accepted += len(program.steps)
        for rejection in generator.rejections:
            rejected += 1
            kind = meaning(rejection)
            if kind:
                key = f"{rejection.rule}: {rejection.step.op} -> {kind}"
                found[key] += 1
                examples.setdefault(key, rejection)
    return accepted, rejected, found, examples


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accepted, rejected, found, examples = measure(range(int(sys.argv[1])))
    print(f"{accepted} steps accepted, {rejected} rejected, {sum(found.values())} of them right")
    for key, count in found.most_common(60):
        print(f"{count:4d}  {key}")
        if len(sys.argv) > 2:
            example = examples[key]
            names = ", ".join(
                f"{n} {example.program.claims[n].types[0][1]}"
                for n in sorted(example.step.names)
                if n in example.program.claims
            )
            print(f"      {example.step.text}   {names}\n      {example.message.splitlines()[0][:300]}")
