"""ZeRO-1 with `overlap=True`: which collectives start when, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer
from neuronx_dist.parallel_layers import grads
from tests.optimizer.overlap_training import (
    LAYERS,
    Chain,
    backward,
    both,
    rows,
    steps,
    zero1,
)
from tests.optimizer.zero1_training import STEPS, weights_of
from tests.support.synthetic import Model


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
    """Sums of `reduce_gradients` over tp start after it was called, before the step."""

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
        with pytest.raises(RuntimeError, match=r"shape \(.*\) was modified after its reduction had started"):
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
    """Gradients are cleared instead. Reductions that had started are over on all ranks, also with fewer buckets."""

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


@pytest.mark.slow
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
