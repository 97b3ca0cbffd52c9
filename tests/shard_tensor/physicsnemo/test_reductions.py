"""Many tensors by one all-reduce, losses, and parameters whose gradients are summed by every backward."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DistributedManager
from neuronx_dist.shard_tensor.manager import UninitializedManagerError
from neuronx_dist.shard_tensor.physicsnemo import reductions
from tests.shard_tensor.support.cases import assert_close, on_ranks

F64 = torch.float64


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("op, expected", [("SUM", 6.0), ("AVG", 2.0), ("MAX", 3.0), ("MIN", 1.0)])
def test_all_tensors_travel_at_once_in_any_structure(op, expected, asynchronous):
    op = getattr(dist.ReduceOp, op)

    def run(mesh):
        value = mesh.get_rank() + 1.0
        names = ["b", "a", "c"][mesh.get_rank() :] + ["b", "a", "c"][: mesh.get_rank()]  # an order for each rank
        tensors = {name: torch.full((ord(name) - 96, 2), value * (ord(name) - 96), dtype=F64) for name in names}
        tensors["d"] = torch.tensor(value, dtype=torch.float32, requires_grad=True)
        before = {name: x.detach().clone() for name, x in tensors.items()}
        for given in (tensors, [before[name] for name in "abcd"], before["d"], OrderedDict(tensors)):
            with comm.record() as calls:
                result = reductions.fused_all_reduce(given, op=op, async_op=asynchronous)
                if asynchronous:
                    result, work = result
                    assert not work.is_completed()
                    assert work.wait() and work.is_completed() and work.wait()
            assert [call.verb for call in calls if not call.verb.startswith("wait")] == ["all_reduce"]
            if isinstance(given, torch.Tensor):
                assert result.shape == () and result.item() == expected
                continue
            assert type(result) is (list if isinstance(given, list) else dict)
            found = dict(zip("abcd", result)) if isinstance(given, list) else result
            assert list(found) == (list("abcd") if isinstance(given, list) else [*names, "d"])
            for name, x in found.items():
                factor = 1 if name == "d" else ord(name) - 96
                assert x.dtype == before[name].dtype and x.shape == before[name].shape and not x.requires_grad
                assert x.eq(expected * factor).all(), (name, x)
        assert all(torch.equal(x.detach(), before[name]) for name, x in tensors.items())

    on_ranks(3, run)


def test_dtypes_in_which_they_travel():
    def run(mesh):
        def traveled(tensors, **options):
            with comm.record() as calls:
                result = reductions.fused_all_reduce(tensors, **options)
            return result, calls[0].dtype

        counts, dtype = traveled([torch.tensor([2**40 + 1])])
        assert counts[0].item() == 2**41 + 2 and dtype == torch.int64
        half, dtype = traveled(torch.tensor([1.0, 2**-8], dtype=torch.bfloat16))
        assert half.dtype == torch.bfloat16 and dtype == torch.float32
        mixed = [torch.tensor(3), torch.tensor(0.5)]
        with pytest.raises(ValueError, match=r"torch.float32, torch.int64 would travel as torch.float32"):
            reductions.fused_all_reduce(mixed)
        result, dtype = traveled(mixed, buffer_dtype=F64)
        assert [x.item() for x in result] == [6, 1.0] and result[0].dtype == torch.int64 and dtype == F64
        assert reductions.fused_all_reduce([]) == []
        for wrong in (3.0, "ab"):
            with pytest.raises(TypeError, match="a tensor, a mapping or a sequence of tensors, got <class"):
                reductions.fused_all_reduce(wrong)
        with pytest.raises(ValueError, match="is not one of ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN"):
            reductions.fused_all_reduce(torch.ones(1), op=dist.ReduceOp.BAND)

    on_ranks(2, run)


def test_one_process_reduces_nothing():
    x = torch.ones(2, requires_grad=True)
    result, work = reductions.fused_all_reduce({"x": x}, async_op=True)
    assert work.is_completed() and result["x"].tolist() == [1.0, 1.0] and not result["x"].requires_grad
    assert result["x"].data_ptr() != x.data_ptr()
    with pytest.raises(UninitializedManagerError):
        reductions.reduce_loss(1.0)


def test_reduce_loss():
    def run(mesh):
        DistributedManager.initialize()
        loss = mesh.get_rank() + 1.0
        return reductions.reduce_loss(loss), reductions.reduce_loss(torch.tensor(loss), 1, mean=False)

    assert on_ranks(3, run) == [(2.0, None), (None, 6.0), (None, None)]


def test_shared_modules():
    """Gradients of a marked module's parameters are sums over the group; of others, and unmarked ones, they are not."""

    def run(mesh):
        DistributedManager.initialize()
        DistributedManager.create_process_subgroup("pair", 2)
        rank = mesh.get_rank()

        def gradients():
            for param in net.parameters():
                param.grad = None
            net(torch.full((1, 2), rank + 1.0, dtype=F64)).sum().backward()
            return [param.grad.clone() for param in net.parameters()]

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        plain = gradients()
        summed = [comm.all_reduce(x, DistributedManager().group("pair")) for x in plain]
        world = [comm.all_reduce(x, "world") for x in plain]
        cases = (
            (net[0], "pair", True, [*summed[:2], *plain[2:]]),
            (net, "pair", False, plain),
            (net, "pair", True, summed),
            (net, None, True, world),
        )
        for module, name, recurse, expected in cases:
            assert reductions.mark_module_as_shared(module, name, recurse=recurse) is module
            for actual, grad in zip(gradients(), expected):
                assert_close(actual, grad, "gradient")
            reductions.unmark_module_as_shared(module, recurse=recurse)
        assert all(torch.equal(actual, grad) for actual, grad in zip(gradients(), plain))
        reductions.mark_module_as_shared(net[0], "pair")
        with pytest.raises(RuntimeError, match="parameter 0.weight is marked already"):
            reductions.mark_module_as_shared(net, "pair")
        with pytest.raises(RuntimeError, match="parameter weight is not marked"):
            reductions.unmark_module_as_shared(net[2])

    on_ranks(4, run)


@pytest.mark.parametrize("use_fp32", [True, False])
def test_shared_gradients_of_16_bits(use_fp32):
    def run(mesh):
        DistributedManager.initialize()
        net = nn.Linear(1, 1, bias=False).bfloat16()
        reductions.mark_module_as_shared(net, None, use_fp32_reduction=use_fp32)
        with comm.record() as calls:
            net(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        return [call.dtype for call in calls]

    assert on_ranks(2, run) == [[torch.float32 if use_fp32 else torch.bfloat16]] * 2


def test_gradients_that_accumulate_are_summed_once_each():
    def rank(mesh):
        DistributedManager.initialize()
        module = nn.Linear(1, 1, bias=False)
        reductions.mark_module_as_shared(module, None)
        found = []
        for _ in range(3):
            module(torch.ones(1, 1)).sum().backward()
            found.append(module.weight.grad.item())
        return found

    assert on_ranks(2, rank) == [[2.0, 4.0, 6.0]] * 2


def test_mappings_inside_of_mappings():
    def rank(mesh):
        return reductions.fused_all_reduce({"b": torch.ones(2), "a": {"c": torch.full((1,), 3.0)}})

    for found in on_ranks(2, rank):
        assert found["b"].tolist() == [2.0, 2.0] and found["a"]["c"].tolist() == [6.0]
