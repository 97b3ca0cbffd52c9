"""Everything that shard_tensor refuses: what is called on every rank of two, the error, and words of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from neuronx_dist import comm, spmd
from neuronx_dist.comm import CommError
from neuronx_dist.comm.scopes import as_rank
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.autograd_linear import RowLinear, call
from neuronx_dist.parallel_layers.embedding import ParallelEmbedding
from neuronx_dist.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    DistributedManager,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    checkpoint,
    distribute_module,
    distribute_tensor,
    fallback,
    init_device_mesh,
    one_exchange,
    promotion_mode,
    report,
    scatter_tensor,
    spmd_type,
    sync_module_over_mesh,
)
from neuronx_dist.shard_tensor.attention_method import attention_method, zigzag
from neuronx_dist.shard_tensor.draws import random_numbers
from neuronx_dist.shard_tensor.halo import HaloConfig, halo_padding, unhalo_padding
from neuronx_dist.shard_tensor.moves import one_program
from neuronx_dist.shard_tensor.moves.exchange import exchange
from neuronx_dist.shard_tensor.moves.intervals import Run, cut, repartition, virtual_runs
from neuronx_dist.shard_tensor.moves.redistribute import redistributed, steps
from neuronx_dist.shard_tensor.ops.one_exchange import Chain, InTurn
from neuronx_dist.shard_tensor.points import knn, radius_search
from neuronx_dist.shard_tensor.ring import RingPassingConfig, perform_ring_iteration, perform_ring_iteration_async
from neuronx_dist.shard_tensor.spec import make_spec
from neuronx_dist.shard_tensor.typed import laid_out
from neuronx_dist.shard_tensor.windows.chains import plan_chain
from neuronx_dist.shard_tensor.windows.index_maps import Sliding, plan_windows
from neuronx_dist.shard_tensor.xla import partition_spec, placements_of
from neuronx_dist.sharded_functions.vocabulary import hide_padding
from neuronx_dist.spmd import I, P, S, SpmdTypeError, V
from neuronx_dist.torch_internals.dual_numbers import make_dual
from tests.shard_tensor.sharding import Doubled

__all__ = ["REFUSALS"]


def x(mesh, *sizes, shape=(7, 6), dim=0):
    return distribute_tensor(torch.ones(shape), mesh, [Shard(dim)], sizes=[sizes or None], src=None)


def _local(mesh, rows):
    return ShardTensor.from_local(torch.ones(rows, 6), mesh, [Shard(0)], sharding_shapes="infer")


def _dtensor():
    """A DTensor of torch, whole on both ranks; it needs no processes as long as nothing is computed."""
    mesh = TorchMesh("cpu", [[0, 1]], _init_backend=False, _rank=0)
    whole = torch.ones(7, 6)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(whole, DTensorSpec(mesh, (Replicate(),) * 2, tensor_meta=meta), requires_grad=False)


def _split_in_another_order():
    """A DTensor whose dim is split by mesh dim 1 first."""
    mesh = TorchMesh("cpu", [[0]], _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size((7, 6)), (6, 1), torch.float32)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    return DTensor(torch.ones(7, 6), spec, requires_grad=False)


def _on_two_mesh_dims(ranks):
    """A tensor with a dim on two mesh dims."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "domain"))
    return distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Shard(0)], src=None)


def _plain_dual(mesh):
    y = x(mesh)
    make_dual(torch.ones(7, 6), y, 0)


def _outside(mesh):
    with as_rank(Mesh(4), 2):
        distribute_tensor(torch.ones(8, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)], src=None).sum()


def _checked_off_the_axes(mesh):
    with as_rank(Mesh(4), mesh.get_rank()):
        y = _on_two_mesh_dims([[0, 1], [2, 3]])
        with spmd.SpmdTypeMode():
            y * 2


def _synchronised_alone(mesh):
    module = nn.Module()
    module.weight = nn.Parameter(x(DeviceMesh("cpu", [1, 0])))
    sync_module_over_mesh(module, mesh)


def alone(mesh, *, shape=(7, 6), dim=0):
    """A tensor on this rank alone, for operators over the two ranks."""
    own = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("other", "own"))["own"]
    return distribute_tensor(torch.ones(shape), own, [Shard(dim)], src=None)


def _another_layout(mesh):
    with spmd.SpmdTypeMode():
        y = x(mesh)
        laid_out(y._local, y._spec.replicated())


REFUSALS = {
    "an operator over the tensor's own ranks": (
        lambda mesh: spmd.all_reduce(x(mesh), "dp", src=P, dst=I),
        ValueError,
        r"ranks \[0, 1\] belong to both",
    ),
    "features in pieces": (
        lambda mesh: spmd.convert(alone(mesh, dim=1), "dp", src=I, dst=S(1)),
        ValueError,
        "would split or join dim 1, the features",
    ),
    "shards in pieces": (
        lambda mesh: spmd.convert(alone(mesh), "dp", src=I, dst=S(0)),
        ValueError,
        r"its shards \[7\] on mesh dim 0 are not multiples",
    ),
    "a sharded dim taken apart": (
        lambda mesh: spmd.reduce_scatter(alone(mesh, shape=(2, 6)), "dp", src=P, dst=V),
        ValueError,
        "would unstack dim 0",
    ),
    "a parallel layer of other features": (
        lambda mesh: call(RowLinear, alone(mesh), torch.ones(3, 5), None, comm.communicator("dp"), None, None),
        ValueError,
        r"an input of shape \[7, 6\] does not match weights and biases of shapes \[\[3, 5\]\]",
    ),
    "max_norm of a parallel embedding": (
        lambda mesh: ParallelEmbedding(4, 3, max_norm=1.0, tensor_model_parallel_group="dp")(alone(mesh).long()),
        NotImplementedError,
        "does not support max_norm and sparse",
    ),
    "labels of another shape": (
        lambda mesh: parallel_cross_entropy(
            alone(mesh), torch.zeros(6, dtype=torch.int64), tensor_model_parallel_group="dp"
        ),
        ValueError,
        r"labels \[6\] do not match logits \[7, 6\]",
    ),
    "padding of a sharded vocabulary": (
        lambda mesh: hide_padding(alone(mesh, dim=1), 11, "dp"),
        ValueError,
        "the vocabulary dim must be complete",
    ),
    "a type that is not the layout's": (_another_layout, SpmdTypeError, r"its layout requires I on dp, .* is S\(0\)"),
    "sizes that do not add up": (lambda mesh: x(mesh, 3, 3), ValueError, r"sizes \[3, 3\] on mesh dim 0.*with sum 7"),
    "a negative size": (lambda mesh: x(mesh, 9, -2), ValueError, r"2 numbers of at least 0"),
    "a wrong number of sizes": (lambda mesh: x(mesh, 7), ValueError, r"must be 2 numbers"),
    "DTensor's run_check": (
        lambda mesh: ShardTensor.from_local(torch.ones(2), mesh, run_check=True),
        ValueError,
        "broadcasts the first rank's values",
    ),
    "a gradient in another dtype than the result": (
        lambda mesh: x(mesh).redistribute(backward_dtype=torch.float16),
        ValueError,
        "backward_dtype=torch.float16, and the result is torch.float32",
    ),
    "from_local of a tensor that has a layout": (
        lambda mesh: ShardTensor.from_local(x(mesh), mesh, [Shard(0)], sharding_shapes="chunk"),
        ValueError,
        r"local_tensor is a ShardTensor, .*Shard\(dim=0\).*, and must be a plain tensor: call redistribute\(\)",
    ),
    "other dims that differ between ranks": (
        lambda mesh: ShardTensor.from_local(torch.ones(2, 3 + mesh.get_rank()), mesh, [Shard(0)]),
        ValueError,
        "must be equal but for dim 0, but the ranks have",
    ),
    "a replicated tensor of which ranks have other shapes": (
        lambda mesh: ShardTensor.from_local(torch.ones(2 + mesh.get_rank()), mesh, [Replicate()]),
        ValueError,
        "must be equal, but the ranks have",
    ),
    "an attribute that a mesh has not": (lambda mesh: mesh.no_such, AttributeError, "has no attribute 'no_such'"),
    "threads for fully_shard": (
        lambda mesh: fully_shard(nn.Linear(2, 2), mesh=mesh),
        RuntimeError,
        r"no process group on the backend .*: pass mesh.communicator\(",
    ),
    "a placement too many": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()], src=None),
        ValueError,
        "has 2 entries for a mesh of 1 dims",
    ),
    "a dim that is not there": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(1)], src=None),
        ValueError,
        "the tensor has 1 dims",
    ),
    "another mesh among operands": (
        lambda mesh: x(mesh) + x(DeviceMesh("cpu", [1, 0])),
        ValueError,
        r"operands are on .* redistribute\(mesh, placements\) one of them",
    ),
    "a module synchronised over other ranks than shard it": (
        _synchronised_alone,
        ValueError,
        r"over ranks \[0, 1\]: a parameter of shape \(7, 6\) is Shard\(dim=0\) over ranks \[1, 0\]",
    ),
    "values of a rank that a mesh lacks": (
        lambda mesh: sync_module_over_mesh(nn.Linear(1, 1), mesh, src_mesh_rank=2),
        ValueError,
        "src_mesh_rank=2 is not one of the 2 ranks",
    ),
    "values of a negative rank": (
        lambda mesh: sync_module_over_mesh(nn.Linear(1, 1), mesh, src_mesh_rank=-1),
        ValueError,
        "src_mesh_rank=-1 is not one of the 2 ranks",
    ),
    "a layout that is changed": (
        lambda mesh: setattr(x(mesh)._spec, "shape", (7,)),
        AttributeError,
        r"shape of a layout cannot be set, because tensors share the layout; use redistribute",
    ),
    "an attribute of a layout that is deleted": (
        lambda mesh: delattr(x(mesh)._spec, "sizes"),
        AttributeError,
        "sizes of a layout cannot be deleted",
    ),
    "means of shards that are not told": (
        lambda mesh: ShardTensor.from_local(torch.ones(6), mesh, [Partial("avg")], sharding_shapes={0: [(7, 6)]}),
        ValueError,
        r"1 shapes for mesh dim 0, which is Partial\(avg\) over 2 ranks: pass one for each rank",
    ),
    "a gradient on another mesh": (
        lambda mesh: setattr(x(mesh), "grad", x(DeviceMesh("cpu", [1, 0]))),
        ValueError,
        r"operands are on .* redistribute\(mesh, placements\) one of them",
    ),
    "a plain tensor under DISABLED": (
        lambda mesh: _disabled(x(mesh)),
        ValueError,
        "its layout is unknown: use distribute_tensor",
    ),
    "a halo that reflects past the tensor": (
        lambda mesh: F.pad(x(mesh, 2, 1, shape=(3, 6)).t(), (4, 0), mode="reflect"),
        ValueError,
        "positions -4 to 1 are beyond the reflections.*use less padding",
    ),
    "in place on a Partial": (
        lambda mesh: torch.dot(x(mesh, shape=(6,)), x(mesh, shape=(6,))).exp_(),
        ValueError,
        "redistribute",
    ),
    "distribute_tensor of a Partial": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Partial()], src=None),
        ValueError,
        "has a Partial: distribute with Replicate",
    ),
    "distribute_tensor of a result": (
        lambda mesh: distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)], src=None),
        RuntimeError,
        "takes a leaf",
    ),
    "a process group of threads": (lambda mesh: mesh.get_group(), RuntimeError, "has no process group on the backend"),
}


def _disabled(x):
    with promotion_mode("disabled"):
        return x + torch.ones(7, 6)


def whole(mesh: DeviceMesh, *shape: int) -> ShardTensor:
    return distribute_tensor(torch.ones(shape), mesh, [Replicate()], src=None)


def summand(mesh: DeviceMesh, *shape: int, op: str = "sum") -> ShardTensor:
    return ShardTensor.from_local(torch.ones(shape), mesh, [Partial(op)], sharding_shapes="chunk")


def _gradient_of_a_maximum(mesh: DeviceMesh) -> None:
    y = summand(mesh, 2, op="max").requires_grad_()
    y.full_tensor().sum().backward()
    _ = y.grad


def _others(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh that this rank is not in."""
    meshes = [DeviceMesh("cpu", [rank], mesh_dim_names=("alone",)) for rank in range(2)]
    return meshes[1 - mesh.get_rank()]


def _two_dims() -> DeviceMesh:
    return DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("data", "domain"))


def _attention(mesh: DeviceMesh, q: Any, k: Any, v: Any, **options: Any) -> None:
    F.scaled_dot_product_attention(x(mesh, shape=q), whole(mesh, *k), whole(mesh, *v), **options)


def _forced(mesh: DeviceMesh) -> None:
    with attention_method("all_to_all"):
        F.scaled_dot_product_attention(*[x(mesh, shape=(1, 3, 4, 2), dim=2)] * 3)


def _written_plain(write: Callable[..., Any], mesh: DeviceMesh) -> None:
    with fallback("error"):
        write(x(mesh))


def _row_written(y: Any) -> None:
    y[5].mul_(2)


def _fallback(mesh: DeviceMesh, call: Callable[..., Any], mode: str = "error") -> None:
    with fallback(mode):
        call(x(mesh))


def _enter(manager: Any) -> None:
    with manager:
        pass


def _multihead(mesh: DeviceMesh, causal: bool = False, **options: Any) -> None:
    q = x(mesh, shape=(2, 4, 6))
    nn.MultiheadAttention(6, 2, batch_first=True, **options)(q, q, q, is_causal=causal, need_weights=False)


def _partial_written(mesh: DeviceMesh) -> None:
    summand(mesh, 4)[0] = 1.0


def _assigned(target: torch.Tensor, index: Any, value: Any) -> None:
    target[index] = value


def _leaf(mesh: DeviceMesh) -> ShardTensor:
    return x(mesh).requires_grad_()


def _manager() -> DistributedManager:
    DistributedManager.initialize()
    return DistributedManager()


def _fused_step(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(x(mesh))
    weight.grad = x(mesh)
    optimizer = torch.optim.Adam([weight], fused=True)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = whole(mesh, 7, 6)
    optimizer.step()


def _twice(handler: Any) -> None:
    handler.__module__ = "neuronx_dist.shard_tensor.ops.another"
    ShardTensor.register_function_handler(torch.dot, handler)


def _modified_on_its_way(x):
    y = x.redistribute(placements=[Partial()], async_op=True)
    with torch.no_grad():
        x.to_local().add_(1)
    return y.to_local()


def _tied_in_two_layouts(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 4, bias=False)
    module.add_module("inner", nn.Linear(4, 4, bias=False))
    module.inner.weight = module.weight

    def partition(name: str, child: Any) -> None:
        child.weight = nn.Parameter(distribute_tensor(child.weight, mesh, [Shard(1 if name else 0)]))

    distribute_module(module, mesh, partition)


def _judged(mesh: DeviceMesh, call: Callable[[torch.Tensor], Any]) -> None:
    with spmd.SpmdTypeMode():
        call(spmd.convert(torch.ones(3, 3), mesh.communicator(), src=spmd.R, dst=spmd.P))


def _exchange(mesh: DeviceMesh, y: torch.Tensor) -> None:
    exchange(y, repartition((0, 3, 6), (0, 1, 6)), mesh.communicator(), 0)


def _layer(mesh: DeviceMesh, layer: Callable[[Any], Any]) -> None:
    one_exchange(x(mesh, shape=(1, 1, 16, 5), dim=2), [nn.Conv2d(1, 2, 3), layer])


def _uneven_program(mesh: DeviceMesh) -> None:
    one_program.gathered(torch.ones(3), repartition((0, 3, 8), (0, 4, 8)), mesh.communicator(), 0, 0)


_OF_3 = Sliding(8, 3)
_MORE: list[tuple[Callable[[DeviceMesh], Any], type[Exception], str]] = [
    (lambda mesh: _enter(attention_method("tree")), ValueError, "attention_method 'tree' is not one of"),
    (lambda mesh: x(mesh)._spec.tensor_meta.dtype, AttributeError, "read x.dtype of the tensor"),
    (lambda mesh: _enter(random_numbers("local")), ValueError, "random_numbers 'local' is not one of whole, part"),
    (lambda mesh: _enter(zigzag(0)), ValueError, "the number of ranks must be at least 1"),
    (_forced, ValueError, "cannot be divided among the ranks; use one of"),
    (lambda mesh: _attention(mesh, (4, 3), (5, 2), (5, 2)), ValueError, r"must be \[.., rows, e\]"),
    (
        lambda mesh: _attention(mesh, (1, 3, 4, 2), (1, 2, 4, 2), (1, 2, 4, 2), enable_gqa=True),
        ValueError,
        "the same number of heads, and a multiple",
    ),
    (lambda mesh: _attention(mesh, (2, 4, 3), (3, 4, 3), (3, 4, 3)), ValueError, "before the last two cannot be"),
    (
        lambda mesh: _attention(mesh, (4, 3), (5, 3), (5, 3), attn_mask=torch.ones(3, 5)),
        ValueError,
        r"attn_mask \[3, 5\] cannot be broadcast",
    ),
    (
        lambda mesh: _attention(mesh, (4, 3), (4, 3), (4, 3), attn_mask=torch.ones(4, 4), is_causal=True),
        ValueError,
        "pass only one",
    ),
    (
        lambda mesh: plan_chain((_OF_3, _OF_3), (0, 4, 8)),
        ValueError,
        "^shards with a total of 6 positions do not match windows over 8",
    ),
    (
        lambda mesh: Chain(x(mesh), x(mesh)._spec, ()).window_dim(1),
        InTurn,
        "must be sharded on exactly one spatial dim",
    ),
    (_uneven_program, CommError, r"shards have sizes \[3, 5\], but on XLA all ranks run one program"),
    (
        lambda mesh: plan_chain((_OF_3,), (0, 4, 9)),
        ValueError,
        "^shards with a total of 9 positions do not match windows over 8",
    ),
    (
        lambda mesh: checkpoint.get_tensor_shard(x(mesh), MetadataIndex("w", (1, 1))),
        ValueError,
        r"w: the block at \(1, 1\) was requested",
    ),
    (lambda mesh: checkpoint.create_chunk_list(summand(mesh, 4)), ValueError, "a Partial tensor cannot be saved"),
    (lambda mesh: distribute_tensor(torch.ones(4), mesh, src=7), ValueError, "src=7 is not one of the 2 ranks"),
    (
        lambda mesh: scatter_tensor(None, 7, mesh, [Shard(0)]),
        ValueError,
        r"global_src=7 is not one of the ranks \[0, 1\]",
    ),
    (lambda mesh: scatter_tensor(None, 0, mesh, [Shard(0)]), ValueError, "tensor is None on rank"),
    (lambda mesh: init_device_mesh("cpu", (3,)), ValueError, "does not fit 2 ranks"),
    (lambda mesh: DeviceMesh("cpu", [0, 0]), ValueError, "must be distinct and below the world size 2"),
    (lambda mesh: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), ValueError, "must be 1 distinct names"),
    (lambda mesh: _others(mesh).communicator(), RuntimeError, "is not in"),
    (lambda mesh: _others(mesh)["alone"], RuntimeError, "rank . is not in"),
    (lambda mesh: mesh["a"], ValueError, "has no dim 'a'"),
    (lambda mesh: mesh.communicator(1), ValueError, "has no dim 1"),
    (lambda mesh: _two_dims().communicator(), ValueError, "has 2 dims: pass mesh_dim"),
    (lambda mesh: _exchange(mesh, torch.ones(9)), ValueError, "does not match the plan, which has"),
    (lambda mesh: _enter(fallback("ignore")), ValueError, "fallback 'ignore' is not one of"),
    (lambda mesh: _fallback(mesh, lambda y: y.put_(torch.tensor([0]), torch.ones(1))), NotImplementedError, "in place"),
    (lambda mesh: _fallback(mesh, lambda y: torch.histc(y, 4)), NotImplementedError, "histc has no handler"),
    (lambda mesh: _fallback(mesh, lambda y: y.to_sparse(), "gather"), NotImplementedError, "must be strided"),
    (
        lambda mesh: x(mesh)[x(mesh, shape=(4,)).long() * 9],
        IndexError,
        "indices are out of range for a dim of 7 elements; number of such indices by rank: {0: 2, 1: 2}",
    ),
    (lambda mesh: HaloConfig(0, 0, 1, 2), ValueError, "must be from 0 to halo_size=1"),
    (
        lambda mesh: unhalo_padding(torch.ones(9), mesh, HaloConfig(0, 0, 1, sizes=(3, 3))),
        ValueError,
        "is not the length of a shard with the halo of",
    ),
    (
        lambda mesh: halo_padding(torch.ones(3), mesh, HaloConfig(0, 0, 1, sizes=(3,))),
        ValueError,
        "one size for each of the",
    ),
    (lambda mesh: x(mesh).to_local(grad_placements=[Partial()]), ValueError, "grad_placements has Partial"),
    (lambda mesh: ShardTensor.register_function_handler(torch.dot, None), TypeError, "must be functions"),
    (lambda mesh: torch.matmul(x(mesh), torch.ones(5, 2)), RuntimeError, r"\[\(7, 6\), \(5, 2\)\] do not match"),
    (lambda mesh: x(mesh) + torch.ones(6, 6), RuntimeError, r"\[\(7, 6\), \(6, 6\)\] do not match"),
    (lambda mesh: _twice(lambda *_: None), ValueError, "dot has two handlers"),
    (lambda mesh: ShardTensor.register_dispatch_handler(torch.dot, print), TypeError, "is not an operator overload"),
    (lambda mesh: ShardTensor.register_named_function_handler("dot", print), ValueError, "is not of the form"),
    (lambda mesh: _enter(promotion_mode("loud")), ValueError, "promotion_mode 'loud' is not one of"),
    (
        lambda mesh: cut([Run(9, 1, 1)], (0, 3, 8)),
        ValueError,
        "position 9 is out of range: bounds .* cover 8 positions",
    ),
    (
        lambda mesh: HaloConfig(0, 0, 1, communication_method="nvl"),
        ValueError,
        "communication_method='nvl': use one of",
    ),
    (lambda mesh: virtual_runs(-1, 4, 4, "mirror"), ValueError, "padding mode 'mirror': use one of"),
    (lambda mesh: virtual_runs(-1, 4, 0, "circular"), ValueError, "needs values to repeat, but the dim is empty"),
    (
        lambda mesh: repartition((0, 3, 4), (0, 3, 5)),
        ValueError,
        "shards with a total of 5 positions cannot hold a dim of 4",
    ),
    (
        lambda mesh: ShardTensor.from_local(torch.ones(4), mesh, [Shard(0)], sharding_shapes="guess"),
        ValueError,
        'is not "infer", "chunk" or a dict',
    ),
    (
        lambda mesh: ShardTensor.from_local(torch.ones(0), _others(mesh), [Shard(0)]),
        ValueError,
        "cannot infer the layout",
    ),
    (
        lambda mesh: ShardTensor.from_local(torch.ones(4), mesh, [Shard(0)], sharding_shapes={0: [(3,), (3,)]}),
        ValueError,
        "but its layout requires",
    ),
    (
        lambda mesh: ShardTensor.from_local(torch.ones(4), mesh, [Shard(0)], global_shape=(9,)),
        ValueError,
        r"add up to shape \(8,\), but global_shape is \(9,\)",
    ),
    (
        lambda mesh: ShardTensor.from_local(torch.ones(4), mesh, [Shard(0)], sharding_shapes={}),
        ValueError,
        "has no entry for mesh dim 0",
    ),
    (lambda mesh: DistributedManager(), RuntimeError, r"call DistributedManager.initialize\(\) first"),
    (lambda mesh: _manager().initialize_mesh((2,), ("a", "b")), ValueError, "pass one name for each"),
    (lambda mesh: distribute_module(nn.ReLU(), mesh, lambda a, b, c, d: None), TypeError, "takes 4 arguments"),
    (lambda mesh: F.glu(x(mesh, shape=(4, 5))), RuntimeError, "glu: dim -1 has 5 elements"),
    (
        lambda mesh: torch.matmul(x(mesh), torch.ones(6, 2), out=torch.ones(7, 2)),
        ValueError,
        "matmul: out= is not supported",
    ),
    (lambda mesh: torch.tensordot(x(mesh), x(mesh), out=x(mesh)), ValueError, "tensordot: out= is not supported"),
    (lambda mesh: x(mesh).bernoulli_(torch.ones(7, 6)), NotImplementedError, "with a tensor of probabilities"),
    (lambda mesh: F.dropout(x(mesh), 1.5), ValueError, "between 0 and 1, but got 1.5"),
    (lambda mesh: x(mesh).index_select(0, torch.tensor([9])), IndexError, "indices range from 9 to 9, but dim 0"),
    (
        lambda mesh: x(mesh)[torch.ones(5) > 0],
        IndexError,
        r"a mask of shape \(5,\) does not match the first dims of a tensor of shape \(7, 6\)",
    ),
    (
        lambda mesh: F.embedding(torch.tensor([1]), x(mesh), max_norm=1.0),
        NotImplementedError,
        "does not support max_norm, scale_grad_by_freq and sparse",
    ),
    (lambda mesh: x(mesh).gather(0, torch.tensor([0])), ValueError, "the tensor has 2 dims and the index 1"),
    (lambda mesh: F.conv1d(x(mesh, shape=(2, 3, 8)), torch.ones(3, 3, 3), stride=(1, 2)), ValueError, "has 2 entries"),
    (lambda mesh: F.cross_entropy(x(mesh), torch.zeros(7).long(), reduction="all"), ValueError, "reduction 'all' is"),
    (
        lambda mesh: F.mse_loss(x(mesh), x(mesh), reduction="batchmean"),
        ValueError,
        "reduction 'batchmean' is not one of",
    ),
    (lambda mesh: F.binary_cross_entropy(x(mesh), torch.ones(7, 1)), ValueError, "they must be equal"),
    (
        lambda mesh: F.cross_entropy(x(mesh), torch.zeros(3).long()),
        ValueError,
        r"must have shape \(7,\) or that of the input",
    ),
    (lambda mesh: _multihead(mesh, add_zero_attn=True), NotImplementedError, "add_zero_attn, static_k"),
    (
        lambda mesh: F.multi_head_attention_forward(
            *[x(mesh, shape=(4, 2, 6), dim=1)] * 3,
            *(6, 2, torch.ones(18, 6), None, None, None, False, 0.0, torch.ones(6, 6), None),
            is_causal=True,
        ),
        ValueError,
        "is_causal=True describes attn_mask",
    ),
    (
        lambda mesh: torch.batch_norm_stats(x(mesh), 1e-5),
        NotImplementedError,
        "SyncBatchNorm does not take ShardTensors",
    ),
    (lambda mesh: F.layer_norm(x(mesh), (5,)), RuntimeError, "does not match the last dims"),
    (lambda mesh: F.batch_norm(x(mesh, shape=(1, 6), dim=1), None, None, training=True), ValueError, "1 value per"),
    (lambda mesh: F.group_norm(x(mesh), 4), RuntimeError, "num_groups=4 must divide the channels"),
    (lambda mesh: F.instance_norm(x(mesh, shape=(4, 3, 1))), ValueError, "more than 1 spatial element"),
    (_fused_step, ValueError, "create the optimizer after distributing the parameters"),
    (lambda mesh: _written_plain(lambda y: torch.ones(7, 6).add_(y), mesh), NotImplementedError, "add_ of a plain"),
    (
        lambda mesh: torch._foreach_add_([torch.ones(7, 6)], [x(mesh)]),
        ValueError,
        "_foreach_add_ would write a ShardTensor's values to a plain",
    ),
    (lambda mesh: torch.add(x(mesh), 1, out=torch.ones(7, 6)), ValueError, "out must be a ShardTensor of shape"),
    (lambda mesh: F.prelu(x(mesh), torch.ones(3)), ValueError, "or one for each channel"),
    (
        lambda mesh: F.avg_pool2d(x(mesh, shape=(1, 1, 8, 8), dim=2), 2, divisor_override=0),
        ValueError,
        "divisor_override must not be zero",
    ),
    (
        lambda mesh: F.max_pool1d(x(mesh, shape=(1, 1, 8), dim=2), 2, padding=2),
        ValueError,
        "to half of its kernel",
    ),
    (lambda mesh: x(mesh).roll((1, 2), (0,)), ValueError, "2 shifts for 1 dims"),
    (lambda mesh: x(mesh).repeat(2), ValueError, "1 counts for a tensor of 2 dims"),
    (lambda mesh: x(mesh).unfold(0, 9, 1), ValueError, "size=9, step=1 do not fit dim 0, which has 7"),
    (lambda mesh: x(mesh).bincount(), ValueError, "input must be 1-d and of integers"),
    (lambda mesh: torch.bincount(-x(mesh)[:, 0].long()), ValueError, "bincount: input has the value -1"),
    (lambda mesh: torch.sum(x(mesh), 0, out=x(mesh)), ValueError, "sum: out= is not supported"),
    (lambda mesh: x(mesh).sum(2), IndexError, "dim 2 is out of range for a tensor of 2 dims"),
    (lambda mesh: torch.norm(x(mesh), "nuc"), NotImplementedError, "norm of order 'nuc' is not supported"),
    (lambda mesh: x(mesh).long().mean(), RuntimeError, "a tensor of torch.int64 has no mean"),
    (lambda mesh: F.interpolate(x(mesh, shape=(2, 2, 4)), scale_factor=0.1), ValueError, "gives an empty"),
    (
        lambda mesh: _written_plain(lambda y: _assigned(torch.ones(7, 6), slice(0, 7), y), mesh),
        NotImplementedError,
        "= y of a plain tensor",
    ),
    (
        lambda mesh: _assigned(x(mesh), (torch.tensor([0]), torch.tensor([1])), 1.0),
        NotImplementedError,
        "index the first dim only",
    ),
    (_partial_written, ValueError, r"redistribute\(\) (the tensor|x) to Replicate first"),
    (lambda mesh: _assigned(_leaf(mesh), 0, 1.0), RuntimeError, "a leaf that requires gradients"),
    (
        lambda mesh: _written_plain(lambda y: torch.ones(7, 6).index_add_(0, torch.arange(7), y), mesh),
        NotImplementedError,
        "index_add_ of a plain tensor of shape",
    ),
    (
        lambda mesh: torch.gradient(x(mesh), edge_order=3),
        RuntimeError,
        "gradient: edge_order 3 must be 1 or 2",
    ),
    (
        lambda mesh: torch.stft(x(mesh)[:, 0], 4, 1, center=False, return_complex=True, align_to_window=True),
        NotImplementedError,
        "does not support align_to_window",
    ),
    (lambda mesh: _assigned(x(mesh), x(mesh) > 0, torch.ones(42)), NotImplementedError, "depends on the mask's values"),
    (lambda mesh: _assigned(x(mesh), 9, 1.0), IndexError, "^index 9 is out of bounds for dim 0 with size 7"),
    (lambda mesh: x(mesh).sort(2), IndexError, "dim 2 is out of range"),
    (lambda mesh: x(mesh, shape=(4, 0)).max(1), IndexError, "over dim 1, which has no elements"),
    (lambda mesh: x(mesh, shape=(4, 0)).argmax(), IndexError, r"of shape \(4, 0\), which has no elements"),
    (lambda mesh: x(mesh).topk(9, 0), ValueError, "topk: k=9 is out of range for dim 0, which has 7 elements"),
    (lambda mesh: x(mesh).softmax(2), IndexError, "softmax: dim 2 is out of range"),
    (lambda mesh: F.max_pool3d(x(mesh), 2), ValueError, "has fewer than 3 spatial dims"),
    (lambda mesh: F.local_response_norm(x(mesh), 2), ValueError, "needs at least 3 dims"),
    (lambda mesh: x(mesh)[9], IndexError, "index 9 is out of bounds for dim 0 with size 7"),
    (
        lambda mesh: x(mesh, 3, 3, dim=1).view(torch.float64),
        RuntimeError,
        r"shards \[3, 3\] of dim 1, of 4 bytes an element, are no multiples of 8 bytes",
    ),
    (lambda mesh: x(mesh).narrow(0, 3, 9), IndexError, "3 to 12 is out of range for dim 0 with size 7"),
    (lambda mesh: x(mesh)[0, 0, 0], IndexError, "too many indices for a tensor of 2 dims"),
    (
        lambda mesh: F.conv1d(x(mesh, shape=(2, 3, 8)), torch.ones(3, 3, 3), stride=2, padding="same"),
        ValueError,
        "padding='same' needs stride 1",
    ),
    (
        lambda mesh: F.conv1d(x(mesh, shape=(2, 3, 8)), torch.ones(3, 3, 3), padding="full"),
        ValueError,
        "padding 'full': use 'same', 'valid' or numbers",
    ),
    (
        lambda mesh: F.conv_transpose1d(x(mesh, shape=(2, 3, 8)), torch.ones(3, 3, 3), output_padding=2),
        ValueError,
        "output_padding 2 must be smaller",
    ),
    (lambda mesh: spmd_type(_StridedShard(0, split_factor=2)), ValueError, "has no SPMD type"),
    (
        lambda mesh: distribute_tensor(torch.ones(8), DeviceMesh("cpu", [[0]]), [Shard(0), Shard(0)], src=None),
        ValueError,
        "a group over several of its dims needs all of these",
    ),
    (
        lambda mesh: distribute_tensor(
            torch.ones(8), _two_dims(), [Shard(0), Shard(0)], sizes=[(4, 4), (3, 5)], src=None
        ),
        ValueError,
        r"on mesh dims \(0, 1\) must be equal: all of them shard dim 0",
    ),
    (
        lambda mesh: partition_spec(
            distribute_tensor(torch.ones(8), _two_dims(), [Shard(0), Shard(0)], src=None)._spec
        ),
        ValueError,
        "shards one tensor dim on several mesh dims",
    ),
    (lambda mesh: _on_two_mesh_dims([[0, 1]]) + x(mesh, 4, 4, shape=(8, 2)), ValueError, "operands are on two meshes"),
    (_outside, RuntimeError, "sum of a ShardTensor: rank 2 is not in DeviceMesh"),
    (_plain_dual, ValueError, r"make_dual: a plain tensor of shape \(7, 6\)"),
    (_checked_off_the_axes, NotImplementedError, "where these are axes of the job"),
    (
        lambda mesh: F.batch_norm(
            _on_two_mesh_dims([[0, 1]]),
            *(distribute_tensor(torch.ones(2), _two_dims(), [Replicate(), Shard(0)], src=None) for _ in range(2)),
            training=True,
        ),
        RuntimeError,
        r"batch_norm wrote to a copy of a tensor of \[Replicate\(\), Shard\(dim=0\)\]",
    ),
    (
        lambda mesh: distribute_tensor(
            torch.ones(4, 4), DeviceMesh("cpu", [[[0]], [[1]]]), [Shard(0), Shard(1), Shard(0)], src=None
        ).flatten(),
        NotImplementedError,
        r"over dims \[0, 2, 1\] of .*, in this order",
    ),
    (lambda mesh: ShardTensor.from_dtensor(_split_in_another_order()), ValueError, "in another order than theirs"),
    (lambda mesh: knn(x(mesh), torch.ones(3, 5), 1), ValueError, r"must be \[n, d\] and \[m, d\]"),
    (lambda mesh: knn(x(mesh), torch.ones(3, 6), 8), ValueError, "k=8 of 7 points"),
    (lambda mesh: knn(x(mesh), x(DeviceMesh("cpu", [1, 0])), 1), ValueError, "operands are on"),
    (lambda mesh: radius_search(x(mesh), torch.ones(3, 6), -1.0, 1), ValueError, "radius=-1.0"),
    (
        lambda mesh: redistributed(torch.ones(4), make_spec(mesh, None, (4,)), make_spec(mesh, None, (5,))),
        ValueError,
        r"of shape \(4,\) cannot have a layout of shape \(5,\)",
    ),
    (
        lambda mesh: steps(make_spec(mesh, None, (4,)), make_spec(DeviceMesh("cpu", [1, 0]), None, (4,)), (0,)),
        ValueError,
        "cannot be combined with operands on",
    ),
    (
        lambda mesh: perform_ring_iteration(torch.ones(2), mesh, RingPassingConfig(mesh_size=3)),
        ValueError,
        "mesh_size=3, but mesh dim 0 of .* has 2 ranks",
    ),
    (lambda mesh: RingPassingConfig(ring_direction="up"), ValueError, "ring_direction='up': use one of"),
    (lambda mesh: x(mesh).redistribute(sizes=[None, None]), ValueError, "has 2 entries for a mesh of 1 dims"),
    (
        lambda mesh: x(mesh).redistribute(placements=[Partial("max")], async_op=True),
        NotImplementedError,
        "use async_op=False",
    ),
    (
        lambda mesh: dist.all_reduce(x(mesh)),
        ValueError,
        r"all_reduce over ranks \[0, 1\]: ranks \[0, 1\] of these hold",
    ),
    (lambda mesh: dist.all_gather([torch.ones(7, 6)], x(mesh)), NotImplementedError, "^all_gather of a ShardTensor"),
    (
        lambda mesh: torch.ops._c10d_functional.all_reduce(x(mesh), "sum", "0"),
        NotImplementedError,
        "^_c10d_functional.all_reduce of a ShardTensor",
    ),
    (lambda mesh: x(mesh).data_ptr(), RuntimeError, r"^data_ptr: no rank has the memory of a ShardTensor"),
    (lambda mesh: _modified_on_its_way(x(mesh)), RuntimeError, "modified in place before the transfer finished"),
    (lambda mesh: copy.deepcopy(_leaf(mesh) * 2), RuntimeError, "only leaf ShardTensors support deepcopy"),
    (lambda mesh: _judged(mesh, lambda y: _exchange(mesh, y)), spmd.SpmdTypeError, "it is P on"),
    (
        lambda mesh: _judged(mesh, lambda y: ShardTensor.from_local(y, mesh, [Replicate()])),
        spmd.SpmdTypeError,
        "the local tensor of a ShardTensor with",
    ),
    (
        lambda mesh: plan_windows(_OF_3, (0, 4, 9)),
        ValueError,
        "shards with a total of 9 positions do not match windows over 8",
    ),
    (
        lambda mesh: F.conv1d(x(mesh, shape=(1, 1, 2), dim=2), torch.ones(1, 1, 3)),
        ValueError,
        "does not fit into 2 inputs",
    ),
    (
        lambda mesh: F.max_pool1d(x(mesh, shape=(1, 1, 2), dim=2), 5, 3, ceil_mode=True),
        ValueError,
        "a window of 5 does not fit into 2 inputs",
    ),
    (
        lambda mesh: x(mesh) + _dtensor(),
        ValueError,
        r"two meshes, .*\[0, 1\]\) and .*\[\[0, 1\]\]",
    ),
    (
        lambda mesh: perform_ring_iteration_async(torch.ones(2), mesh, RingPassingConfig(communication_method="a2a")),
        ValueError,
        "communication_method='a2a': pass 'p2p'",
    ),
    (lambda mesh: torch.cat([_dtensor(), x(mesh)]), ValueError, r"two meshes, .*\[\[0, 1\]\]\) and"),
    (
        lambda mesh: torch.isin(x(mesh), _dtensor()),
        ValueError,
        r"on two meshes, .* and DeviceMesh\(.*\[\[0, 1\]\]",
    ),
    (
        lambda mesh: torch.vmap(lambda row: row + x(mesh))(torch.ones(3, 6)),
        NotImplementedError,
        "leaves the transformed",
    ),
    (
        lambda mesh: torch.func.grad(lambda weight: (x(mesh) * weight).sum())(x(mesh)),
        NotImplementedError,
        ": a ShardTensor that torch.func transforms meets one that it does not",
    ),
    (lambda mesh: x(mesh).resize_(3, 14), NotImplementedError, r"shape \(7, 6\) cannot become \(3, 14\) in place"),
    (
        lambda mesh: _row_written(x(mesh)),
        RuntimeError,
        r"^mul_ in place on x\[i\], or on another view .*: this view is a copy",
    ),
    (_tied_in_two_layouts, ValueError, r": weight, inner.weight are tied, .* \(weight .*, inner.weight .*\): use"),
    (lambda mesh: partition_spec(summand(mesh, 4)._spec), ValueError, "partition_spec: Partial"),
    (
        lambda mesh: partition_spec(x(mesh)._spec),
        ValueError,
        r"dim 0 has shards of sizes \[4, 3\], but XLA needs equal shards",
    ),
    (lambda mesh: placements_of((0, 0), 1), ValueError, "and shard no other dim"),
]
_LAYERS: list[tuple[Callable[[Any], Any], str]] = [
    (nn.GroupNorm(1, 2), "group_norm has"),
    (nn.BatchNorm2d(2), "batch_norm has"),
    (nn.Upsample(scale_factor=2), "interpolate has"),
    (nn.ConvTranspose2d(2, 2, 3), "conv_transpose2d has"),
    (nn.MaxPool2d(2, return_indices=True), "max_pool2d.* with indices has"),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), "avg_pool2d with divisors that differ has"),
    (nn.PReLU(), "prelu has"),
    (lambda h: h + h, "__add__ has"),
    (lambda h: h - torch.ones(1), "__sub__ has"),
    (lambda h: torch.ones(1) * h, "(__r)?mul(__)? has"),
    (lambda h: h[:, :1], "__getitem__ has"),
    (lambda h: h if h.mean() > 0 else -h, "mean has"),
    (lambda h: h if h else -h, "__bool__ has"),
    (lambda h: torch.relu_(h), "relu_ has"),
    (lambda h: Doubled.apply(h), "__mul__ is called under a grad mode or autocast that differs"),
    (lambda h: (h, h), r"layers\[1\] returns a tuple"),
]
_MORE += [(partial(_layer, layer=layer), NotImplementedError, f"^one_exchange: {words}") for layer, words in _LAYERS]
_MORE.append(
    (
        lambda mesh: one_exchange(x(mesh), [nn.ReLU(inplace=True)]),
        NotImplementedError,
        r"one_exchange: relu\(inplace=True\) would write to x",
    )
)
_MORE.append(
    (lambda mesh: report(mesh=8, rank=8).__enter__(), ValueError, "rank 8 is not one of the 8 ranks of the mesh")
)
_MORE.append((_gradient_of_a_maximum, RuntimeError, "^the gradient of a tensor that is .* differs between the ranks"))
_MORE.append(
    (
        lambda mesh: torch.take(x(mesh), torch.zeros(1, dtype=torch.int64), out=torch.empty(1)),
        NotImplementedError,
        "^take with out= is not supported: use its out-of-place form",
    )
)
_MORE.append((lambda mesh: report(rank=1).__enter__(), ValueError, "rank=1 is played on a mesh: pass mesh="))
_MORE.append((lambda mesh: x(mesh)._fsdp_flattened, NotImplementedError, "^FullyShardedDataParallel of a ShardTensor"))
_MORE.append((lambda mesh: _layer(mesh, lambda h: h.grad_fn), AttributeError, "one_exchange: grad_fn has"))
REFUSALS |= {words: (function, kind, words) for function, kind, words in _MORE}
