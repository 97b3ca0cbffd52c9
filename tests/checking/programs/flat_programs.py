"""ZeRO-1 by hand: gradients and parameters in one flat buffer, of which each dp rank updates its piece."""

from __future__ import annotations

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from neuronx_dist import comm
from tests.checking.programs.whole_steps import program


def loss(model, x):
    return model(x).square().sum()


def flat_gradients(model):
    return torch.cat([param.grad.view(-1) for param in model.parameters()])


def flat_parameters(model):
    return torch.cat([param.detach().view(-1) for param in model.parameters()])


def bounds(flat, rank=None):
    size = flat.numel() // comm.size("dp")
    rank = comm.rank("dp") if rank is None else rank
    return rank * size, (rank + 1) * size


def written_back(model, flat):
    offset = 0
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(flat[offset : offset + param.numel()].view_as(param))
            offset += param.numel()


@program()
def flat_slice(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    start, stop = bounds(flat)
    mine = flat[start:stop] - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program()
def flat_slice_in_place(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    start, stop = bounds(flat)
    mine = flat[start:stop].clone()
    mine -= 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program()
def flat_narrow(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    size = flat.numel() // comm.size("dp")
    mine = flat.narrow(0, comm.rank("dp") * size, size) - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program()
def flat_rows(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    mine = flat_parameters(model).view(comm.size("dp"), -1)[comm.rank("dp")] - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program()
def flat_optimizer(model, optimizer, x):
    loss(model, x).backward()
    flat = flat_parameters(model)
    start, stop = bounds(flat)
    master = torch.nn.Parameter(flat[start:stop].clone())
    own = torch.optim.AdamW([master], lr=0.1)
    master.grad = comm.reduce_scatter(flat_gradients(model), "dp")
    own.step()
    written_back(model, comm.all_gather(master.detach(), "dp"))


@program()
def flat_all_reduced(model, optimizer, x):
    """The whole gradient on every rank, of which a piece is used."""
    loss(model, x).backward()
    grad, flat = comm.all_reduce(flat_gradients(model), "dp"), flat_parameters(model)
    start, stop = bounds(flat)
    mine = flat[start:stop] - 0.1 * grad[start:stop]
    written_back(model, comm.all_gather(mine, "dp"))


@program()
def flat_by_torch(model, optimizer, x):
    loss(model, x).backward()
    params = list(model.parameters())
    grad = comm.reduce_scatter(_flatten_dense_tensors([param.grad for param in params]), "dp")
    flat = _flatten_dense_tensors([param.detach() for param in params])
    start, stop = bounds(flat)
    whole = comm.all_gather(flat[start:stop] - 0.1 * grad, "dp")
    with torch.no_grad():
        for param, value in zip(params, _unflatten_dense_tensors(whole, params)):
            param.copy_(value)


@program()
def flat_by_vectors(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(parameters_to_vector([param.grad for param in model.parameters()]), "dp")
    with torch.no_grad():
        flat = parameters_to_vector(model.parameters())
        start, stop = bounds(flat)
        whole = comm.all_gather(flat[start:stop] - 0.1 * grad, "dp")
        vector_to_parameters(whole, model.parameters())


@program()
def ddp_flat(model, optimizer, x):
    loss(model, x).backward()
    params = list(model.parameters())
    total = comm.all_reduce(_flatten_dense_tensors([param.grad for param in params]), "dp")
    for param, grad in zip(params, _unflatten_dense_tensors(total, params)):
        param.grad.copy_(grad)
    optimizer.step()


@program(refused="dp")
def flat_without_gather(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    start, stop = bounds(flat)
    flat[start:stop] -= 0.1 * grad
    written_back(model, flat)


@program(refused="dp")
def flat_without_gather_into_vectors(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    with torch.no_grad():
        flat = parameters_to_vector(model.parameters())
        start, stop = bounds(flat)
        flat[start:stop] -= 0.1 * grad
        vector_to_parameters(flat, model.parameters())


@program(assumed="another part")
def flat_in_another_order(model, optimizer, x):
    """Each rank updates what another one's gradients are of."""
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    start, stop = bounds(flat, comm.size("dp") - 1 - comm.rank("dp"))
    mine = flat[start:stop] - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program(assumed="another part")
def flat_gathered_in_another_order(model, optimizer, x):
    loss(model, x).backward()
    grad, flat = comm.all_reduce(flat_gradients(model), "dp"), flat_parameters(model)
    start, stop = bounds(flat, comm.size("dp") - 1 - comm.rank("dp"))
    mine = flat[start:stop] - 0.1 * grad[start:stop]
    written_back(model, comm.all_gather(mine, "dp"))


@program(assumed="another part")
def flat_rows_in_another_order(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model).view(comm.size("dp"), -1)
    mine = flat[comm.size("dp") - 1 - comm.rank("dp")] - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program(assumed="another part")
def flat_chunks_in_another_order(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    mine = flat_parameters(model).chunk(comm.size("dp"))[comm.size("dp") - 1 - comm.rank("dp")] - 0.1 * grad
    written_back(model, comm.all_gather(mine, "dp"))


@program(refused="dp")
def flat_without_reduction(model, optimizer, x):
    loss(model, x).backward()
    grad, flat = flat_gradients(model), flat_parameters(model)
    start, stop = bounds(flat)
    mine = flat[start:stop] - 0.1 * grad[start:stop]
    written_back(model, comm.all_gather(mine, "dp"))


@program(refused="dp")
def flat_with_one_slice_for_all(model, optimizer, x):
    """Every rank takes the first piece."""
    loss(model, x).backward()
    grad, flat = comm.all_reduce(flat_gradients(model), "dp"), flat_parameters(model)
    start, stop = bounds(flat, 0)
    mine = flat[start:stop] - 0.1 * grad[start:stop]
    written_back(model, comm.all_gather(mine, "dp"))


@program(refused="dp|clip|norm")
def flat_normalised_by_a_piece(model, optimizer, x):
    loss(model, x).backward()
    grad = comm.reduce_scatter(flat_gradients(model), "dp")
    flat = flat_parameters(model)
    start, stop = bounds(flat)
    mine = flat[start:stop] - 0.1 * grad / grad.norm()
    written_back(model, comm.all_gather(mine, "dp"))
