"""ZeRO-1 against the same optimizer in one process, at every kind of layout, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from neuronx_dist.planning.fake_rank import WireBackend
from neuronx_dist.planning.meter import MemoryMeter
from tests.optimizer.zero1_training import OPTIMIZERS, STEPS, train, train_whole, weights_of
from tests.support.synthetic import LAYOUTS, MESHES, Model, assemble, draw, relative_error, weight

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["zero1", "masters"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_weights_and_norms_are_those_of_one_process(mesh: Mesh, optimizer: str, kind: str) -> None:
    cls, options = OPTIMIZERS[optimizer]
    wrapper = NeuronZero1Optimizer if kind == "zero1" else MasterWeightsOptimizer

    def rank_main() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = Model()
        norms = train(model, wrapper(model.parameters(), cls, max_norm=2.5, **options), average=kind == "masters")
        return norms, weights_of(model)

    expected_norms, expected = train_whole(mesh, optimizer, 2.5, torch.float64)
    assert any(norm > 2.5 for norm in expected_norms)
    results = comm.threads.run(mesh, rank_main)
    for norms, _ in results:
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < 1e-12
    for (name, value), param in zip(assemble(mesh, [result[1] for result in results]), expected):
        assert relative_error(value, param.detach()) < 1e-10, name


@pytest.mark.each_pair
@pytest.mark.parametrize("clipping", [{}, {"grad_clipping": False}, {"max_norm": 0.5}, {"max_norm": math.inf}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_clipping(dp: int, optimizer: str, dtype: torch.dtype, clipping: dict[str, Any]) -> None:
    """max_norm: None is 1.0, a value is that value (B13 of NxD: it was always 1.0), and grad_clipping=False is off."""
    mesh = Mesh(dp)
    cls, options = OPTIMIZERS[optimizer]

    def rank_main() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = Model(dtype)
        norms = train(model, NeuronZero1Optimizer(model.parameters(), cls, **clipping, **options))
        return norms, weights_of(model)

    max_norm = clipping.get("max_norm", math.inf if "grad_clipping" in clipping else 1.0)
    expected_norms, expected = train_whole(mesh, optimizer, max_norm, dtype)
    results = comm.threads.run(mesh, rank_main)
    for (name, value), param in zip(assemble(mesh, [result[1] for result in results]), expected):
        assert value.dtype == dtype
        assert relative_error(value, param.detach()) < TOLERANCE[dtype], name
    norms = results[0][0]
    if "grad_clipping" in clipping:
        assert norms == [None] * STEPS
    else:
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < TOLERANCE[dtype]


def test_same_run_twice_is_bit_equal() -> None:
    def rank_main() -> dict[str, torch.Tensor]:
        model = Model(torch.float32)
        train(model, NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1))
        return weights_of(model)

    first, second = (comm.threads.run(Mesh(8, tp=2), rank_main) for _ in range(2))
    for a, b in zip(first, second):
        assert all(torch.equal(a[name], b[name]) for name in a)


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_state_is_one_dp_th_plus_padding(dp: int) -> None:
    def rank_main() -> None:
        model = Model(torch.bfloat16)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        train(model, optimizer, last=1)
        rows = [(param.shape[0] if param.dim() else 1, param.shape[1:].numel()) for param in model.parameters()]
        shards = sum(math.ceil(num / dp) * rest for num, rest in rows)
        state = optimizer.base_optimizer.state_dict()["state"].values()
        moments = [value for values in state for name, value in values.items() if name != "step"]
        masters = [param for group in optimizer.base_optimizer.param_groups for param in group["params"]]
        assert sum(t.untyped_storage().nbytes() for t in moments) == 2 * 4 * shards
        assert sum(t.untyped_storage().nbytes() for t in masters) == 4 * shards
        assert all(master.grad is None for master in masters)

    comm.threads.run(Mesh(dp), rank_main)


def test_collectives_of_a_step() -> None:
    """One reduce-scatter and one all-gather a bucket, each of every element once, and one scalar all-reduce."""

    def rank_main() -> None:
        model = Model(torch.bfloat16)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        model.set_gradients(0)
        grads.reduce_gradients(model, average_over_data=False)
        with comm.record() as calls:
            optimizer.step()
        rows = [(param.shape[0] if param.dim() else 1, param.shape[1:].numel()) for param in model.parameters()]
        padded = sum(math.ceil(num / 4) * 4 * rest for num, rest in rows)
        flags = 4 * len(LAYOUTS)  # which parameters have a gradient
        assert [(call.verb, call.axis, call.bytes) for call in calls] == [
            ("reduce_scatter", "dp,cp", 2 * (padded + flags)),
            ("all_reduce", "world", 8),
            ("all_gather", "dp,cp", 2 * padded),
        ]

    comm.threads.run(Mesh(8, tp=2), rank_main)


def test_buckets_start_ahead_and_are_awaited_in_order() -> None:
    def rank_main() -> None:
        model = Model()
        cap = dict(bucket_cap_mb_all_gather=4e-4, bucket_cap_mb_reduce_scatter=4e-4)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, **cap)
        with comm.record(waits=True) as calls:
            train(model, optimizer, last=1)
        for verb in ("reduce_scatter", "all_gather"):
            order = [call.verb for call in calls if call.verb.endswith(verb)]
            assert order[:3] == [verb, verb, f"wait:{verb}"]
            assert order.count(verb) == order.count(f"wait:{verb}") > 2

    comm.threads.run(Mesh(2), rank_main)


# --- low precision ---------------------------------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["zero1", "masters", "zero1 higher_cc_precision", "zero1 use_grad_acc_hook"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dp", [1, 2])
def test_low_precision_parameters_with_fp32_masters(dp: int, dtype: torch.dtype, kind: str) -> None:
    """Bit-equal to fp32 masters written out by hand: gradients averaged in their dtype, all else in fp32."""
    shape, mesh = (5, 3), Mesh(dp)
    options: dict[str, Any] = dict.fromkeys(kind.split()[1:], True)
    sum_dtype = torch.float32 if options else dtype

    def gradient(step: int, rank: int) -> torch.Tensor:
        return draw(step, rank, shape=shape, dtype=dtype)

    def rank_main() -> torch.Tensor:
        model = nn.ParameterDict({"w": weight("column", dtype)[:5, :3].clone()})
        wrapper = MasterWeightsOptimizer if kind == "masters" else NeuronZero1Optimizer
        optimizer = wrapper(model.parameters(), torch.optim.AdamW, lr=0.03, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            (model["w"] * gradient(step, comm.rank("dp"))).sum().backward()
            grads.reduce_gradients(model, average_over_data=kind == "masters")
            optimizer.step()
        assert model["w"].dtype == dtype
        return model["w"].detach()

    master = nn.Parameter(weight("column", dtype)[:5, :3].float())
    reference = torch.optim.AdamW([master], lr=0.03)
    for step in range(STEPS):
        total = sum(gradient(step, rank).to(sum_dtype) / dp for rank in range(dp))
        master.grad = total.float()
        norm = master.grad.double().square().sum().sqrt().float()
        master.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        reference.step()
    for value in comm.threads.run(mesh, rank_main):
        assert relative_error(value, master.detach().to(dtype)) < 1e-7


def test_small_updates_are_not_lost_in_bf16() -> None:
    def rank_main() -> float:
        model = nn.ParameterDict({"w": torch.ones(2, dtype=torch.bfloat16)})
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=1e-3, grad_clipping=False)
        for _ in range(100):
            model["w"].grad = torch.ones_like(model["w"])
            optimizer.step()
        return model["w"][0].item()

    assert comm.threads.run(Mesh(2), rank_main) == [pytest.approx(0.9, abs=4e-3)] * 2  # in bf16 it would still be 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dp", [1, 2])
def test_microbatches_accumulate_in_fp32_with_the_hook(dp: int, dtype: torch.dtype) -> None:
    def rank_main() -> None:
        model = nn.ParameterDict({"w": torch.zeros(2, dtype=dtype)})
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.SGD, lr=1.0, max_norm=math.inf, use_grad_acc_hook=True
        )
        for value in (256.0, 1.0):  # 257 is not a bf16 number
            (model["w"] * value).sum().backward()
        assert model["w"].grad is None and model["w"].main_grad.tolist() == [257.0, 257.0]
        grads.reduce_gradients(model, average_over_data=False)
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(257 * math.sqrt(2))
        assert torch.equal(model["w"], torch.full((2,), -257.0).to(dtype))
        optimizer.zero_grad()
        assert model["w"].main_grad is None

    comm.threads.run(Mesh(dp), rank_main)


@pytest.mark.parametrize("kind", ["zero1", "masters"])
def test_large_fp16_gradients_do_not_overflow_in_the_sum(kind: str) -> None:
    """4e4 on each of 4 ranks: their mean is a fp16 number, their sum is not."""

    def rank_main() -> list[float]:
        model = nn.ParameterDict({"w": torch.zeros(6, dtype=torch.float16)})
        wrapper = NeuronZero1Optimizer if kind == "zero1" else MasterWeightsOptimizer
        optimizer = wrapper(model.parameters(), torch.optim.SGD, lr=1e-4, max_norm=math.inf)
        model["w"].grad = torch.full_like(model["w"], 4e4)
        grads.reduce_gradients(model, average_over_data=kind == "masters")
        optimizer.step()
        return model["w"].tolist()

    assert comm.threads.run(Mesh(4), rank_main) == [[pytest.approx(-4.0)] * 6] * 4


def test_the_accumulated_gradient_of_a_float64_parameter_is_float64() -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, lr=1.0, max_norm=math.inf, use_grad_acc_hook=True)
        for value in (1.0, 2.0**-40):  # beyond fp32
            (param * value).sum().backward()
        optimizer.step()
        assert param.tolist() == [-1.0 - 2.0**-40] * 2

    comm.threads.run(Mesh(2), rank_main)


def test_masters_of_experts() -> None:
    """Groups of one rank go with experts: nothing is mixed, and the norm counts each expert once."""

    def rank_main() -> tuple[float, float]:
        model = nn.ParameterDict({"dense": torch.zeros(1), "expert": torch.zeros(1)})
        model["expert"].expert_model_parallel = True
        model["dense"].grad, model["expert"].grad = torch.tensor([12.0]), torch.tensor([3.0 + comm.rank("ep")])
        optimizer = MasterWeightsOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, max_norm=math.inf)
        optimizer.step()
        return optimizer.grad_norm.item(), model["expert"].item()

    assert comm.threads.run(Mesh(2, ep=2), rank_main) == [(13.0, -3.0), (13.0, -4.0)]


@pytest.mark.parametrize("scale", [1, 2])
def test_clipping_does_not_write_the_accumulated_gradient(scale: int) -> None:
    """At dp 1 the shard's gradient is a copy: `main_grad` is what it was, for whoever reads it after the step."""

    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(4))
        options: dict[str, Any] = dict(lr=1.0, max_norm=1.0, use_grad_acc_hook=True)
        optimizer = NeuronZero1Optimizer(
            [param], torch.optim.SGD, sharding_groups=[[r] for r in range(scale)], **options
        )
        (param * 3.0).sum().backward()
        optimizer.step()
        assert param.main_grad.tolist() == [3.0] * 4
        assert param.tolist() == pytest.approx([-0.5] * 4)  # a gradient of norm 6, clipped to norm 1

    comm.threads.run(Mesh(scale), rank_main)


# --- the same to the bit ---------------------------------------------------------------------------------------------


BITS = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1)),
    "AdamW, foreach": (torch.optim.AdamW, dict(lr=0.1, foreach=True)),
}


@pytest.mark.parametrize("optimizer", BITS)
@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4), Mesh(2, cp=2), Mesh(4, pp=2)], ids=str)
def test_fp32_weights_are_those_of_plain_data_parallelism_to_the_bit(mesh: Mesh, optimizer: str) -> None:
    """Scaling after the sum changes no bit of a mean over a power of two; views of parameters change none either."""
    cls, options = BITS[optimizer]

    def rank_main() -> None:
        sharded, plain = Model(torch.float32), Model(torch.float32)
        zero1 = NeuronZero1Optimizer(sharded.parameters(), cls, grad_clipping=False, **options)
        whole = cls(plain.parameters(), **options)
        train(sharded, zero1)
        for step in range(STEPS):
            plain.set_gradients(step)
            grads.reduce_gradients(plain)
            whole.step()
        for (name, value), expected in zip(weights_of(sharded).items(), weights_of(plain).values()):
            assert torch.equal(value, expected), name

    comm.threads.run(mesh, rank_main)


def test_fused_steps_too_where_shards_are_whole_vectors() -> None:
    """torch's fused AdamW rounds what is left over of a tensor, beyond whole vectors of the CPU, in another way."""

    def rank_main() -> None:
        values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        sharded, plain = nn.Parameter(values.clone()), nn.Parameter(values.clone())
        zero1 = NeuronZero1Optimizer([sharded], torch.optim.AdamW, grad_clipping=False, lr=0.1, fused=True)
        whole = torch.optim.AdamW([plain], lr=0.1, fused=True)
        for step in range(STEPS):
            sharded.grad, plain.grad = (draw(step, comm.rank("dp"), shape=(8, 64), dtype=torch.float32) for _ in "ab")
            zero1.step()
            grads.reduce_gradients([plain])
            whole.step()
        assert torch.equal(sharded, plain)

    comm.threads.run(Mesh(4), rank_main)


MEMORY = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.each_pair
@pytest.mark.parametrize("wire", ["nccl", "gloo, small", "gloo, large"])
@pytest.mark.parametrize("rows", [64, 61])  # 61: padded, so that gradients are copied once more
@pytest.mark.parametrize("dtype", MEMORY, ids=str)
@pytest.mark.parametrize("dp", [2, 4, 8])
def test_memory_of_a_step_is_one_bucket_above_what_is_kept(dp: int, dtype: torch.dtype, rows: int, wire: str) -> None:
    """No second copy of parameters or gradients: beside the reduced gradients, what is under way.

    On gloo small gradients (64 KiB a rank) take a second bucket: they are received beside what is sent.
    """
    columns = 64 if wire != "gloo, large" else 2**16 * dp // (60 * dtype.itemsize)
    meter, count = MemoryMeter(), 24
    backend = WireBackend(meter, torch.device("cpu"))
    backend.is_gloo = wire != "nccl"
    with comm.as_rank(Mesh(dp), 0, backend), meter:
        params = [nn.Parameter(torch.ones(rows, columns, dtype=dtype)) for _ in range(count)]
        bucket = 4 * rows * columns * dtype.itemsize
        caps = dict.fromkeys(("bucket_cap_mb_all_gather", "bucket_cap_mb_reduce_scatter"), bucket / 2**20)
        optimizer = NeuronZero1Optimizer(params, torch.optim.AdamW, lr=0.1, foreach=False, **caps)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            before = meter.current
            meter.reset()
            optimizer.step()
    shards = count * math.ceil(rows / dp) * columns
    masters = 0 if all(shard.is_view for shard in optimizer.shards) else 4 * shards
    assert before == pytest.approx(2 * count * rows * columns * dtype.itemsize + masters + 8 * shards, rel=0.03)
    reduced = 4 * shards  # in the dtype of the masters
    assert meter.peak - before <= reduced + bucket * (2 if wire == "gloo, small" else 1)


def test_a_parameter_that_is_larger_than_a_bucket_is_under_way_alone() -> None:
    """Two small ones are under way together, a large one with none: what is held is a bucket, or that one."""

    def rank_main() -> None:
        params = [nn.Parameter(torch.ones(rows, 2)) for rows in (64, 64, 512, 512, 64, 64)]
        caps = dict.fromkeys(("bucket_cap_mb_all_gather", "bucket_cap_mb_reduce_scatter"), 1024 / 2**20)
        optimizer = NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1, grad_clipping=False, **caps)
        for param in params:
            param.grad = torch.ones_like(param)
        with comm.record(waits=True) as calls:
            optimizer.step()
        for verb in ("reduce_scatter", "all_gather"):
            order = "".join("w" if call.verb.startswith("wait") else "s" for call in calls if call.verb.endswith(verb))
            assert order == "ssww" + "sw" * 2 + "ssww"

    comm.threads.run(Mesh(2), rank_main)
