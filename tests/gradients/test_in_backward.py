"""`reduce_gradients(overlap=True)`: the same bits, with all-reduces that start in backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from tests.parity.mutation_cases import one_step
from tests.support.call_sites import MUTATIONS, find_sites, mutate
from tests.support.llama_training import Case
from tests.support.pool import processes
from tests.support.synthetic import Model

pytestmark = pytest.mark.slow

EACH = 4e-6  # MB of a bucket: each tensor has one
STEPS = 4


def backward(model: Model, step: int, without: str = "") -> None:
    """The gradients of the synthetic model, through a backward."""
    model.set_gradients(step)
    products = [(param * param.grad).sum() for name, param in model.named_parameters() if name != without]
    for param in model.parameters():
        param.grad = None
    sum(products).backward()


def linears(*sizes: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(*shape) for shape in zip(sizes, sizes[1:])))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2, generator=generator)
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "mesh", [Mesh(1), Mesh(2), Mesh(4), Mesh(2, cp=2), Mesh(4, tp=2), Mesh(4, pp=2), Mesh(4, ep=2)], ids=str
)
def test_weights_are_those_without_overlap(mesh: Mesh, optimizer: type[torch.optim.Optimizer]) -> None:
    """Microbatches; parameters that the last one does not use, that one rank does not, and that none does."""

    def use(overlap: bool) -> list[torch.Tensor]:
        model = Model(torch.float32)
        if hasattr(model, "one"):
            model.one.expert_model_parallel = mesh.ep > 1
        wrapped = optimizer(model.parameters(), lr=0.1)
        for step in range(STEPS):
            wrapped.zero_grad()
            with nxd.no_sync(model):
                backward(model, step, without="row" if step > 1 else "")
            missing = "column" if comm.rank("dp") and step == 1 else "row" if step == 2 else "one"
            gradients = [param.grad for param in model.parameters()]
            products = [(param * 2.0).sum() for name, param in model.named_parameters() if name != missing]
            assert all(param.grad is grad for param, grad in zip(model.parameters(), gradients))
            if products:
                sum(products).backward()
            nxd.reduce_gradients(model, overlap=overlap, bucket_cap_mb=EACH)
            grads.clip_grad_norm(model.parameters(), 1.0)
            wrapped.step()
        return [param.detach().clone() for param in model.parameters()]

    without, with_overlap = (comm.threads.run(mesh, use, overlap) for overlap in (False, True))
    for expected, result in zip(without, with_overlap):
        assert all(map(torch.equal, expected, result))


@pytest.mark.parametrize("options", [{"reduce_dtype": torch.float32}, {}], ids=str)
def test_bf16_and_main_grad(options: dict[str, Any]) -> None:
    def use(overlap: bool) -> list[torch.Tensor]:
        model = Model(torch.bfloat16)
        for step in range(STEPS):
            model.zero_grad()
            backward(model, step)
            nxd.reduce_gradients(model, overlap=overlap, bucket_cap_mb=EACH, **options)
        return [param.grad for param in model.parameters()]

    without, with_overlap = (comm.threads.run(Mesh(4), use, overlap) for overlap in (False, True))
    assert all(map(torch.equal, without[0], with_overlap[0]))


def test_the_second_step_starts_in_backward_in_reverse_and_ends_in_the_call() -> None:
    def rank_main() -> None:
        model = linears(2, 3, 4)
        shapes = [(param.numel() + 1,) for param in model.parameters()]
        for step in range(3):
            model.zero_grad()
            with comm.record(waits=True) as calls:
                model(torch.ones(1, 2)).sum().backward()
                in_backward = [(call.verb, call.shape) for call in calls]
                nxd.reduce_gradients(model, overlap=True, bucket_cap_mb=EACH)
                in_call = [call.verb for call in calls[len(in_backward) :]]
            if step:
                assert in_backward == [("all_reduce", shape) for shape in reversed(shapes)]
                assert in_call == ["wait:all_reduce"] * 4
            else:
                assert not in_backward and in_call.count("all_reduce") == 4

    comm.threads.run(Mesh(2), rank_main)


def test_another_dtype_of_the_sums_holds_from_the_next_backward_on() -> None:
    def rank_main() -> None:
        model = linears(2, 3, 4).bfloat16()

        def dtypes(**options: Any) -> set[torch.dtype]:
            model.zero_grad()
            with comm.record() as calls:
                model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
                nxd.reduce_gradients(model, overlap=True, **options)
            return {call.dtype for call in calls if call.verb == "all_reduce"}

        assert dtypes() == {torch.bfloat16}  # the first step has no overlap: it sums as this call says
        assert dtypes(reduce_dtype=torch.float32) == {torch.bfloat16}  # began in backward, as the call before said
        assert dtypes(reduce_dtype=torch.float32) == {torch.float32}
        assert dtypes() == {torch.float32}
        assert dtypes() == {torch.bfloat16}

    comm.threads.run(Mesh(2), rank_main)


def test_it_is_switched_off_and_follows_the_options_and_the_parameters() -> None:
    def rank_main() -> None:
        model = linears(2, 3, 4)

        def counts(**options: Any) -> tuple[int, int]:
            model.zero_grad()
            with comm.record() as calls:
                model(torch.ones(1, 2)).sum().backward()
                in_backward = len(calls)
                nxd.reduce_gradients(model, **options)
            return in_backward, len(calls)

        assert counts(overlap=True, bucket_cap_mb=EACH) == (0, 4)
        assert counts(overlap=True) == (4, 4)  # with the cap of the call before
        assert counts(overlap=True) == (1, 1)
        model[0].requires_grad_(False)
        assert counts(overlap=True) == (1, 1)
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        assert counts(overlap=True) == (0, 1)  # the bucket of the step before has a parameter without a gradient
        assert counts(overlap=True) == (1, 1)
        assert counts(overlap=False) == (1, 1)
        assert counts() == (0, 1)

    comm.threads.run(Mesh(2), rank_main)


def test_it_keeps_no_model_alive() -> None:
    def rank_main() -> None:
        model = linears(2, 3)
        nxd.reduce_gradients(model, overlap=True)
        dead = weakref.ref(model)
        del model
        gc.collect()
        assert dead() is None

    comm.threads.run(Mesh(2), rank_main)


def test_mistakes() -> None:
    def rank_main() -> None:
        model = linears(2, 2)
        with pytest.raises(TypeError, match="pass the module, not list"):
            nxd.reduce_gradients(list(model.parameters()), overlap=True)

        def one_backward() -> None:
            model(torch.ones(1, 2)).sum().backward()

        one_backward()
        nxd.reduce_gradients(model, overlap=True)
        with pytest.raises(RuntimeError, match="reduced already"):
            nxd.reduce_gradients(model, overlap=True)
        model.zero_grad()
        one_backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            one_backward()
        model.zero_grad()
        one_backward()
        model[0].weight.grad.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"shape \(2, 2\) was modified after its reduction had started"):
            nxd.reduce_gradients(model, overlap=True)

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.parametrize("mutation", [None, *(pytest.param(m, marks=pytest.mark.slow) for m in MUTATIONS)])
def test_a_llama_computes_what_one_process_does(mutation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its second backward; the first one, of other numbers, is left out."""
    reduce = grads.reduce_gradients
    monkeypatch.setitem(reduce.__wrapped__.__kwdefaults__, "overlap", True)

    def twice(module: nn.Module, **options: Any) -> None:
        grads = [None if param.grad is None else param.grad.clone() for param in module.parameters()]
        reduce(module, **options)
        module.zero_grad()
        sum((param * grad).sum() for param, grad in zip(module.parameters(), grads) if grad is not None).backward()
        reduce(module, **options)

    monkeypatch.setattr(grads, "reduce_gradients", twice)
    if mutation is None:
        one_step(Case(dp=2))
        return
    with mutate(find_sites()["start_sum:comm.all_reduce#1"], mutation), pytest.raises(AssertionError):
        one_step(Case(dp=2))


def _on_processes() -> None:
    results = []
    for overlap in (False, True):
        model = linears(200, 200, 200)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 200, generator=torch.Generator().manual_seed(10 * step + comm.rank("dp")))
            model(x).square().sum().backward()
            nxd.reduce_gradients(model, overlap=overlap, bucket_cap_mb=0.1)
            optimizer.step()
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.process
def test_on_processes() -> None:
    processes(2).run(_on_processes, mesh={})
