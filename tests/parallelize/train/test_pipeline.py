"""Pipelines of parallel modules: losses, gradients, norms and weights equal those of accumulation in one process."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import (
    ComputeConfig,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    merge_state_dicts,
    parallelize,
)
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from tests.parallelize.support.models import WIDTH
from tests.parallelize.support.mutants import EAGER, Emitted, mutants, noticed
from tests.parallelize.support.pipelines import (
    accumulated,
    assert_same,
    close,
    config,
    first,
    mlp_sample,
    module,
    pipelined,
    samples,
)

pytestmark = pytest.mark.slow

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
# Ranks of a unit, units, groups of ranks, options.
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "pp2 tp2": (4, 1, 2, {"pipeline_nstages": 2}),
    "pp2 dp2 zero": (2, 2, 2, {"pipeline_nstages": 2, "zero": True}),
    "pp2 of 2 x 2": (8, 1, 2, {"pipeline_nstages": 2, "tp_size": 2}),
}


def _on_ranks(function: Any, folder: Path, name: str = "mlp", policy: Any = "pp", stages: int = 2) -> list[Any]:
    def rank() -> Any:
        given = samples(name, 1)[0]
        return function(parallelize(module(name), {"data": given}, policy, config(stages), gen_savedir=folder))

    return threads.run(config(stages).mesh(stages), rank)


def test_dummy_batches_add_nothing_and_losses_are_not_scaled(tmp_path: Path) -> None:
    batch = samples("skip", 4)
    batch[1]["x"][0, 0] = float("nan")

    def train(parallel: Any) -> Any:
        losses = parallel.train_step(batch, [False, True, False, True], lambda loss: loss * 3)
        return losses, {name: p.grad for name, p in parallel.named_parameters()}

    whole = module("skip")
    wanted = [whole(sample) for sample in batch]
    (3 * (first(wanted[0]) + first(wanted[2]))).backward()
    for losses, gradients in _on_ranks(train, tmp_path, "skip"):
        close([losses[0], losses[2], losses[3]], [wanted[0], wanted[2], wanted[3]], 1e-12)
        assert gradients
        close(gradients, {name: whole.get_parameter(name).grad for name in gradients}, 1e-12)


@pytest.mark.parametrize(
    "policy, options",
    [
        ("pp", {"pipeline_scheduler": "chimera_direct"}),
        ("autodist", {"pipeline_pivots": "Linear", "pipeline_nstages": 2, "pipeline_scheduler": "1f1b_plus"}),
    ],
)
def test_schedules_of_nnscaler(policy: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = config(4 if policy == "pp" else 2, **options)
    has = pipelined("mlp", ADAMW, 2, settings, settings.plan_ngpus, tmp_path, policy)
    assert_same(has, accumulated("mlp", ADAMW, 2, 1), 1)


def test_inference_pipe(tmp_path: Path) -> None:
    options = {"pipeline_nmicros": 3, "pipeline_scheduler": "infer_pipe"}
    settings = ComputeConfig(2, 2, use_end2end=True, inference_only=True, pas_config=options)

    def rank() -> Any:
        given = {"data": samples("mlp", 1)[0]}
        return parallelize(module("mlp"), given, "pp", settings, gen_savedir=tmp_path).infer_step(samples("mlp", 3))

    wanted = [module("mlp")(sample) for sample in samples("mlp", 3)]
    for results in threads.run(settings.mesh(2), rank):
        close(results, wanted, 1e-12)


@pytest.mark.parametrize("stages", [2, 4])  # cut as in training, two stages of four would be empty in evaluation
def test_inference_in_evaluation_mode(stages: int, tmp_path: Path) -> None:
    def infer(parallel: Any) -> Any:
        parallel.eval()
        return parallel.infer_step(samples("skip", 4))

    whole = module("skip").eval()
    for results in _on_ranks(infer, tmp_path, "skip", stages=stages):
        close(results, [whole(sample) for sample in samples("skip", 4)], 1e-12)
        assert not first(results[0]).requires_grad


@dataclasses.dataclass
class Outcome:
    loss: torch.Tensor
    others: tuple[Any, ...]


class WithOutcome(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: dict[str, torch.Tensor]) -> Outcome:
        loss = self.inner(data)
        return Outcome(loss, (loss * 2, None, "text"))


@pytest.mark.parametrize("policy, stages", [("tp", 1), ("pp", 2)])
def test_results_of_a_dataclass_where_another_process_recorded(policy: str, stages: int, tmp_path: Path) -> None:
    given = {"data": samples("mlp", 1)[0]}
    settings = config(2) if stages > 1 else ComputeConfig(2, 2, use_end2end=True)
    parallelize(WithOutcome(module("mlp")), given, policy, settings, gen_savedir=tmp_path, load_module=False)
    pytree.SUPPORTED_NODES.pop(Outcome)  # this process has recorded nothing

    def rank() -> Any:
        parallel = parallelize(WithOutcome(module("mlp")), given, policy, settings, gen_savedir=tmp_path)
        trained = parallel.train_step(samples("mlp", 4))
        assert all(parameter.grad is not None for parameter in parallel.parameters())
        return trained, parallel.infer_step(samples("mlp", 4))

    wanted = [WithOutcome(module("mlp"))(sample) for sample in samples("mlp", 4)]
    for results in itertools.chain(*threads.run(settings.mesh(stages), rank)):
        assert not any(result.loss.requires_grad or result.others[0].requires_grad for result in results)
        close([dataclasses.astuple(x) for x in results], [(x.loss, x.others) for x in wanted], 1e-12)


@pytest.mark.parametrize("step", ["train_step", "infer_step"])
def test_wrong_samples_are_refused_on_every_rank(step: str, tmp_path: Path) -> None:
    def wrong(parallel: Any) -> None:
        run = getattr(parallel, step)
        with pytest.raises(ValueError, match=r"pipeline of 4 microbatches .* got 3 samples"):
            run(samples("mlp", 3))
        with pytest.raises(TypeError, match=r"pipeline of 4 microbatches: pass a list of 4 samples, not dict"):
            run(samples("mlp", 1)[0])
        short = samples("mlp", 4)
        short[2]["data"] = short[2]["data"][:1]
        with pytest.raises(ValueError, match=r"data.data is \[1, 16\]"):
            run(short)

    _on_ranks(wrong, tmp_path)


def test_optimizers_of_stages(tmp_path: Path) -> None:
    """Each has whole parameters, and not all of them."""

    def build(parallel: Any) -> None:
        build_optimizer(parallel, torch.optim.Adafactor)
        with pytest.raises(ValueError, match="LBFGS cannot work on some of the parameters: it takes inner products"):
            build_optimizer(parallel, torch.optim.LBFGS)

    _on_ranks(build, tmp_path)


def test_ranks_without_messages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On XLA all ranks run one program."""
    given = {"data": samples("mlp", 1)[0]}
    parallelize(module("mlp"), given, "pp", config(2), gen_savedir=tmp_path, load_module=False)

    def rank() -> None:
        monkeypatch.setattr(type(comm.current().backend), "has_messages", False)
        with pytest.raises(
            RuntimeError, match=r"Mlp is a pipeline of 2 stages, .* backend threads has none.*policy without"
        ):
            parallelize(module("mlp"), given, "pp", config(2), gen_savedir=tmp_path)

    threads.run(config(2).mesh(2), rank)


def test_another_mesh_is_refused(tmp_path: Path) -> None:
    def rank() -> None:
        with pytest.raises(RuntimeError, match=r"stages on 2 groups of ranks, but the mesh has 1 along pp.*mesh\(2\)"):
            parallelize(module("mlp"), {"data": samples("mlp", 1)[0]}, "pp", config(2), gen_savedir=tmp_path)

    threads.run(config(2).mesh(), rank)


def _merged(layout: str, folder: Path) -> tuple[list[Any], Any]:
    """GPT after three steps in a layout: of each rank its deduped states, and the states of all merged."""
    plan, units, ranks, options = LAYOUTS[layout]
    settings = config(plan, units, **options)

    def rank() -> Any:
        parallel, stepper = _gpt(settings, folder)
        for step in range(3):
            parallel.train_step(samples("gpt", 4, step))
            stepper.step()
        return parallel.state_dict(), stepper.state_dict(), deduped_state_dict(parallel, stepper)

    models, optimizers, deduped = zip(*threads.run(settings.mesh(ranks), rank))
    return list(deduped), merge_state_dicts(models, optimizers)


def _gpt(settings: ComputeConfig, folder: Path) -> Any:
    parallel = parallelize(module("gpt"), {"data": samples("gpt", 1)[0]}, "hybrid", settings, gen_savedir=folder)
    return parallel, build_optimizer(parallel, ADAMW)


def _states(state: dict[str, Any]) -> Any:
    return state.get("base_state", state["state"])


def _numbers(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(map(_numbers, state.values())) if isinstance(state, dict) else 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["pp2 tp2", "pp2 dp2 zero", "pp2 of 2 x 2"])
def test_merged_states_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    deduped, (model, optimizer) = _merged(layout, tmp_path)
    whole = module("gpt")
    stepper = ADAMW(whole.parameters())
    for step in range(3):
        whole.zero_grad()
        for _ in range(LAYOUTS[layout][1]):
            for sample in samples("gpt", 4, step):
                first(whole(sample)).backward()
        stepper.step()
    loaded = module("gpt")
    loaded.load_state_dict(model)
    close(loaded.state_dict(), whole.state_dict(), 1e-9)
    again = ADAMW(loaded.parameters())
    again.load_state_dict(optimizer)
    close(again.state_dict()["state"], stepper.state_dict()["state"], 1e-9)
    for index, expected in enumerate((model, optimizer["state"])):
        parts = [state[index] if not index else _states(state[index]) for state in deduped]
        assert sum(map(_numbers, parts)) == _numbers(expected), index  # the tied weight is on the first stage alone

    plan, units, ranks, options = LAYOUTS[layout]
    settings = config(plan, units, **options)

    def resumed() -> Any:
        states = []
        for merged in (True, False):
            parallel, other = _gpt(settings, tmp_path)
            if merged:
                load_merged_state_dict(parallel, model, other, optimizer)
            else:
                state, optimizer_state = deduped[comm.current().rank]
                load_deduped_state_dict(parallel, state, other, optimizer_state)
            parallel.train_step(samples("gpt", 4, 3))
            other.step()
            states.append({name: x.clone() for name, x in parallel.state_dict().items()})
        return states

    for merged, found in threads.run(settings.mesh(ranks), resumed):
        close(found, dict(merged), 0.0)


def test_mutants_of_collectives_of_stages_are_red() -> None:
    settings = config(4, pipeline_nstages=2, costs=EAGER)
    whole, given = module("mlp"), {"data": samples("mlp", 1)[0]}
    division = divide(decomposed(record_program(whole, given, training=True)), "hybrid", settings)
    assert len(division.stages) == 2
    source = emit(division, stored=stored_of(whole, division), signature=inspect.signature(whole.forward))
    program = Emitted(source, division, whole, {}, given)
    assert noticed(program, source) == ""
    wrong = list(mutants(source))
    stages = source.split("def stage_")[1:]
    assert len(stages) == 2 and "= spmd." in stages[0] + stages[1]
    assert [(mutant.operator, mutant.line) for mutant in wrong if not noticed(program, mutant.edited)] == []


class Named(nn.Module):
    """Arguments that are called as values between stages would be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, linear: dict[str, torch.Tensor], tanh: float = 2.0) -> torch.Tensor:
        x = linear["data"]
        for layer in self.layers:
            x = torch.tanh(layer(x)) * tanh
        return (x - linear["target"]).pow(2).mean()


def test_an_argument_called_as_a_value_between_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Named().double()
    given = [mlp_sample(torch.Generator().manual_seed(seed)) for seed in range(2)]

    def rank() -> list[float]:
        parallel = parallelize(whole, {"linear": given[0]}, "pp", config(2, micro=2), gen_savedir=tmp_path)
        return [float(loss) for loss in parallel.train_step(given)]

    expected = [float(whole(sample).detach()) for sample in given]
    assert threads.run(config(2).mesh(2), rank) == [pytest.approx(expected, rel=1e-12)] * 2
