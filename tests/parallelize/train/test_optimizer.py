"""`build_optimizer`: parity with one process, and what it adds to an optimizer."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients.accumulation import no_sync
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MuonAdamW, NeuronZero1Optimizer, muon_groups
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.train.optimizer import (
    MixedPrecisionAdam,
    ParallelOptimizer,
    build_optimizer,
    sync_grad_when,
)
from tests.parallelize.support.training import (
    ADAMW,
    SGD,
    Parent,
    batch,
    close,
    loss_of,
    one_process,
    one_rank,
    original,
    parallel,
    whole,
)

pytestmark = pytest.mark.slow

STEPS = range(8)


def trained(config, make_optimizer, parent="", max_norm=None, body=one_rank):
    """Returns what `body(module, optimizer, ...)` returned on each rank, and the rank's whole weights."""
    with parallel(config, parent) as make:

        def program():
            module = make()
            optimizer = make_optimizer(module)
            return body(module, optimizer, STEPS, max_norm), whole(module)

        return comm.threads.run(config.mesh(), program)


CASES = [
    (plan, units, zero, parent)
    for (plan, units), zero, parent in itertools.product(
        [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)], [0, 1, 2], ["", "parent", "two"]
    )
    if zero <= units and (zero == 0 or parent != "two")
]


@pytest.mark.one_in(2)
@pytest.mark.each_value
@pytest.mark.parametrize("factory", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("plan, units, zero, parent", CASES)
def test_training_equals_one_process(plan, units, zero, parent, factory):
    """zero: the number of groups, 0 without."""
    config = ComputeConfig(plan, plan * units, use_zero=zero > 0, zero_ngroups=max(zero, 1))
    module = original(parent)
    expected = one_process(module, factory(module.parameters()), STEPS, units, 0.5)
    weights = dict(module.named_parameters())
    for results, found in trained(config, lambda module: build_optimizer(module, factory), parent, 0.5):
        close(results, expected)
        close(found, {name: param.detach() for name, param in weights.items()})


def muon(params):
    params = list(params)
    matrices, vectors = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return MuonAdamW([{"params": matrices, "optimizer": "muon"}, {"params": vectors, "optimizer": "adamw"}], lr=0.02)


@pytest.mark.parametrize("plan, units, zero", [(1, 2, 1), (2, 2, 2), (4, 1, 1)])
def test_muon_of_cut_matrices_under_zero_equals_one_process(plan, units, zero):
    config = ComputeConfig(plan, plan * units, use_zero=True, zero_ngroups=zero)
    module = original()
    expected = one_process(module, muon(module.parameters()), STEPS, units, 0.5)
    weights = dict(module.named_parameters())

    def make(module):
        with pytest.raises(ValueError, match="muon_groups cannot see .* pass is_muon=lambda name"):
            muon_groups(module)
        groups = muon_groups(module, is_muon=lambda name: True)
        assert [len(group["params"]) for group in groups] == [
            len(group["params"]) for group in muon(weights.values()).param_groups
        ]
        return build_optimizer(module, muon)

    for results, found in trained(config, make, "", 0.5):
        close(results, expected)
        close(found, {name: param.detach() for name, param in weights.items()})


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_of_a_state_from_the_start_are_those_of_the_group(groups: int) -> None:
    """Each element has another initial state, and a unit has the rows of its place in its group."""

    def factory(params):
        optimizer = torch.optim.Adagrad(params, lr=0.02)
        for state in optimizer.state.values():
            state["sum"].view(-1).copy_(torch.arange(state["sum"].numel()) / 100)
        return optimizer

    module = original()
    expected = one_process(module, factory(module.parameters()), STEPS, 4, 0.5)
    config = ComputeConfig(1, 4, use_zero=True, zero_ngroups=groups)
    for results, found in trained(config, lambda module: build_optimizer(module, factory), "", 0.5):
        close(results, expected)
        close(found, {name: param.detach() for name, param in module.named_parameters()})


def test_the_optimizer_is_of_its_class_and_has_what_is_added():
    def body(module, optimizer, *_):
        return (
            isinstance(optimizer, torch.optim.AdamW),
            isinstance(optimizer, NeuronZero1Optimizer),
            isinstance(optimizer, ParallelOptimizer),
            type(optimizer).__name__,
            optimizer._non_parallel_module_reducer is not None,
        )

    def results(parent="", **options):
        return trained(ComputeConfig(1, 2, **options), lambda m: build_optimizer(m, ADAMW), parent, body=body)[0][0]

    assert results() == (True, False, True, "ParallelAdamW", False)
    assert results("parent") == (True, False, True, "ParallelAdamW", True)
    assert results("parent", use_zero=True) == (False, True, True, "ParallelNeuronZero1Optimizer", True)


@pytest.mark.parametrize("zero", [False, True])
def test_parameter_groups_of_a_factory_and_schedulers(zero):
    def factory(params, lr):
        params = list(params)
        return torch.optim.AdamW(
            [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
                {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": lr / 3},
            ],
            lr=lr,
        )

    def body(module, optimizer, steps, _):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        rates = []
        for step in steps:
            unit = comm.rank("dp") if comm.is_initialized() else 0
            units = [unit] if comm.is_initialized() else range(2)
            torch.stack([loss_of(module, batch(step, state)) for state in units]).sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates

    module = original()
    rates = body(module, factory(module.parameters(), 0.02), STEPS, None)
    config = ComputeConfig(2, 4, use_zero=zero)
    for found_rates, weights in trained(config, lambda m: build_optimizer(m, factory, lr=0.02), body=body):
        assert found_rates == rates
        close(weights, {name: param.detach() for name, param in module.named_parameters()})


@pytest.mark.parametrize("synchronise_in_closure", [False, True])
@pytest.mark.parametrize("factory, zero", [(SGD, False), (SGD, True), (partial(torch.optim.LBFGS, max_iter=4), False)])
def test_closures(factory, zero, synchronise_in_closure):
    """One unit of one rank each: LBFGS takes inner products of what is whole there."""

    def body(module, optimizer, steps, _):
        is_parallel = comm.is_initialized()
        losses = []
        for step in steps:

            def closure(step=step):
                optimizer.zero_grad()
                units = [comm.rank("dp")] if is_parallel else range(2)
                loss = torch.stack([loss_of(module, batch(step, unit)) for unit in units]).sum()
                loss.backward()
                if is_parallel and synchronise_in_closure:
                    optimizer.sync_shard_grad()
                return comm.all_reduce(loss.detach(), "dp") if is_parallel else loss.detach()

            losses.append(float(optimizer.step(closure)))
        return losses

    module = original()
    losses = body(module, factory(module.parameters()), range(3), None)
    config = ComputeConfig(1, 2, use_zero=zero)
    for found, weights in trained(
        config, lambda m: build_optimizer(m, factory), body=lambda m, o, *_: body(m, o, range(3), None)
    ):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(
            weights, {name: param.detach() for name, param in module.named_parameters()}, rtol=1e-9, atol=1e-9
        )


def owners_of(optimizer):
    """The tensors that have the summed gradients."""
    shards = getattr(optimizer, "shards", None)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return params if shards is None else [shard.master for shard in shards]


@pytest.mark.parametrize("plan, units, zero", [(2, 1, False), (2, 2, False), (2, 1, True), (2, 2, True)])
def test_a_module_clips_only_what_is_summed(plan, units, zero):
    """Before the sum each unit would clip by a norm of its own; under ZeRO the optimizer steps by other tensors."""

    def body(module, optimizer, *_):
        loss_of(module, batch(0, comm.rank("dp"))).backward()
        if zero or units > 1:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            before = [grad.clone() for grad in grads]
            with pytest.raises(RuntimeError, match=r"call clip_gnorm\(\) of the optimizer"):
                module.clip_gnorm(0.1)
            assert before and all(map(torch.equal, grads, before))
            return
        assert float(module.clip_gnorm(0.1)) > 0.2
        assert float(module.clip_gnorm()) == pytest.approx(0.1, rel=1e-4)

    trained(ComputeConfig(plan, plan * units, use_zero=zero), lambda m: build_optimizer(m, SGD), body=body)


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_are_summed_once_and_scaled_after(zero):
    def body(module, optimizer, *_):
        with pytest.raises(RuntimeError, match="call sync_shard_grad\\(\\) first"):
            optimizer.scale_grads(2.0)
        loss_of(module, batch(0, comm.rank("dp"))).backward()
        if zero:
            assert all(owner.grad is None for owner in owners_of(optimizer))
        with pytest.raises(RuntimeError, match="call sync_shard_grad\\(\\) first"):
            optimizer.scale_grads(2.0)
        first = float(optimizer.clip_gnorm())
        with comm.record() as calls:
            optimizer.sync_shard_grad()
            optimizer.sync_shard_grad()
        assert not calls
        optimizer.scale_grads(0.5)
        second = float(optimizer.clip_gnorm())
        third = float(optimizer.clip_gnorm(0.25))
        last = float(optimizer.clip_gnorm())
        optimizer.step()
        if zero:  # the shards' gradients are used up
            with pytest.raises(RuntimeError, match="call sync_shard_grad"):
                optimizer.scale_grads(2.0)
        optimizer.zero_grad()
        assert all(owner.grad is None for owner in (*owners_of(optimizer), *module.parameters()))
        with pytest.raises(RuntimeError, match="call sync_shard_grad"):
            optimizer.scale_grads(2.0)
        return first, second, third, last

    module = original()
    loss_of(module, batch(0, 0)).backward()
    loss_of(module, batch(0, 1)).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), float("inf")))
    for norms, _ in trained(ComputeConfig(2, 4, use_zero=zero), lambda m: build_optimizer(m, SGD), body=body):
        close(norms, (norm, norm / 2, norm / 2, 0.25 * (norm / 2) / (norm / 2 + 1e-6)))


def test_a_backward_after_the_sum_is_refused():
    def body(module, optimizer, *_):
        loss_of(module, batch(0, comm.rank("dp"))).backward()
        optimizer.sync_shard_grad()
        with pytest.raises(RuntimeError, match="already summed over the units .*: call optimizer.zero_grad"):
            loss_of(module, batch(1, comm.rank("dp"))).backward()

    trained(ComputeConfig(1, 2), lambda m: build_optimizer(m, SGD), body=body)


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_that_are_new_are_summed_again_without_zero_grad_of_the_optimizer(zero):
    def body(module, optimizer, *_):
        norms = []
        for step in range(2):
            module.zero_grad()
            loss_of(module, batch(step, comm.rank("dp"))).backward()
            norms.append(float(optimizer.clip_gnorm()))
            optimizer.step()
        return norms, float(sum(p.square().sum() for p in whole(module).values()))

    def usual(module, optimizer, *_):
        return one_rank(module, optimizer, range(2))[1], float(sum(p.square().sum() for p in whole(module).values()))

    config = ComputeConfig(1, 2, use_zero=zero)
    results = [trained(config, lambda m: build_optimizer(m, SGD), body=steps)[0][0] for steps in (body, usual)]
    assert results[0] == results[1]


@pytest.mark.parametrize("zero, asynchronous", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("plan, units", [(1, 2), (2, 2), (1, 1)])
def test_hooks_see_every_gradient_before_and_after_its_sum(zero, asynchronous, plan, units):
    """The guide's example: scaled down before, scaled up after; and what each sees, in order."""

    def body(module, optimizer, *_):
        seen = []
        optimizer.register_reducer_pre_hook(lambda reducer, grad: seen.append(("pre", grad.clone())))
        optimizer.register_reducer_pre_hook(lambda reducer, grad: grad.div_(4))
        optimizer.register_reducer_post_hook(lambda reducer, grad: grad.mul_(4))
        optimizer.register_reducer_post_hook(lambda reducer, grad: seen.append(("post", grad.clone())))
        losses = one_rank(module, optimizer, range(2))
        for when in ("pre", "post"):
            assert sum(grad.numel() for name, grad in seen if name == when) > 0
            assert all(grad.dim() == 1 for _, grad in seen)
        total = sum(float(grad.square().sum()) for name, grad in seen if name == "post")
        return losses, float(comm.all_reduce(torch.tensor(total), "world"))

    options = dict(use_zero=zero, use_async_reducer=asynchronous, use_end2end=asynchronous)
    config = ComputeConfig(plan, plan * units, **options)
    plain = trained(ComputeConfig(plan, plan * units), lambda m: build_optimizer(m, SGD), "parent", None, first_two)
    if asynchronous:
        end_to_end_hooks(config, body)
        return
    results = trained(config, lambda m: build_optimizer(m, SGD), "parent", body=body)
    for (result, weights), (expected, expected_weights) in zip(results, plain, strict=True):
        close(result[0], expected)
        close(weights, expected_weights)


def first_two(module, optimizer, *_):
    return one_rank(module, optimizer, range(2))


def end_to_end_hooks(config, body):
    """The same on an end2end module, whose reductions start in backward."""

    def on_run(module, optimizer, *_):
        module.forward = module.run
        return body(module, optimizer)

    def plain(module, optimizer, *_):
        module.forward = module.run
        return one_rank(module, optimizer, range(2))

    base = ComputeConfig(config.plan_ngpus, config.runtime_ngpus, use_end2end=True)
    expected = trained(base, lambda m: build_optimizer(m, SGD), body=plain)
    for (result, weights), (losses, expected_weights) in zip(
        trained(config, lambda m: build_optimizer(m, SGD), body=on_run), expected
    ):
        close(result[0], losses)
        close(weights, expected_weights)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("cap", [None, 1e-6])
def test_asynchronous_reduction_is_bit_equal_and_starts_in_backward(zero, cap):
    def body(module, optimizer, *_):
        early, started = [], []
        for step in STEPS:
            with no_sync(module):
                loss_of_run(module, step, 0).backward()
            loss = loss_of_run(module, step, 1)
            before_last = []
            first = module.layers[0].weight
            with comm.record() as calls:
                hook = first.register_hook(lambda grad, calls=calls, counts=before_last: counts.append(len(calls)))
                loss.backward()
            hook.remove()
            started.append(before_last[0])
            early.append(len(calls))
            optimizer.step()
            optimizer.zero_grad()
        return early, started

    def loss_of_run(module, step, microbatch):
        return module.run(batch(step, 2 * microbatch + comm.rank("dp")))["loss"]

    def without_spare(module):
        module.spare.requires_grad_(False)  # a parameter without a gradient holds back those after it
        return build_optimizer(module, SGD)

    options = dict(use_zero=zero, use_end2end=True, reducer_bucket_cap_mb=cap)
    results = [
        trained(ComputeConfig(1, 2, use_async_reducer=overlap, **options), without_spare, body=body)
        for overlap in (False, True)
    ]
    for ((early, started), weights), ((late, _), expected) in zip(results[1], results[0], strict=True):
        assert not cap or all(started)  # the last layer's buckets start first
        assert (not any(late), early) == (True, [3 if cap else 1] * 8)
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_nothing_is_summed_while_accumulating():
    def body(module, optimizer, *_):
        for step in range(2):
            with sync_grad_when(False), comm.record() as calls:
                loss_of(module, batch(step, comm.rank("dp"))).backward()
                optimizer.sync_shard_grad()
                with pytest.raises(RuntimeError, match="sync_grad_when\\(False\\)"):
                    optimizer.clip_gnorm()
            assert not [call for call in calls if call.axis == "dp"]
            with sync_grad_when(True):
                loss_of(module, batch(step, 2 + comm.rank("dp"))).backward()
                optimizer.step()
            optimizer.zero_grad()

    module = original()
    optimizer = SGD(module.parameters())
    for step in range(2):
        torch.stack([loss_of(module, batch(step, unit)) for unit in range(4)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for zero in (False, True):
        for _, weights in trained(ComputeConfig(1, 2, use_zero=zero), lambda m: build_optimizer(m, SGD), body=body):
            close(weights, {name: param.detach() for name, param in module.named_parameters()})


@pytest.mark.parametrize("zero", [False, True])
def test_a_gradient_that_one_unit_lacks_counts_as_zero_there(zero):
    def body(module, optimizer, *_):
        if comm.rank("dp") == 0:
            loss_of(module, batch(0, 0)).backward()
        optimizer.step()
        assert module.inner.spare.weight.grad is None

    module = original("parent")
    optimizer = SGD(module.parameters())
    loss_of(module, batch(0, 0)).backward()
    optimizer.step()
    config = ComputeConfig(1, 2, use_zero=zero)
    for _, weights in trained(config, lambda m: build_optimizer(m, SGD), "parent", body=body):
        close(weights, {name: param.detach() for name, param in module.named_parameters()})


@pytest.mark.parametrize("config", [None, ComputeConfig(1, 1, use_zero=True)])
def test_one_rank_without_a_mesh_and_without_parallel_modules(config):
    module, ours = original("parent"), original("parent")
    expected = one_process(module, SGD(module.parameters()), range(2), 1)
    optimizer = build_optimizer(ours, SGD, config)
    norms = []
    for step in range(2):
        loss_of(ours, batch(step, 0)).backward()
        norms.append(float(optimizer.clip_gnorm()))
        optimizer.step()
        optimizer.zero_grad()
    close(norms, expected[1])
    close(dict(ours.named_parameters()), dict(module.named_parameters()))


def test_fp32_copies_need_a_job_and_a_configuration():
    """Without them the optimizer would step low-precision parameters; fp32 parameters need no copies."""
    build_optimizer(nn.Linear(2, 2), MixedPrecisionAdam)
    module = nn.Linear(2, 2).bfloat16()
    with pytest.raises(RuntimeError, match="Adam makes fp32 copies of torch.bfloat16, but there is no job: call"):
        build_optimizer(module, MixedPrecisionAdam, ComputeConfig(1, 1))
    with pytest.raises(RuntimeError, match=r"but no module is parallelized: pass compute_config=ComputeConfig\(1"):
        comm.threads.run(Mesh(1), build_optimizer, module, MixedPrecisionAdam)


def test_what_does_not_go_together_is_refused():
    with parallel(ComputeConfig(1, 1)) as make, parallel(ComputeConfig(1, 2)) as make_other:
        with pytest.raises(
            ValueError, match="'inner' is compiled for plan_ngpus=1, runtime_ngpus=1, 'second' for 1, 2"
        ):
            build_optimizer(Parent(make(), make_other()), SGD)
        outer = make()
        outer.add_module("inside", make())
        with pytest.raises(ValueError, match="'inside' is inside parallel module '\\(the whole\\)'"):
            build_optimizer(outer, SGD)
        with pytest.raises(ValueError, match="2 units of 1 ranks, but the job's mesh is Mesh"):
            build_optimizer(make_other(), SGD)
        with pytest.raises(TypeError, match="made a int, not a torch optimizer"):
            build_optimizer(make(), lambda params: 3)
    with parallel(ComputeConfig(1, 1, use_zero=True)) as make, parallel(ComputeConfig(1, 1)) as make_other:
        with pytest.raises(ValueError, match="'inner' has use_zero=True, .* 'second' False.*pass compute_config"):
            build_optimizer(Parent(make(), make_other()), SGD)
        build_optimizer(Parent(make(), make_other()), SGD, ComputeConfig(1, 1))
    with (
        parallel(ComputeConfig(1, 1, use_end2end=True)) as make,
        pytest.raises(ValueError, match="'inner' is an end2end"),
    ):
        build_optimizer(Parent(make()), SGD)
    with (
        parallel(ComputeConfig(1, 1, inference_only=True)) as make,
        pytest.raises(RuntimeError, match="'Pair' was comp"),
    ):
        build_optimizer(make(), SGD)


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor"])
def test_updates_that_need_whole_parameters_are_refused_where_they_are_cut(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")

    def body(module, *_):
        with pytest.raises(ValueError, match=rf"{name} cannot work on shards of parameters: it .* elementwise"):
            build_optimizer(module, lambda params: getattr(torch.optim, name)([p for p in params if p.dim() == 2]))

    trained(ComputeConfig(2), lambda m: None, body=body)
