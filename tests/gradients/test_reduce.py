"""Reduction, norm and clipping of gradients at every kind of layout, against one process."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients.buckets import cut
from neuronx_dist.gradients.reduce import refuse_accumulation
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec
from tests.support.synthetic import LAYOUTS, MESHES, Model, assemble, mean_gradient, relative_error, stages, weight

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def whole_model(mesh: Mesh, step: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """The same parameters with their gradients, in one process."""
    params = [nn.Parameter(weight(name, dtype)) for name in LAYOUTS]
    for name, param in zip(LAYOUTS, params):
        param.grad = mean_gradient(name, step, mesh, dtype)
    return params


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_reduced_gradients_are_those_of_one_process(mesh: Mesh, dtype: torch.dtype) -> None:
    def rank_main() -> dict[str, torch.Tensor]:
        model = Model(dtype)
        model.set_gradients(step=3)
        grads.reduce_gradients(model)
        return gradients_of(model)

    for name, grad in assemble(mesh, comm.threads.run(mesh, rank_main)):
        assert relative_error(grad, mean_gradient(name, 3, mesh, dtype)) < TOLERANCE[dtype], name


def test_b3_context_parallel_gradients_are_not_multiplied_by_cp() -> None:
    def rank_main() -> float:
        module = nn.Linear(1, 1, bias=False)
        module.weight.grad = torch.ones(1, 1)
        grads.reduce_gradients(module)
        other = [torch.ones(1)]
        grads.bucket_allreduce_gradients(other)  # through NxD's names
        assert other[0].item() == 1.0
        return module.weight.grad.item()

    assert comm.threads.run(Mesh(2, cp=2), rank_main) == [1.0, 1.0]


@pytest.mark.parametrize("cap_mb", [None, 1e-4], ids=["one bucket", "many buckets"])
def test_reduction_in_buckets(cap_mb: float | None) -> None:
    mesh = Mesh(4, tp=2)

    def rank_main() -> tuple[dict[str, torch.Tensor], list[comm.Call]]:
        model = Model()
        model.set_gradients(step=0)
        with comm.record() as calls:
            grads.reduce_gradients(model, bucket_cap_mb=cap_mb)
        return gradients_of(model), calls

    results = comm.threads.run(mesh, rank_main)
    for name, grad in assemble(mesh, [result[0] for result in results]):
        assert relative_error(grad, mean_gradient(name, 0, mesh, torch.float64)) < 1e-10, name
    calls = results[0][1]
    assert all(call.verb == "all_reduce" for call in calls)
    over_tp = [call for call in calls if call.axis == "tp"]
    over_data = [call for call in calls if call.axis == "dp,cp"]
    assert len(calls) == len(over_tp) + len(over_data)
    # An element for each element of a gradient, and one for each parameter.
    assert sum(call.bytes for call in over_tp) == (5 + 3 + 6 + 3) * 8
    assert sum(call.bytes for call in over_data) == (12 + 5 + 20 + 12 + 3 + 1 + 7 + 6 + 8) * 8
    if cap_mb is None:
        assert (len(over_tp), len(over_data)) == (1, 1)
    else:
        assert len(over_data) > 3


def test_bucket_cap_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main() -> int:
        model = Model()
        model.set_gradients(step=0)
        with comm.record() as calls:
            grads.reduce_gradients(model)
        return len(calls)

    monkeypatch.setenv("ALLREDUCE_BUCKET_CAP_MB", "0.0001")
    assert comm.threads.run(Mesh(2), rank_main)[0] > 1
    monkeypatch.setenv("ALLREDUCE_BUCKET_CAP_MB", "-1")
    with pytest.raises(ValueError, match="must be positive"):
        comm.threads.run(Mesh(2), rank_main)


def test_buckets_start_ahead_and_are_awaited_in_order() -> None:
    def rank_main() -> list[str]:
        model = Model()
        model.set_gradients(step=0)
        with comm.record(waits=True) as calls:
            grads.reduce_gradients(model, bucket_cap_mb=1e-4)
        return [call.verb for call in calls]

    verbs = comm.threads.run(Mesh(2), rank_main)[0]
    assert verbs[:3] == ["all_reduce", "all_reduce", "wait:all_reduce"]
    assert verbs[-1] == "wait:all_reduce"
    assert verbs.count("all_reduce") == verbs.count("wait:all_reduce") > 2


def test_cut() -> None:
    assert cut([5, 5, 5], key=lambda _: 0, nbytes=int, cap=10) == [[5, 5], [5]]
    assert cut([1, 99, 1], key=lambda _: 0, nbytes=int, cap=10) == [[1], [99], [1]]
    assert cut([1, -2, 3, -4], key=lambda n: n > 0, nbytes=abs, cap=10) == [[1, 3], [-2, -4]]
    assert cut([], key=lambda _: 0, nbytes=int, cap=10) == []


def test_data_mean_is_left_to_zero1() -> None:
    mesh = Mesh(4, tp=2)

    def rank_main() -> None:
        model = Model()
        model.set_gradients(step=1)
        before = gradients_of(model)
        with comm.record() as calls:
            grads.reduce_gradients(model, average_over_data=False)
        assert {call.axis for call in calls} == {"tp"}
        for name, grad in gradients_of(model).items():
            assert torch.equal(grad, before[name]) != LAYOUTS[name].sequence_parallel, name
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(model, average_over_data=False)

    comm.threads.run(mesh, rank_main)


def test_experts_are_summed_over_edp_and_divided_by_the_whole_data_parallel_size() -> None:
    mesh = Mesh(4, ep=2)  # edp = 2, dp = 4

    def rank_main() -> tuple[float, float]:
        module = nn.ParameterDict({"expert": torch.zeros(1), "dense": torch.zeros(1)})
        module["expert"].expert_model_parallel = True
        for param in module.values():
            param.grad = torch.tensor([float(10 ** comm.rank("dp"))])
        grads.reduce_gradients(module)
        return module["expert"].grad.item(), module["dense"].grad.item()

    results = comm.threads.run(mesh, rank_main)
    assert [dense for _, dense in results] == [1111 / 4] * 4
    assert [expert for expert, _ in results] == [101 / 4, 1010 / 4, 101 / 4, 1010 / 4]


def test_nxd_names_reduce_experts_in_two_calls() -> None:
    def rank_main() -> float:
        grad = torch.tensor([float(10 ** comm.rank("dp"))])
        grads.bucket_allreduce_gradients([grad])
        grads.bucket_allreduce_gradients([grad], reduce_over_ep_group=True)
        return grad.item()

    assert comm.threads.run(Mesh(4, ep=2), rank_main) == [1111 / 4] * 4


# --- once per step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(2, tp=2)], ids=str)
def test_a_second_reduction_in_a_step_raises(mesh: Mesh) -> None:
    def rank_main() -> None:
        layer = nn.Linear(2, 2).double()
        layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        x = torch.ones(1, 2, dtype=torch.float64)
        layer(x).sum().backward()
        layer(x).sum().backward()  # accumulating before is what microbatches do
        grads.reduce_gradients(layer)
        with pytest.raises(RuntimeError, match="zero_grad before the next step"):
            grads.reduce_gradients(layer)
        grads.clip_grad_norm(layer.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(layer)
        layer.zero_grad()
        layer(x).sum().backward()
        grads.reduce_gradients(layer)
        layer.zero_grad(set_to_none=False)
        layer(x).sum().backward()
        grads.reduce_gradients(layer)

    comm.threads.run(mesh, rank_main)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "left to the script"])
@pytest.mark.parametrize(
    "mesh", [Mesh(1), Mesh(4, tp=2), Mesh(4, cp=2), Mesh(8, tp=2, cp=2), Mesh(8, pp=2, tp=2)], ids=str
)
def test_nxd_names_after_the_reduction_do_what_is_left(mesh: Mesh, average: bool) -> None:
    """NxD's pipeline scripts call them after run_train: it did the sum over tp, and without a wrapper the mean."""

    def rank_main() -> dict[str, torch.Tensor]:
        model = Model()
        model.set_gradients(step=2)
        grads.reduce_gradients(model, average_over_data=average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with comm.record() as calls:
            grads.allreduce_context_parallel_gradients(optimizer)
            grads.allreduce_sequence_parallel_gradients(optimizer)
            grads.bucket_allreduce_gradients([param.grad for param in model.parameters()])
        left = [] if average else [axis for axis in ("cp", "dp") if getattr(mesh, axis) > 1]
        assert [call.axis for call in calls] == left
        grads.clip_grad_norm(model.parameters(), 0.7)
        return gradients_of(model)

    reference = whole_model(mesh, 2)
    torch.nn.utils.clip_grad_norm_(reference, 0.7)
    for (name, grad), param in zip(assemble(mesh, comm.threads.run(mesh, rank_main)), reference):
        assert relative_error(grad, param.grad) < 1e-10, name


@pytest.mark.parametrize("mesh", [Mesh(8, tp=2, cp=2), Mesh(4, tp=2), Mesh(4, cp=2)], ids=str)
def test_nxd_names_one_after_the_other_do_the_same(mesh: Mesh) -> None:
    def rank_main() -> dict[str, torch.Tensor]:
        model = Model()
        model.set_gradients(step=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with comm.record() as calls:
            grads.allreduce_context_parallel_gradients(optimizer)
            grads.allreduce_sequence_parallel_gradients(optimizer)
            grads.bucket_allreduce_gradients([param.grad for param in model.parameters()])
        assert len(calls) == sum(size > 1 for size in (mesh.cp, mesh.tp, mesh.dp * mesh.cp))
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.allreduce_sequence_parallel_gradients(model)
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(model)
        return gradients_of(model)

    for name, grad in assemble(mesh, comm.threads.run(mesh, rank_main)):
        assert relative_error(grad, mean_gradient(name, 2, mesh, torch.float64)) < 1e-10, name


# --- missing gradients -----------------------------------------------------------------------------------------------


def test_missing_gradients() -> None:
    """On one rank it counts as zero; on all ranks it stays None, and frozen parameters are not touched."""

    def rank_main() -> None:
        module = nn.ParameterDict({name: torch.zeros(2) for name in ("all", "one", "none", "frozen")})
        module["frozen"].requires_grad_(False)
        module["all"].grad = torch.ones(2)
        if comm.rank("dp") == 1:
            module["one"].grad = torch.full((2,), 8.0)
        with comm.record() as calls:
            grads.reduce_gradients(module)
        assert [call.shape for call in calls] == [(3 * 2 + 3,)]
        assert module["all"].grad.tolist() == [1, 1]
        assert module["one"].grad.tolist() == [2, 2]
        assert module["none"].grad is None and module["frozen"].grad is None

    comm.threads.run(Mesh(4), rank_main)


def test_rank_without_any_gradient_takes_part() -> None:
    def rank_main() -> list[float]:
        module = nn.Linear(2, 1, bias=False)
        if comm.rank("dp") == 0:
            module.weight.grad = torch.tensor([[2.0, 4.0]])
        grads.reduce_gradients(module)
        return module.weight.grad.flatten().tolist()

    assert comm.threads.run(Mesh(2), rank_main) == [[1.0, 2.0]] * 2


def test_mixed_dtypes_and_strided_gradients() -> None:
    def rank_main() -> None:
        module = nn.ParameterDict({
            "narrow": torch.zeros(3, dtype=torch.bfloat16),
            "wide": torch.zeros(2, 3, dtype=torch.float64),
            "single": torch.zeros(3),
        })  # fmt: skip
        value = float(1 + 2 * comm.rank("dp"))
        module["narrow"].grad = torch.full((3,), value, dtype=torch.bfloat16)
        module["wide"].grad = torch.full((3, 2), value, dtype=torch.float64).t()
        module["single"].grad = torch.full((3,), value)
        with comm.record() as calls:
            grads.reduce_gradients(module, reduce_dtype=torch.float32)
        assert sorted(call.dtype.itemsize for call in calls) == [4, 4, 8]  # bfloat16 is summed in float32
        for param in module.values():
            assert param.grad.dtype == param.dtype
            assert torch.equal(param.grad, torch.full_like(param, 2.0))

    comm.threads.run(Mesh(2), rank_main)


# --- norm and clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_norm_and_clipped_gradients_are_those_of_one_process(mesh: Mesh) -> None:
    norm_types = [2, 1, 0.5, 3.0, math.inf]

    def rank_main() -> tuple[list[torch.Tensor], list[comm.Call], dict[str, torch.Tensor]]:
        model = Model()
        model.set_gradients(step=4)
        grads.reduce_gradients(model)
        with comm.record() as calls:
            norms = [grads.get_grad_norm(model.parameters(), norm_type) for norm_type in norm_types]
        assert torch.equal(grads.clip_grad_norm(model.parameters(), max_norm=0.7), norms[0])
        return norms, calls, gradients_of(model)

    results = comm.threads.run(mesh, rank_main)
    for index, norm_type in enumerate(norm_types):
        expected = torch.nn.utils.clip_grad_norm_(whole_model(mesh, 4), math.inf, norm_type)
        norms = [result[0][index] for result in results]
        assert all(torch.equal(norm, norms[0]) for norm in norms)
        assert norms[0].dtype == torch.float64 and norms[0].dim() == 0
        assert relative_error(norms[0], expected) < 1e-12, norm_type
    reference = whole_model(mesh, 4)
    torch.nn.utils.clip_grad_norm_(reference, 0.7)
    for (name, grad), param in zip(assemble(mesh, [result[2] for result in results]), reference):
        assert relative_error(grad, param.grad) < 1e-10, name
    # One scalar over the merged model axes, and no other communication.
    expected_calls = len(norm_types) if mesh.tp * mesh.pp > 1 else 0
    for _, calls, _ in results:
        assert [(call.verb, call.axis, call.shape) for call in calls] == [("all_reduce", "pp,tp", ())] * expected_calls


def test_b11_any_iterable_and_any_norm() -> None:
    def rank_main() -> None:
        layer = nn.Linear(3, 2)
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        for kind in (list, tuple, set, iter):
            assert grads.get_grad_norm(kind(layer.parameters()), math.inf).item() == 1.0
        assert grads.clip_grad_norm((p for p in layer.parameters()), 1.0, norm_type=1).item() == 8.0
        assert layer.bias.grad.tolist() == pytest.approx([1 / 8] * 2)
        assert grads.get_grad_norm(layer.bias, 1).item() == pytest.approx(2 / 8)
        layer.bias.grad = None
        assert grads.get_grad_norm(layer.parameters(), 1).item() == pytest.approx(6 / 8)
        assert grads.get_grad_norm([], 2).item() == 0.0
        assert grads.get_grad_norm(iter([layer.bias]), math.inf).item() == 0.0
        assert grads.clip_grad_norm([], 1.0).item() == 0.0
        with pytest.raises(ValueError, match="norm_type must be positive"):
            grads.get_grad_norm(layer.parameters(), 0)

    comm.threads.run(Mesh(1), rank_main)


def test_parameter_given_twice_counts_once() -> None:
    def rank_main() -> None:
        layer = nn.Linear(2, 2, bias=False)
        layer.weight.grad = torch.full((2, 2), 2.0)
        assert grads.clip_grad_norm([layer.weight, layer.weight], 2.0).item() == 4.0
        assert torch.allclose(layer.weight.grad, torch.ones(2, 2))

    comm.threads.run(Mesh(1), rank_main)


def test_shared_copies_are_left_out_of_the_norm_but_clipped() -> None:
    def rank_main() -> None:
        first, copy = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        first.grad, copy.grad = torch.tensor([3.0]), torch.tensor([3.0])
        copy.shared = True
        assert grads.clip_grad_norm([first, copy], 1.5).item() == 3.0
        assert first.grad.item() == copy.grad.item() == pytest.approx(1.5)

    comm.threads.run(Mesh(1), rank_main)


def test_norm_of_low_precision_gradients_is_taken_in_fp32() -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(70000, dtype=torch.float16))
        param.grad = torch.full_like(param, 2.0)  # the sum of squares is beyond fp16
        norm = grads.get_grad_norm(param)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(2 * math.sqrt(70000))

    comm.threads.run(Mesh(1), rank_main)


@pytest.mark.parametrize("sharded", [False, True], ids=["marked", "sharded over ep"])
def test_norm_with_experts_counts_each_once(sharded: bool) -> None:
    def rank_main() -> float:
        module = nn.ParameterDict({"expert": torch.zeros(1), "dense": torch.zeros(1)})
        expert, dense = module["expert"], module["dense"]
        expert.expert_model_parallel = True
        if sharded:  # every tp rank has the same shard
            set_spec(module, "expert", ShardSpec(axis="ep", dim=0, num_partitions=2, full_shape=(2,)))
        expert.grad, dense.grad = torch.tensor([3.0 if comm.rank("ep") else 4.0]), torch.tensor([12.0])
        return grads.get_grad_norm([expert, dense]).item()

    assert comm.threads.run(Mesh(8, ep=2, tp=2), rank_main) == pytest.approx([13.0] * 8)


def test_small_norm_leaves_gradients_alone_and_inf_only_measures() -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.tensor([3.0, 4.0])
        assert grads.clip_grad_norm(param, 5.1).item() == 5.0
        assert grads.clip_grad_norm(param, math.inf).item() == 5.0
        assert param.grad.tolist() == [3.0, 4.0]

    comm.threads.run(Mesh(1), rank_main)


def test_norm_of_shards_over_groups() -> None:
    def rank_main() -> list[float]:
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.tensor([3.0 if comm.rank("dp") % 2 else 4.0])
        mesh = comm.current().mesh
        pairs = [[group[i], group[i + 1]] for group in mesh.groups("dp") for i in (0, 2)]
        return [
            grads.get_grad_norm(param, 2, True, pairs).item(),
            grads.get_grad_norm(param, 2, True).item() / math.sqrt(2),
            grads.get_grad_norm(param, 2, True, mesh.groups(("dp", "cp"))).item() / math.sqrt(2),
        ]

    assert comm.threads.run(Mesh(8, tp=2), rank_main) == [pytest.approx([5.0] * 3)] * 8
    with pytest.raises(ValueError, match="pass both"):
        comm.threads.run(Mesh(1), lambda: grads.get_grad_norm([], zero1_optimizer_groups=[[0]]))


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4), Mesh(4, tp=2), Mesh(4, pp=2), Mesh(4, cp=2)], ids=str)
def test_losses_over_num_items_average_to_the_mean_over_the_global_batch(mesh: Mesh, shift: bool) -> None:
    num_microbatches = 2

    def batch(data_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(data_rank)
        labels = torch.randint(0, 9, (4, 6), generator=generator)
        keep = torch.rand(4, 6, generator=generator) < 0.2 + 0.2 * data_rank
        return labels.where(keep, torch.tensor(-100))

    def loss_sum(labels: torch.Tensor) -> torch.Tensor:
        used = labels[:, 1:] if shift else labels
        return (used.double() ** 2)[used != -100].sum()

    def rank_main() -> torch.Tensor:
        labels = batch(comm.rank(("dp", "cp")))
        with comm.record() as calls:
            num_items = grads.global_num_items(labels, num_microbatches, shift=shift, dtype=torch.float64)
        assert [(c.axis, c.dtype, c.shape) for c in calls] == [("dp,cp", torch.int64, ())] * (mesh.dp * mesh.cp > 1)
        assert num_items.dim() == 0
        loss = sum(loss_sum(part) / num_items for part in labels.chunk(num_microbatches)) / num_microbatches
        return comm.all_reduce(loss, ("dp", "cp")) / (mesh.dp * mesh.cp)

    everything = torch.cat([batch(data_rank) for data_rank in range(mesh.dp * mesh.cp)])
    used = everything[:, 1:] if shift else everything
    expected = loss_sum(everything) / (used != -100).sum()
    for loss in comm.threads.run(mesh, rank_main):
        assert relative_error(loss, expected) < 1e-12


def test_no_valid_label_gives_no_nan() -> None:
    def rank_main() -> float:
        return (torch.zeros(()) / grads.global_num_items(torch.full((2, 3), -100), num_microbatches=2)).item()

    with pytest.warns(UserWarning, match=r"global_num_items: all labels of the global batch are -100 \(ignore_index\)"):
        assert comm.threads.run(Mesh(2), rank_main) == [0.0, 0.0]
    with pytest.raises(ValueError, match="num_microbatches"):
        comm.threads.run(Mesh(1), lambda: grads.global_num_items(torch.zeros(1, 2), 0))


def test_layout_of_the_synthetic_model() -> None:
    """Every stage owns something, so that the tests above say something about it."""
    for pp in (1, 2, 4):
        assert {stages(name, pp)[0] for name in LAYOUTS} == set(range(pp))


@pytest.mark.parametrize(
    "mesh,refused", [(Mesh(4), False), (Mesh(4, cp=2), False), (Mesh(4, tp=2), True), (Mesh(4, ep=2), True)], ids=str
)
def test_what_a_second_reduction_would_scale_is_not_added_to(mesh: Mesh, refused: bool) -> None:
    def rank_main() -> None:
        model = Model()
        next(model.parameters()).expert_model_parallel = mesh.ep > 1
        model.set_gradients(step=0)
        refuse_accumulation(model)
        grads.reduce_gradients(model)
        with pytest.raises(RuntimeError, match="Call zero_grad") if refused else nullcontext():
            refuse_accumulation(model)
        model.zero_grad(set_to_none=False)
        refuse_accumulation(model)

    comm.threads.run(mesh, rank_main)
