"""Runs the stages of an emitted module by a schedule, on the runtime of `pipeline`.

    pipeline = Pipelined(module)                          # on all ranks, when the module is made
    pipeline.train(samples, dummies, scale_fn)            # adds gradients to those of the parameters

A rank runs the methods of its stages. Gradients are sums over the microbatches; the gradient of a weight on several
stages is the sum over these stages, too. Other gradients are complete in the backward of their stage's last microbatch,
and their reduction over the units may start there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import comm
from ...gradients.in_backward import paused
from ...pipeline.run.executor import Executor
from ...pipeline.run.message_transport import Messages
from ...pipeline.run.transport import Channels, wires_of
from ...pipeline.schedule import Inference, Kind, Task
from ...pipeline.schedule.tasks import OTHER_END
from ...program.recording import TensorSpec
from ...torch_internals.tensors import pytree
from ..choose.stages import schedule_of
from .module_tensors import buffers_kept, device_of

__all__ = ["Pipelined", "StageTable"]

# For each stage the name of its method, and for each received value shape, dtype, whether it requires a gradient.
StageTable = Mapping[str, Mapping[str, tuple[list[int], torch.dtype, bool]]]


class Pipelined:
    """The pipeline of a parallel module on this rank. All ranks of the job build it together.

    Args:
        ranks: number of groups of ranks that the stages lie on.
        schedule: a name of `pipeline.schedule`.
        stages: number of stages.
        used_by: the stages that use each parameter, by the name under which the parameter is registered.

    Raises:
        RuntimeError: the backend has no messages between two ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: int,
        stages: int,
        microbatches: int,
        schedule: str,
        used_by: Mapping[str, Sequence[int]],
    ) -> None:
        if not comm.current().backend.has_messages:
            raise RuntimeError(
                f"{type(module).__name__} is a pipeline of {stages} stages, which needs point-to-point messages, but "
                f"the backend {comm.current().backend.name} has none. "
                "Compile with a policy without stages (pipeline_nstages=1, or 'tp'), or run on gloo or NCCL"
            )
        self.microbatches = microbatches
        self._training = schedule_of(ranks, stages, microbatches, schedule)
        self._inference = Inference(ranks, microbatches, self._training)
        self._stage = comm.rank("pp")
        self._results: dict[bool, _Results] = {}  # by `module.training`
        pipelines = comm.current().mesh.groups("pp")
        ways = ["pp_forward", "pp_backward"] + ["pp_forward_up", "pp_backward_down"] * (stages > ranks)
        self._channels = Channels(*(comm.new_group(pipelines, way) for way in ways))
        self.tied: dict[str, comm.Communicator] = {}  # of the weights that are here
        for name, users in used_by.items():
            holders = sorted({stage % ranks for stage in users})
            if len(users) == 1 and self._stage in holders:
                module.get_parameter(name).complete_in_backward = True  # type: ignore[attr-defined]
            if len(holders) == 1:
                continue
            lists = [[pipeline[stage] for stage in holders] for pipeline in pipelines]
            group = comm.new_group(lists, f"pp_tied_{'_'.join(map(str, holders))}")
            if group is not None:
                self.tied[name] = group
                if self._stage != holders[0]:
                    module.get_parameter(name).shared = True  # type: ignore[attr-defined]  # norms count the first

    def train(
        self,
        module: nn.Module,
        table: StageTable,
        samples: Sequence[Any],
        dummies: Collection[int],
        scale_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> list[Any]:
        """Adds the gradients of all samples; returns the results of forward for each sample, on every rank.

        Args:
            dummies: numbers of the samples that add nothing.
        """
        results = self._run(module, table, samples, True, dummies, scale_fn or _as_it_is)
        for name, group in self.tied.items():
            parameter = module.get_parameter(name)
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = comm.all_reduce(grad, group)
        return results

    def infer(self, module: nn.Module, table: StageTable, samples: Sequence[Any]) -> list[Any]:
        """Returns the results of forward for each sample, without gradients, on every rank."""
        with torch.no_grad():
            return self._run(module, table, samples, False, (), None)

    def expect(self, training: bool, result: Any) -> None:
        """Declares that forward returns results like `result` in this mode, so that ranks need not exchange that."""
        self._results[training] = _Results.of(*pytree.tree_flatten(result))

    def _run(
        self,
        module: nn.Module,
        table: StageTable,
        samples: Sequence[Any],
        trains: bool,
        dummies: Collection[int],
        scale_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> list[Any]:
        if len(samples) != self.microbatches:
            raise ValueError(
                f"{type(module).__name__} is a pipeline of {self.microbatches} microbatches "
                f"(pas_config['pipeline_nmicros']), but got {len(samples)} samples: pass a list of {self.microbatches}"
            )
        schedule = self._training if trains else self._inference
        stages = [*table.items()]
        numbers = [schedule.virtual_stage(self._stage, chunk) for chunk in range(schedule.num_chunks)]
        chunks = [_Chunk(stages, number) for number in numbers]
        outputs_of: dict[int, list[Any]] = {}

        def keep(task: Task, outputs: list[Any], _: Any) -> None:
            outputs_of[task.microbatch] = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]

        messages = _Messages(
            module=module,
            dummies=dummies,
            schedule=schedule,
            stage=self._stage,
            wires=[{kind: wires_of(chunk, kind) for kind in OTHER_END} for chunk in chunks],
            channels=self._channels,
            device=device_of(module),
        )
        executor = Executor(
            module=module,
            chunks=chunks,
            schedule=schedule,
            stage=self._stage,
            transport=messages,
            microbatches=samples,
            pick_loss=(lambda outputs: outputs[0]) if trains else None,
            check_outputs=keep,
            scale_loss=scale_fn,
            without_backward=dummies,
        )
        executor.execute()
        last = schedule.holders[-1]
        return self._everywhere(
            [outputs_of[number] for number in sorted(outputs_of)], chunks[-1].structure, last, module
        )

    def _everywhere(
        self, results: list[list[Any]], structure: pytree.TreeSpec | None, last: int, module: nn.Module
    ) -> list[Any]:
        """Returns the results of all microbatches, broadcast by the stage that computed them."""
        if module.training not in self._results:
            results_here = None if self._stage != last else _Results.of(results[0], structure)
            self._results[module.training] = comm.broadcast_object(results_here, "pp", src=last)
        like = self._results[module.training]
        device = device_of(module)
        columns: list[Any] = []
        for number, leaf in enumerate(like.leaves):
            if isinstance(leaf, TensorSpec):
                stacked = torch.empty((self.microbatches, *leaf.shape), dtype=leaf.dtype, device=device)
                if self._stage == last:
                    stacked = torch.stack([leaves[number] for leaves in results])
                columns.append(comm.broadcast(stacked, "pp", src=last).unbind())
            else:
                columns.append([leaf] * self.microbatches)
        return [pytree.tree_unflatten(list(leaves), like.structure) for leaves in zip(*columns, strict=True)]


class _Messages(Messages):
    """Messages of a training step, with the contexts around its tasks.

    Reductions of gradients start only in the last backward of a stage that adds a gradient. The forward of a
    dummy batch does not change buffers.

    Args:
        module: the part of the module on this rank.
        dummies: microbatches that add nothing.
    """

    def __init__(self, *, module: nn.Module, dummies: Collection[int], **options: Any) -> None:
        super().__init__(**options)
        self._module, self._dummies = module, dummies
        self._parameters = [*module.parameters()]
        tasks = options["schedule"].tasks(options["stage"])
        backwards = [task for task in tasks if task.kind is Kind.BACKWARD and task.microbatch not in dummies]
        self._last = {task.chunk: task for task in backwards}

    def run(self, compute: Callable[[Task], None]) -> None:
        def computed(task: Task) -> None:
            with self._around(task):
                compute(task)

        super().run(computed)

    def _around(self, task: Task) -> AbstractContextManager[None]:
        if task.kind is Kind.FORWARD:
            return buffers_kept(self._module) if task.microbatch in self._dummies else nullcontext()
        return nullcontext() if task == self._last.get(task.chunk) else paused(self._parameters)


class _Results(NamedTuple):
    """The results of forward: specs of tensors, constants, and the structure of both."""

    leaves: list[Any]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: pytree.TreeSpec | None) -> _Results:
        assert structure is not None  # a forward has run
        return cls([TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves], structure)


class _Chunk:
    """The method of one stage, as a piece of a model.

    Attributes:
        structure: structure of forward's result, on the last stage once it has run.
    """

    def __init__(self, stages: Sequence[tuple[str, Mapping[str, Any]]], number: int) -> None:
        self._method, received = stages[number]
        self._is_last = number + 1 == len(stages)
        self.received_specs = _specs(received)
        self.sent_specs = [] if self._is_last else _specs(stages[number + 1][1])
        self.structure: pytree.TreeSpec | None = None

    def run(
        self, module: nn.Module, inputs: Any, received: Sequence[torch.Tensor], first: list[Any] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]]:
        result = getattr(module, self._method)(inputs, *received)
        if not self._is_last:
            return list(result), []
        outputs, self.structure = pytree.tree_flatten(result)
        return [], outputs

    def warn_of_undivided(self, names: Sequence[str]) -> None:
        """Does nothing: no schedule here divides a backward."""


def _specs(received: Mapping[str, tuple[list[int], torch.dtype, bool]]) -> list[TensorSpec]:
    specs = []
    for shape, dtype, requires_grad in received.values():
        stride = torch.empty(shape, device="meta").stride()
        specs.append(TensorSpec(tuple(shape), stride, dtype, requires_grad))
    return specs


def _as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss
