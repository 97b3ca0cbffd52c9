"""Arguments of `NxDPPModel` and `trace`: names that match nothing, what is refused, what has no effect and says so."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel, OneFOneB
from tests.support.pipeline_models import Block, Model, batch, make


def alone(model: nn.Module | None = None, **options: Any) -> NxDPPModel:
    with comm.as_rank(Mesh(1), 0):
        return NxDPPModel(model or make(), **options)


class Absent(nn.Module):
    """In no model."""


@pytest.mark.parametrize(
    "options,message",
    [
        ({"virtual_pipeline_size": 0}, "virtual_pipeline_size must be an integer of at least 1, got 0"),
        ({"virtual_pipeline_size": 1.5}, "virtual_pipeline_size must be an integer of at least 1, got 1.5"),
        ({"virtual_pipeline_size": 3, "schedule": "zb_v"}, r"2 chunks on each stage, not 3 \(virtual_pipeline_size"),
        ({"virtual_pipeline_size": 2, "schedule": "1f1b"}, r"1 chunk on each stage, not 2 \(virtual_pipeline_size"),
        ({"virtual_pipeline_size": 2, "schedule": "zb_h1"}, "has 1 chunk on each stage, not 2"),
        ({"schedule": "interleaved"}, "at least 2"),
        ({"schedule": "zbv"}, "there is no schedule 'zbv'; there are '1f1b', 'interleaved', 'gpipe', 'zb_h1', 'zb_v'"),
        ({"schedule": OneFOneB(2, 1)}, "does not fit 1 stage and 1 microbatch:"),
        ({"schedule": OneFOneB(1, 4), "num_microbatches": 2}, "does not fit 1 stage and 2 microbatches"),
        ({"schedule": "zb_v", "pipeline_cuts": ["layers.0"] * 2}, "1 .* with 2 chunks each need 1 cuts, got 2"),
        ({"virtual_pipeline_size": 5, "auto_partition": True, "transformer_layer_cls": Block}, "4: use .* chunks, "),
        ({"auto_partition": True}, "auto_partition cuts .*, but their class is unknown: pass transformer_layer_cls"),
        ({"check_finite": "yes"}, "check_finite is True or False, got 'yes'"),
        ({"num_microbatches": True}, "num_microbatches must be an integer of at least 1, got True"),
        ({"virtual_pipeline_size": True}, "virtual_pipeline_size must be an integer of at least 1, got True"),
        ({"num_microbatches": 0}, "integer of at least 1, got 0"),
        ({"num_microbatches": 2.0}, "integer of at least 1, got 2.0"),
        ({"num_microbatches": "2"}, "integer of at least 1, got '2'"),
        ({"trace_file_path": True}, "trace_file_path=True: expected the name of a file, such as 'trace.json'"),
        ({"trace_file_path": ""}, "trace_file_path='': expected the name of a file"),
        ({"trace_file_path": "/"}, "trace_file_path='/' is a folder: name a file in it"),
        ({"return_mb_loss": True, "broadcast_and_average_loss": True}, "use return_mb_loss=False"),
        ({"auto_partition": True, "pipeline_cuts": ["layers.0"]}, "leave out pipeline_cuts"),
        ({"pipeline_cuts": ["layers.0"]}, "1 pipeline stages need 0 cuts, got 1"),
        ({"pipeline_cuts": "layers.0"}, "pipeline_cuts is a list of names, got 'layers.0'"),
        ({"input_names": "ids"}, "input_names is a list of names, got 'ids'"),
        ({"input_names": ["ids", 3]}, r"input_names is a list of names, got \['ids', 3\]"),
        ({"input_names": ["ids", "lables"]}, "Model.forward takes no argument 'lables'; nearest: labels"),
        ({"leaf_module_cls": [3]}, "leaf_module_cls: expected a module class or the name of one, got 3"),
        ({"leaf_module_cls": ["Blok"]}, "leaf_module_cls: this Model has no layer of class 'Blok'; .* Block"),
        ({"leaf_module_cls": [""]}, "leaf_module_cls: this Model has no layer of class ''; nearest classes: Block"),
        ({"leaf_module_cls": [Block, Absent]}, "this Model has no layer of class 'Absent'; nearest classes:"),
        ({"transformer_layer_cls": Absent}, "transformer_layer_cls: this Model has no layer of class 'Absent'"),
        ({"transformer_layer_cls": "Bloc"}, "transformer_layer_cls: this Model has no layer of class 'Bloc'; .* Block"),
        ({"tracer_cls": "nonsense"}, """tracer_cls='nonsense': allowed are "hf", "torch", a class, or None"""),
        ({"tracer_cls": 3}, "tracer_cls=3: allowed are"),
        ({"autowrap_modules": ["Block"]}, "autowrap_modules: expected .* got 'Block'; .* belong in leaf_module_cls"),
        ({"autowrap_modules": Block}, "autowrap_modules: .*Block.*; classes of layers, .* in leaf_module_cls"),
        ({"autowrap_functions": (max, 3)}, "autowrap_functions: expected .* got 3"),
        ({"autowrap_obj_methods": ["loss"]}, r"expected \{object: \[names of methods\]\}, got \['loss'\]"),
        ({"autowrap_obj_methods": {nn.Linear(1, 1): ["forwards"]}}, "no method 'forwards'; nearest: forward"),
        ({"autowrap_obj_methods": {nn.Linear(1, 1): "forward"}}, "is a list of names, got 'forward'"),
    ],
)  # fmt: skip
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone(**options)


@pytest.mark.parametrize(
    "module,message",
    [
        (Model, r"Model'>: pass an instance: Model\(\)"),
        (None, r"module is None: pass an instance: Model\(\)"),
        (alone, "belongs to manual_pp_partition=True"),
        ("a pipeline", "module is a NxDPPModel already: pass the original model"),
    ],
)
def test_impossible_modules(module: Any, message: str) -> None:
    with comm.as_rank(Mesh(1), 0), pytest.raises(ValueError, match=message):
        NxDPPModel(NxDPPModel(make()) if module == "a pipeline" else module)


@pytest.mark.parametrize("number", [0, "4", True])
def test_a_number_of_microbatches_that_is_set_later(number: Any) -> None:
    model = alone(output_loss_value_spec=True)
    model.num_microbatches = number
    with comm.as_rank(Mesh(1), 0), pytest.raises(ValueError, match="num_microbatches must be an integer of at least 1"):
        model.run_train(**batch())


def test_inputs_go_by_name() -> None:
    for method in (alone().run_train, alone(input_names=["ids", "labels"]).run_eval):
        with pytest.raises(
            TypeError, match=r"got 2 positional arguments: pass inputs by the names .*\((input_)?ids=..., labels=...\)"
        ):
            method(*batch().values())


def test_names_that_match_nothing_in_trace() -> None:
    model = alone()
    with pytest.raises(ValueError, match="leaf_modules: this Model has no layer of class 'Attention'; nearest classes"):
        model.trace(leaf_modules=["Attention"])
    with pytest.raises(ValueError, match="takes no argument 'id'; nearest: ids"):
        model.trace(input_names=["id"])
    with pytest.raises(ValueError, match="tracer_cls='fx': allowed are"):
        model.trace(tracer_cls="fx")


class WideBlock(Block):
    pass


def test_names_of_leaves_are_parts_of_names_and_those_of_transformer_layers_are_whole() -> None:
    model = make()
    model.layers[1] = WideBlock().double()
    assert alone(model, leaf_module_cls=["Bloc"])._leaf_classes[-2:] == [Block, WideBlock]
    assert alone(model, leaf_module_cls=["Wi"])._leaf_classes[-1] is WideBlock
    assert alone(model, transformer_layer_cls="Block")._layer_classes == [Block]
    assert alone(model, transformer_layer_cls=[Block, "WideBlock"])._layer_classes == [Block, WideBlock]
    assert alone(model, transformer_layer_cls=nn.Module)._layer_classes == [nn.Module]


def test_a_forward_that_takes_anything_has_any_input_names() -> None:
    class Anything(Model):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs)

    assert alone(make(Anything), input_names=["ids", "labels"]).input_names == ["ids", "labels"]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"tracer_cls": "hf"}, "^tracer_cls: no effect, .* the forward runs once on fake tensors"),
        ({"tracer_cls": "torch"}, "^tracer_cls: no effect"),
        ({"tracer_cls": torch.fx.Tracer}, "^tracer_cls: no effect"),
        (
            {"autowrap_modules": [math], "autowrap_functions": (max,)},
            "^autowrap_functions, autowrap_modules: no effect",
        ),
        ({"autowrap_modules": max, "autowrap_functions": math}, "^autowrap_functions, autowrap_modules: no effect"),
        ({"autowrap_obj_methods": {torch.nn.Linear(1, 1): ["forward"]}}, "^autowrap_obj_methods: no effect"),
        ({"use_model_wrapper": True}, "^use_model_wrapper=True has no effect: the pipeline trains"),
        ({"fuse_microbatches": True}, "^fuse_microbatches=True has no effect: each task"),
    ],
)
def test_what_has_no_effect_says_so_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning) as seen:
        model = alone(output_loss_value_spec=True, **options)
    (warning,) = seen
    assert warning.filename == __file__ and "\n" not in str(warning.message)
    assert re.search(message, str(warning.message))
    with comm.as_rank(Mesh(1), 0):
        model.run_train(**batch())


def test_what_is_left_alone_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = alone(deallocate_pipeline_outputs=True, use_zero1_optimizer=True, leaf_module_cls=["Block"])
        model.trace(input_names=["ids", "labels"])


class Positions(nn.Module):
    """A leaf without parameters, which runs wherever its result is needed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().cos()


class Loss(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions, self.last = nn.Linear(2, 2), Positions(), Loss(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y + self.positions(x))


class LateStart(Idle):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions = Positions(), nn.Identity()


@pytest.mark.parametrize(
    "model_class,cuts,message",
    [
        (LateStart, ["first"], "stage 0 of 2 is empty: the forward calls nothing before cut 'first' that"),
        (Idle, ["first", "positions"], "stage 1 of 3 .* calls nothing between cuts 'first' and 'positions' that"),
        (Idle, ["last"], "stage 1 of 2 is empty: the forward calls nothing after cut 'last' that depends"),
        (Idle, ["first", "last"], "stage 2 of 3 is empty: the forward calls nothing after cut 'last' that"),
    ],
)  # fmt: skip
def test_a_stage_with_nothing_to_do_is_an_error_that_names_the_cut(
    model_class: Any, cuts: list[str], message: str
) -> None:
    pp = len(cuts) + 1
    with comm.as_rank(Mesh(pp, pp=pp), 0):
        pipeline = NxDPPModel(
            model_class().double(), pipeline_cuts=cuts, output_loss_value_spec=True, leaf_module_cls=[Positions, Loss]
        )
        with pytest.raises(ValueError, match=f"pipeline {message}"):
            pipeline.run_train(x=torch.ones(2, 2).double())


def test_a_cut_at_a_layer_that_is_not_called() -> None:
    class Skipping(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[3](self.layers[0](x))

    with comm.as_rank(Mesh(2, pp=2), 0):
        pipeline = NxDPPModel(make(Skipping), Block, pipeline_cuts=["layers.1"], output_loss_value_spec=True)
        with pytest.raises(ValueError, match="cut 'layers.1' is not a layer that the forward calls, .* near it: l"):
            pipeline.run_train(**batch())
