"""What a recording became on this rank, for inputs of one shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from ... import comm
from ...weights.module_tree import ModuleTree
from ..cut.placement import Placement, misplaced, misplacement
from ..cut.splitting import StagePlan, split
from ..cut.stage import Stage, add_place
from ..record.recording import Recording, TensorSpec, TracingError, describe
from ..schedule import Kind, Schedule
from ..schedule.tasks import OTHER_END
from .lockstep import Transfers
from .loss import find_loss
from .microbatches import Batch
from .wire import Wire, wires_of

__all__ = ["Programs", "StageProgram", "build_program", "program_key", "recorded"]


class StageProgram(NamedTuple):
    """What a stage runs for each microbatch.

    Attributes:
        chunks: the stage's pieces of the model, as functions.
        structure: how output leaves make up the forward's result; None if only the loss is wanted.
        loss: the loss, if it is known which output that is. It is then the first output leaf.
        constants: inputs that are no tensors; compared by identity where they do not hash, so they must stay alive.
        wires: what messages carry, by chunk and by kind.
        boundaries: what goes from each piece of the model to the next, in words.
        transfers: between stages, where ranks have no messages.
    """

    chunks: tuple[Stage, ...]
    structure: pytree.TreeSpec | None
    loss: TensorSpec | None
    constants: list[Any]
    wires: tuple[dict[Kind, list[Wire]], ...]
    boundaries: list[str]
    transfers: Transfers | None

    @property
    def input_leaves(self) -> list[int]:
        """Numbers of the input leaves (of `tree_flatten(inputs)`) that this stage reads."""
        return list(dict.fromkeys(leaf for chunk in self.chunks for leaf in chunk.input_leaves))


class Programs:
    """The programs of a model that were used last, by key.

    Attributes:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_key: dict[Any, StageProgram] = {}  # the one used last is the last
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: Any) -> StageProgram | None:
        program = self._by_key.pop(key, None)
        if program is not None:
            self._by_key[key] = program
        return program

    def add(self, key: Any, program: StageProgram) -> None:
        """Keeps one more; if that is one too many, drops the one that was not used for longest."""
        self._by_key[key] = program
        while len(self._by_key) > self.most:
            del self._by_key[next(iter(self._by_key))]
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"more than {self.most} recordings of this pipeline model, of as many shapes of a microbatch or "
                    "values of inputs that are no tensors: those not used for longest are dropped, and recorded again "
                    "when they are needed. Pad batches to fewer shapes, give numbers that change as 0-dim tensors, or "
                    "raise recordings_kept of the model",
                    stacklevel=2,
                )


def program_key(batch: Batch, tree: ModuleTree, device: torch.device, return_outputs: bool) -> tuple[Any, ...]:
    """Equal wherever one program serves: for batches of one shape, while modes, parameters and autocast stay so.

    (`checkpoint_layers` wraps the `forward` of a module; Hugging Face's modules have `gradient_checkpointing`.)
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
    """Records the forward; what the model itself raises says what it was given."""
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
        schedule: says which pieces a stage holds.
        constants: inputs that are no tensors.

    Raises:
        ValueError: no loss where `loss_spec` says; layers that do not run in the order in which they were placed.
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
    own = [plans[schedule.virtual_stage(stage, chunk)] for chunk in range(schedule.num_chunks)]
    lockstep = schedule.num_stages > 1 and not comm.current().backend.has_messages
    return StageProgram(
        chunks=tuple(map(Stage, own)),
        structure=recording.structure if loss is None or return_outputs else None,
        loss=loss,
        constants=constants,
        wires=tuple({kind: wires_of(plan, kind) for kind in OTHER_END} for plan in own),
        boundaries=[_in_words(plan) for plan in plans[:-1]],
        transfers=Transfers(plans, schedule) if lockstep else None,
    )


def _in_words(plan: StagePlan) -> str:
    """What a piece of the model sends."""
    words = [
        f"{[*wire.shape]} {str(wire.dtype).removeprefix('torch.')}{', with a gradient' * spec.requires_grad}"
        for wire, spec in zip(wires_of(plan, Kind.SEND_FORWARD), plan.sent_specs)
    ]
    return "; ".join(words) or "nothing"
