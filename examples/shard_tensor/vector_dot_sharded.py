"""Example 1, on all ranks: the dot product with a handler of one's own, which reduces one scalar.

The package has a handler for `torch.dot`; this one takes its place. The tutorial reduces by `torch.distributed`, which
gradients do not pass; `spmd.all_reduce` is the same sum with types, so that both passes are right.

    torchrun --nproc-per-node 2 examples/shard_tensor/vector_dot_sharded.py [--size full]
"""

from typing import Any

import torch
from tutorial import expect_equal, expect_traffic, say, seconds, size_of
from vector_dot_baseline import f

from neuronx_dist import spmd
from neuronx_dist.shard_tensor import DistributedManager, Replicate, Shard, ShardTensor, report, scatter_tensor


def sharded_dot_product(func: Any, types: Any, args: Any, kwargs: Any) -> ShardTensor:
    def extract_args(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        return x, y

    x, y = extract_args(*args, **kwargs)
    x_spec, y_spec = x._spec, y._spec
    if not x_spec.placements == y_spec.placements:
        raise NotImplementedError("Tensors must be sharded in the same way")
    if not x_spec.mesh == y_spec.mesh:
        raise NotImplementedError("Tensors must be sharded on the same mesh")
    mesh = x_spec.mesh
    local_dot_product = func(x.to_local(), y.to_local())  # on plain tensors it runs plainly
    total = spmd.all_reduce(local_dot_product, mesh.communicator(), src=spmd.P, dst=spmd.I)
    return ShardTensor.from_local(total, device_mesh=mesh, placements=(Replicate(),))


ShardTensor.register_function_handler(torch.dot, sharded_dot_product)


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    (n,), small = size_of((1_000_003,), full=(1_000_000_000,))

    torch.manual_seed(0)
    dtype = torch.float64 if small else torch.float32
    whole: list[Any] = [
        torch.randn(n, device=manager.device, dtype=dtype) if small or manager.rank == 0 else None for _ in range(2)
    ]
    x, y = (scatter_tensor(x, 0, mesh, (Shard(0),), requires_grad=True) for x in whole)

    with report() as r:
        z = f(x, y)
        z.backward()
    expect_traffic(r, {"all_reduce": 1}, dtype.itemsize)
    if small:
        expect_equal("x . y", z, f(*whole), 1e-10)
        expect_equal("gradient of x", x.grad, whole[1], 1e-10)
    say(f"{n:,} elements on {manager.world_size} ranks: {seconds(lambda: f(x, y)) * 1e3:.2f} ms a call")


if __name__ == "__main__":
    main()
