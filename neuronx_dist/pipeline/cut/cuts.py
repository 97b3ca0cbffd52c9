"""Cuts of a model: names of layers, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from ...model_shape import stage_layers
from ...nearest import nearest

__all__ = ["check_cuts", "create_partitions"]


def create_partitions(pipeline_parallel_size: int, model_layer_names: Sequence[str]) -> list[str]:
    """Cuts that divide layers evenly: `floor(layers / stages)` for each stage, and one more for the last stages.

    >>> create_partitions(4, [f"layers.{i}" for i in range(19)])
    ['layers.3', 'layers.8', 'layers.13']

    Raises:
        ValueError: there is no stage, or there are fewer layers than stages.
    """
    stages, layers = pipeline_parallel_size, len(model_layer_names)
    if stages < 1:
        raise ValueError(f"pipeline_parallel_size must be at least 1, got {stages}")
    if layers < stages:
        raise ValueError(
            f"auto_partition: {stages} pipeline stages need at least {stages} transformer layers, found {layers}: use "
            f"a pipeline_model_parallel_size of at most {max(1, layers)}, or check transformer_layer_cls"
        )
    return [model_layer_names[of_stage.stop - 1] for of_stage in stage_layers(layers, stages)[:-1]]


def check_cuts(cuts: Sequence[str], names: Sequence[str], num_stages: int, which: str = "of this model") -> None:
    """Checks cuts against the leaf layers of a model, in the order in which they run.

    Args:
        which: which layers `names` are, for a message.

    Raises:
        ValueError: a wrong number of cuts, a name that is no layer (the message lists near ones), or a wrong order.
    """
    if len(cuts) != num_stages - 1:
        raise ValueError(
            f"{num_stages} pipeline stages need {num_stages - 1} cuts, got {len(cuts)}: {list(cuts)}. A cut is the "
            f"name of the last layer of a stage; the last stage needs none."
        )
    for cut in cuts:
        if cut not in names:
            raise ValueError(
                f"pipeline cut {cut!r} is not a layer {which}; near it: {nearest(cut, names)}. A cut is a transformer "
                "layer or, outside of those, a layer with parameters"
            )
    positions = [names.index(cut) for cut in cuts]
    if positions != sorted(set(positions)):
        raise ValueError(f"pipeline cuts must be different layers, in the order in which they run; got {list(cuts)}")
