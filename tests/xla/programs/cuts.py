"""Functions that are several programs: cut by `torch_xla.sync()`, and by what pipeline stages exchange."""

from __future__ import annotations

import sys
from typing import Any

import torch

from neuronx_dist import ColumnParallelLinear, RowParallelLinear, comm, materialize


def sync() -> None:
    if "torch_xla" in sys.modules and comm.current().backend.name == "xla":
        import torch_xla

        torch_xla.sync()


def block(x: torch.Tensor) -> torch.nn.Module:
    column = ColumnParallelLinear(8, 16, gather_output=False, device="meta")
    row = RowParallelLinear(16, 8, input_is_parallel=True, device="meta")
    return materialize(torch.nn.Sequential(column, torch.nn.GELU(), row), 0, device=x.device)


def forward_and_backward(x: torch.Tensor, cuts: int) -> dict[str, Any]:
    """`cuts` of three: in the forward, between forward and backward, before an update in place."""
    model = block(x)
    hidden = model[0](x)
    left, right = hidden.chunk(2, -1)  # views, alive at the cut
    if cuts > 2:
        sync()
    loss = model[2](model[1](torch.cat([left.square(), right], -1))).square().mean()
    if cuts > 0:
        sync()
    loss.backward()
    if cuts > 1:
        sync()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-0.1)
    return {"loss": loss.detach(), "x": x.grad, "weights": [p.detach() for p in model.parameters()]}


def gradient_that_is_a_view(x: torch.Tensor) -> torch.Tensor:
    """Autograd makes the gradient as a view of a tensor that Python never meets."""
    (gradient,) = torch.autograd.grad(x.t().exp().sum(), x)
    sync()
    y = gradient + 1
    sync()
    return y + gradient


def two_stages(x: torch.Tensor) -> dict[str, Any]:
    """Sends the result of stage 0 to stage 1, and its gradient back; the stages compute different things."""
    model = block(x)
    first = comm.rank("pp") == 0
    received = comm.permute(model(x) if first else x, "pp", [(0, 1)])
    if not first:
        received.requires_grad_()
        loss = model(received.tanh()).square().sum()
        loss.backward()
    back = comm.permute(received if first else received.grad, "pp", [(1, 0)])
    total = comm.all_reduce(back.square().sum(), ("pp", "tp"))
    return {"received": received.detach(), "back": back, "total": total}


def differs_in_a_stage(x: torch.Tensor) -> torch.Tensor:
    y = comm.all_reduce(x, "tp") if comm.current().rank != 3 else comm.all_reduce(x * 2, "tp")
    return comm.all_reduce(y, "pp")


def one_transfer_too_many(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2 if comm.current().rank == 1 else 1):
        with comm.current().backend.own_program():
            x = comm.permute(x, "pp", [(0, 1)])
    return x


def loop_with_syncs(x: torch.Tensor) -> Any:
    """A step of two programs that leaves something to the next one outside of what it calls its state."""
    model = block(x)
    running = [torch.zeros((), device=x.device)]

    def step(more: torch.Tensor) -> dict[str, Any]:
        loss = model(more).square().mean()
        sync()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None
        running[0] = running[0] + loss.detach()
        sync()
        return {"loss": loss.detach(), "running": running[0]}

    return step, lambda: dict(model.named_parameters())


def reads_behind_a_cut(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    sync()
    return y * float(y.sum())


def copies_behind_a_cut(x: torch.Tensor) -> torch.Tensor:
    y = comm.all_reduce(x, "tp")
    sync()
    return x * y.to("cpu").sum().item()


def copies_into_the_host(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    sync()
    torch.empty(4, 8).copy_(y)
    return y


def changes_a_viewed_tensor(x: torch.Tensor) -> torch.Tensor:
    cache = x * 1
    slot = cache[0]
    sync()
    slot.add_(1)
    return cache


def changes_what_was_saved(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.add_(1)
    y.sum().backward()
    return x.grad


KEPT: list[torch.Tensor] = []


def keeps_in_the_module(x: torch.Tensor) -> torch.Tensor:
    if not KEPT:
        KEPT.append(comm.all_reduce(x, "tp"))
    sync()
    return KEPT[0] * 2


def fails_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    if comm.current().rank == 2:
        raise ValueError("no such token: 17")
    return x * 2


def permutes_some_stages(x: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    return comm.permute(x, "pp", pairs)


def permutes_beside_a_group(x: torch.Tensor) -> torch.Tensor:
    """A permutation, and a sum over ranks of one stage only."""
    group = comm.new_group([[0, 1]], "first_stage")
    y = comm.permute(x, "tp", [(0, 1)])
    return y if group is None else comm.all_reduce(y, group)


def sums_without_groups(x: torch.Tensor) -> torch.Tensor:
    import torch_xla.core.xla_model as xm

    return xm.all_reduce("sum", x)


def in_steps(x: torch.Tensor) -> torch.Tensor:
    import torch_xla

    with torch_xla.step():
        y = x * 2
    return y + 1


def set_up_reads(x: torch.Tensor) -> Any:
    """Values that follow from the arguments alone can be had in the set-up, also behind a cut."""
    doubled = x * 2
    sync()
    scale = float(doubled.sum())
    return lambda: x * scale, lambda: {"x": x}


def set_up_reads_a_sum(x: torch.Tensor) -> Any:
    total = comm.all_reduce(x, "tp")
    sync()
    scale = float(total.sum())
    return lambda: x * scale, lambda: {"x": x}


def update_of_an_input(x: torch.Tensor) -> Any:
    """Changes an input of a program in place after the program has read it."""

    def step(more: torch.Tensor) -> torch.Tensor:
        before = x * 1
        sync()
        x.copy_(more)
        sync()
        return before + x

    return step, lambda: {"x": x}
