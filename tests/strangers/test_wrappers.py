"""DistributedDataParallel, FSDP, accelerate and Trainer around tensor-parallel models: right over dp, else refused."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.moe import ExpertMLPs, MoE, RouterTopK
from neuronx_dist.parallel_layers import parallel_state
from neuronx_dist.parallel_layers.grads import allreduce_sequence_parallel_gradients
from tests.hf.models import llama_config, meta_model, reference_model
from tests.strangers.test_training_functions import stage
from tests.strangers.toy import BATCH, HIDDEN, Net, local_batch, message_of, trained_alone, whole_weights
from tests.support.pool import processes

MESHES = [{"tp": 2}, {"tp": 2, "dp": 2}]
PART = r"\(((embed.)?weight|parameter 0) is one of 2 shards; "
REFUSAL = r"over ranks \[0, 1.*they hold different parts " + PART + ".*get_data_parallel_group"

without_torch_xla = pytest.mark.skipif(
    find_spec("torch_xla") is not None, reason="accelerate prepares for torch_xla where it is installed"
)


def sizes(mesh: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Number of processes, and the degrees that `initialize_model_parallel` takes (dp is the rest)."""
    number = 1
    for size in mesh.values():
        number *= size
    return number, {axis: size for axis, size in mesh.items() if axis != "dp"}


def on(mesh: dict[str, int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on the ranks of a mesh; returns the results by rank."""
    number, degrees = sizes(mesh)
    return processes(number).run(function, *args, mesh=degrees)


@contextmanager
def launched() -> Iterator[None]:
    """Sets what torchrun sets, from which accelerate and Trainer learn that there are several processes."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29500}
    before = {name: os.environ.get(name) for name in (*names, "MASTER_ADDR", "ACCELERATE_USE_CPU")}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def by_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def by_fully_shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def by_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    with launched():
        try:
            return Accelerator(cpu=True).prepare(model)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def by_fsdp1_flat(model: nn.Module) -> nn.Module:
    """FSDP's default: the parameters leave their modules before FSDP takes the module."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def by_distribute_module(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor import distribute_module

    return distribute_module(model, torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def by_zero_redundancy(model: nn.Module) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(**local_batch(0)).backward()
    optimizer.step()


def averaging(model: nn.Module, group: Any = None) -> Any:
    """SGD, after which torch averages the parameters."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=1, warmup_steps=0, process_group=group)
    return PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), averager)


def by_model_averaging(model: nn.Module) -> None:
    optimizer = averaging(model)
    model(**local_batch(0)).backward()
    optimizer.step()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": by_ddp,
    "fsdp1": by_fsdp1,
    "fsdp1, flat": by_fsdp1_flat,
    "fully_shard": by_fully_shard,
    "distribute_module": by_distribute_module,
    "ZeroRedundancyOptimizer": by_zero_redundancy,
    "PostLocalSGDOptimizer": by_model_averaging,
    "accelerate": by_accelerate,
}
# Parameters are replaced one by one, or a local step comes first.
IN_PLACE = ("fsdp1", "fsdp1, flat", "fully_shard", "distribute_module", "PostLocalSGDOptimizer")


class ExpertNet(nn.Module):
    """A layer of experts, of tokens that are no part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(RouterTopK(4, 2, HIDDEN), ExpertMLPs(4, 2, HIDDEN, HIDDEN, "silu", True, None))

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.moe(torch.ones(3, HIDDEN))[0].sum()


def refusal(wrapper: str, model_class: Callable[[], nn.Module] = Net) -> str:
    model = model_class()
    before = {name: param.clone() for name, param in model.named_parameters()}
    try:
        WRAPPERS[wrapper](model)
    except RuntimeError as error:
        assert wrapper in IN_PLACE or all(
            torch.equal(param, before[name]) for name, param in model.named_parameters()
        ), "the refusal came after a broadcast"
        return str(error)
    return "not refused"


@pytest.mark.process
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=[without_torch_xla] * (name == "accelerate")) for name in WRAPPERS]
)
def test_a_group_with_other_shards_is_refused(wrapper, mesh):
    for message in on(mesh, refusal, wrapper):
        assert re.search(REFUSAL, message), message


@pytest.mark.process
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "ZeroRedundancyOptimizer"])
def test_a_group_with_other_experts_is_refused(wrapper):
    for message in processes(2).run(refusal, wrapper, ExpertNet, mesh={"ep": 2}):
        assert re.search("experts of one ep rank.*rank . shares its part with ranks .* Leave the wrapper out", message)


def experts_compiled() -> tuple[torch.Tensor, torch.Tensor]:
    model = ExpertNet()
    return model().detach(), torch.compile(model, backend="eager")().detach()


@pytest.mark.process
def test_experts_are_compiled_between_their_exchanges():
    """Runs on processes, whose messages are methods of process groups that dynamo does not trace."""
    for eager, compiled in processes(2).run(experts_compiled, mesh={"ep": 2}):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


CLIPPED = ("ddp", "fully_shard")  # by this package's norm


def over_data(wrapper: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after SGD of a model that is wrapped over the data-parallel ranks."""
    group = parallel_state.get_data_parallel_group()
    sequence_parallel = "sequence" in wrapper
    model: nn.Module = Net(sequence_parallel=sequence_parallel)
    if "ddp" in wrapper:
        model = DistributedDataParallel(model, process_group=group)
    elif "fsdp1" in wrapper:
        model = FullyShardedDataParallel(
            model, process_group=group, device_id=torch.device("cpu"), use_orig_params="flat" not in wrapper
        )
    elif wrapper == "fully_shard":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = averaging(model, group) if wrapper == "averaging" else torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        loss = model(**local_batch(step))
        loss.backward()
        if sequence_parallel:
            allreduce_sequence_parallel_gradients(model)
        if wrapper in CLIPPED:
            nxd.clip_grad_norm(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(comm.all_reduce(loss.detach(), "dp").item() / comm.size("dp"))
    if "ddp" in wrapper or wrapper == "averaging":
        return losses, whole_weights(model)
    return losses, {}


@pytest.mark.process
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize(
    "wrapper", ["ddp", "ddp, sequence parallel", "fsdp1", "fsdp1, flat", "fully_shard", "averaging"]
)
def test_over_the_data_it_is_one_process(wrapper, mesh):
    """Losses of the third step show the weights after two."""
    losses, weights = trained_alone(max_norm=0.3 if wrapper in CLIPPED else math.inf)
    for local_losses, local_weights in on(mesh, over_data, wrapper):
        assert local_losses == pytest.approx(losses, rel=1e-12)
        for name, weight in local_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-10, atol=1e-12)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "neuronx_dist": lambda model: nxd.clip_grad_norm(model.parameters(), 0.1),
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "FSDP": lambda model: model.clip_grad_norm_(0.1),
}


def clipped_flat(clip: str, use_orig_params: bool) -> str:
    group = parallel_state.get_data_parallel_group()
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(Net(torch.float32), process_group=group, **options)
    model(**local_batch(0)).backward()
    return message_of(lambda: CLIPS[clip](model))


@pytest.mark.process
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["parameters", "flat"])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_norm_of_flat_pieces_is_refused(clip, use_orig_params):
    for message in on({"tp": 2, "dp": 2}, clipped_flat, clip, use_orig_params):
        assert "a rank has pieces of flat gradients" in message and "Use fully_shard" in message


@pytest.mark.process
def test_fsdps_norm_over_the_data_is_its_own():
    assert on({"dp": 2}, clipped_flat, "FSDP", True) == ["not refused"] * 2


def pipeline_refusal() -> str:
    layers = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
    model = nxd.NxDPPModel(
        layers, transformer_layer_cls=nn.Linear, num_microbatches=2, auto_partition=True, input_names=["input"]
    )
    model.run_eval(input=torch.randn(BATCH, HIDDEN))
    with pytest.raises(ValueError) as refused:
        DistributedDataParallel(model)
    return str(refused.value)


@pytest.mark.process
def test_a_pipeline_is_refused_by_torch():
    """The layers of other stages are on the meta device."""
    for message in on({"pp": 2}, pipeline_refusal):
        assert "module parameters locate in {" in message and "'meta'" in message


def averaging_refusal() -> str:
    optimizer = averaging(stage())
    return message_of(optimizer.step)


@pytest.mark.process
def test_averages_of_stages_are_refused():
    for message in on({"pp": 2}, averaging_refusal):
        assert "torch's model averaging over ranks [0, 1]" in message
        assert "(parameter 0 is of one of 2 pipeline stages;" in message


def trained_by_trainer(folder: str) -> tuple[str, list[float]]:
    """The refusal, or losses of three steps with SGD by Hugging Face's Trainer on a swapped model."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    model = reference_model(llama_config())
    nxd.hf.swap(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(12 * 8).reshape(12, 8)]
    with launched() if torch.distributed.get_world_size() > 1 else nullcontext():
        try:
            size = 4 // torch.distributed.get_world_size()
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=size,
                max_steps=3,
                optim="sgd",
                learning_rate=0.5,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                train_sampling_strategy="sequential",
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows)
            trainer.train()
        except RuntimeError as error:
            return str(error), []
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return "", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@without_torch_xla
@pytest.mark.process
def test_trainer_over_the_data_is_one_process(tmp_path):
    ((refusal, alone),) = on({"dp": 1}, trained_by_trainer, str(tmp_path))
    assert not refusal and len(alone) == 3
    both = on({"dp": 2}, trained_by_trainer, str(tmp_path))
    assert [refusal for refusal, _ in both] == ["", ""]
    assert both[0][1] == pytest.approx(alone, abs=1e-5) and len({*alone}) == 3


@without_torch_xla
@pytest.mark.process
def test_trainer_refuses_tensor_parallel_models(tmp_path):
    for refusal, _ in on({"tp": 2}, trained_by_trainer, str(tmp_path)):
        assert "DistributedDataParallel over ranks [0, 1]" in refusal and "Hugging Face's Trainer" in refusal


@pytest.mark.parametrize("on_meta", [False, True])
def test_each_layer_has_its_weights_where_accelerate_offloads_them(on_meta):
    """The layers with which one shares the gradient of its input have weights on meta then: it computes by itself."""
    from accelerate import cpu_offload

    whole = reference_model(llama_config())
    ids = torch.arange(16).view(2, 8)

    def rank():
        model = meta_model(llama_config()) if on_meta else reference_model(llama_config())
        nxd.hf.load_pretrained(nxd.hf.swap(model), whole.state_dict())
        cpu_offload(model, execution_device="cpu")
        return model(input_ids=ids).logits, next(model.parameters()).is_meta

    for logits, is_offloaded in comm.threads.run(Mesh(2, tp=2), rank):
        torch.testing.assert_close(logits, whole(input_ids=ids).logits, rtol=1e-10, atol=1e-12)
        assert is_offloaded


def saved_by_dcp(folder: str, how: str) -> str:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = Net()
    try:
        if how == "save":
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        elif how == "async_save":
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder).result()
        elif how == "the module":
            dcp.save({"model": model}, checkpoint_id=folder)
        else:
            dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    except RuntimeError as error:
        return str(error)
    other = Net()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    return "right" if all(map(torch.equal, model.parameters(), other.parameters())) else "wrong"


@pytest.mark.process
@pytest.mark.parametrize("how", ["save", "async_save", "the module", "get_model_state_dict"])
def test_shards_are_refused_by_torchs_checkpoints(how, tmp_path):
    for message in on({"tp": 2}, saved_by_dcp, str(tmp_path), how):
        assert "embed.weight once for all ranks" in message and "neuronx_dist.save_checkpoint" in message
    assert not [*tmp_path.iterdir()]


@pytest.mark.process
def test_whole_parameters_are_saved_by_torchs_checkpoints(tmp_path):
    assert on({"dp": 2}, saved_by_dcp, str(tmp_path), "save") == ["right", "right"]
