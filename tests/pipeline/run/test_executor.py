"""Backwards in halves on stages: parallel layers, checkpoints, what is counted; the memory that schedules keep."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.pipeline import Interleaved, Kind, NxDPPModel, OneFOneB, Schedule, Task, ZeroBubbleH1, ZeroBubbleV
from neuronx_dist.pipeline.cut.stage import StageFunction
from neuronx_dist.pipeline.run.executor import Executor
from tests.hf.models import batch as llama_batch
from tests.hf.models import llama_config, reference_model
from tests.support import pipeline_models
from tests.support.counting import Flops, Storages
from tests.support.pipeline_models import HIDDEN, SEQ, Block, Model, batch, error, make, on_ranks, reference
from tests.support.toy_schedules import Around, GPipe, Halves

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

OPTIONS: dict[str, Any] = {"num_microbatches": 3, "output_loss_value_spec": True}


class AroundInHalves(Around):
    """Two chunks; input gradients of all microbatches, then weight gradients."""

    def computations(self, stage: int) -> list[Task]:
        tasks = super().computations(stage)
        backwards = [task for task in tasks if task.kind is Kind.BACKWARD]
        forwards = [task for task in tasks if task.kind is Kind.FORWARD]
        inputs = [task._replace(kind=Kind.BACKWARD_INPUT) for task in backwards]
        return forwards + inputs + [task._replace(kind=Kind.BACKWARD_WEIGHT) for task in backwards]


def enable(how: str, model: Any) -> None:
    if how == "layers":
        nxd.recompute(model)
    elif how:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})


def llama_step(mesh: Mesh, schedule: Schedule, model: Any, how: str, **options: Any) -> list[Any]:
    """By rank: losses, gradients, FLOPs, collectives and MLPs that ran in a step of this schedule."""
    ids, labels = llama_batch(batch_size=4)

    def main() -> Any:
        mine = copy.deepcopy(model)
        if how in ("hf", "reentrant"):
            enable(how, mine)
        mine = nxd.hf.swap(mine, sequence_parallel=options.get("sequence_parallel", False))
        pipeline = NxDPPModel(
            mine,
            transformer_layer_cls="LlamaDecoderLayer",
            auto_partition=True,
            num_microbatches=schedule.num_microbatches,
            output_loss_value_spec={"loss": True},
        )
        pipeline.train()
        if how == "layers":
            enable(how, pipeline)
        inputs = {"input_ids": ids, "labels": labels}
        pipeline.program(inputs)
        runs: Counter[str] = Counter()
        for name, module in pipeline.local_named_modules():
            if name.endswith("mlp.up_proj"):
                module.register_forward_hook(lambda *_, name=name: runs.update([name]))
        cast = torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False))
        with cast, Flops() as flops, comm.record() as calls:
            losses = pipeline.run(schedule, inputs)
        verbs = Counter(call.verb for call in calls if "send" not in call.verb and "recv" not in call.verb)
        grads = {n: p.grad.clone() for n, p in pipeline.local_named_parameters() if p.grad is not None}
        return losses, grads, flops.total, verbs, runs

    return comm.threads.run(mesh, main)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh,how,options",
    [
        (Mesh(4, pp=2, tp=2), "", {}),
        pytest.param(Mesh(4, pp=2, tp=2), "", {"sequence_parallel": True}, marks=pytest.mark.full),
        (Mesh(4, pp=2, tp=2), "layers", {"sequence_parallel": True}),
        (Mesh(2, pp=2), "hf", {}),
        (Mesh(2, pp=2), "reentrant", {}),
        (Mesh(2, tp=2), "hf", {"sequence_parallel": True}),
        (Mesh(8, pp=2, tp=4), "", {"sequence_parallel": True}),
        (Mesh(2, pp=2), "", {"autocast": True}),
    ],
    ids=["tp", "sp", "sp, layers", "hf", "reentrant", "sp, hf, pp 1", "replicated kv", "autocast"],
)
def test_llama_in_halves_does_what_it_does_whole(mesh: Mesh, how: str, options: dict[str, Any]) -> None:
    """The same gradients bit for bit, of the same products and collectives; each layer is recomputed once."""
    model = reference_model(llama_config(), LlamaForCausalLM)
    whole = llama_step(mesh, GPipe(mesh.pp, 2), model, how if how != "reentrant" else "hf", **options)
    halves = llama_step(mesh, Halves(mesh.pp, 2), model, how, **options)
    for (losses, grads, flops, verbs, runs), (expected, expected_grads, *work) in zip(halves, whole):
        assert [loss if loss is None else float(loss) for loss in losses] == [
            loss if loss is None else float(loss) for loss in expected
        ]
        assert grads.keys() == expected_grads.keys()
        # GPipe goes backward from the last microbatch, so that sums of two are the same.
        assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())
        assert [flops, verbs, runs] == work
        assert mesh.tp == 1 or verbs


@pytest.mark.parametrize("how", ["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("schedule_class", [Halves, AroundInHalves, ZeroBubbleV])
def test_checkpoints_and_chunks_give_the_gradients_of_one_process(schedule_class: type[Schedule], how: str) -> None:
    schedule = schedule_class(2, 3)
    original, inputs = make(tied=True), batch(rows=6)
    loss, grads = reference(original, inputs, 3)

    def use(pipeline: NxDPPModel) -> Any:
        runs = 0
        for layer in pipeline.original_module.layers:
            forward = layer.forward

            def call(x: torch.Tensor, mask: Any = None, forward: Any = forward) -> Any:
                def count(x: torch.Tensor) -> Any:
                    nonlocal runs
                    runs += type(x) is torch.Tensor
                    return forward(x, mask)

                return checkpoint(count, x, use_reentrant=how == "reentrant") if how else count(x)

            layer.forward = call
        losses = pipeline.run(schedule, inputs)
        reduce_gradients(pipeline)
        return losses, runs, {name: param.grad for name, param in pipeline.local_named_parameters()}

    for stage, (losses, runs, found) in enumerate(on_ranks(Mesh(2, pp=2), original, use, schedule=schedule, **OPTIONS)):
        assert runs == 2 * 3 * (2 if how else 1)
        if stage == schedule.holders[-1]:
            assert error(torch.stack(losses).mean(), loss) < 1e-12
        assert found and all(error(grad, grads[name]) < 1e-10 for name, grad in found.items())


def test_halves_accumulate_where_whole_backwards_do() -> None:
    """In `main_grad`, by a hook that ZeRO-1 has on each parameter, once for each microbatch; weights are equal."""
    inputs = batch(rows=6)

    def train(schedule: Schedule) -> list[Any]:
        def use(pipeline: NxDPPModel) -> Any:
            optimizer = NeuronZero1Optimizer(
                pipeline.local_parameters(), torch.optim.SGD, lr=0.5, use_grad_acc_hook=True, grad_clipping=False
            )
            hooks: Counter[str] = Counter()
            for name, param in pipeline.local_named_parameters():
                param.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update([name]))
            pipeline.run(schedule, inputs)
            reduce_gradients(pipeline, average_over_data=False)
            optimizer.step()
            return hooks, {name: param.detach().clone() for name, param in pipeline.local_named_parameters()}

        return on_ranks(Mesh(4, pp=2), make(), use, use_zero1_optimizer=True, **OPTIONS)

    for (hooks, weights), (expected_hooks, expected) in zip(train(Halves(2, 3)), train(GPipe(2, 3))):
        assert hooks == expected_hooks and set(hooks.values()) == {3}
        assert all(error(weight, expected[name]) < 1e-14 for name, weight in weights.items())


# --- where the first stage's line ends, and what cannot be divided ----------------------------------------------------


class TwoEmbeddings(Model):
    """The first activations are two embeddings, one of them by a function; the weight of the other is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(SEQ, HIDDEN)
        for name in ("layers", "norm", "head"):  # run after it
            self._modules[name] = self._modules.pop(name)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = F.embedding(ids, self.embed.weight / self.embed.weight.norm())
        x = x + self.positions(torch.arange(SEQ))
        return self.loss(self.body(x), labels)


class Hooked(nn.Embedding):
    """Multiplies the gradient of what it returns."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids)
        if out.requires_grad:
            out.register_hook(lambda grad: 3 * grad)
        return out


class WithHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Hooked(pipeline_models.VOCAB, HIDDEN)


@pytest.mark.parametrize("model_class", [Model, TwoEmbeddings, WithHook])
def test_the_first_stage_has_halves_too(model_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The input half ends at the first activations: as many products as in forward, and no parameter's gradient.

    Where such an activation has a hook of its own, all of the backward is in the weight half.
    """
    flops: Counter[Kind] = Counter()
    compute = Executor._compute

    def counted(executor: Executor, task: Task) -> None:
        with Flops() as count:
            compute(executor, task)
        if executor._stage == 0:
            flops[task.kind] += count.total

    monkeypatch.setattr(Executor, "_compute", counted)
    original, inputs = make(model_class), batch(rows=6)
    _, grads = reference(original, inputs, 3)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run(Halves(2, 3), inputs)
        return {name: param.grad for name, param in pipeline.local_named_parameters()}

    for found in on_ranks(Mesh(2, pp=2), original, use, **OPTIONS):
        assert found and all(error(grad, grads[name]) < 1e-10 for name, grad in found.items())
    forward = flops[Kind.FORWARD]
    halves = (0, 2 * forward) if model_class is WithHook else (forward, forward)
    assert (flops[Kind.BACKWARD_INPUT], flops[Kind.BACKWARD_WEIGHT]) == halves


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)


class Undivided(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return super().forward(Product.apply(x, self.weight))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["function", "compiled"])
def test_what_cannot_be_divided_is_said_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stage that has it, for all its microbatches; the gradients are right."""
    model, inputs = make(), batch(rows=6)
    if compiled:  # threads of other tests that entered modes in turn leave torch's flags set: it would compile nothing
        torch._dynamo.reset()
        modes = torch.utils._python_dispatch
        for flag in [name for name, value in vars(modes).items() if name.startswith("_is_in_") and value is True]:
            monkeypatch.setattr(modes, flag, False)
    else:
        model.layers[3] = Undivided().double()
    _, grads = reference(model, inputs, 3)
    ranks, first = (1, "embed") if compiled else (2, "layers_2")  # compiled: one, for modes of two would do the same

    def use(pipeline: NxDPPModel) -> Any:
        if compiled:
            pipeline.original_module.layers[3].compile(backend="aot_eager")
        pipeline.run(Halves(ranks, 3), inputs)
        return {name: param.grad for name, param in pipeline.local_named_parameters()}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        stages = on_ranks(Mesh(ranks, pp=ranks), model, use, **OPTIONS)
    said = [str(warning.message) for warning in caught if "cannot be split" in str(warning.message)]
    name = "CompiledFunctionBackward" if compiled else "ProductBackward"
    assert len(said) == 1 and f"the stage of {first} .. cross_entropy: the backward of {name} " in said[0]
    advice = ("can only be split if it is not compiled",) if compiled else ("declare it", "splits_backward = True")
    assert all(text in said[0] for text in advice)
    assert all(error(grad, grads[name]) < 1e-10 for found in stages for name, grad in found.items())


# --- memory -----------------------------------------------------------------------------------------------------------


class Wide(Block):
    """An activation function between its layers, of which autograd keeps what only its own gradient needs."""

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WideModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(6))


def kept_bytes(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> list[dict[Task, int]]:
    """By stage: bytes of activations that are alive after each task.

    They are what the stage received and what its forward made, but for what it sent, which a transport keeps until it
    has arrived, and the loss.
    """
    storages = [Storages() for _ in range(schedule.num_stages)]
    after: list[dict[Task, int]] = [{} for _ in storages]
    run, compute = StageFunction.run, Executor._compute

    def noted_run(chunk: StageFunction, module: Any, leaves: Any, received: Any, *first: Any) -> Any:
        mine = storages[comm.rank("pp")]
        with mine:
            sent, outputs = run(chunk, module, leaves, received, *first)
        for x in received:
            mine.add(x)
        for x in (*sent, *outputs, *leaves.values(), *module.parameters()):
            mine.forget(x)
        return sent, outputs

    def noted_compute(executor: Executor, task: Task) -> None:
        compute(executor, task)
        after[executor._stage][task] = storages[executor._stage].alive()

    def use(pipeline: NxDPPModel) -> None:
        pipeline.run(schedule, batch(rows=2 * schedule.num_microbatches))
        assert pipeline.peak_in_flight == schedule.peak_in_flight(pipeline.stage)

    with monkeypatch.context() as patch:
        patch.setattr(StageFunction, "run", noted_run)
        patch.setattr(Executor, "_compute", noted_compute)
        options = {**OPTIONS, "num_microbatches": schedule.num_microbatches, "schedule": schedule}
        on_ranks(Mesh(schedule.num_stages, pp=schedule.num_stages), make(WideModel), use, **options)
    return after


PP, MANY = 3, 6
NUMBER = 8  # bytes of a float64
TOKENS = 2 * SEQ  # of a microbatch
WIDE = 2 * HIDDEN
# A block's norm keeps its input, mean and 1/deviation; its layers their inputs; the activation function its own.
OF_A_BLOCK = NUMBER * TOKENS * (HIDDEN + 2 + HIDDEN + WIDE + WIDE)
FREED_OF_A_BLOCK = NUMBER * TOKENS * WIDE


@pytest.mark.parametrize(
    "schedule_class",
    [OneFOneB, GPipe, Halves, Interleaved, ZeroBubbleH1, ZeroBubbleV],
    ids=lambda function: function.__name__,
)
def test_live_activations_are_those_of_the_schedule(
    schedule_class: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, after each task: what one forward keeps, or one first half, times the microbatches that are there."""
    chunks: tuple[int, ...] = (2,) if schedule_class is Interleaved else ()
    one = kept_bytes(schedule_class(PP, 1, *chunks), monkeypatch)
    schedule = schedule_class(PP, MANY, *chunks)
    for stage, (alone, after) in enumerate(zip(one, kept_bytes(schedule, monkeypatch))):
        size = _sizes(alone)
        saved: dict[tuple[int, int], int] = {}
        most_in_flight = 0
        for task, alive in after.items():
            saved[task.chunk, task.microbatch] = size[task.kind, task.chunk]
            assert alive == sum(saved.values()), (stage, task)
            if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                del saved[task.chunk, task.microbatch]
            most_in_flight = max(most_in_flight, len(saved))
        assert not saved and most_in_flight == schedule.peak_in_flight(stage)
        if schedule.num_chunks == 1 and schedule_class is not ZeroBubbleH1:
            assert max(after.values()) == schedule.peak_in_flight(stage) * size[Kind.FORWARD, 0]


def _sizes(alone: dict[Task, int]) -> dict[tuple[Kind, int], int]:
    """Memory of a microbatch after each kind of task, by chunk, from a step of one microbatch."""
    sizes: dict[tuple[Kind, int], int] = {}
    now: dict[int, int] = {}
    for task, alive in alone.items():
        others = sum(size for chunk, size in now.items() if chunk != task.chunk)
        now[task.chunk] = sizes[task.kind, task.chunk] = alive - others
    assert all(sizes[kind, chunk] > 0 for kind, chunk in sizes if kind is Kind.FORWARD)
    return sizes


def test_a_microbatch_between_its_halves_keeps_what_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of layers and norms; what activation functions kept is freed."""
    after = kept_bytes(Halves(PP, 1), monkeypatch)[1]  # two blocks
    whole, half = after[Task(Kind.FORWARD, 0, 0)], after[Task(Kind.BACKWARD_INPUT, 0, 0)]
    assert (whole, half) == (2 * OF_A_BLOCK, 2 * (OF_A_BLOCK - FREED_OF_A_BLOCK))
