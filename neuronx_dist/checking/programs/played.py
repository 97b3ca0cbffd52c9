"""One rank's program, played on fake tensors: build, a microbatch of training, the optimizer's step.

    played = Played(subject, mesh, rank=3)
    played.build()               # the user's function, on meta; then its tensors become fake
    played.train(rank=3)         # forward, loss, backward, gradient reduction
    played.step(rank=3)          # the optimizer

`train` and `step` can be played again for a rank that built the same model. The record of a phase has its collectives,
its calls and its reads of rank numbers.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.parallel import distributed

from ... import comm
from ...call_site import DRIVER, PACKAGE, USER, call_site, frames, hide, line_of
from ...comm.backends.observed import CheckBackend, Event
from ...comm.ranks.observed_ranks import Read
from ...comm.ranks.rank_tables import RankTable
from ...gradients.gradient import ParameterGradient, parameters_of
from ...gradients.reduce import reduce_gradients
from ...mesh import Mesh
from ...optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from ...pipeline.model import NxDPPModel
from ...pipeline.run.microbatches import Batch
from ...pipeline.schedule import Schedule
from ...pipeline.schedule.derived import OneMicrobatch
from ...program.fake_mode import QuietFakeMode
from ...program.recorder import record
from ...program.recording import Recording
from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import TensorType, type_of
from ...spmd.types import DIFFERING
from ...torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from ...weights.partial_model import unwrapped
from ..types.axis_powers import tracked
from ..types.handlers.one_rank import Claim
from ..types.handlers.seeds import OUTSIDE, kept_seeds
from ..types.mode import SpmdTypeMode
from ..types.read_numbers import Decisions, number_of
from .calls import Deadline, Op, OpRecorder
from .fakes import MadeLike, built_anew, fake_inputs, make_fake, no_messages, optimizers_of
from .gate import check_buffers, gated
from .inputs import declare_inputs
from .kept_hooks import kept_hooks
from .message_types import Halted, MessageTypes
from .returned import check_returned

__all__ = ["PHASES", "Phase", "Played", "ReadsValues", "Subject", "call_model", "default_optimizer", "find_loss"]

hide(__name__, DRIVER)

PHASES = ("build", "train", "step")
_DEVICE = torch.device("cpu")


class ReadsValues(ValueError):
    """The program reads a tensor's value, which a check does not have."""


@dataclass(frozen=True)
class Subject:
    """The subject of a check; `spmd.check` documents the fields."""

    model_fn: Callable[..., Any]
    inputs: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Callable[[Any, Any, Any], Any] | None = None
    optimizer: Callable[..., Any] | None = None
    in_types: Any = None
    level: str | None = None
    recordings: Recordings = field(default_factory=lambda: Recordings())
    seeds: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)  # see `Session.seeds`
    decisions: Decisions = field(default_factory=Decisions)


@dataclass
class Phase:
    """The record of one phase.

    Attributes:
        events: collectives and messages, in order, of communicators of earlier phases too.
        ops: torch functions, in order.
        claims: values that no other rank adds.
        backend: has the program's reads of rank numbers in this phase.
    """

    name: str
    rank: int
    backend: CheckBackend
    events: list[Event] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


class PlayedTypeMode(SpmdTypeMode):
    """The type checker of a played program.

    A declaration or assumption of this package is listed once, with the first line of the user's code that led to it:
    `train.py:12 (in neuronx_dist/spmd/rows.py:30)`.
    """

    decisions: Decisions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._callers: dict[str, str] = {}

    def read_number(self, x: torch.Tensor, function: str) -> Any:
        """A number in place of a value that all ranks have; None: the stages of a pipeline have different ones."""
        if any(spmd_type.letter in DIFFERING for _, spmd_type in type_of(x) or ()):
            return None
        scales = {axis: spmd_type.scale for axis, spmd_type in type_of(x) or () if spmd_type.scale}
        self.assume(f"{function}: that the step is right whatever number is read: judged with 1, and on both branches")
        return number_of(x, function, self.decisions, scales)

    def line(self) -> str:
        frame = next((frame for owner, frame in frames() if owner in (USER, PACKAGE)), None)
        if frame is None:
            return "an unknown line"
        inside = line_of(frame)
        caller = self._callers.setdefault(inside, call_site(frame))
        return inside if caller == inside else f"{caller} (in {inside})"


class Played:
    """A model as one rank builds it, and the phases of a step.

    Attributes:
        model, optimizer: results of `build`.
        types: the type checker of all phases; None: types are not checked.
        schedule: of the pipeline model, before its number of microbatches was set to one; None without a pipeline.
        phases: the latest play of each phase, by name; up to the error, for a phase that raised.
    """

    def __init__(
        self, subject: Subject, mesh: Mesh, rank: int, deadline: Deadline, message_types: MessageTypes | None = None
    ) -> None:
        self.subject = subject
        self.mesh = mesh
        self.rank = rank
        self.deadline = deadline
        self.model: Any = None
        self.optimizer: Any = None
        self.schedule: Schedule | None = None
        self.phases: dict[str, Phase] = {}
        self._events: list[Event] = []  # of all phases, since communicators of one are used in the next
        self._extras: dict[str, Any] = {}
        self._made_like: list[tuple[torch.Tensor, TensorType]] = []  # tensors of `model_fn`, with their types
        self._main_grads: dict[Any, torch.Tensor | None] = {}
        self._fake = QuietFakeMode()
        self.types: PlayedTypeMode | None = None
        self._message_types = message_types
        if subject.level is not None:
            self.types = PlayedTypeMode(mesh, level=subject.level, strict=False)
            self.types.seeds = subject.seeds
            self.types.decisions, self.types.stand_in = subject.decisions, self.types.read_number
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(OUTSIDE)
            self._built_random = torch.get_rng_state()

    def same_program(self, rank: int, phases: tuple[str, ...] = PHASES) -> bool:
        """Returns whether `rank` would have read the same answers in these phases."""
        return all(self.phases[name].backend.same_program(rank) for name in phases if name in self.phases)

    def answers(self) -> list[RankTable]:
        """Answers to every rank query, on all ranks."""
        return [read.answers for phase in self.phases.values() for read in phase.backend.reads]

    # --- the phases

    def build(self) -> Phase:
        """Calls the user's function, and replaces the tensors of its result by fakes."""
        with self._phase("build", self.rank) as phase:
            _check_call(self.subject.model_fn, (), self.subject.options, "model_fn is called with the options {given}")
            with torch.device("meta"), OpRecorder(self.deadline), MadeLike() as made_like:
                built = built_anew(lambda: self.subject.model_fn(**self.subject.options))
            self._built = built if isinstance(built, tuple) else (built, None)
            self.model, self.optimizer = map(unwrapped, self._built)
            if not isinstance(self.model, nn.Module):
                raise TypeError(
                    f"{_name(self.subject.model_fn)} returned a {type(self.model).__name__}; it must return a module, "
                    f"an NxDPPModel, or (model, optimizer)"
                )
            if isinstance(self.model, NxDPPModel):
                self.schedule = self.model.training_schedule
            fakes = make_fake(self.model, self.optimizer, self._fake, _DEVICE)
            if self.types is not None:
                self.types.watch(self.model)
                with self._fake, torch.no_grad(), self.types:
                    self._made_like = made_like.types(fakes)
            self._main_grads = {
                param: param.main_grad for param in self.model.parameters() if hasattr(param, "main_grad")
            }
            if self.optimizer is None:
                make = self.subject.optimizer or (lambda params: default_optimizer(self.model, params))
                with self._fake, OpRecorder(self.deadline):
                    params = [param for param in parameters_of(self.model) if param.requires_grad]
                    self.optimizer = make(params) if params else None
        return phase

    def train(self, rank: int) -> Phase:
        """Plays forward, loss, backward and gradient reduction of one microbatch; or the whole of the user's `step`."""
        self._forget_gradients()
        states = self._states()
        with self._phase("train", rank) as phase:
            inputs = self._inputs()
            if isinstance(self.model, NxDPPModel):
                self._record(inputs)
            if self.types is not None:
                declare_inputs(inputs, self.subject.in_types, self.types)
                if self._message_types is not None:
                    self._message_types.connect(self.types, self.model, inputs, self.mesh, rank)
            with kept_hooks(self.model), self._fake, torch.enable_grad(), self._trace(phase):
                if self.subject.step is not None:
                    arguments = (self._built[0], self._built[1] or self.optimizer, inputs)  # in the trainer's wrappers
                    _check_step(self.subject.step, *arguments)
                    returned = self.subject.step(*arguments)
                    if self.types is not None:
                        check_returned(self.types, returned)
                elif isinstance(self.model, NxDPPModel):
                    self.model.run_train(**inputs)
                else:
                    find_loss(call_model(self.model, inputs)).backward()
                    reduce_gradients(self.model, average_over_data=not _averages(self.optimizer))
                if self.types is not None:
                    check_buffers(self.types, self.model)
        if self.subject.step is not None:
            self._restore(states)
        return phase

    def train_until_halted(self, rank: int, chunk: int | None = None) -> bool:
        """Plays as `train` does; returns whether to the end.

        Args:
            chunk: the chunk of the stage that ends the play when it has sent its results, so that the next stage can be
                played; None: a receive of a message that was not sent yet ends it.
        """
        states = self._states()
        if self._message_types is not None:
            self._message_types.halt_after = chunk
        try:
            self.train(rank)
        except Halted:
            self._restore(states)
            del self.phases["train"]
            return False
        finally:
            if self._message_types is not None:
                self._message_types.halt_after = None
        if chunk is not None:
            del self.phases["train"]
        return True

    def step(self, rank: int) -> Phase:
        """Plays the optimizer's step, unless the user's own step has done it."""
        states = self._states()
        with self._phase("step", rank) as phase:
            if self.subject.step is None and self.optimizer is not None:
                with self._fake, self._trace(phase):
                    self.optimizer.step()
        self._restore(states)
        return phase

    # --- surroundings

    @contextmanager
    def _phase(self, name: str, rank: int) -> Iterator[Phase]:
        self.deadline.check()
        backend = CheckBackend()
        backend.events = self._events
        phase = self.phases[name] = Phase(name, rank, backend)
        for later in PHASES[PHASES.index(name) + 1 :]:
            self.phases.pop(later, None)
        begin = len(self._events)
        with ExitStack() as stack:
            context = stack.enter_context(comm.as_rank(self.mesh, rank, backend))
            context.extras.update(self._extras)
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(kept_seeds)
            torch.set_rng_state(self._built_random)
            if self.types is not None:
                self.types.outside_seed = torch.initial_seed()
            stack.enter_context(no_messages())
            stack.enter_context(tracked())
            stack.enter_context(self.subject.decisions.answering())
            try:
                yield phase
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ReadsValues(
                    "the program asks for the value of a tensor (item, bool, float, nonzero, ...), and a check has "
                    "shapes and no values: use torch.where or a mask in the model; leave logging and data-dependent "
                    "steps out of the function that is checked"
                ) from error
            except Exception as error:
                if any(frame.filename == distributed.__file__ for frame in traceback.extract_tb(error.__traceback__)):
                    raise TypeError(
                        "DistributedDataParallel cannot be checked: leave it out, and call reduce_gradients(model) "
                        "after the last backward"
                    ).with_traceback(error.__traceback__) from None
                if _moves_to_a_device(error):
                    raise TypeError(
                        f"{type(error).__name__}: {error}. A check has no device and no values: leave .cuda(), "
                        '.to(device) and device="cuda" out of the function that is checked'
                    ).with_traceback(error.__traceback__) from None
                raise
            finally:
                self._extras.update(context.extras)
                if name == "build":
                    self._built_random = torch.get_rng_state()
                phase.events = self._events[begin:]

    @contextmanager
    def _trace(self, phase: Phase) -> Iterator[None]:
        with ExitStack() as stack:
            trace = OpRecorder(self.deadline, self.types)
            phase.ops = trace.ops
            if self.types is not None:
                self.types.around_hooks = trace.in_backward
                self.types.claims = phase.claims
                stack.enter_context(self.types)
                stack.enter_context(gated(self.types))
            stack.enter_context(trace)
            yield

    def _inputs(self) -> Any:
        """One microbatch of the example inputs, as fakes."""
        inputs = self.subject.inputs
        if callable(inputs):
            inputs = inputs()
        model = self.model
        if isinstance(model, NxDPPModel):
            if not isinstance(inputs, Mapping):
                values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
                if model.input_names is None or len(values) != len(model.input_names):
                    raise ValueError(
                        f"{len(values)} example inputs without names for a pipeline model with input_names="
                        f"{model.input_names}: pass a dict"
                    )
                inputs = dict(zip(model.input_names, values))
            assert self.schedule is not None
            inputs = Batch(inputs, model.input_names, self.schedule.num_microbatches).example()
            model.num_microbatches, model.schedule = 1, OneMicrobatch(self.schedule)
        return fake_inputs(inputs, self._fake, _DEVICE)

    def _record(self, inputs: dict[str, Any]) -> None:
        """Has the pipeline record its forward, which is not part of the step."""
        self.model.recorder = functools.partial(self.subject.recordings.record, self)
        with torch.enable_grad():
            self.model.program(inputs)

    def _forget_gradients(self) -> None:
        """Restores the gradients, and the types of tensors that were made like parameters, from before a step."""
        for param in self.model.parameters():
            ParameterGradient(param).clear()
        for param, main_grad in self._main_grads.items():
            param.main_grad = main_grad
        for x, type_ in self._made_like:
            assert self.types is not None
            self.types.stamp(x, type_)

    def _states(self) -> list[tuple[Any, Any]]:
        return [(wrapped, dict(wrapped.state)) for wrapped in optimizers_of(self.optimizer)]

    def _restore(self, states: list[tuple[Any, Any]]) -> None:
        """Restores the optimizers' states from before the step: every rank that is played takes a first step."""
        for wrapped, state in states:
            wrapped.state.clear()
            wrapped.state.update(state)


class Recordings:
    """Recordings of the forward of pipeline models: ranks that read the same answers have one recording."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Recording, list[tuple[str, Read]], int]] = []

    def record(
        self, played: Played, module: nn.Module, inputs: dict[str, Any], leaf_classes: Any, device: torch.device
    ) -> Recording:
        """Records as `pipeline.trace.record` does, or returns an earlier recording that would be equal."""
        phases = {name: phase.backend for name, phase in played.phases.items()}
        rank = played.phases["train"].rank
        here = played.mesh.coordinates(rank)
        inside = Batch(inputs, None, 1).key(), tuple(child.training for child in module.modules())
        for kind, recording, reads, other in self._known:
            there = played.mesh.coordinates(other)
            if kind == inside and all(read.answer(here) == read.answer(there) for _, read in reads):
                for name, read in reads:  # this rank has read them too
                    observed = phases[name].observed
                    assert observed is not None
                    observed.read(read.answers)
                return recording
        before = {name: len(backend.reads) for name, backend in phases.items()}
        recording = record(module, inputs, leaf_classes, device)
        reads = [(name, read) for name, backend in phases.items() for read in backend.reads[before[name] :]]
        self._known.append((inside, recording, reads, rank))
        return recording


def default_optimizer(model: nn.Module, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Plain SGD, in ZeRO-1 if the model leaves the mean over the data to its optimizer."""
    if getattr(model, "use_zero1_optimizer", False) or getattr(model, "use_optimizer_wrapper", False):
        return NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1)
    return torch.optim.SGD(params, lr=0.1)


def _check_step(step: Callable[..., Any], *arguments: Any) -> None:
    """Raises a TypeError that says how `step` is called, if it cannot be called so."""
    inputs = arguments[-1]
    what = f"a {type(inputs).__name__} of {len(inputs)}" if isinstance(inputs, (tuple, list, dict)) else "a tensor"
    words = f"step is called as step(model, optimizer, inputs), where inputs, all of the example inputs, is {what}"
    _check_call(step, arguments, {}, words)


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], words: str) -> None:
    """Raises a TypeError that says how the function is called, if it cannot be called so; `{given}`: the keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # it is not known
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        words = words.format(given=f"{[*kwargs]}; its parameters are {[*signature.parameters]}")
        raise TypeError(f"{_name(function)}: {error}: {words}") from None


def _moves_to_a_device(error: Exception) -> bool:
    """Returns whether an error is of a tensor or module that the program moves to a device."""
    if isinstance(error, SpmdTypeError):
        return False
    frames = {(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)}
    starts_cuda = (torch.cuda.__file__, "_lazy_init")  # without a device or a driver
    return bool(frames & {(modules.__file__, "_apply"), starts_cuda}) or "meta tensor" in str(error)


def _averages(optimizer: Any) -> bool:
    """Returns whether the optimizer takes the mean over the data itself."""
    return isinstance(optimizer, NeuronZero1Optimizer) and not isinstance(optimizer, MasterWeightsOptimizer)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Calls a module with a dict of keyword arguments, a tuple or list of positional ones, or one tensor."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = args if isinstance(args, (tuple, list)) else (args,)
    _check_call(getattr(model, "forward", model), args, kwargs, "forward is called with the example inputs {given}")
    return model(*args, **kwargs)


def find_loss(output: Any) -> torch.Tensor:
    """The loss in a model's result: a scalar, `.loss`, `["loss"]`, or the first of a tuple or dict.

    Raises:
        ValueError: there is none; the message says what was found.
    """
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, Mapping) and output:
            loss = output.get("loss", next(iter(output.values())))
        elif loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        actual = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise ValueError(
            f"the model's result holds no loss but {actual}: let it return a scalar (pass it labels, or wrap it), or "
            f"pass step=, a function step(model, optimizer, inputs) that does the whole training step"
        )
    return loss


def _name(function: Any) -> str:
    return getattr(inspect.unwrap(function), "__qualname__", repr(function)) if callable(function) else repr(function)
