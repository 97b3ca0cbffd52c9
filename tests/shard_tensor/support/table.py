"""Every function with a handler: one line each, which `test_ops.py` runs at all placements and splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor.attention_method import attention_method
from tests.shard_tensor.support.cases import Case, quietly
from tests.shard_tensor.support.numerics import CASES as NUMERICS
from tests.shard_tensor.support.selection import CASES as SELECTION

N = 16


def _batch_norm_in_eval(x, mean, variance, weight):
    return F.batch_norm(x, mean.detach(), variance.detach().square() + 0.1, weight)


def _binary_cross_entropy(x, y, weight):
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight.detach().abs())


def _bce_with_logits(x, y, positive):
    return F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=positive.detach())


def _targets(shape):
    """Classes for logits of a shape, some of them ignored."""
    classes, places = shape[1], shape[0] * torch.Size(shape[2:]).numel()
    targets = torch.arange(places).mul(5).remainder(classes)
    return torch.where(torch.arange(places) % 4 == 1, -100, targets).view(shape[0], *shape[2:])


def _of_classes(loss, reduction, **options):
    return lambda x, w: loss(x, _targets(x.shape), w.detach().abs(), reduction=reduction, **options)


def _of_probabilities(reduction):
    def loss(x, y, w):
        return F.cross_entropy(x, y.softmax(1), w.detach().abs(), reduction=reduction, label_smoothing=0.2)

    return loss


def _unweighted(x):
    return F.cross_entropy(x, _targets(x.shape), ignore_index=-100, label_smoothing=0.3)


def _torchs_batch_norm(x, w, b):
    return torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False)


def _torchs_instance_norm(x, w):
    return torch.instance_norm(
        x, w, None, None, None, use_input_stats=True, momentum=0.1, eps=1e-5, cudnn_enabled=False
    )


def _triplet(**options):
    return lambda x, y, z: F.triplet_margin_loss(x, y, z, **options)


def _cosine_embedding(loss, *options, **named):
    def call(x, y):
        return loss(x, y, torch.arange(len(x)).remainder(3).sub(1), *options, **named)

    return call


def _multilabel(x, w):
    return F.multilabel_soft_margin_loss(x, (x.detach() > 0.2).double(), w)


POINTWISE = [
    Case("relu", torch.relu, [(N, 3)]),
    Case("gelu", F.gelu, [(N, 3)]),
    Case("times a number", lambda x: x * 2.0, [(N, 3)]),
    Case("a number minus", lambda x: 1.0 - x, [(N, 3)]),
    Case("power", lambda x: x**3, [(N, 3)]),
    Case("add", torch.add, [(N, 3), (N, 3)]),
    Case("add alpha", lambda x, y: torch.add(x, y, alpha=3), [(N, 3), (N, 3)]),
    Case("add a row", torch.add, [(N, 3), (3,)]),
    Case("multiply a column", torch.mul, [(N, 3), (N, 1)]),
    Case("divide outer", torch.div, [(N, 1), (1, 5)], positive=True),
    Case("outer difference", lambda x, y: x[None, :, :] - y[:, None, :], [(N, 3), (7, 3)]),
    Case("a plain operand", torch.mul, [(N, 3), (N, 3)], plain=(1,)),
    Case("a plain row first", lambda x, y: y - x, [(N, 3), (3,)], plain=(1,)),
    Case("where", lambda x, y: torch.where(x > 0, x, y), [(N, 3), (N, 3)]),
    Case("where alone", lambda x: torch.where(x > 0), [(N, 3)], gradients=False, gathers=True),
    Case("where of a tensor", lambda x, y: x.where(y > 0, 0.0), [(N, 3), (N, 3)]),
    Case("where with a number", lambda x: torch.where(x > 0, x, 0.0), [(N, 3)]),
    Case("clamp", lambda x: x.clamp(-0.5, 0.5), [(N, 3)]),
    Case("lerp", torch.lerp, [(N, 3), (N, 3), (N, 1)]),
    Case("addcmul", torch.addcmul, [(N, 3), (N, 1), (3,)]),
    Case("masked_fill", lambda x, y: x.masked_fill(y > 0, 2.0), [(N, 3), (N, 1)]),
    Case("atan2", torch.atan2, [(N, 3), (N, 3)]),
    Case("comparison", lambda x, y: x > y, [(N, 3), (N, 3)], gradients=False),
    Case("a float32", lambda x: x.float().double() * 0 + x, [(N, 3)]),
    Case("frexp", lambda x: torch.frexp(x)[0], [(N, 3)], gradients=False),
    Case("in place", lambda x, y: (x * 1).add_(y), [(N, 3), (N, 3)]),
    Case("in place, broadcast", lambda x, y: (x * 1).mul_(y), [(N, 3), (3,)]),
    Case("augmented", lambda x, y: x.clone().__iadd__(y), [(N, 3), (N, 1)]),
    Case("softplus", F.softplus, [(N, 3)]),
    Case("leaky_relu", lambda x: F.leaky_relu(x, 0.2), [(N, 3)]),
    Case("prelu", lambda x, y: torch.where(x > 0, x, x * y), [(N, 3), (1,)]),
    Case("prelu of channels", F.prelu, [(4, N, 3), (N,)]),
    Case("prelu of one", F.prelu, [(N, 3), (1,)]),
    Case("glu", F.glu, [(N, 6)]),
    Case("glu of a dim", lambda x: F.glu(x, 0), [(N, 3)]),
    Case("rrelu in eval", F.rrelu, [(N, 3)]),
    Case("zeros and ones like it", lambda x, y: torch.zeros_like(x) + torch.ones_like(x) * y, [(N, 3), (N, 3)]),
    Case("of lists", lambda x, y: torch._foreach_mul([x, y], [y, x]), [(N, 3), (N, 3)]),
    Case("of lists and a number", lambda x: torch._foreach_add([x], 2.0), [(N, 3)]),
    Case("logs", lambda x: torch.log(x) + x.sqrt(), [(N, 3)], positive=True),
]
MATMUL = [
    Case("linear", F.linear, [(2, N, 6), (5, 6), (5,)]),
    Case("linear without bias", F.linear, [(N, 6), (5, 6)]),
    Case("matmul", torch.matmul, [(N, 6), (6, 5)]),
    Case("matmul by names", lambda x, y: torch.matmul(other=y, input=x), [(N, 6), (6, 5)]),
    Case("mm by names", lambda x, y: torch.mm(mat2=y, input=x), [(N, 6), (6, N)]),
    Case("mv by names", lambda x, y: torch.mv(input=x, vec=y), [(N, 6), (6,)]),
    Case("dot by names", lambda x, y: x.dot(tensor=y), [(N,), (N,)]),
    Case("batched matmul", lambda x, y: x @ y, [(3, N, 4), (3, 4, 5)]),
    Case("broadcast matmul", torch.matmul, [(2, 3, N, 4), (4, 5)]),
    Case("matmul of a vector", torch.matmul, [(3, N, 4), (4,)]),
    Case("vector matmul", torch.matmul, [(N,), (N, 5)]),
    Case("mm", torch.mm, [(N, 6), (6, 5)]),
    Case("bmm", torch.bmm, [(3, N, 4), (3, 4, 5)]),
    Case("mv", torch.mv, [(N, 6), (6,)]),
    Case("dot", torch.dot, [(N,), (N,)]),
    Case("outer", torch.outer, [(N,), (5,)]),
    Case("addmm", torch.addmm, [(5,), (N, 6), (6, 5)]),
    Case("addmm beta", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(N, 5), (N, 6), (6, 5)]),
    Case("einsum", lambda x, y: torch.einsum("bik,bkj->bij", x, y), [(3, N, 4), (3, 4, 5)]),
    Case("einsum with dots", lambda x, y: torch.einsum("...i,ji->...j", x, y), [(2, N, 4), (5, 4)]),
    Case("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), [(N, 4), (4, 5)]),
    Case("einsum of sublists", lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [2, 0]), [(N, 4), (4, 5)]),
    Case("einsum of sublists, implicit", lambda x, y: torch.einsum(x, [..., 26, 0], y, [0, 1]), [(2, N, 4), (4, 5)]),
    Case("einsum outer", lambda x, y: torch.einsum("i,j->ij", x, y), [(N,), (5,)]),
    Case("einsum trace", lambda x: torch.einsum("iij->j", x), [(4, 4, N)]),
    Case("tensordot", lambda x, y: torch.tensordot(x, y, ([1, 0], [0, 2])), [(N, 3, 2), (3, 4, N)]),
    Case("tensordot, broadcast", lambda x, y: torch.tensordot(x, y, ([1, 0], [0, 1])), [(N, 1), (3, N, 2)]),
    Case("kron", torch.kron, [(N, 3), (2, 3, 2)], gathers=True),
    Case("kron of a transposed tensor", lambda x, y: torch.kron(x.t().contiguous(), y), [(N, 3), (2,)], gathers=True),
    Case("einsum, broadcast", lambda x, y: torch.einsum("ij,jk->ik", x, y), [(3, 1), (N, 4)]),
    Case("tensordot of dims", lambda x, y: torch.tensordot(x, y, 1), [(2, N, 3), (3, 4)]),
    Case("a sum times a matrix", lambda x, y, z: (x @ y) @ z, [(5, N), (N, 6), (6, 3)]),
]
VIEWS = [
    Case("transpose", lambda x: x.transpose(0, 1), [(N, 3, 2)]),
    Case("permute", lambda x: x.permute(2, 0, 1), [(N, 3, 2)]),
    Case("permute by name", lambda x: torch.permute(x, dims=[2, 0, 1]), [(N, 3, 2)]),
    Case("T", lambda x: x.T, [(N, 3)]),
    Case("mT", lambda x: x.mT, [(2, N, 3)]),
    Case("movedim", lambda x: torch.movedim(x, 0, -1), [(N, 3, 2)]),
    Case("unsqueeze", lambda x: x.unsqueeze(1), [(N, 3)]),
    Case("squeeze", lambda x: x.squeeze(), [(1, N, 1, 3)]),
    Case("flatten behind", lambda x: x.flatten(1), [(N, 3, 2)], gathers=True),
    Case("flatten all", lambda x: x.flatten(), [(N, 3)], gathers=True),
    Case("view of a merge", lambda x: x.view(2 * N, 3), [(N, 2, 3)], gathers=True),
    Case("reshape of a split", lambda x: x.reshape(4, 4, 3), [(N, 3)], gathers=True),
    Case("unflatten", lambda x: x.unflatten(1, (2, 3)), [(N, 6)], gathers=True),
    Case("reshape by name", lambda x: torch.reshape(x, shape=[N, 6]), [(N, 3, 2)], gathers=True),
    Case("unflatten by name", lambda x: torch.unflatten(x, dim=1, sizes=[2, 3]), [(N, 6)], gathers=True),
    Case("heads", lambda x: x.view(2, N, 2, 3).transpose(1, 2), [(2, N, 6)], gathers=True),
    Case("expand", lambda x: x.expand(4, N, 5), [(N, 1)]),
    Case("expand_as", lambda x, y: x.expand_as(y) * 1, [(1, 3), (N, 3)]),
    Case("contiguous", lambda x: x.transpose(0, 1).contiguous(), [(N, 3)]),
    Case("slice", lambda x: x[2:13], [(N, 3)]),
    Case("slice with step", lambda x: x[1:15:3, ::2], [(N, 3)]),
    Case("empty slice", lambda x: x[9:4], [(N, 3)]),
    Case("position", lambda x: x[5], [(N, 3)]),
    Case("last position", lambda x: x[..., -1], [(N, 3)]),
    Case("None and slice", lambda x: x[None, :, 1:], [(N, 3)]),
    Case("select", lambda x: x.select(1, 2), [(N, 3)]),
    Case("narrow", lambda x: x.narrow(0, 3, 8), [(N, 3)]),
    Case("chunk", lambda x: x.chunk(3, 0), [(N, 3)]),
    Case("split", lambda x: torch.split(x, [5, 0, 11]), [(N, 3)]),
    Case("tensor_split", lambda x: x.tensor_split(5), [(N, 3)]),
    Case("rows one by one", lambda x: [row * 2 for row in x], [(4, N)], refusals="redistribute"),
    Case("unbind", lambda x: x.unbind(1), [(N, 3)]),
    Case("stack", lambda x, y: torch.stack([x, y], 1), [(N, 3), (N, 3)]),
    Case("cat of other dims", lambda x, y: torch.cat([x, y], 1), [(N, 3), (N, 2)]),
]
REDUCE = [
    Case("sum", torch.sum, [(N, 3)]),
    Case("sum of a dim", lambda x: x.sum(0), [(N, 3)]),
    Case("sum of dims, keepdim", lambda x: x.sum((0, -1), keepdim=True), [(2, N, 3)]),
    Case("sum of the last", lambda x: x.sum(-1), [(N, 3)]),
    Case("mean", torch.mean, [(N, 3)]),
    Case("mean of dims", lambda x: x.mean((0, 1)), [(2, N, 3)]),
    Case("mean keepdim", lambda x: x.mean(1, keepdim=True), [(2, N, 3)]),
    Case("prod", torch.prod, [(N, 3)]),
    Case("prod of a dim", lambda x: x.prod(0), [(N, 3)]),
    Case("var", torch.var, [(N, 3)]),
    Case("var of dims", lambda x: x.var((0, 2), keepdim=True, correction=0), [(4, N, 3)]),
    Case("std", lambda x: x.std(0), [(N, 3)]),
    Case("var_mean", lambda x: torch.var_mean(x, 0), [(N, 3)]),
    Case("amax", lambda x: x.amax(0), [(N, 3)]),
    Case("amax then mean", lambda x: x.amax(0).mean(), [(N, 3)]),
    Case("amin of all", torch.amin, [(N, 3)]),
    Case("amax of ties", lambda x: x.round().amax(0), [(N, 3)]),
    Case("amax of equals", lambda x: (x * 0).amax((0, 1)), [(N, 3)]),
    Case("max", torch.max, [(N, 3)]),
    Case("max of two", torch.max, [(N, 3), (N, 3)]),
    Case("logsumexp", lambda x: x.logsumexp(0), [(N, 3)]),
    Case("norm", torch.norm, [(N, 3)]),
    Case("vector_norm", lambda x: torch.linalg.vector_norm(x, 3, 0), [(N, 3)]),
    Case("norm inf", lambda x: torch.linalg.vector_norm(x, float("inf"), 0), [(N, 3)]),
    Case("any", lambda x: (x > 1).any(0), [(N, 3)], gradients=False),
    Case("all", lambda x: (x > -1).all(), [(N, 3)], gradients=False),
    Case("count_nonzero", lambda x: torch.count_nonzero(x > 0, 0), [(N, 3)], gradients=False),
    Case("a sum in further use", lambda x, y: (x / x.sum(0)) * y, [(N, 3), (N, 3)]),
    Case("standardised", lambda x: (x - x.mean(0)) / x.std(0), [(N, 3)]),
]
NORMALISE = [
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), [(N, 3), (3,), (3,)]),
    Case("layer_norm of long rows", lambda x, w, b: F.layer_norm(x, (N,), w, b), [(4, N), (N,), (N,)]),
    Case("layer_norm of two dims", lambda x, w: F.layer_norm(x, (N, 3), w), [(2, N, 3), (N, 3)]),
    Case("layer_norm at mean 1e4", lambda x: F.layer_norm(x + 1e4, (N, 3)), [(2, N, 3)]),
    Case("layer_norm of plain weights", lambda x, w: F.layer_norm(x, (N,), w), [(4, N), (N,)], plain=(1,)),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (N,), w), [(4, N), (N,)]),
    Case("rms_norm of two dims", lambda x: F.rms_norm(x, (N, 3), eps=1e-3), [(2, N, 3)]),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [(4, 6, N), (6,), (6,)]),
    Case("group_norm of many channels", lambda x, w, b: F.group_norm(x, 4, w, b), [(3, N, 2, 4), (N,), (N,)]),
    Case("group_norm of one group", lambda x: F.group_norm(x, 1), [(N, 4, 3)]),
    Case("group_norm at mean 1e4", lambda x: F.group_norm(x + 1e4, 2), [(2, 4, N)]),
    Case("instance_norm", lambda x, w: F.instance_norm(x, weight=w), [(3, N, 4, 4), (N,)]),
    Case("instance_norm at mean 1e4", lambda x: F.instance_norm(x + 1e4), [(2, 3, N)]),
    Case("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(N, 4, 3), (4,), (4,)]),
    Case("batch_norm of channels", lambda x, w: F.batch_norm(x, None, None, w, None, True), [(5, N), (N,)]),
    Case("batch_norm in eval", _batch_norm_in_eval, [(N, 4), (4,), (4,), (4,)]),
    Case("batch_norm at mean 1e4", lambda x: F.batch_norm(x + 1e4, None, None, training=True), [(N, 2, 3)]),
    Case("normalize", F.normalize, [(3, N)]),
    Case("local_response_norm", lambda x: F.local_response_norm(x, 3), [(2, 6, N)]),
    Case("local_response_norm of channels", lambda x: F.local_response_norm(x, 4, 0.5, 0.6, 2.0), [(2, N, 3, 2)]),
    Case("local_response_norm of volumes", lambda x: F.local_response_norm(x, 5), [(1, 3, 2, N, 2)]),
    Case("torch.batch_norm", _torchs_batch_norm, [(N, 4, 3), (4,), (4,)]),
    Case("torch.instance_norm", _torchs_instance_norm, [(3, 4, N), (4,)]),
]
SOFTMAX = [
    Case("softmax", lambda x: F.softmax(x, 0), [(N, 3)]),
    Case("softmax of the last", lambda x: x.softmax(-1), [(2, 3, N)]),
    Case("softmax with -inf", lambda x: x.masked_fill(x > 0.3, -float("inf")).softmax(0), [(N, 3)]),
    Case("softmax of large values", lambda x: torch.softmax(x * 1e3, 0), [(N, 3)]),
    Case("softmin", lambda x: F.softmin(x, 0), [(N, 3)]),
    Case("log_softmax", lambda x: F.log_softmax(x, 1), [(3, N, 2)]),
    Case("log_softmax of the dtype", lambda x: torch.log_softmax(x, 0, torch.float64), [(N, 3)]),
    Case("softmax of a product", lambda x, y: (x @ y).softmax(-1), [(3, N), (N, 4)]),
    Case("cumsum", lambda x: x.cumsum(0), [(N, 3)]),
    Case("cumsum of integers", lambda x: (x > 0).cumsum(0), [(N, 3)], gradients=False),
    Case("cumprod", lambda x: torch.cumprod(x, 1), [(3, N)]),
    Case("cumprod with zeros", lambda x: (x * (x > -1)).cumprod(0), [(N, 3)]),
    Case("logcumsumexp", lambda x: torch.logcumsumexp(x, 0), [(N, 3)]),
]
LOSSES = [
    Case("mse_loss", F.mse_loss, [(N, 3), (N, 3)]),
    Case("mse_loss sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), [(N, 3), (N, 3)]),
    Case("mse_loss none", lambda x, y: F.mse_loss(x, y, reduction="none"), [(N, 3), (N, 3)]),
    Case("mse_loss of a plain target", F.mse_loss, [(N, 3), (N, 3)], plain=(1,)),
    Case("mse_loss with weights", lambda x, y, w: F.mse_loss(x, y, weight=w), [(N, 3)] * 3, positive=True),
    Case("l1_loss", F.l1_loss, [(N, 3), (N, 3)]),
    Case("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), [(N, 3), (N, 3)]),
    Case("huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.7), [(N, 3), (N, 3)]),
    Case("kl_div", quietly(lambda x, y: F.kl_div(x, y.softmax(1))), [(N, 3), (N, 3)]),
    Case("kl_div batchmean", lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), [(N, 3), (N, 3)]),
    Case("binary_cross_entropy", _binary_cross_entropy, [(N, 3), (N, 3), (3,)]),
    Case("bce_with_logits", _bce_with_logits, [(N, 3), (N, 3), (3,)], positive=True),
    Case("poisson_nll_loss", F.poisson_nll_loss, [(N, 3), (N, 3)]),
    Case("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.detach().sign()), [(N, 3), (N, 3)]),
    Case("hinge_embedding_loss", lambda x, y: F.hinge_embedding_loss(x, y.detach().sign(), 0.3), [(N, 3), (N, 3)]),
    Case("margin_ranking_loss", lambda x, y: F.margin_ranking_loss(x, y, y.sign(), 0.2), [(N,), (N,)]),
    *(
        Case(f"triplet_margin_loss {reduction}", _triplet(reduction=reduction, margin=0.5), [(N, 4)] * 3)
        for reduction in ("mean", "sum", "none")
    ),
    Case("triplet_margin_loss, swapped", _triplet(swap=True, p=3, eps=1e-3), [(3, N)] * 3),
    Case(
        "torch.triplet_margin_loss",
        lambda x, y, z: torch.triplet_margin_loss(x, y, z, 1, 2, 1e-6, True, 2),
        [(N, 4)] * 3,
    ),
    Case("triplet_margin_with_distance_loss", F.triplet_margin_with_distance_loss, [(N, 4)] * 3),
    Case("cosine_embedding_loss", _cosine_embedding(F.cosine_embedding_loss), [(N, 4), (N, 4)]),
    Case(
        "cosine_embedding_loss of features",
        _cosine_embedding(F.cosine_embedding_loss, 0.1, reduction="none"),
        [(4, N)] * 2,
    ),
    Case("torch.cosine_embedding_loss", _cosine_embedding(torch.cosine_embedding_loss, 0.2, 2), [(N, 4), (N, 4)]),
    Case("gaussian_nll_loss", lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True), [(N, 3)] * 3, positive=True),
    Case(
        "gaussian_nll_loss of rows",
        lambda x, y, v: F.gaussian_nll_loss(x, y, v),
        [(N, 3), (N, 3), (N, 1)],
        positive=True,
    ),
    Case("multilabel_soft_margin_loss", _multilabel, [(N, 3), (3,)]),
    Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), [(3, N), (3, N)]),
    Case("cosine_similarity broadcast", lambda x, y: F.cosine_similarity(x, y, dim=1), [(3, N), (1, N)]),
    *(
        Case(f"cross_entropy{name} {reduction}", _of_classes(F.cross_entropy, reduction, **options), [(5, N, 3), (N,)])
        for name, options in {
            "": {},
            ", smoothed,": {"label_smoothing": 0.1},
        }.items()
        for reduction in ("mean", "sum", "none")
    ),
    Case("cross_entropy of rows", _of_classes(F.cross_entropy, "mean"), [(N, 5), (5,)]),
    Case("nll_loss", _of_classes(F.nll_loss, "mean"), [(5, N, 3), (N,)]),
    Case("nll_loss of none", _of_classes(F.nll_loss, "none"), [(N, 5), (5,)]),
    Case("cross_entropy of unweighted classes", _unweighted, [(5, N, 3)]),
    Case("cross_entropy of a vector", lambda x: F.cross_entropy(x, torch.tensor(7)), [(N,)]),
    *(
        Case(f"cross_entropy of probabilities {reduction}", _of_probabilities(reduction), [(5, N, 3), (5, N, 3), (N,)])
        for reduction in ("mean", "none")
    ),
]


def _attention(method: str = "auto", **options: Any) -> Callable[..., torch.Tensor]:
    def call(*operands: torch.Tensor) -> torch.Tensor:
        with attention_method(method):
            return F.scaled_dot_product_attention(*operands, **options)

    return call


def _blind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen = mask > 0.1
    row = torch.arange(mask.shape[-2])[:, None] == 3
    return F.scaled_dot_product_attention(q, k, v, seen & ~row)


_Q = (2, 4, N, 3)
ATTENTION = [
    Case("attention by ring", _attention("ring", is_causal=True), [_Q, _Q, _Q]),
    Case("attention by gathers", _attention("gather", is_causal=True), [_Q, _Q, _Q]),
    Case("attention by heads", _attention("all_to_all", is_causal=True), [_Q, _Q, _Q], refusals="be divided"),
    Case("cross-attention", _attention(scale=0.3), [(2, N, 4), (2, 7, 4), (2, 7, 5)]),
    Case("grouped heads", _attention(enable_gqa=True, is_causal=True), [_Q, (2, 2, N, 3), (2, 2, N, 3)]),
    Case("attention, added mask", _attention("ring"), [_Q, _Q, _Q, (4, 1, N)]),
    Case("attention, boolean mask", _blind, [_Q, _Q, _Q, (N, N)]),
    Case("attention, plain keys", _attention(), [(N, 3), (N, 3), (N, 3)], plain=(1, 2)),
]

CASES = [*POINTWISE, *MATMUL, *VIEWS, *REDUCE, *NORMALISE, *SOFTMAX, *LOSSES, *ATTENTION, *SELECTION, *NUMERICS]
