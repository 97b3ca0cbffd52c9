"""Division of a model into pieces, by a recording of its calls or by the order of registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import nn

from ...program.recording import Recording
from .balance import balanced_cuts, weights_by_recording, weights_by_registration
from .cuts import check_cuts, create_partitions
from .placement import Placement, leaf_names, place_by_recording, place_by_registration
from .splitting import split

__all__ = ["Partition", "partition"]


class Partition(NamedTuple):
    """A model in pieces.

    Attributes:
        cuts: names of the last layers of all pieces but the last.
        placement: which pieces hold which parameters.
    """

    cuts: list[str]
    placement: Placement


def partition(
    module: nn.Module,
    pieces: int,
    *,
    cuts: Sequence[str] | Literal["layers", "balanced"],
    layer_classes: Sequence[type],
    leaf_classes: Sequence[type],
    recording: Recording | None = None,
    chunks: int = 1,
) -> Partition:
    """Cuts a model into pieces.

    Args:
        cuts: names of layers; "layers": evenly between layers of `layer_classes`; "balanced": see `balance`.
        recording: of the model's forward; None: layers are assumed to run in the order in which they are registered.
        chunks: pieces on each stage, for error messages.

    Raises:
        ValueError: cuts that do not fit the model or the number of pieces.
        TracingError: the recording cannot be cut there.
    """
    names = leaf_names(module, leaf_classes) if recording is None else list(recording.last_calls())
    if cuts == "balanced":
        by_registration = weights_by_registration(module, leaf_classes)
        layers = by_registration if recording is None else weights_by_recording(module, recording)
        cuts = balanced_cuts(pieces, layers)
    elif cuts == "layers":
        layer_names = [name for name in names if isinstance(module.get_submodule(name), tuple(layer_classes))]
        _check_divides(len(layer_names), pieces, chunks, layer_classes)
        cuts = create_partitions(pieces, layer_names)
    if recording is None:
        check_cuts(cuts, names, pieces)
        return Partition([*cuts], place_by_registration(module, cuts, leaf_classes))
    return Partition([*cuts], place_by_recording(module, split(recording, cuts), cuts, leaf_classes))


def _check_divides(layers: int, pieces: int, chunks: int, layer_classes: Sequence[type]) -> None:
    """Raises ValueError for unknown transformer layers, or fewer layers than pieces with several chunks."""
    if not layer_classes:
        raise ValueError(
            "auto_partition cuts between transformer layers, but their class is unknown: pass "
            'transformer_layer_cls, a class or its name (auto_partition="balanced" needs none)'
        )
    if layers < pieces and chunks > 1:
        raise ValueError(
            f"auto_partition: {pieces // chunks} pipeline stages with {chunks} chunks each (virtual_pipeline_size, or "
            f"the schedule's) need at least {pieces} transformer layers, found {layers}: use a schedule with fewer "
            "chunks, such as '1f1b', or fewer stages, or check transformer_layer_cls"
        )
