"""Makes programs: a random operation at a time, each asked of the checker on rank 0, and kept if it is accepted."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import SpmdTypeError
from tests.checking.types.soundness.choices import Choices
from tests.checking.types.soundness.denotation import Claim, claim_of, whole_shape
from tests.checking.types.soundness.program import Program, Step, local_inputs, run_line
from tests.checking.types.soundness.program_ops import OPERATIONS, SAME, Proposal

_WEIGHTS = [weight for weight, _ in OPERATIONS]
_GROUPS = [group for _, group in OPERATIONS]
LARGEST = 3000


class Unsound(AssertionError):
    """The unsharded program cannot run a step that the checker accepted, or gives another shape."""


@dataclass
class Rejection:
    """A step that the checker did not accept, after the steps of a program."""

    program: Program
    step: Step
    rule: str
    message: str
    shapes: list[Any] = field(default_factory=list)


class Generator(Choices):
    """One program. `local`: of rank 0 by name, typed; `whole`: of the unsharded program, None where it has no
    meaning.
    """

    def __init__(self, seed: int, grid: dict[str, int], level: str, fixed: Program | None = None) -> None:
        self.rng = random.Random(seed)
        self.grid, self.level = grid, level
        self.width = max(grid.values())
        self.program = Program(grid, level, seed)
        self.local: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor | None] = {}
        self.claims: dict[str, Claim] = {}
        self.previous: dict[str, Claim] = {}  # before the last step
        self.rejections: list[Rejection] = []
        self.errors: Counter[str] = Counter()
        self.fixed = fixed
        self.recast: set[str] = set()
        self.ended = False
        self.letters = "RIVPASM"  # types of inputs

    # --- making

    def make(self, steps: int) -> Program:
        """A program of so many steps, if as many are accepted in a few tries each.

        Raises:
            Unsound: see there.
        """
        torch.manual_seed(0)
        self.program.inputs = self.inputs() if self.fixed is None else self.fixed.inputs
        self.wholes = {x.name: x.whole(self.program.seed) for x in self.program.inputs}
        mine = local_inputs(self.program, self.program.seed, 1, self.wholes)[0]
        with comm.as_rank(self.program.mesh, 0), spmd.SpmdTypeMode(level=self.level) as self.mode:
            self.start(mine)
            if self.fixed is not None:
                for step in self.fixed.steps:
                    self.try_step(Proposal(step.text, step.op, step.whole, -1), step)
                self.program.losses = [n for n in self.fixed.losses if n in self.local]
                self.backward()
                return self.finish()
            for _ in range(steps):
                for _ in range(0 if self.ended else 6):
                    proposal = self.rng.choice(self.rng.choices(_GROUPS, _WEIGHTS)[0])(self)
                    if proposal is not None and self.try_step(proposal):
                        break
            if not self.ended:
                self.add_losses()
            return self.finish()

    def finish(self) -> Program:
        self.program.claims = self.claims
        self.program.known = {name for name, x in self.whole.items() if x is not None}
        return self.program

    def start(self, mine: dict[str, Tensor]) -> None:
        for x in self.program.inputs:
            local = mine[x.name].requires_grad_(x.grad)
            self.local[x.name] = spmd.assert_type(local, dict(x.claim.types))
            with self.mode.pause():
                whole = self.wholes[x.name].clone().requires_grad_(x.grad)
            self.whole[x.name] = None if "V" in x.claim.letters else whole
            self.claims[x.name] = x.claim

    def try_step(self, proposal: Proposal, given: Step | None = None) -> bool:
        """Runs a step; False if it was not accepted, or is an error in torch."""
        number = len(self.local)
        if given is not None:
            targets: tuple[str, ...] = given.targets
            text = given.text
        else:
            targets = tuple(f"v{number + i}" for i in range(proposal.count))
            text = f"{', '.join(targets)} = {proposal.text}" if targets else proposal.text
        bare = self.rng.random() < 0.06 and given is None and not proposal.text.startswith(("spmd", "comm"))
        if bare and ":" not in text:
            text = f"with torch.no_grad(): {text}"
        assumed = self._assumptions()
        before = {**self.local}
        try:
            run_line(text, self.local)
        except SpmdTypeError as error:
            step = Step(text, text if proposal.whole is SAME else None, targets, proposal.op)
            self.rejections.append(Rejection(self.snapshot(), step, error.rule, str(error)))
            self.local = before
            return False
        except Exception as error:
            self.errors[f"{proposal.op}: {type(error).__name__} {str(error)[:60]}"] += 1
            self.local = before
            return False
        if any(not isinstance(self.local[n], Tensor) or self.local[n].numel() > LARGEST for n in targets):
            self.local = before
            return False
        claims = self.read()
        whole = self._whole_text(proposal, text, targets, claims)
        if self._assumptions() > assumed:
            whole = None
        step = Step(text, whole, targets, proposal.op)
        if given is None and len(self.names_of(step)) == 0 and not targets:
            return False
        previous = self.previous = self.claims
        self.claims = claims
        try:
            step = self._run_whole(step)
        except _Drop:
            self.local, self.claims = before, {n: c for n, c in previous.items() if n in before}
            self.ended = not targets  # what was written stays written
            return False
        self.program.steps.append(step)
        return True

    def _assumptions(self) -> int:
        """Counts assumptions, but for local sizes that are written as numbers: the whole has others in their place."""
        return sum("is the local size of dim" not in text for text, _ in self.mode.assumed)

    def names_of(self, step: Step) -> list[str]:
        return [name for name in step.names if name not in step.targets]

    def read(self) -> dict[str, Claim]:
        """Reads the checker's types of everything now; tensors of which it can say nothing any more are left out."""
        found = {}
        with torch._C.DisableTorchFunction():
            for name, x in self.local.items():
                try:
                    note = self.mode.note(x, name)
                except (SpmdTypeError, RuntimeError):
                    continue
                if note is not None and note.extra is None:
                    try:
                        found[name] = claim_of(note.type, self.grid, x.dim())
                    except AttributeError:
                        continue
        return found

    def _whole_text(
        self, proposal: Proposal, text: str, targets: tuple[str, ...], claims: dict[str, Claim]
    ) -> str | None:
        whole = proposal.whole
        if whole is SAME:
            return text
        if callable(whole):
            if any(name not in claims for name in targets):
                return None
            whole = whole([claims[name] for name in targets])
        if whole is None or proposal.count == -1:
            return whole  # type: ignore[no-any-return]
        line = f"{', '.join(targets)} = {whole}" if targets else str(whole)
        return f"with torch.no_grad(): {line}" if text.startswith("with") else line

    def _run_whole(self, step: Step) -> Step:
        """Runs it in the unsharded program too.

        Raises:
            Unsound: that is an error, or has another shape than the type says.
        """
        used = self.names_of(step)
        written = [n for n in used if not step.targets or ".detach().mul_" in step.text]
        if written:  # what was given another meaning is the same memory with two
            sharing = set(self._sharing(written))
            if sharing & self.recast:
                for name in sharing:
                    self.whole[name] = None
        elif step.op.startswith("reinterpret"):
            self.recast.update(step.targets)
        varies = any("V" in self.claims[name].letters for name in (*step.targets, *written) if name in self.claims)
        if step.whole is None or varies or any(self.whole[name] is None for name in used):
            for name in (*step.targets, *self._sharing(written)):
                self.whole[name] = None
            return Step(step.text, None, step.targets, step.op)
        names: dict[str, Any] = {name: x for name, x in self.whole.items() if x is not None}
        constants = [name for name in used if self.claims.get(name, _NONE).free]
        lines = self._resized(step.whole, constants, written) + [step.whole]
        first = ""
        for line in lines:
            mine = dict(names)
            try:
                with self.mode.pause():
                    run_line(line, mine)
            except Exception as error:
                first = first or f"{type(error).__name__}: {error}"
                if isinstance(error, IndexError) or "out of" in first or "view size is not compatible" in first:
                    raise _Drop from None  # positions that there are on this rank only; memory laid out otherwise
                continue
            why = self._wrong_shape(step, mine)
            if why:
                first = first or why
                continue
            self.whole.update(mine)
            if line != step.whole:  # no views of the constants any more
                self.recast.update(step.targets)
            for name in self._sharing(written):
                if self._odd(name, self.whole[name]):  # it was a constant, of another length than it has now
                    self.whole[name] = None
            return Step(step.text, line, step.targets, step.op)
        were = [name for name in self._sharing(written) if self.previous.get(name, _NONE).free]
        if written and (
            constants or were or ".copy_(" in step.text
        ):  # memory that is used for something else from now on
            for name in self._sharing(written):
                self.whole[name] = None
            return Step(step.text, None, step.targets, step.op)
        if constants and len(lines) > 200:
            raise _Drop
        self.program.steps.append(step)
        self.program.claims = self.claims
        raise Unsound(f"{step.text} was accepted, but of the whole tensors {step.whole}: {first}")

    def _wrong_shape(self, step: Step, names: dict[str, Any]) -> str:
        return next((why for name in step.targets if (why := self._odd(name, names[name]))), "")

    def _odd(self, name: str, whole: Tensor | None) -> str:
        """Whether a tensor of the unsharded program has another shape than the type on the ranks says."""
        if name not in self.claims or whole is None:
            return ""
        claim, found = self.claims[name], list(whole.shape)
        shape = whole_shape(self.local[name].shape, claim, self.grid)
        same = (a == b for dim, (a, b) in enumerate(zip(found, shape)) if dim not in claim.free)
        if len(found) == len(shape) and all(same):
            return ""
        return f"shape {found}, but by its type {claim.types} {shape}"

    def _resized(self, text: str, constants: list[str], written: list[str]) -> list[str]:
        """The line with constants as long as what they meet is in the unsharded program."""
        lines = [text]
        factors = sorted({1, *self.grid.values(), self.width, 2 * self.width if len(self.grid) > 1 else 1})
        for name in constants:
            if name in written or self.whole.get(name) is None:
                continue
            shapes: list[list[int]] = [[]]
            for dim, size in enumerate(self.whole[name].shape):  # type: ignore[union-attr]
                free = dim in self.claims[name].free
                sizes = [self.local[name].shape[dim] * factor for factor in factors] if free else [size]
                shapes = [[*shape, size] for shape in shapes for size in sizes]
            if len(shapes) > 100:
                continue
            lines = [
                re.sub(rf"\b{name}\b(?! = )", f"sized({name}, {shape})", line) for line in lines for shape in shapes
            ]
            if len(lines) > 300:
                return lines[:300]
        return lines if constants else []

    def _sharing(self, written: list[str]) -> list[str]:
        """All names whose memory is that of one of these."""
        stores = {self.local[name].untyped_storage().data_ptr() for name in written if name in self.local}
        return [name for name, x in self.local.items() if x.untyped_storage().data_ptr() in stores]

    def snapshot(self) -> Program:
        p = self.program
        return Program(p.grid, p.level, p.seed, p.inputs, list(p.steps), dict(self.claims))

    # --- losses

    def add_losses(self) -> None:
        """Losses of some of the values that have a gradient, and backward."""
        names = [n for n, x in self.local.items() if x.is_floating_point() and x.requires_grad and n in self.claims]
        self.rng.shuffle(names)
        for name in names[:3]:
            found = self._loss(name)
            if found is not None:
                self.program.losses.append(found)
        self.backward()

    def backward(self) -> None:
        if not self.program.losses:
            return
        mine = dict(self.local)
        text = f"torch.autograd.backward([{', '.join(self.program.losses)}])"
        try:
            run_line(text, mine)
        except SpmdTypeError as error:
            step = Step(text, text, (), "backward")
            self.rejections.append(Rejection(self.snapshot(), step, error.rule, str(error)))
            self.program.losses = []
        except RuntimeError as error:
            self.errors[f"backward: {str(error)[:60]}"] += 1
            self.program.losses = []

    def _loss(self, name: str) -> str | None:
        """A scalar of it that is I or P on all axes."""

        def step(text: str, whole: Any = SAME) -> bool:
            nonlocal name
            done = self.try_step(Proposal(text, "loss", whole))
            name = self.program.steps[-1].targets[0] if done else ""
            return done

        for axis, kind in self.claims[name].types:
            if kind.letter == "P" and self.rng.random() < 0.8:
                if kind.reduction in ("max", "norm"):
                    return None
                dst = self.rng.choice("RI")
                if not step(f"spmd.all_reduce({name}, {axis!r}, src=P, dst={dst})", f"{name}.clone()"):
                    return None
        nonlinear = "P" not in self.claims[name].letters
        if not step(f"({name} * {name}).sum()" if nonlinear else f"{name}.sum()"):
            return None
        for axis, kind in self.claims[name].types:
            if kind.letter == "V":
                if not step(f"spmd.reinterpret({name}, {axis!r}, src=V, dst=P)", None):
                    return None
            elif kind.letter == "R" and not step(f"spmd.convert({name}, {axis!r}, src=R, dst=P)", f"{name}.clone()"):
                return None
        return name


class _Drop(Exception):
    pass


_NONE = Claim(())
