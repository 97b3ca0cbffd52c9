"""The check of a step of the whole job before it is loaded: schedule, messages, sums over units, optimizer.

Nothing is emitted for dp: a unit computes on its data, and `train_step` and the optimizer communicate between units. So
a step of the emitted class is played for each rank of the job (`spmd.check`), without the computation of its stages:
each stage is replaced by one that reads the same parameters and returns tensors of the shapes that the next stage
receives. The computation is proven apart, once for all units (`verify.py`); the cost of this check depends on
parameters and messages alone.

    loss                       P on dp: the loss of the job is the sum over its units
    gradients of parameters    P on dp, until they are summed: a step on others is refused, and so is one on means
    what stages send           V on dp; paired with what is received, shape, dtype and peer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...checking.api import check
from ...pipeline.schedule import prove
from ...program.program import Division, Value, local_shape, values_in
from ...spmd.tensor_type import TensorType
from ...spmd.types import I, P, SpmdType, V
from ...spmd.watching import active
from ...torch_internals.tensors import pytree
from ..choose.stages import StageCalls, schedule_of, stages_of
from ..config import ComputeConfig
from ..train.optimizer import build_optimizer
from ..train.parallel_module import ParallelModule, pipelined
from .emitted import imported
from .value_comparison import EmittedProgramError

__all__ = ["check_mesh"]


def check_mesh(
    source: str,
    divisions: Sequence[Division],
    config: ComputeConfig,
    arguments: Mapping[str, Any],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Checks a step of the whole job, and returns the report in words.

    Args:
        divisions: the division for training, and the division for evaluation if that differs.
        arguments: of forward, by name.

    Raises:
        EmittedProgramError: there is a problem.
    """
    first = divisions[0]
    stages, ranks = len(first.stages), first.pipeline_ranks
    if stages == 1 and (config.units == 1 or config.inference_only):
        return "one unit without stages" if config.units == 1 else "units that do not communicate"
    if stages > 1:
        prove(schedule_of(ranks, stages, first.microbatches, first.schedule))
    with imported(source, first.ranks, constants=constants, config=config) as emitted:
        _fold_parameters(emitted, divisions)
        _replace_stages(emitted, divisions)
        results = [_result(division) for division in (first, divisions[-1])]
        levels: list[tuple[str | None, ComputeConfig]] = [("G", replace(config, zero_ngroups=1))]
        if config.zero_ngroups > 1:  # types are written on all of dp; groups of units are compared without
            levels.append((None, config))
        reports, mesh = [], replace(config.mesh(ranks), tp_replicas=first.cuts)
        for level, settings in levels:
            report = check(
                lambda: emitted(init_params=False),
                dict(arguments),
                mesh,
                step=_step(settings, *results),
                optimizer=lambda params: None,  # the step makes it
                level=level,
            )
            if not report.ok:
                raise EmittedProgramError(f"a step of the whole job is wrong:\n{report}")
            reports.append(str(report))
    schedule = f", {stages} stages by {first.schedule!r} in {first.microbatches} microbatches" if stages > 1 else ""
    return "; ".join(reports) + schedule


def _step(config: ComputeConfig, trained: Any, evaluated: Any) -> Callable[[Any, Any, Any], None]:
    """Returns a function that runs a step of training, and one of inference where that has messages.

    Args:
        trained, evaluated: the results of forward in the two modes.
    """

    def step(module: ParallelModule, _: Any, inputs: Mapping[str, Any]) -> None:
        pipeline = pipelined(module)
        samples = [next(iter(inputs.values()))] * module.MICROBATCHES if config.use_end2end else []
        if pipeline is not None:
            pipeline.expect(True, trained)
            pipeline.expect(False, evaluated)
            _declare_messages(module, pipeline.tied)
        if not config.inference_only:
            optimizer = build_optimizer(module, torch.optim.SGD, config, lr=1.0)
            if samples:
                module.train_step(samples)
            else:
                results = [x for x in pytree.tree_leaves(module(**inputs)) if isinstance(x, torch.Tensor)]
                sum(x.sum() for x in results if x.requires_grad).backward()  # type: ignore[union-attr]
            optimizer.clip_gnorm(1.0)
            optimizer.step()
        if pipeline is not None:
            module.eval()
            module.infer_step(samples)
            module.train()

    return step


def _declare_messages(module: ParallelModule, tied: Mapping[str, Any]) -> None:
    """Declares received tensors as V over the units, and gradients of tied weights as P on pp until summed."""
    mode: Any = active()
    if mode is not None:
        mode.received = lambda *message: lambda: _type(mode, V)
        mode.tied.update((id(module.get_parameter(name)), group) for name, group in tied.items())


# --- stages without their computation ---------------------------------------------------------------------------------


def _fold_parameters(emitted: type[ParallelModule], divisions: Sequence[Division]) -> None:
    """Removes all but two parameters of each kind: what holds for two equal parameters holds for all."""
    read = [_read_parameters(stage) for division in divisions for stage in stages_of(division)]
    equal_parameters: dict[Any, list[str]] = {}
    for name, stored in emitted.STORED.items():
        if stored.kind == "parameter":
            equal_parameters.setdefault((stored, tuple(name in paths for paths in read)), []).append(name)
    names = {name for equal in equal_parameters.values() for name in equal[:2]}
    emitted.STORED = {name: stored for name, stored in emitted.STORED.items() if (stored.same_as or name) in names}


def _read_parameters(stage: StageCalls) -> set[str]:
    """Returns the names of the trained parameters that a stage reads."""
    read = {value for call in stage.calls for value in values_in((call.args, call.kwargs))}
    return {value.path for value in read if value.kind == "parameter" and value.requires_grad}


def _replace_stages(emitted: type[ParallelModule], divisions: Sequence[Division]) -> None:
    for division, table in zip(divisions, (emitted.STAGES, emitted.EVAL_STAGES)):
        stages = stages_of(division)
        bodies = [_body(emitted, division, stage, number == len(stages) - 1) for number, stage in enumerate(stages)]
        if table:
            for name, body in zip(table, bodies, strict=True):
                setattr(emitted, name, body)
        elif division is divisions[0]:
            emitted.run = bodies[0]
            if not emitted.compute_config.use_end2end:
                emitted.forward = bodies[0]


def _body(emitted: type[ParallelModule], division: Division, stage: StageCalls, is_last: bool) -> Callable[..., Any]:
    """Returns a stage that reads its parameters and the received tensors, and returns tensors of the right shapes."""
    paths = sorted(_read_parameters(stage) & emitted.STORED.keys())
    count = len(stage.received)
    shapes = [local_shape(value.shape, division.type_of(value), division.size) for value in stage.sent]

    def body(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        received = args[len(args) - count :] if count else ()
        with _unchecked():
            elements = [x.reshape(-1)[:1] for x in (*map(self.get_parameter, paths), *received) if x.requires_grad]
            history = (
                torch.cat([x.abs().double() for x in elements]).sum()
                if elements
                else torch.zeros((), dtype=torch.float64, device="cpu")
            )
        if not is_last:
            return tuple(_like(value, shape, history, V) for value, shape in zip(stage.sent, shapes))
        outputs = [
            _like(x, x.shape, history, P if x.requires_grad else V) if isinstance(x, Value) else x
            for x in division.program.outputs
        ]
        return pytree.tree_unflatten(outputs, division.program.output_structure)

    return body


def _like(value: Value, shape: Sequence[int], history: torch.Tensor, over_units: SpmdType) -> torch.Tensor:
    """Returns a tensor in the place of a value, with this history if the value requires a gradient."""
    with _unchecked():
        x = torch.zeros(tuple(shape), dtype=value.dtype, device=history.device)
        x = x + history.to(value.dtype) if value.requires_grad else x
    mode = active()
    if mode is not None:
        mode.stamp(x, _type(mode, over_units))
    return x


def _type(mode: Any, over_units: SpmdType) -> TensorType:
    """Returns a type for the axes between stages and units; types over the ranks of a stage are proven apart."""
    types: dict[str, SpmdType] = dict.fromkeys(mode.atoms("tp"), I)
    return TensorType.of({**types, **dict.fromkeys(mode.atoms("dp"), over_units), "pp": V})


def _unchecked() -> AbstractContextManager[Any]:
    """Returns a context in which tensors get no types."""
    mode = active()
    return nullcontext() if mode is None else mode.pause()


def _result(division: Division) -> Any:
    """Returns the result of a division's forward, on meta."""
    outputs = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Value) else x
        for x in division.program.outputs
    ]
    return pytree.tree_unflatten(outputs, division.program.output_structure)
