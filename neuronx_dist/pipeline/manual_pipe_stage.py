"""Models given as a list of layers: `NxDPPModel(layers, manual_pp_partition=True, manual_pp_loss_fn=...)`.

    PipelineStageModule.mark_weight_sharing([(layers[0], "weight"), (layers[-1], "weight")])
    model = NxDPPModel(layers, num_microbatches=8, manual_pp_partition=True, manual_pp_loss_fn=loss)
    model.run_train(inputs=x, labels=y)          # loss(layers[-1](... layers[0](x)), y)

The list becomes one module, which is recorded and cut as any other is: its parameters are called `layers.3.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .cut.cuts import create_partitions

__all__ = ["LayerList", "PartitionFunction", "PipelineStageModule"]

# (layers, number of stages) -> the stage of each layer.
PartitionFunction = Callable[[Sequence[nn.Module], int], Mapping[nn.Module, int]]


class LayerList(nn.Module):
    """Layers that run one after the other, each on the output of the one before, and a loss of the last output.

    Args:
        layers: each takes and returns a tensor, or a list of tensors.
        loss_fn: `loss_fn(output, labels)`, of a list or tuple its first entry, as in NxD; None: forward returns the
            last layer's output alone.

    Raises:
        ValueError: `layers` is not a list of different modules.
    """

    def __init__(self, layers: Any, loss_fn: Callable[..., Any] | None = None) -> None:
        super().__init__()
        _check_layers(layers)
        self.layers = nn.ModuleList(layers)
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        if labels is None and self.loss_fn is not None:
            raise ValueError(f"manual_pp_loss_fn, {self.loss_fn!r}, needs labels: pass labels=...")
        output = inputs
        for layer in self.layers:
            output = layer(output)
        return output if self.loss_fn is None else (self.loss_fn(_first(output), _first(labels)), output)

    @property
    def layer_classes(self) -> list[type]:
        """The classes of the layers; each layer is recorded as one call."""
        return list(dict.fromkeys(map(type, self.layers)))

    @property
    def loss_spec(self) -> Any:
        """`output_loss_value_spec` for this model; None without a loss."""
        return None if self.loss_fn is None else (True, False)

    def cuts(self, num_stages: int, partition_fn: PartitionFunction | None = None) -> list[str]:
        """Names of the last layers of all stages but the last.

        Args:
            num_stages: pieces that the model is cut into: stages times chunks.
            partition_fn: as of `PipelineStageModule`.

        Raises:
            ValueError: `partition_fn` does not assign at least one layer to each stage, in order.
        """
        stages = _stages(list(self.layers), num_stages, partition_fn)
        return [f"layers.{number}" for number, stage in enumerate(stages[:-1]) if stage != stages[number + 1]]


class PipelineStageModule(nn.Module):
    """The layers of one stage, one after the other.

    Args:
        layers: of the whole model.
        num_stages, stage_index: number of stages, and index of this one.
        partition_fn: `partition_fn(layers, num_stages)` returns `{layer: stage}`, the layers being keys. None: equally
            many layers for each stage, and one more for the last stages where that does not divide.

    Raises:
        ValueError: `partition_fn` does not assign at least one layer to each stage, in order.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        num_stages: int,
        stage_index: int,
        partition_fn: PartitionFunction | None = None,
    ) -> None:
        super().__init__()
        _check_layers(layers)
        if not 0 <= stage_index < num_stages:
            raise ValueError(f"stage_index={stage_index} is none of {num_stages} stages")
        stages = _stages(layers, num_stages, partition_fn)
        self.stage_modules = nn.ModuleList(layer for layer, stage in zip(layers, stages) if stage == stage_index)

    def forward(self, x: Any) -> Any:
        for layer in self.stage_modules:
            x = layer(x)
        return x

    @staticmethod
    def mark_weight_sharing(
        layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default"
    ) -> None:
        """Ties weights of several layers: all become the parameter of the first layer.

        To be called before the model is made. The model keeps the copies on several stages equal.

        Args:
            layer_and_weight_path: layers, and the names of their weights, such as `(layer, "norm.weight")`.
            sharing_group_name: for error messages.

        Raises:
            ValueError: fewer than two weights, a name that is no parameter, or shapes that differ.
        """
        what = f"mark_weight_sharing of group {sharing_group_name!r}"
        if len(layer_and_weight_path) < 2:
            raise ValueError(
                f"{what}: expected at least two pairs (layer, name of its weight), got {layer_and_weight_path}"
            )
        weights = [_parameter(what, layer, path) for layer, path in layer_and_weight_path]
        first, (_, first_path) = weights[0], layer_and_weight_path[0]
        for weight, (layer, path) in zip(weights, layer_and_weight_path):
            if weight.shape != first.shape:
                raise ValueError(
                    f"{what}: {path} of {type(layer).__name__} has shape {list(weight.shape)}, but the first "
                    f"weight, {first_path}, has {list(first.shape)}"
                )
        for layer, path in layer_and_weight_path:
            owner, _, name = path.rpartition(".")
            layer.get_submodule(owner)._parameters[name] = first


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def _parameter(what: str, layer: nn.Module, path: str) -> nn.Parameter:
    try:
        return layer.get_parameter(path)
    except AttributeError:
        near = ", ".join([name for name, _ in layer.named_parameters()][:4]) or "none"
        raise ValueError(
            f"{what}: {type(layer).__name__} has no parameter {path!r}; its parameters are {near}"
        ) from None


def _check_layers(layers: Any) -> None:
    """Raises ValueError if `layers` is not a list of different modules."""
    if not isinstance(layers, (list, tuple, nn.ModuleList)) or not all(isinstance(x, nn.Module) for x in layers):
        raise ValueError(f"manual_pp_partition: module is a list of layers (modules), got {layers!r:.200}")
    different = len(set(layers))
    if different != len(layers) or not layers:
        raise ValueError(
            f"manual_pp_partition: layers must be at least one layer, without repetition; got {len(layers)}, of "
            f"which {different} are distinct. To tie the weights of two layers, call "
            "PipelineStageModule.mark_weight_sharing"
        )


def _stages(layers: Sequence[nn.Module], num_stages: int, partition_fn: PartitionFunction | None) -> list[int]:
    """The stage of each layer."""
    if len(layers) < num_stages:
        raise ValueError(
            f"manual_pp_partition: {num_stages} stages (or chunks) need at least as many layers, got {len(layers)}"
        )
    if partition_fn is None:
        last = [int(name) for name in create_partitions(num_stages, [str(number) for number in range(len(layers))])]
        return [sum(number > end for end in last) for number in range(len(layers))]
    by_layer = partition_fn(layers, num_stages)
    problem = _problem(by_layer, layers, num_stages)
    if problem:
        raise ValueError(
            f"manual_pp_stage_partition_fn(layers, {num_stages}) returned {problem}; it must return {{layer: "
            f"stage}} with each of the {len(layers)} layers as a key, and stages (or chunks: stages * chunks) that "
            f"ascend from 0 to {num_stages - 1}"
        )
    return [by_layer[layer] for layer in layers]


def _problem(by_layer: Any, layers: Sequence[nn.Module], num_stages: int) -> str:
    """The fault of a dict of the layers' stages, in words; empty if there is none."""
    if not isinstance(by_layer, Mapping):
        return f"no dict, but {by_layer!r:.200}"
    foreign = next((key for key in by_layer if key not in set(layers)), None)
    if foreign is not None:
        return f"a dict whose keys are not the layers: {foreign!r:.100} ({type(foreign).__name__})"
    missing = next((number for number, layer in enumerate(layers) if layer not in by_layer), None)
    if missing is not None:
        return f"no stage of layer {missing} ({type(layers[missing]).__name__})"
    stages = [by_layer[layer] for layer in layers]
    for number, stage in enumerate(stages):
        if stage not in range(num_stages):
            return f"stage {stage!r:.100} for layer {number}, which is none of 0 to {num_stages - 1}"
        if number and stage < stages[number - 1]:
            return f"stages that descend, from {stages[number - 1]} to {stage} at layer {number}: {stages}"
    empty = [stage for stage in range(num_stages) if stage not in stages]
    return f"no layer for stage {empty[0]}: {stages}" if empty else ""
