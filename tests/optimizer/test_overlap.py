"""ZeRO-1 with `overlap=True`: the same bits, with collectives that start in backward and end in the next forward."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler, MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.optimizer.gathers import Gathers
from neuronx_dist.parallel_layers import grads
from tests.checking.mutation import mutants
from tests.optimizer.zero1_training import STEPS, weights_of
from tests.parity.mutation_cases import one_step
from tests.support import pipeline_models
from tests.support.call_sites import MUTATIONS, find_sites, mutate
from tests.support.llama_training import Case
from tests.support.pool import processes
from tests.support.synthetic import Model

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1)),
}
SMALL = dict(bucket_cap_mb_all_gather=4e-6, bucket_cap_mb_reduce_scatter=4e-6)  # 4 bytes: each tensor is a bucket
LAYERS, WIDTH = 4, 4


class Chain(nn.Module):
    """Layers one after the other, and a weight of its own that it uses itself, not by a layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(
        self, x: torch.Tensor, without: Sequence[int] = (), layer: Callable[..., torch.Tensor] = lambda f, x: f(x)
    ) -> torch.Tensor:
        for number, each in enumerate(self.layers):
            x = x if number in without else torch.tanh(layer(each, x))
        return (x * self.scale).square().mean()


def rows(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (comm.rank(("dp", "cp")) if rank is None else rank))
    return torch.randn(3, WIDTH, generator=generator)


def zero1(model: nn.Module, overlap: bool, name: str = "SGD", **options: Any) -> NeuronZero1Optimizer:
    cls, arguments = OPTIMIZERS[name]
    return NeuronZero1Optimizer(model.parameters(), cls, overlap=overlap, **SMALL, **arguments, **options)


Train = Callable[..., Any]


def steps(model: nn.Module, optimizer: NeuronZero1Optimizer, call: Train | None = None, last: int = STEPS) -> None:
    for step in range(last):
        optimizer.zero_grad()
        (model(rows(step)) if call is None else call(model, step)).backward()
        optimizer.step()


def both(mesh: Mesh, use: Callable[[bool], Any], **options: Any) -> list[Any]:
    """What each rank returns with overlap, after a comparison with what it returns without, to the bit."""
    without, with_overlap = (comm.threads.run(mesh, use, overlap, **options) for overlap in (False, True))
    for expected, result in zip(without, with_overlap):
        assert expected.keys() == result.keys()
        for name, value in expected.items():
            assert torch.equal(value, result[name]), name
    return with_overlap


# --- the same bits ---------------------------------------------------------------------------------------------------


def backward(model: Model, step: int) -> None:
    """The gradients of the synthetic model, through a backward."""
    model.set_gradients(step)
    loss = sum((param * param.grad).sum() for param in model.parameters())
    for param in model.parameters():
        param.grad = None
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "mesh",
    [Mesh(1), Mesh(2), Mesh(4), Mesh(2, cp=2), Mesh(4, cp=2), Mesh(4, tp=2), Mesh(4, pp=2), Mesh(8, tp=2, pp=2)],
    ids=str,
)
def test_weights_and_norms_are_those_without_overlap(mesh: Mesh, optimizer: str) -> None:
    """Sequence-parallel and tied weights too, of which `reduce_gradients` makes sums after backward."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Model(torch.float32)
        wrapped = zero1(model, overlap, optimizer, max_norm=2.5)
        norms = []
        for step in range(STEPS):
            wrapped.zero_grad()
            backward(model, step)
            grads.reduce_gradients(model, average_over_data=False)
            wrapped.step()
            norms.append(wrapped.grad_norm)
        return {**weights_of(model), "norms": torch.stack(norms)}

    both(mesh, use)


@pytest.mark.parametrize("options", [{"use_grad_acc_hook": True}, {"higher_cc_precision": True}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Model(dtype)
        wrapped = zero1(model, overlap, "AdamW", **options)
        for step in range(STEPS):
            wrapped.zero_grad()
            with nxd.no_sync(model):
                backward(model, step)
            backward(model, step + 7)
            wrapped.step()
        return weights_of(model)

    both(Mesh(2), use)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dp", [2, 4])
def test_microbatches_and_missing_gradients(dp: int, optimizer: str) -> None:
    """A frozen layer; one that the last microbatch does not use, and ranks but one do not; one that nobody uses."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        model.layers[0].requires_grad_(False)
        wrapped = zero1(model, overlap, optimizer)
        for step in range(STEPS):
            wrapped.zero_grad()
            with nxd.no_sync(model):
                for microbatch in range(2):
                    model(rows(10 * step + microbatch)).backward()
            model(rows(10 * step + 2), without=[1, *([2] if comm.rank("dp") and step > 2 else [])]).backward()
            wrapped.step()
            wrapped.zero_grad()
            model(rows(step), without=[1, 3]).backward()
            wrapped.step()
        return weights_of(model)

    both(Mesh(dp), use)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_tied_layers(reentrant: bool) -> None:
    """A layer that is used several times has its gradient when the last use has added to it."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        if not reentrant:
            model.layers[2] = model.layers[0]
        wrapped = zero1(model, overlap)
        call = partial(checkpoint, use_reentrant=reentrant)
        steps(model, wrapped, lambda model, step: model(rows(step).requires_grad_(), layer=call))
        return weights_of(model)

    both(Mesh(2), use)


def test_hybrid_sharding() -> None:
    """Pairs of a dp of 4, over whose replicas a shard is summed when its reduce-scatter is awaited."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        steps(model, zero1(model, overlap, "AdamW", sharding_groups=[[0, 1], [2, 3]]))
        return weights_of(model)

    both(Mesh(4), use)


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"loss_scaler": True}], ids=str)
def test_a_step_that_is_skipped(options: dict[str, Any]) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        scaler = LossScaler(scale=8.0) if "loss_scaler" in options else None
        wrapped = zero1(model, overlap, loss_scaler=scaler, skip_nonfinite=scaler is None, max_norm=0.5)

        def loss(model: nn.Module, step: int) -> torch.Tensor:
            value = model(rows(step)) * (float("nan") if step == 2 and comm.rank("dp") else 1.0)
            return value if scaler is None else scaler.scaled(value)

        steps(model, wrapped, loss)
        assert wrapped.skipped_steps == 1
        return weights_of(model)

    both(Mesh(2), use)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("tied", [False, True])
def test_pipelines(schedule: str, tied: bool) -> None:
    """`run_train` knows its last backward: nothing starts before it, and everything before the loss is reported."""
    model = pipeline_models.make(tied=tied)
    orders = []

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        def train(pipeline: nxd.NxDPPModel) -> dict[str, torch.Tensor]:
            optimizer = NeuronZero1Optimizer(
                pipeline.local_parameters(), torch.optim.AdamW, lr=0.1, overlap=overlap, **SMALL
            )
            pieces = pipeline_models.cut(pipeline_models.batch(16), 4)
            for step in range(2):
                optimizer.zero_grad()
                with comm.record(waits=True) as calls:
                    with pipeline.no_sync():
                        pipeline.run_train(**pieces[2 * step])
                    assert all("reduce_scatter" not in call.verb for call in calls)
                    pipeline.run_train(**pieces[2 * step + 1])
                verbs = [call.verb for call in calls]
                if overlap:
                    first = verbs.index("reduce_scatter")
                    assert not {"send", "recv"} & {*verbs[first:]} and "wait:reduce_scatter" not in verbs
                    orders.append(verbs.count("reduce_scatter"))
                optimizer.step()
            return {name: param.detach().clone() for name, param in pipeline.local_named_parameters()}

        chunks = {"virtual_pipeline_size": 2} if schedule == "interleaved" else {}
        return pipeline_models.on_ranks(  # type: ignore[return-value]
            Mesh(4, pp=2),
            model,
            train,
            num_microbatches=2,
            output_loss_value_spec=True,
            use_zero1_optimizer=True,
            schedule=schedule,
            **chunks,
        )

    expected, found = use(False), use(True)
    assert orders and min(orders) > 1
    for one, other in zip(expected, found):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


# --- what is communicated, and when ----------------------------------------------------------------------------------


def test_reduce_scatters_start_in_backward_one_by_one_and_gathers_are_awaited_in_forward() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = zero1(model, True)
        steps(model, optimizer, last=1)
        with comm.record(waits=True) as calls:
            forward: list[int] = []
            for layer in model.layers:
                layer.register_forward_hook(lambda *_: forward.append(len(calls)))
            started: list[int] = []
            for layer in model.layers:
                layer.register_full_backward_pre_hook(lambda *_: started.append(len(calls)))
            optimizer.zero_grad()
            loss = model(rows(1))
            in_forward = [call.verb for call in calls]
            loss.backward()
            in_backward = [call.verb for call in calls[len(in_forward) :]]
            optimizer.step()
            in_step = [call.verb for call in calls[len(in_forward) + len(in_backward) :]]
        num = len(list(model.parameters()))  # each is a bucket
        assert in_forward == ["wait:all_gather"] * num
        assert forward == [2, 4, 6, 8]  # each layer has waited for its own weight and bias
        assert in_backward == ["reduce_scatter"] * num
        assert [index - num for index in started] == [0, 2, 4, 6]  # two of each layer; `scale` is the first parameter
        assert in_step == ["wait:reduce_scatter"] * num + ["all_reduce"] + ["all_gather"] * num
        sizes = [call.shape[0] for call in calls if call.verb == "reduce_scatter"]
        assert sizes == [
            2 * (-(-param.shape[0] // 2) * param.shape[1:].numel() + 1) for param in reversed([*model.parameters()])
        ]

    comm.threads.run(Mesh(2), rank_main)


def test_without_overlap_nothing_starts_before_the_step() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = zero1(model, False)
        with comm.record(waits=True) as calls:
            model(rows(0)).backward()
            assert not calls
            optimizer.step()
        assert calls[-1].verb == "wait:all_gather"

    comm.threads.run(Mesh(2), rank_main)


def test_the_collectives_are_as_many_as_without() -> None:
    def count(overlap: bool) -> list[tuple[str, int]]:
        model = Chain()
        optimizer = zero1(model, overlap)
        with comm.record() as calls:
            steps(model, optimizer, last=2)
            model(rows(2))
        return sorted((call.verb, call.bytes) for call in calls)

    assert comm.threads.run(Mesh(2), count, False) == comm.threads.run(Mesh(2), count, True)


def test_the_order_is_the_same_on_all_ranks_whatever_autograd_does() -> None:
    """Ranks use two towers in two orders, so that backward reaches them in two orders."""

    def rank_main() -> list[tuple[int, ...]]:
        towers = nn.ParameterDict({name: torch.ones(2 + index) for index, name in enumerate("abcd")})
        optimizer = zero1(towers, True)
        order = "abcd" if comm.rank("dp") else "dcab"
        with comm.record() as calls:
            loss = torch.zeros(())
            for name in order:
                loss = (loss + 1.0) * (towers[name] * 2.0).sum()
            loss.backward()
            optimizer.step()
        return [call.shape for call in calls if call.verb == "reduce_scatter"]

    first, second = comm.threads.run(Mesh(2), rank_main)
    assert first == second == [(2 * (rows + 1),) for rows in (3, 2, 2, 1)]


def test_a_bucket_without_a_gradient_holds_back_those_after_it_until_the_step() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = zero1(model, True)
        with comm.record() as calls:
            model(rows(0), without=[2]).backward()
            assert len(calls) == 2  # bias and weight of the last layer
            optimizer.step()
        assert sum(call.verb == "reduce_scatter" for call in calls) == 2 * LAYERS + 1

    comm.threads.run(Mesh(2), rank_main)


def test_reduce_gradients_starts_what_is_left() -> None:
    """What `reduce_gradients` sums over tp starts after it has, before the step."""

    def rank_main() -> None:
        model = Model(torch.float32)
        optimizer = zero1(model, True)
        with comm.record() as calls:
            backward(model, 0)
            in_backward = len(calls)
            grads.reduce_gradients(model, average_over_data=False)
            verbs = [call.verb for call in calls[in_backward:]]
        assert in_backward == 5 and verbs == ["all_reduce"] + ["reduce_scatter"] * 3  # the norms
        optimizer.step()

    comm.threads.run(Mesh(4, tp=2), rank_main)


# --- whoever reads a parameter gets its new value --------------------------------------------------------------------

READERS: dict[str, Callable[[nn.Module], Any]] = {
    "evaluation": lambda model: model.eval()(rows(9, 0)),
    "no_grad": lambda model: torch.no_grad()(model)(rows(9, 0)),
    "inference": lambda model: torch.inference_mode()(model)(rows(9, 0)),
    "state_dict": lambda model: model.state_dict()["layers.1.weight"],
    "deepcopy": lambda model: copy.deepcopy(model).layers[1].weight.detach(),
    "data": lambda model: model.layers[1].weight.data.clone(),
    "arithmetic": lambda model: torch.zeros(WIDTH, WIDTH).lerp_(model.layers[1].weight.detach(), 0.5),
    "list": lambda model: torch._foreach_norm(list(model.parameters()))[2],
    "save": lambda model: _saved(model.layers[1].weight),
    "double": lambda model: copy.deepcopy(model).double().layers[1].weight.detach(),
    "function": lambda model: _Product.apply(rows(9, 0), model.layers[1].weight),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (rows(9, 0),)),
    "checkpoint": lambda model: checkpoint(model, rows(9, 0), use_reentrant=False),
    "gather_full": lambda model: nxd.parallel_layers.utils.move_all_tensor_to_cpu(model.state_dict())["scale"],
}


def _saved(param: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file, weights_only=True).detach()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.t(), None


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_waits(reader: str) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        optimizer = zero1(model, overlap)
        steps(model, optimizer, last=2)
        value = READERS[reader](model)
        return {"value": value.detach().clone(), **weights_of(model)}

    both(Mesh(2), use)


@pytest.mark.slow
def test_compiled_code_waits() -> None:
    """Where it is not refused: it runs eagerly up to the first use of a parameter that is under way."""
    linear, gathers = nn.Linear(3, 3, bias=False), Gathers()
    compiled = torch.compile(linear, backend="eager")
    compiled(torch.ones(1, 3))
    for value in (1.0, 2.0):
        gathers.append([linear.weight], partial(linear.weight.fill_, value))
        assert compiled(torch.ones(1, 3)).tolist() == [[3 * value] * 3]
        assert type(linear.weight) is nn.Parameter


def test_reading_one_parameter_waits_for_its_bucket_alone_and_clearing_gradients_for_none() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = zero1(model, True)
        steps(model, optimizer, last=1)
        with comm.record(waits=True) as calls:
            optimizer.zero_grad()
            model.zero_grad()
            assert all(param.grad is None and param.requires_grad and param.shape for param in model.parameters())
            assert not calls
            model.layers[3].weight.sum()
            assert len(calls) == 1
            optimizer.wait()
            assert len(calls) == 2 * LAYERS + 1
            optimizer.wait()
            assert len(calls) == 2 * LAYERS + 1
        assert all(type(param) is nn.Parameter and "awaits" not in param.__dict__ for param in model.parameters())

    comm.threads.run(Mesh(2), rank_main)


def test_parameters_of_a_class_of_their_own_are_there_after_the_step() -> None:
    class Own(nn.Parameter):
        pass

    def rank_main() -> None:
        model = nn.ParameterDict({"w": Own(torch.ones(4)), "v": nn.Parameter(torch.ones(40))})
        optimizer = zero1(model, True)
        (model["w"].sum() * model["v"].sum()).backward()
        with comm.record(waits=True) as calls:
            optimizer.step()
        assert type(model["w"]) is Own and sum(call.verb == "wait:all_gather" for call in calls) == 1

    comm.threads.run(Mesh(2), rank_main)


def test_weights_and_state_that_are_loaded_between_steps() -> None:
    """Loading waits for what is under way, which would overwrite it."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        optimizer = zero1(model, overlap, "AdamW", save_master_weights=True)
        steps(model, optimizer, last=1)
        kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        steps(model, optimizer, last=2)
        model.load_state_dict(kept)
        optimizer.load_state_dict(state)
        steps(model, optimizer, last=1)
        optimizer.load_state_dict(state)
        model.load_state_dict(kept)
        optimizer.init_zero()
        steps(model, optimizer, last=2)
        return weights_of(model)

    both(Mesh(2), use)


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_another_backward_outside_of_no_sync_is_refused() -> None:
    def rank_main() -> None:
        model = Chain()
        zero1(model, True)
        optimizer = zero1(model, True)
        model(rows(0)).backward()
        with pytest.raises(RuntimeError, match=r"no_sync"):
            model(rows(1)).backward()
        del optimizer

    comm.threads.run(Mesh(2), rank_main)


def test_a_gradient_that_is_written_after_backward_is_refused() -> None:
    def rank_main(change: Callable[[nn.Module], Any]) -> None:
        model = Chain()
        optimizer = zero1(model, True)
        model(rows(0)).backward()
        change(model)
        with pytest.raises(RuntimeError, match=r"shape \(.*\) was written after its reduction had started"):
            optimizer.step()

    for change in (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.scale.grad.mul_(2.0),
        lambda model: setattr(model.scale, "grad", None),
        grads.reduce_gradients,
    ):
        comm.threads.run(Mesh(2), rank_main, change)


@pytest.mark.parametrize("cleared_by", ["optimizer", "model", "optimizer, in place"])
def test_a_step_that_the_script_leaves_out(cleared_by: str) -> None:
    """Its gradients are cleared instead. What had started is over on all ranks, also where fewer buckets had."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        optimizer = zero1(model, overlap)
        for step in range(STEPS):
            model(rows(step), without=[3] if step == 1 and comm.rank("dp") else []).backward()
            if step % 2 == 0:
                optimizer.step()
            (model if cleared_by == "model" else optimizer).zero_grad("in place" not in cleared_by)
        return weights_of(model)

    both(Mesh(2), use)


def test_an_optimizer_that_is_replaced_starts_nothing_any_more_and_is_freed() -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        first = zero1(model, overlap)
        steps(model, first, last=1)
        first.zero_grad()
        second = zero1(model, False)
        with comm.record() as calls:
            model(rows(3)).backward()
            assert not calls
        second.step()
        third = zero1(model, overlap)
        steps(model, third, last=1)
        dead = weakref.ref(third)
        del third
        assert dead() is None  # without the collector
        with comm.record() as calls:
            model(rows(3)).backward()
        assert not calls
        return weights_of(model)

    both(Mesh(2), use)
    gc.collect()


def test_masters_without_shards_have_nothing_to_overlap() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = MasterWeightsOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, overlap=True)
        with comm.record() as calls:
            model(rows(0)).backward()
        assert not calls
        grads.reduce_gradients(model)
        optimizer.step()

    comm.threads.run(Mesh(2), rank_main)


# --- the type checker ------------------------------------------------------------------------------------------------


@pytest.fixture
def overlap_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs of other tests, which do not name it."""
    monkeypatch.setitem(NeuronZero1Optimizer.__init__.__kwdefaults__, "overlap", True)


@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize("case", [Case(dp=2, optimizer="zero1"), Case(tp=2, dp=2, optimizer="zero1")], ids=str)
def test_a_llama_computes_what_one_process_does(case: Case) -> None:
    one_step(replace(case, sequence_parallel=case.tp > 1))


@pytest.mark.slow
@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize("name", ["start_reduce_scatter:comm.reduce_scatter#1", "start_all_gather:comm.all_gather#1"])
def test_a_check_accepts_it_and_sees_what_is_dropped_or_doubled(name: str) -> None:
    program = mutants.PROGRAMS[mutants.PROGRAM_OF[name]]
    assert not program.check().problems
    for edit in mutants.some(mutants.edits_at(name)):
        assert mutants.checked.__wrapped__(name, edit).kind, edit.name


@pytest.mark.slow
@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize("site", ["start_reduce_scatter:comm.reduce_scatter#1", "start_all_gather:comm.all_gather#1"])
def test_values_show_what_is_dropped_doubled_or_scaled(site: str) -> None:
    for mutation in MUTATIONS:
        with mutate(find_sites()[site], mutation) as hits, pytest.raises(AssertionError):
            one_step(Case(dp=2, optimizer="zero1"))
        assert hits


# --- processes -------------------------------------------------------------------------------------------------------


def _on_processes() -> dict[str, torch.Tensor]:
    """Both sides of the size at which a tensor travels alone on gloo."""
    results: dict[bool, dict[str, torch.Tensor]] = {}
    for overlap in (False, True):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
        for param in model.parameters():
            nn.init.normal_(param, std=0.1, generator=generator)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, overlap=overlap, bucket_cap_mb_reduce_scatter=0.1
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 200, generator=torch.Generator().manual_seed(10 * step + comm.rank("dp")))
            model(x).square().sum().backward()
            optimizer.step()
        results[overlap] = weights_of(model)
        if overlap:  # a step whose gathers nobody waits for
            model(x).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(value, results[True][name]) for name, value in results[False].items())
    return results[True]


@pytest.mark.process
@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_processes(dp: int) -> None:
    first, *others = processes(dp).run(_on_processes, mesh={})
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
