"""The program of a stage, built from a recording, for inputs of one shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import comm
from ...program.recording import Recording, TensorSpec, TracingError, describe
from ...torch_internals.tensors import pytree
from ...weights.module_tree import ModuleTree
from ..cut.placement import Placement, misplaced, misplacement
from ..cut.splitting import StagePlan, split
from ..cut.stage import StageFunction, add_place
from ..schedule import Kind, Schedule
from ..schedule.tasks import OTHER_END
from .lockstep_transport import Transfers
from .microbatches import Batch
from .step_loss import find_loss
from .transport import WireFormat, wires_of

__all__ = ["Programs", "StageProgram", "build_program", "program_key", "recorded"]


class StageProgram(NamedTuple):
    """The program that a stage runs for each microbatch.

    Attributes:
        chunks: the stage's pieces of the model, as functions.
        structure: pytree structure of the forward's result; None if only the loss is wanted.
        loss: the loss, if it is known which output that is; then the first output leaf.
        constants: inputs that are no tensors; compared by identity where they do not hash, so they must stay alive.
        wires: formats of the tensors in messages, by chunk and by kind.
        boundaries: tensors between each piece of the model and the next, in words.
        transfers: between stages, on a backend without messages.
    """

    chunks: tuple[StageFunction, ...]
    structure: pytree.TreeSpec | None
    loss: TensorSpec | None
    constants: list[Any]
    wires: tuple[dict[Kind, list[WireFormat]], ...]
    boundaries: list[str]
    transfers: Transfers | None

    @property
    def input_leaves(self) -> list[int]:
        """Numbers of the input leaves (of `tree_flatten(inputs)`) that this stage reads."""
        return list(dict.fromkeys(leaf for chunk in self.chunks for leaf in chunk.input_leaves))


class Programs:
    """The programs of a model that were used last, by key.

    Attributes:
        most: number of programs in memory.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_key: dict[Any, StageProgram] = {}  # in the order of last use
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: Any) -> StageProgram | None:
        program = self._by_key.pop(key, None)
        if program is not None:
            self._by_key[key] = program
        return program

    def add(self, key: Any, program: StageProgram) -> None:
        """Adds a program; above `most`, drops the program that was not used for longest."""
        self._by_key[key] = program
        while len(self._by_key) > self.most:
            del self._by_key[next(iter(self._by_key))]
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"more than {self.most} recordings of this pipeline model, because of as many shapes of a "
                    "microbatch or values of non-tensor inputs: the least recently used are dropped, and recorded "
                    "again if needed. Pad batches to fewer shapes, pass changing numbers as 0-dim tensors, or raise "
                    "recordings_kept of the model",
                    stacklevel=2,
                )


def program_key(batch: Batch, tree: ModuleTree, device: torch.device, return_outputs: bool) -> tuple[Any, ...]:
    """A key that is equal where one program serves: for batches of one shape, while modes and parameters stay.

    (`recompute` wraps the `forward` of a module; Hugging Face's modules have `gradient_checkpointing`.)
    """
    return (
        batch.key(),
        device,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        return_outputs,
        tuple(
            (m.training, "forward" in m.__dict__, m.__dict__.get("gradient_checkpointing", False)) for m in tree.modules
        ),
        tuple((p.requires_grad, p.dtype) for p in tree.parameters()),
    )


def recorded(
    recorder: Callable[..., Recording],
    module: nn.Module,
    inputs: dict[str, Any],
    leaf_classes: Sequence[type],
    device: torch.device | None,
) -> Recording:
    """Records the forward; an error of the model itself gets a description of the inputs."""
    try:
        return recorder(module, inputs, leaf_classes, device)
    except TracingError:
        raise
    except Exception as error:
        add_place(error, f"{type(module).__name__}.forward, given {describe(inputs)}")
        raise


def build_program(
    module: nn.Module,
    recording: Recording,
    *,
    loss_spec: Any,
    return_outputs: bool,
    cuts: Sequence[str],
    placement: Placement,
    schedule: Schedule,
    stage: int,
    constants: list[Any],
) -> StageProgram:
    """Cuts a recording, and takes the pieces of this stage.

    Args:
        loss_spec: `NxDPPModel.output_loss_value_spec`; None: the whole result is wanted, and there is no loss.
        return_outputs: the result is wanted beside the loss.
        cuts: names of the last layers of all pieces but the last.
        placement: which stages hold which parameters.
        schedule: decides which pieces a stage holds.
        constants: inputs that are no tensors.

    Raises:
        ValueError: no loss at the place of `loss_spec`; layers that do not run in the order in which they were placed.
        TracingError: the recording cannot be cut here.
    """
    wanted: list[Any] = recording.outputs
    loss: TensorSpec | None = None
    if loss_spec is not None:
        node = find_loss(recording, loss_spec)
        wanted, loss = [node, *(recording.outputs if return_outputs else ())], node.meta["info"].spec
    plans = split(recording, cuts, wanted)
    wrong = misplaced(module, placement, plans, schedule.holders)
    if wrong is not None:
        raise misplacement(module, placement, *wrong)
    stage_plans = [plans[schedule.virtual_stage(stage, chunk)] for chunk in range(schedule.num_chunks)]
    lockstep = schedule.num_stages > 1 and not comm.current().backend.has_messages
    return StageProgram(
        chunks=tuple(map(StageFunction, stage_plans)),
        structure=recording.structure if loss is None or return_outputs else None,
        loss=loss,
        constants=constants,
        wires=tuple({kind: wires_of(plan, kind) for kind in OTHER_END} for plan in stage_plans),
        boundaries=[_in_words(plan) for plan in plans[:-1]],
        transfers=Transfers(plans, schedule) if lockstep else None,
    )


def _in_words(plan: StagePlan) -> str:
    """The tensors that a piece of the model sends, in words."""
    words = [
        f"{[*wire.shape]} {str(wire.dtype).removeprefix('torch.')}{', with a gradient' * spec.requires_grad}"
        for wire, spec in zip(wires_of(plan, Kind.SEND_FORWARD), plan.sent_specs)
    ]
    return "; ".join(words) or "nothing"
