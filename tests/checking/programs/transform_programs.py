"""`torch.vmap`, `torch.func` and scripted functions over plain code."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from tests.checking.programs.whole_steps import TP, Sharded, program


def finish(model, optimizer, total):
    """Data parallel: gradients are summed over dp, of which there may be one rank."""
    total.backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad = comm.all_reduce(param.grad, "dp")
    optimizer.step()


def own_loss(optimizer, total):
    total.backward()
    optimizer.step()


# --- vmap -------------------------------------------------------------------------------------------------------------


@program()
def vmap_elementwise(model, optimizer, x):
    y = torch.vmap(lambda row: torch.tanh(row) * row + 1)(model(x))
    finish(model, optimizer, y.square().sum())


@program()
def vmap_layer(model, optimizer, x):
    y = torch.vmap(lambda row: F.linear(row, model.up.weight, model.up.bias))(x)
    finish(model, optimizer, model.down(torch.tanh(y)).square().sum())


@program()
def vmap_model(model, optimizer, x):
    finish(model, optimizer, torch.vmap(lambda row: model(row).square().sum())(x).sum())


@program()
def vmap_over_features(model, optimizer, x):
    y = torch.vmap(lambda column: column * 2 + column.cos(), in_dims=1, out_dims=1)(model(x))
    finish(model, optimizer, y.square().sum())


@program()
def vmap_softmax_in_rows(model, optimizer, x):
    y = torch.vmap(lambda row: row.softmax(-1))(model(x))
    finish(model, optimizer, y.square().sum())


@program()
def vmap_two_batched(model, optimizer, x):
    y = torch.vmap(torch.dot)(model(x), x)
    finish(model, optimizer, y.square().sum())


@program()
def vmap_nested(model, optimizer, x):
    y = torch.vmap(torch.vmap(lambda a, b: a * b + torch.relu(a)))(model(x), x)
    finish(model, optimizer, y.square().sum())


@program()
def vmap_outer_product(model, optimizer, x):
    y = torch.vmap(torch.vmap(lambda a, b: a * b, in_dims=(None, 0)), in_dims=(0, None))(model(x)[:, 0], model.up.bias)
    finish(model, optimizer, y.square().sum())


@program()
def vmap_with_constants(model, optimizer, x):
    def body(row):
        shift = torch.zeros_like(row)
        return torch.where(row > 0, row, shift) + torch.arange(row.shape[0], dtype=row.dtype)

    finish(model, optimizer, torch.vmap(body)(model(x)).square().sum())


@program(Sharded, TP)
def vmap_over_heads(model, optimizer, x):
    hidden = model.up(x)
    heads = hidden.view(len(x), -1, 2)
    y = torch.vmap(lambda head: torch.tanh(head) / head.norm(dim=-1, keepdim=True), in_dims=1, out_dims=1)(heads)
    own_loss(optimizer, model.down(y.reshape(hidden.shape)).square().sum())


@program(Sharded, TP)
def vmap_of_sharded_features(model, optimizer, x):
    hidden = torch.vmap(torch.tanh)(model.up(x))
    own_loss(optimizer, model.down(hidden).square().sum())


@program(refused="dp")
def vmap_mixes_the_batch(model, optimizer, x):
    """Over features, so that the body has the batch, of which this rank has a part."""
    y = torch.vmap(lambda column: column.softmax(0), in_dims=1, out_dims=1)(model(x))
    finish(model, optimizer, y.square().sum())


@program(Sharded, TP, refused="tp")
def vmap_softmax_of_a_shard(model, optimizer, x):
    hidden = torch.vmap(lambda row: row.softmax(-1))(model.up(x))
    own_loss(optimizer, model.down(hidden).square().sum())


@program(Sharded, TP, refused="tp")
def vmap_product_not_reduced(model, optimizer, x):
    hidden = torch.tanh(model.up(x))
    y = torch.vmap(lambda row: F.linear(row, model.down.weight))(hidden)
    own_loss(optimizer, y.square().sum())


@program(Sharded, TP)
def vmap_product_reduced(model, optimizer, x):
    hidden = torch.tanh(model.up(x))
    y = torch.vmap(lambda row: F.linear(row, model.down.weight))(hidden)
    own_loss(optimizer, spmd.all_reduce(y, "tp", dst=spmd.I).square().sum())


@program(assumed="summands")
def vmap_scaled_by_rank(model, optimizer, x):
    weight = torch.vmap(lambda row: row * (1 + comm.rank("dp")))(model.up.weight)
    y = model.down(torch.tanh(F.linear(x, weight)))
    finish(model, optimizer, y.square().sum())


@program(refused="gradient of")
def vmap_gradients_not_reduced(model, optimizer, x):
    own_loss(optimizer, torch.vmap(lambda row: model(row).square().sum())(x).sum())


# --- torch.func -------------------------------------------------------------------------------------------------------


def functional(model, x):
    return lambda params, row: torch.func.functional_call(model, params, (row,)).square().sum()


@program()
def func_grad(model, optimizer, x):
    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.grad(functional(model, x))(params, x)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param -= 0.1 * comm.all_reduce(grads[name], "dp")


@program(refused="dp")
def func_grad_not_reduced(model, optimizer, x):
    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.grad(functional(model, x))(params, x)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param -= 0.1 * grads[name]


@program()
def func_vjp(model, optimizer, x):
    params = {name: param.detach() for name, param in model.named_parameters()}
    total, backward = torch.func.vjp(lambda params: functional(model, x)(params, x), params)
    (grads,) = backward(torch.ones_like(total))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param -= 0.1 * comm.all_reduce(grads[name], "dp")


@program()
def per_sample_gradients(model, optimizer, x):
    """Clipped one by one, and then summed."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.vmap(torch.func.grad(functional(model, x)), in_dims=(None, 0))(params, x)
    with torch.no_grad():
        for name, param in model.named_parameters():
            clipped = grads[name].clamp(-0.1, 0.1).sum(0)
            param -= 0.1 * comm.all_reduce(clipped, "dp")


@program(refused="dp")
def per_sample_gradients_not_reduced(model, optimizer, x):
    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.vmap(torch.func.grad(functional(model, x)), in_dims=(None, 0))(params, x)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param -= 0.1 * grads[name].clamp(-0.1, 0.1).sum(0)


# --- scripted ---------------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@torch.jit.script
def scripted_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@torch.jit.script
def scripted_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


traced_gelu = torch.jit.trace(lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421)), torch.ones(2, dtype=torch.float64))


@program()
def script_elementwise(model, optimizer, x):
    finish(model, optimizer, model.down(scripted_gelu(model.up(x))).square().sum())


@program(Sharded, TP)
def script_of_a_shard(model, optimizer, x):
    own_loss(optimizer, model.down(scripted_gelu(model.up(x))).square().sum())


@program()
def trace_elementwise(model, optimizer, x):
    finish(model, optimizer, model.down(traced_gelu(model.up(x))).square().sum())


@program(refused="gradient of")
def script_not_reduced(model, optimizer, x):
    own_loss(optimizer, model.down(scripted_gelu(model.up(x))).square().sum())


@program(Sharded, TP, refused="tp")
def script_softmax_of_a_shard(model, optimizer, x):
    own_loss(optimizer, model.down(scripted_softmax(model.up(x))).square().sum())


@program(Sharded, TP, refused="tp")
def script_product_not_reduced(model, optimizer, x):
    own_loss(optimizer, scripted_linear(torch.tanh(model.up(x)), model.down.weight).square().sum())


@program(Sharded, TP)
def script_product_reduced(model, optimizer, x):
    y = scripted_linear(torch.tanh(model.up(x)), model.down.weight)
    own_loss(optimizer, spmd.all_reduce(y, "tp", dst=spmd.I).square().sum())


# --- once more: what is harder ----------------------------------------------------------------------------------------


@program()
def vmap_in_place(model, optimizer, x):
    def body(row):
        result = torch.zeros_like(row)
        result.copy_(row * 2)
        return result.mul_(0.5)

    with torch.no_grad():
        scale = torch.vmap(body)(x)
    finish(model, optimizer, (model(x) * scale).square().sum())


@program()
def value_and_per_sample_gradients(model, optimizer, x):
    params = {name: param.detach() for name, param in model.named_parameters()}
    both = torch.vmap(torch.func.grad_and_value(functional(model, x)), in_dims=(None, 0))
    grads, losses = both(params, x)
    weights = losses.detach().sigmoid()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param -= 0.1 * comm.all_reduce(torch.einsum("b,b...->...", weights, grads[name]), "dp")


@program()
def jacobian(model, optimizer, x):
    with torch.no_grad():
        slopes = torch.func.jacrev(lambda h: torch.tanh(h).sum(0))(x).diagonal(dim1=0, dim2=2)
    finish(model, optimizer, (model(x) * slopes).square().sum())


@program(refused="dp")
def vmap_of_two_batches(model, optimizer, x):
    """Each row of this rank's data with one of the first rows of all."""
    everything = comm.all_gather(x, "dp")
    y = torch.vmap(lambda a, b: a * b)(model(x), everything[: len(x)])
    finish(model, optimizer, y.square().sum())
