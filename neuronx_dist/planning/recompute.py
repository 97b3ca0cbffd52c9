"""Recomputation of activations: of named parts of a model, or of the cheapest ones that a memory budget needs.

    nxd.recompute(model, "attention")                          # or "full", "norms", classes, names, predicates
    print(nxd.recompute(model, memory="24 GB", inputs=batch))  # a table: what is recomputed, bytes freed, extra time

Within a budget each transformer layer has options: nothing, its norms, its attention function, both, or the complete
layer. A copy of the model on fake tensors runs a forward with each of them: the bytes that it saves less are counted,
and the operations and collectives inside of checkpoints, which backward repeats, are priced by `Costs`. The set of
options of least time that frees enough is exact (a front of bytes against seconds, layer by layer). The peak of a step
with that set is played, on the schedule of the pipeline, and if it is above the budget, the set has to free more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import comm
from ..parallel_layers.activation_checkpoint import WORDS, checkpoint_layers, modules_of, transformer_layers
from ..pipeline.model import NxDPPModel
from ..program.effects import flops_of, tensors_in
from ..spmd.random import streams
from ..torch_internals.autograd import is_checkpoint_hook, top_saved_tensors_hooks
from ..torch_internals.operators import TorchDispatchMode
from ..torch_internals.tensors import storage_key
from ..weights.partial_model import partial_model
from ..weights.wrappers import wrapper_of
from .costs import CPU, H100, Costs
from .fake_rank import WireBackend, on_fakes, playing, run_step
from .layout import format_bytes, parse_bytes
from .meter import MemoryMeter

__all__ = ["Recomputation", "least_time", "recompute"]


class Part(NamedTuple):
    """Recomputed parts of one word: how many layers have them, bytes freed and seconds added, of one microbatch."""

    what: str
    layers: int
    freed: int
    seconds: float


@dataclass(frozen=True)
class Recomputation:
    """Recomputed parts of a model; `str()` is a table if there was a budget.

    Attributes:
        modules: names of the modules that are recomputed, or whose attention is.
        parts: what is recomputed within the budget, of one microbatch.
        in_flight: microbatches, times chunks, whose activations are saved at one time.
        saved, saved_before: bytes that the layers save of one microbatch, and without recomputation.
        peak, peak_before: bytes of parameters, gradients, optimizer state, batch and activations at the peak of a
            step, and without recomputation.
        budget: the bytes allowed.
        is_decimal: the table has decimal units (GB), as the budget.
        seconds: time of one microbatch's forward in the layers, by which extra time is shown in percent of the step.
    """

    modules: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    in_flight: int = 0
    saved: int = 0
    saved_before: int = 0
    peak: int = 0
    peak_before: int = 0
    budget: int = 0
    is_decimal: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.budget:
            return f"recomputed: {', '.join(self.modules) or 'nothing'}"
        shown = partial(format_bytes, is_decimal=self.is_decimal)
        rows = [["recomputed", "layers", "bytes freed", "extra time"]]
        for part in self.parts:
            extra = part.seconds / (3 * self.seconds) if self.seconds else 0.0
            rows.append([part.what, str(part.layers), shown(part.freed * self.in_flight), f"{extra:.1%}"])
        if not self.parts:
            rows.append(["nothing", "", "", ""])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        peaks = f"peak {shown(self.peak)} of {shown(self.budget)}"
        return "\n".join([*lines, f"{peaks}, {shown(self.peak_before)} without; {self.in_flight} in flight"])


def recompute(
    model: nn.Module,
    what: Any = None,
    *,
    functions: Collection[Callable[..., Any]] | Callable[[Any], bool] = (),
    offload: bool = False,
    memory: str | float | None = None,
    inputs: Mapping[str, Any] | None = None,
    optimizer_bytes: float = 8,
    costs: Costs | None = None,
) -> Recomputation:
    """Makes parts of a model recompute their activations in backward; in place.

    Loss and gradients stay equal to the bit: random numbers are drawn again. What a forward changes besides, backward
    changes again: running statistics of batch norm, vectors of spectral norm. A tensor argument that changes in place
    is an error; a cache of transformers is left out in training. It may be called before or after `swap`, and before
    or after a pipeline model is made; a budget needs the model as it is trained, with both. Predicted is the forward
    as recorded: transformers leaves out causal masks outside of pipelines, so that the peak is less there.

    Args:
        model: a module, a pipeline model, or a DistributedDataParallel around one; of any device, meta too.
        what: "full": the transformer layers, as a pipeline model (`transformer_layer_cls`) or a Hugging Face model
            names them. "attention": the attention functions, without projections. "norms": the layers that normalise.
            A class of modules, its name, the name of one module ("layers.3"), a predicate on modules, or a list of
            these. None: "full", or with a budget all three words.
        functions: torch functions whose calls run under a checkpoint, one by one: a list, one, or a predicate.
        offload: saved inputs of checkpoints lie in the host's memory until backward.
        memory: bytes that this rank may use at the peak of forward and backward, as a number or "24 GB" (or "GiB"):
            the fastest of the parts in `what` that fit are recomputed. Parameters, gradients, optimizer state, the
            batch, messages and temporaries count.
        inputs: with `memory`: a batch, as the model or `run_train` takes it; shapes and dtypes count.
        optimizer_bytes: with `memory`: of optimizer state per trainable element on this rank. 8: Adam's.
        costs: with `memory`: speeds by which time is predicted; None: those of a GPU, or of a CPU.

    Raises:
        ValueError: nothing matches; the message names the nearest. Or the budget is too small for the model with all
            of `what` recomputed; the message has the smallest possible one.
    """
    if wrapper_of(type(model)) == "DistributedDataParallel":
        model = model.get_submodule("module")
    if memory is None:
        return Recomputation(tuple(checkpoint_layers(model, what, functions=functions, offload=offload)))
    if inputs is None:
        raise ValueError("recompute: a memory budget needs inputs, a batch as the model takes it")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"recompute: inputs is a {type(inputs).__name__}; pass arguments by name, as dict(input_ids=...)"
        )
    if functions:
        raise ValueError("recompute: functions are recomputed without a budget; leave out memory or functions")
    budget = parse_bytes(memory)
    play = _Play(model, inputs, costs, offload)
    is_decimal = isinstance(memory, str) and "i" not in memory.lower()
    plan = _cheapest(play, _words(what, model), budget, optimizer_bytes, is_decimal)
    for unit, words in plan.options:
        _apply(model, unit, words, offload)
    return plan.recomputation


# --- a copy of the model on fake tensors ------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """Measures of one layer in a forward: bytes that it saves, seconds inside of checkpoints, seconds in all."""

    saved: int
    repeated: float
    seconds: float


class _Clock(TorchDispatchMode):
    """Adds up the predicted seconds of operators and collectives: of all, and of those inside of checkpoints."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._costs = costs
        self.seconds = self.repeated = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = sum(x.nbytes for x in (*tensors_in((args, kwargs)), *tensors_in(result)))
            self._add(self._costs.compute(flops_of(func, args, kwargs or {}, result), moved, backward=False))
        return result

    def communicates(self, sent: int) -> None:
        self._add(self._costs.communicate(sent, 1))

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
        top = top_saved_tensors_hooks(False)
        self.repeated += seconds * bool(top is not None and is_checkpoint_hook(top[0]))


@dataclass
class _Played:
    peak: int
    in_flight: int
    units: dict[str, _Unit] = field(default_factory=dict)


class _Play:
    """Runs steps of a copy of the model on fake tensors, without any communication."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], costs: Costs | None, offload: bool) -> None:
        self.model, self.offload = model, offload
        self._inputs = inputs
        self._device = _device_of(model)
        self._costs = costs or (CPU if self._device.type == "cpu" else H100)
        self.units = transformer_layers(model) or [""]

    @property
    def trainable(self) -> int:
        """Elements of this rank's parameters that are trained."""
        params = partial_model(self.model).local_named_parameters()
        return sum(param.numel() for _, param in params if param.requires_grad)

    def step(self, options: Sequence[tuple[str, Sequence[str]]], *, watched: bool = False) -> _Played:
        """Plays a step's forward and backward in which the words of `options` are recomputed, by unit.

        Units are measured if they are `watched`, which holds memory longer.
        """
        meter, clock = MemoryMeter(self._device.type), _Clock(self._costs)
        with ExitStack() as stack:
            if comm.is_initialized():
                rank = comm.current()
                wires = WireBackend(meter, self._device, clock.communicates)
                stack.enter_context(playing(rank.mesh, rank.rank, wires, streams().get_states()))

            def prepare(model: nn.Module) -> None:
                for unit, words in options:
                    _apply(model, unit, words, self.offload)

            model, inputs = stack.enter_context(on_fakes(self.model, self._inputs, meter, self._device, prepare))
            stack.enter_context(clock)
            meter.kind = "activations"
            units = self._watch(model, clock) if watched else {}
            meter.reset("compute")
            run_step(model, inputs)
            if not isinstance(model, NxDPPModel):
                return _Played(meter.phases["compute"].peak, 1, units)
            local = {name: unit for name, unit in units.items() if model.is_local(name)}
            return _Played(meter.phases["compute"].peak, model.peak_in_flight, local)

    def _watch(self, model: nn.Module, clock: _Clock) -> dict[str, _Unit]:
        """Measures each unit's first forward: its bytes are those of storages that no unit before it has saved."""
        units: dict[str, _Unit] = {}
        kept: dict[int, Any] = {storage_key(x.untyped_storage()): x for x in (*model.parameters(), *model.buffers())}
        starts: dict[str, tuple[Any, float, float]] = {}
        saved = [0]

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage_key(storage) not in kept:
                kept[storage_key(storage)] = storage  # as long as it is here, no other has its address
                saved[0] += storage.nbytes()
            return x

        def before(name: str, module: nn.Module, args: Any) -> None:
            if name not in units:
                saved[0], hooks = 0, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
                hooks.__enter__()
                starts[name] = hooks, clock.repeated, clock.seconds

        def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
            if name not in units:
                hooks, repeated, seconds = starts[name]
                hooks.__exit__()
                units[name] = _Unit(saved[0], clock.repeated - repeated, clock.seconds - seconds)
                if len(units) == len(self.units):
                    kept.clear()

        whole = partial_model(model).original_module
        for name in self.units:
            module = whole.get_submodule(name)
            module.register_forward_pre_hook(_named(before, name))
            module.register_forward_hook(_named(after, name))
        return units


def _named(hook: Callable[..., None], name: str) -> Callable[..., None]:
    return lambda *args: hook(name, *args)


def _device_of(model: nn.Module) -> torch.device:
    """Returns the device of the job: of this rank's parameters or, while they are on meta, of the backend."""
    devices = {param.device for _, param in partial_model(model).local_named_parameters() if not param.is_meta}
    if devices:
        return devices.pop()
    device = torch.device(comm.current().backend.device) if comm.is_initialized() else torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cpu")


# --- the choice -------------------------------------------------------------------------------------------------------

_Option = tuple[str, tuple[str, ...]]  # a unit, and its recomputed words


class _Plan(NamedTuple):
    options: list[_Option]
    recomputation: Recomputation


def _words(what: Any, model: nn.Module) -> tuple[str, ...]:
    """Returns the words among which a budget chooses.

    Raises:
        ValueError: `what` has something else.
    """
    words = WORDS if what is None else tuple(what) if isinstance(what, (list, tuple)) else (what,)
    if other := [word for word in words if word not in WORDS]:
        raise ValueError(
            f"recompute: with a memory budget what={other[0]!r} is not one of {', '.join(map(repr, WORDS))}; other "
            "parts are recomputed without a budget"
        )
    return words


def _apply(model: nn.Module, unit: str, words: Sequence[str], offload: bool) -> None:
    module = partial_model(model).original_module.get_submodule(unit)
    for word in words:
        if word == "full":
            checkpoint_layers(model, [unit], offload=offload)
        else:
            checkpoint_layers(module, word, offload=offload)


def _cheapest(play: _Play, words: Sequence[str], budget: int, optimizer_bytes: float, is_decimal: bool) -> _Plan:
    """Returns the options of least time whose played peak is within the budget.

    Raises:
        ValueError: no options are.
    """
    state = round(play.trainable * optimizer_bytes)
    plain = play.step([])
    peak, of_units = plain.peak + state, play.step([], watched=True).units
    measured = {word: _measured(play, word, [*of_units]) for word in words} if peak > budget else {}
    measured = {word: units for word, units in measured.items() if units}
    tables = {unit: [*_options(unit, of_units[unit], measured)] for unit in of_units}
    most = sum(max(freed for freed, _, _ in table) for table in tables.values())
    freed, options, peaks = 0, list[_Option](), [peak]
    while peak > budget:
        if freed == most:
            least, options = _another_last(play, tables, options)
            peak = least + state
            if peak <= budget:
                freed = _freed(tables, options)
                break
            least, shown = min(*peaks, peak), partial(format_bytes, is_decimal=is_decimal)
            raise ValueError(
                f"recompute: memory={shown(budget)} is too small: with {_listed(measured)} recomputed this rank "
                f"needs {shown(least)} ({least} bytes), {shown(state)} of them for the optimizer; take "
                "more tp, pp or cp ranks, smaller microbatches or ZeRO-1"
            )
        missing = -(-(peak - budget) // plain.in_flight)
        options = least_time(tables, min(most, freed + max(1, missing)))
        freed = _freed(tables, options)
        peak = play.step(options).peak + state
        peaks.append(peak)
    chosen = dict(options)
    parts: dict[str, list[tuple[int, float]]] = {}
    for unit, table in tables.items():
        bytes_freed, extra, option = next(row for row in table if row[2] == chosen.get(unit, ()))
        if option:
            parts.setdefault(" + ".join(option), []).append((bytes_freed, extra))
    saved = sum(unit.saved for unit in of_units.values())
    return _Plan(
        options,
        Recomputation(
            modules=tuple(unit for unit, _ in options),
            parts=tuple(
                Part(name, len(rows), sum(row[0] for row in rows), sum(row[1] for row in rows))
                for name, rows in parts.items()
            ),
            in_flight=plain.in_flight,
            saved=saved - freed,
            saved_before=saved,
            peak=peak,
            peak_before=plain.peak + state,
            budget=budget,
            is_decimal=is_decimal,
            seconds=sum(unit.seconds for unit in of_units.values()),
        ),
    )


def _another_last(
    play: _Play, tables: Mapping[str, list[tuple[int, float, Any]]], options: list[_Option]
) -> tuple[int, list[_Option]]:
    """Returns the least peak of all choices for the last unit, and the options with this choice.

    Its backward is the first, while what all units save is there: recomputing less of it may need less.
    """
    last = next(reversed([*tables]), "")
    before = [option for option in options if option[0] != last]
    choices = [options, *([*before, *([(last, words)] if words else [])] for _, _, words in tables.get(last, ()))]
    return min(((play.step(choice).peak, choice) for choice in choices), key=lambda pair: pair[0])


def _freed(tables: Mapping[str, list[tuple[int, float, Any]]], options: Sequence[_Option]) -> int:
    return sum(row[0] for unit, words in options for row in tables[unit] if row[2] == words)


def _listed(measured: Mapping[str, Any]) -> str:
    return "everything" if "full" in measured else ", ".join(measured) or "nothing"


def _measured(play: _Play, word: str, units: list[str]) -> dict[str, _Unit]:
    """Plays a step in which a word is recomputed in all units that have it; returns the measures of these."""
    whole = partial_model(play.model).original_module
    has = {unit: unit != "" if word == "full" else bool(modules_of(whole.get_submodule(unit), word)) for unit in units}
    present = [(unit, (word,)) for unit in units if has[unit]]
    played = play.step(present, watched=True).units if present else {}
    return {unit: played[unit] for unit, _ in present}


def _options(unit: str, plain: _Unit, measured: Mapping[str, Mapping[str, _Unit]]) -> Iterator[tuple[int, float, Any]]:
    """Yields (bytes freed, seconds added, words) of each option of a unit."""
    yield 0, 0.0, ()
    rows = {
        word: (max(0, plain.saved - units[unit].saved), units[unit].repeated)
        for word, units in measured.items()
        if unit in units
    }
    for word, (freed, seconds) in rows.items():
        yield freed, seconds, (word,)
    if "norms" in rows and "attention" in rows:
        (freed, seconds), (more, added) = rows["norms"], rows["attention"]
        yield freed + more, seconds + added, ("norms", "attention")


def least_time(tables: Mapping[str, list[tuple[int, float, Any]]], need: int) -> list[_Option]:
    """Returns the options of least total time that free `need` bytes: exact, by the front of (bytes, seconds)."""
    front: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for unit, table in tables.items():
        sums = [
            (min(need, freed + more), seconds + added, (words, unit, before) if words else before)
            for freed, seconds, before in front
            for more, added, words in table
        ]
        front = []
        for row in sorted(sums, key=lambda row: (row[1], -row[0])):
            if not front or row[0] > front[-1][0]:
                front.append(row)
    chain = front[-1][2]
    options: list[_Option] = []
    while chain is not None:
        words, unit, chain = chain
        options.append((unit, words))
    return options[::-1]
