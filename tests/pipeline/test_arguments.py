"""Every argument of `NxDPPModel` in the API guide and in NxD's release, by name: what each does, in a few lines.

Details are in the tests of the part that an argument belongs to; here none can be missing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import signatures
from neuronx_dist.pipeline import Kind, NxDPPModel
from tests.pipeline.test_parity import DictOutput
from tests.support.pipeline_models import Block, Model, batch, cut, error, make, on_ranks, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)
TRAIN: dict[str, Any] = {"output_loss_value_spec": True, "num_microbatches": 2}
CHECKS: dict[str, Callable[..., None]] = {}


def argument(check: Callable[..., None]) -> Callable[..., None]:
    """Registers the check of the argument that it is called after."""
    CHECKS[check.__name__] = check
    return check


def losses(mesh: Mesh = PP2, model: nn.Module | None = None, **options: Any) -> list[Any]:
    return on_ranks(mesh, model or make(), lambda p: p.run_train(**batch()), **{**TRAIN, **options})


def local_names(**options: Any) -> list[list[str]]:
    return on_ranks(PP2, make(), lambda p: [name for name, _ in p.local_named_parameters()], **options)


def warnings_of(**options: Any) -> list[str]:
    """Warnings of one rank; it trains in any case."""
    signatures._warned.clear()
    with comm.as_rank(Mesh(1), 0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        assert NxDPPModel(make(), **{**TRAIN, **options}).run_train(**batch()) is not None
    return [str(warning.message) for warning in caught]


def without_data_mean(option: str) -> None:
    """The gradients of a rank are those of its own rows."""
    pieces = cut(batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**pieces[comm.rank("dp")])
        return {name: p.grad for name, p in pipeline.local_named_parameters()}

    for switched_on in (False, True):
        for rank, grads in enumerate(on_ranks(Mesh(2), make(), use, **{**TRAIN, option: switched_on})):
            _, expected = reference(make(), pieces[rank] if switched_on else batch())
            assert all(error(grad, expected[name]) < 1e-10 for name, grad in grads.items())


@argument
def module() -> None:
    model = make()
    with comm.as_rank(Mesh(1), 0):
        assert NxDPPModel(module=model).original_module is model


@argument
def transformer_layer_cls() -> None:
    by_class, by_name = (local_names(transformer_layer_cls=layer_class) for layer_class in (Block, "Block"))
    assert by_class == by_name and by_class[0][-1].startswith("layers.1.")
    with pytest.raises(ValueError, match="this Model has no layer of class 'Blok'; nearest classes: Block"):
        local_names(transformer_layer_cls="Blok")


@argument
def num_microbatches() -> None:
    expected, _ = reference(make(), batch(), 8)
    assert error(losses(num_microbatches=8)[1], expected) < 1e-10
    assert len(losses(num_microbatches=8, return_mb_loss=True)[1]) == 8


@argument
def virtual_pipeline_size() -> None:
    first, second = local_names(virtual_pipeline_size=2)
    assert {name.split(".")[1] for name in first if "layers" in name} == {"0", "2"}
    assert {name.split(".")[1] for name in second if "layers" in name} == {"1", "3"}
    assert error(losses(virtual_pipeline_size=2)[1], reference(make(), batch(), 2)[0]) < 1e-10


@argument
def output_loss_value_spec() -> None:
    expected, _ = reference(make(DictOutput), batch(), 2, {"loss": True})
    assert error(losses(model=make(DictOutput), output_loss_value_spec={"loss": True})[1], expected) < 1e-10
    with pytest.raises(RuntimeError, match="pass output_loss_value_spec"):
        losses(output_loss_value_spec=None)


@argument
def return_mb_loss() -> None:
    first, last = losses(return_mb_loss=True)
    assert first is None and isinstance(last, list)
    for loss, piece in zip(last, cut(batch(), 2), strict=True):
        assert error(loss, reference(make(), piece)[0]) < 1e-10


@argument
def broadcast_and_average_loss() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_train(**cut(batch(), 2)[comm.rank("dp")])

    for loss in on_ranks(Mesh(4, pp=2), make(), use, broadcast_and_average_loss=True, **TRAIN):
        assert error(loss, reference(make(), batch())[0]) < 1e-10


@argument
def pipeline_cuts() -> None:
    first, second = local_names(pipeline_cuts=["layers.0"], auto_partition=False)
    assert "layers.0.up.weight" in first and "layers.1.up.weight" in second


@argument
def input_names() -> None:
    assert losses(input_names=["ids", "labels"])[1] is not None
    with pytest.raises(ValueError, match=r"missing \['mask'\]"):
        on_ranks(PP2, make(Masked), lambda p: p.run_train(**batch()), input_names=["ids", "labels", "mask"], **TRAIN)


class Masked(Model):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: Any = None) -> Any:
        return super().forward(ids, labels)


class Rope(nn.Module):
    """Without parameters or children: looked into unless it is named."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class WithRope(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) + self.rope(x)


@argument
def leaf_module_cls() -> None:
    def calls(pipeline: NxDPPModel) -> list[str]:
        return [str(node.target) for node in pipeline.program(batch()).chunks[0].plan.nodes if node.op == "call_module"]

    for leaves, called in (([], False), ([Rope], True), (["Rop"], True)):
        _, last = on_ranks(PP2, make(WithRope), calls, leaf_module_cls=leaves, **TRAIN)
        assert ("rope" in last) == called
    with pytest.raises(ValueError, match="leaf_module_cls: .* no layer of class 'Roope'; nearest classes: Rope"):
        on_ranks(PP2, make(WithRope), calls, leaf_module_cls=["Roope"], **TRAIN)


@argument
def autowrap_functions() -> None:
    assert "autowrap_functions: no effect" in warnings_of(autowrap_functions=(max,))[0]
    with pytest.raises(ValueError, match="autowrap_functions: expected Python functions or modules"):
        warnings_of(autowrap_functions=(3,))


@argument
def autowrap_modules() -> None:
    assert "autowrap_modules: no effect" in warnings_of(autowrap_modules=(json,))[0]
    with pytest.raises(ValueError, match="autowrap_modules: .* belong in leaf_module_cls"):
        warnings_of(autowrap_modules=(Block,))


@argument
def autowrap_obj_methods() -> None:
    assert "autowrap_obj_methods: no effect" in warnings_of(autowrap_obj_methods={Rope(): ["forward"]})[0]
    with pytest.raises(ValueError, match="Rope has no method 'forwards'; nearest: forward"):
        warnings_of(autowrap_obj_methods={Rope(): ["forwards"]})


@argument
def tracer_cls() -> None:
    for tracer in ("hf", "torch", fx.Tracer):
        (message,) = warnings_of(tracer_cls=tracer)
        assert "tracer_cls: no effect, " in message and "the forward runs once on fake tensors" in message
    for tracer in ("fx", 3):
        with pytest.raises(ValueError, match='allowed are "hf", "torch", a class, or None'):
            warnings_of(tracer_cls=tracer)


@argument
def param_init_fn() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    with torch.device("meta"):
        model = Model().double()

    def use(pipeline: NxDPPModel) -> Any:
        return [float(param.detach().mean()) for param in pipeline.local_parameters()]

    first, last = on_ranks(PP2, model, use, param_init_fn=init)
    assert {*first, *last} == {0.5} and len(first) + len(last) == len(list(model.parameters()))


@argument
def trace_file_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    losses(trace_file_path=str(path))
    assert {"F0", "B0"} <= {event["name"] for event in json.loads(path.read_text())}


@argument
def use_zero1_optimizer() -> None:
    without_data_mean("use_zero1_optimizer")


@argument
def auto_partition() -> None:
    assert on_ranks(PP2, make(), lambda p: p.pipeline_cuts, auto_partition=True)[0] == ["layers.1"]
    with pytest.raises(RuntimeError, match="this model is not partitioned"):
        losses(auto_partition=False)


@argument
def deallocate_pipeline_outputs() -> None:
    def sends_under_way(pipeline: NxDPPModel) -> int:
        return pipeline.training_schedule.send_window(Kind.SEND_FORWARD, 0)

    few, many = (
        on_ranks(Mesh(4, pp=4), make(), sends_under_way, deallocate_pipeline_outputs=flag, num_microbatches=8)[0]
        for flag in (True, False)
    )
    assert few < many
    assert torch.equal(losses(deallocate_pipeline_outputs=True)[1], losses()[1])


@argument
def use_model_wrapper() -> None:
    assert warnings_of(use_model_wrapper=True) == [
        "use_model_wrapper=True has no effect: the pipeline trains the model itself"
    ]


@argument
def use_optimizer_wrapper() -> None:
    without_data_mean("use_optimizer_wrapper")


@argument
def return_loss_on_cpu() -> None:
    for on_cpu in (True, False):
        with comm.as_rank(Mesh(1), 0):
            model = NxDPPModel(make(), return_loss_on_cpu=on_cpu, **TRAIN)
            program = model.program(batch())
            with patch.object(NxDPPModel, "device", torch.device("meta")):  # a device that is not the CPU
                loss = model._report(program, [torch.zeros(())])
        assert isinstance(loss, torch.Tensor) and loss.is_meta != on_cpu


@argument
def fuse_microbatches() -> None:
    assert warnings_of(fuse_microbatches=True)[0].startswith("fuse_microbatches=True has no effect: each task")


def of_layers(**options: Any) -> list[Any]:
    inputs = {"inputs": torch.ones(4, 2).double(), "labels": torch.zeros(4, 2).double()}

    def main() -> Any:
        layers = [nn.Linear(2, 2).double(), nn.Linear(2, 3).double(), nn.Linear(3, 2).double()]
        model = NxDPPModel(layers, **{"num_microbatches": 2, "manual_pp_partition": True, **options})
        return [name for name, _ in model.local_named_parameters()], model.run_train(**inputs)

    return comm.threads.run(PP2, main)


@argument
def manual_pp_partition() -> None:
    (first, none), (last, loss) = of_layers(manual_pp_loss_fn=nn.functional.mse_loss)
    assert first == ["layers.0.weight", "layers.0.bias"] and len(last) == 4 and none is None and loss > 0


@argument
def manual_pp_stage_partition_fn() -> None:
    def two_first(layers: list[nn.Module], stages: int) -> dict[nn.Module, int]:
        return {layer: int(number > 1) for number, layer in enumerate(layers)}

    (first, _), (last, _) = of_layers(manual_pp_loss_fn=nn.functional.mse_loss, manual_pp_stage_partition_fn=two_first)
    assert len(first) == 4 and last == ["layers.2.weight", "layers.2.bias"]


@argument
def manual_pp_loss_fn() -> None:
    (_, _), (_, loss) = of_layers(manual_pp_loss_fn=lambda output, labels: 0 * output.sum() + labels.sum() + 7)
    assert float(loss) == 7.0
    with pytest.raises(RuntimeError, match="run_train of a list of layers needs its loss: pass manual_pp_loss_fn"):
        of_layers()


# --- none is missing --------------------------------------------------------------------------------------------------

# How NxD's runtime is put together, which is another one here: they are accepted, and said to have no effect.
INTERNAL = {
    "_delay_tracing": True, "_turn_off_odd_even_scheduler": True, "_all_reduce_send_recv": True,
    "_fused_send_recv": True, "_fused_fwd_bwd": True, "_mark_step_before_pp_runtime": False,
    "_mark_step_after_pp_runtime": False, "_deallocate_send_tensors": False, "_use_gloo_for_metadata_comm": True,
    "_debug_mode": True, "_debug_pp_size": 4, "_debug_pp_rank": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", list(INTERNAL))
def test_an_internal_argument(name: str) -> None:
    (message,) = warnings_of(**{name: INTERNAL[name]})
    assert message == f"{name}={INTERNAL[name]!r} has no effect here and is ignored"


@pytest.mark.parametrize("name", list(CHECKS))
def test_an_argument(name: str, request: pytest.FixtureRequest) -> None:
    check = CHECKS[name]
    check(*[request.getfixturevalue(fixture) for fixture in check.__code__.co_varnames[: check.__code__.co_argcount]])


def test_no_argument_is_missing() -> None:
    signature = signatures.SIGNATURES["NxDPPModel"]
    documented = {name.rstrip("?") for order in (signature.guide, signature.release) for name in order.split()}
    assert documented == {*CHECKS, *INTERNAL}
