"""Stand-ins for torch_xla: scripts see them, installed packages do not; the device and the backend "xla"."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.compat.torch_xla import xla_model
from neuronx_dist.mesh import Mesh
from tests.support import forked

pytestmark = pytest.mark.process

ALONE = """
import neuronx_dist.compat
import importlib.util
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
import torch_xla.utils.serialization as xser
from torch_neuronx.utils import get_platform_target
from torch_xla.utils.checkpoint import checkpoint

# Nobody else sees them.
assert importlib.util.find_spec("torch_xla") is None and "torch_xla" not in __import__("sys").modules
import accelerate.utils, transformers.utils
assert not accelerate.utils.is_torch_xla_available() and not transformers.utils.is_torch_xla_available()

# The device "xla" is this rank's device.
device = xm.xla_device()
assert device.type == "cpu" and xm.xla_device_hw(device) == "CPU" and xr.device_type() == "CPU"
made = [torch.ones(2, 3, device="xla"), torch.zeros(2, device="xla"), torch.arange(3, device="xla"),
        torch.full((2,), 1.5, device="xla"), torch.randn(2, device="xla"), torch.empty(1, device=torch.device("xla")),
        torch.tensor([1.0, 2.0], device="xla"), torch.as_tensor(3, device="xla:0"),
        torch.asarray([1], device=torch.device("xla"))]
assert all(x.device == device for x in made)
x = torch.ones(2, dtype=torch.float64, requires_grad=True)
for y in (x.to("xla"), x.to(device="xla"), x.to("xla:0", torch.float32), x.to(torch.device("xla", 0))):
    assert y.device == device
x.to("xla", torch.float32).sum().backward()
assert x.grad.dtype == torch.float64
module = torch.nn.Linear(2, 2).to("xla")
assert module.to(device="xla") is module and module.weight.device == device
double = torch.compile(lambda t: t.to(torch.float64) * 2, backend="eager", fullgraph=True)
assert double(torch.ones(1)).dtype == torch.float64

with torch.autocast("xla", dtype=torch.bfloat16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
state = xm.get_rng_state()
drawn = torch.rand(2)
xm.set_rng_state(state)
assert torch.equal(drawn, torch.rand(2))

# One rank.
assert xm.all_gather(torch.tensor(1.0)).tolist() == [1.0]
assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal()) == (1, 0, 0)
assert (xm.get_ordinal(), xm.xrt_world_size()) == (0, 1)
assert xm.is_master_ordinal() and xm.rendezvous("alone", b"x") == [b"x"]
called = []
xm.add_step_closure(lambda *args: called.append(args), args=(1, 2), run_async=True)
xm.mark_step(); torch_xla.sync(); xm.wait_device_ops()
assert called == [(1, 2)]
batches = list(pl.MpDeviceLoader([{"x": torch.ones(1), "n": 3}], device))
assert batches[0]["x"].device == device and batches[0]["n"] == 3
loader = pl.MpDeviceLoader(torch.utils.data.DataLoader(range(5), batch_size=2), device)
assert len(loader) == 3 and loader.batch_size == 2
a = torch.ones(2, requires_grad=True)
checkpoint(torch.sin, a, use_reentrant=True).sum().backward()
assert torch.equal(a.grad, torch.ones(2).cos())
xser.save({"a": torch.ones(2)}, "file.pt")
assert torch.equal(xser.load("file.pt")["a"], torch.ones(2))
assert xm.mesh_reduce("tag", 3, sum) == 3 and isinstance(met.metrics_report(), str)

# Names of torch_xla 2.9 that training scripts call.
import importlib
assert importlib.import_module("torch_xla.runtime") is xr and importlib.util.find_spec("torch_xla") is None
import torch_xla.debug.profiler as xp
from torch_xla.amp.syncfree import AdamW
assert AdamW is torch.optim.AdamW and torch_xla.devices() == [device] and not xr.is_spmd()
assert torch_xla.compile(torch.sin, full_graph=True) is torch.sin
with torch_xla.compile(), torch_xla.step(), xp.StepTrace("train", step_num=1), xm.fork_rng():
    torch.rand(1)
state = xm.get_rng_state()
with xm.fork_rng():
    torch.rand(1)
assert torch.equal(state, xm.get_rng_state())
weight = torch.ones(1, requires_grad=True)
weight.sum().backward()
gradients = xm._fetch_gradients(torch.optim.SGD([weight], lr=1.0))
xm.all_reduce_bucketized_gradients(gradients, 0.5, None, True)
assert weight.grad.tolist() == [0.5] and xm.xla_device_kind() == "cpu" and xm.xla_rendezvous(b"x") == [b"x"]
tracker = xm.RateTracker()
tracker.add(8)
assert tracker.rate() > 0 and tracker.global_rate() > 0

for text, word in (("import torch_xla.nothing", "torch_xla.core.xla_model"),
                   ("xm.send(torch.ones(1), 0)", "collective_permute"), ("xr.get_master_ip()", "MASTER_ADDR"),
                   ("from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as F; F(1)", "fully_shard"),
                   ("import neuronxcc.nki.language as nl; nl.load(1)", "Triton"), ("xr.use_spmd()", "parallelize"),
                   ("xm.all_reduce(xm.REDUCE_MUL, torch.ones(1))", "possible: sum")):
    try:
        exec(text)
    except (ImportError, NotImplementedError) as error:
        assert word in str(error), error
    else:
        raise AssertionError(text)
print("ok")
"""


def test_a_script_on_one_rank(tmp_path) -> None:  # type: ignore[no-untyped-def]
    result = forked.run(["-c", ALONE], cwd=tmp_path)
    assert result.outputs == ["ok\n"], result.errors[0][-3000:]


SPAWNING = """
import multiprocessing
import neuronx_distributed
import torch
import torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index, xm.get_ordinal()])


def spawn(results, depth):
    results.put(__name__)
    if depth:
        process = multiprocessing.get_context("spawn").Process(target=spawn, args=(results, depth - 1))
        process.start()
        process.join()


if __name__ == "__main__":
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader])
    results = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(results, 2)
    print([results.get() for _ in range(3)])
"""


@pytest.mark.slow
def test_workers_that_are_spawned_run_the_script_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    result = forked.run(["-m", "neuronx_dist", "compat", str(script)])
    rows, names = "[[[0, 0], [1, 0]], [[2, 0], [3, 0]]]", "['__main__', '__mp_main__', '__mp_main__']"
    assert result.outputs == [f"{rows}\n{names}\n"], result.errors[0][-3000:]


def test_a_missing_process_group_is_asked_for_by_the_name_that_scripts_use() -> None:
    code = "import neuronx_dist.compat; import neuronx_distributed as nxd; nxd.initialize_model_parallel()"
    result = forked.run(["-c", code])
    assert "init_process_group(backend='xla' or 'gloo' or 'nccl')" in result.errors[0]


def compare_collectives() -> None:
    """Compares the results of `torch_xla.core.xla_model`'s functions with collectives with what they must be."""

    def main() -> None:
        rank = xla_model.get_ordinal()
        x = torch.arange(4.0) + rank
        assert xla_model.all_to_all(x, 0, 0, 2).tolist() == ([0, 1, 1, 2] if rank == 0 else [2, 3, 3, 4])
        module = torch.nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.fill_(rank + 1.0)
        xla_model.broadcast_master_param(module)
        assert bool((module.weight == 1).all())
        assert xla_model.collective_permute(x, [[0, 1]]).tolist() == ([0, 0, 0, 0] if rank == 0 else [0, 1, 2, 3])
        y = x.clone()
        xla_model.collective_broadcast([y], 1)
        assert y.tolist() == [1, 2, 3, 4]
        assert xla_model.do_on_ordinals(lambda z: z.tolist(), (x,), {1}) == (None if rank == 0 else [1, 2, 3, 4])
        with pytest.raises(ValueError, match="rank 1 is not in this rank's group .0.") if rank == 0 else nullcontext():
            xla_model.collective_broadcast([y], 1, [[0], [1]])
        assert xla_model.mesh_reduce("sum", rank + 1, sum) == 3
        assert xla_model.rendezvous("here", str(rank).encode()) == [b"0", b"1"]

    comm.threads.run(Mesh(2), main)


def test_collectives_on_two_ranks() -> None:
    compare_collectives()


RANKS = """
import neuronx_dist.compat
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from neuronx_distributed.parallel_layers import parallel_state

dist.init_process_group("xla")
assert dist.get_backend() == "gloo"
rank, size = xr.global_ordinal(), xr.world_size()
assert (rank, size) == (dist.get_rank(), 2) and xr.local_ordinal() == rank and xr.local_process_count() == 2


def check(when):
    x = torch.arange(4.0) + rank
    total = xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5)
    assert torch.equal(total, torch.arange(4.0) + 0.5), (when, total)
    assert torch.equal(x, torch.arange(4.0) + rank)
    assert xm.all_reduce(xm.REDUCE_SUM, [x], groups=[[0], [1]]) is None and torch.equal(x, torch.arange(4.0) + rank)
    y = x.clone()
    xm.all_reduce(xm.REDUCE_MAX, [y])
    assert torch.equal(y, torch.arange(4.0) + 1)
    assert xm.all_gather(x[:1], dim=0, groups=[[0, 1]]).tolist() == [0.0, 1.0]
    part = xm.reduce_scatter(xm.REDUCE_SUM, x, 1.0, 0, 2, groups=[[0, 1]])
    assert torch.equal(part, (2 * torch.arange(4.0) + 1)[2 * rank : 2 * rank + 2])
    assert xm.all_to_all(x, 0, 0, 2).tolist() == ([0, 1, 1, 2] if rank == 0 else [2, 3, 3, 4])
    assert xm.mesh_reduce("sum", rank + 1, sum) == 3
    assert xm.rendezvous(when, str(rank).encode()) == [b"0", b"1"]


check("without a mesh")
assert not parallel_state.model_parallel_is_initialized()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
check("with a mesh")
groups = parallel_state.get_tensor_model_parallel_group(as_list=True)
assert xm.all_reduce(xm.REDUCE_SUM, torch.ones(1), groups=groups) == 2
parallel_state.destroy_model_parallel()
parallel_state.initialize_model_parallel()
weight = torch.nn.Parameter(torch.ones(1) * rank)
xm.broadcast_master_param(torch.nn.ParameterList([weight]))
weight.grad = torch.ones(1) * (rank + 1)
xm.optimizer_step(torch.optim.SGD([weight], lr=1.0))
assert float(weight) == -1.5, weight
xm.save({"rank": rank}, "saved.pt")
assert torch.load("saved.pt") == {"rank": 0}
print("ok")
if rank == 1:
    xm.rendezvous("here")
else:
    try:
        xm.rendezvous("there")
    except Exception as error:
        print(error)
"""


def test_a_script_on_two_ranks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    result = forked.run(["-c", RANKS], ranks=2, cwd=tmp_path)
    assert [output.partition("\n")[0] for output in result.outputs] == ["ok", "ok"], result.errors[0][-3000:]
    assert "the ranks are at different rendezvous: ['here', 'there']" in result.outputs[0]


SPAWN = """
import neuronx_dist.compat
import sys
import torch
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.core.xla_model as xm


@torch.jit.script
def add(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(1.0) + torch.as_tensor(2.0)


def main(index, word):
    assert add(torch.ones(1)).item() == 4
    values = word, index, xm.get_ordinal(), xm.xrt_world_size(), xm.mesh_reduce("n", index, sum)
    sys.stdout.write(" ".join(map(str, values)) + "\\n")  # in one call: lines of two processes do not mix
    sys.stdout.flush()


if __name__ == "__main__":
    xmp.spawn(main, args=("hello",), nprocs=int(sys.argv[1]))
"""


@pytest.mark.parametrize("by", ["import", pytest.param("command", marks=pytest.mark.full)])
def test_spawn_starts_a_job(by, tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "spawned.py"
    script.write_text(SPAWN if by == "import" else SPAWN.replace("import neuronx_dist.compat\n", ""))
    command = [] if by == "import" else ["-m", "neuronx_dist", "compat"]
    lines = sorted(forked.run([*command, str(script), "2"]).outputs[0].splitlines())
    assert lines == ["hello 0 0 2 1", "hello 1 1 2 1"]


def test_a_missing_script_is_reported() -> None:
    result = forked.run(["-m", "neuronx_dist", "compat", "nothing.py"])
    assert result.codes == [2]
    assert "the script nothing.py does not exist" in result.errors[0]


CHECKED = """
import neuronx_dist.compat
import torch
from neuronx_dist import spmd

x = spmd.assert_type(torch.ones(4), {"tp": spmd.P})
with spmd.SpmdTypeMode(mesh={"tp": 2}):
    assert spmd.get_local_type(x.to(torch.float64)) == {"tp": spmd.P}
assert x.to("xla").device.type == "cpu" and torch.nn.Linear(1, 1).to("xla", torch.float64).weight.dtype == torch.float64
"""


def test_rules_of_casts_hold_after_the_import() -> None:
    """Torch passes the replaced `torch.Tensor.to` to modes."""
    result = forked.run(["-c", CHECKED])
    assert result.codes == [0], result.errors


CUT = """
import neuronx_dist.compat
import torch
from torch import nn
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.cut.splitting import split
from neuronx_dist.program.recorder import record

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, mask):
        number = torch.tensor([1.0, 2.0])
        mask = mask.to(torch.float32) * torch.as_tensor(number)
        return self.last(self.first(x) * mask) * mask

inputs = {"x": torch.ones(1, 2), "mask": torch.ones(1, 2, dtype=torch.bool)}
with comm.as_rank(Mesh(1), 0):
    first, last = split(record(Model(), inputs), ["first"])
assert [node.target for node in first.sent] == ["first"], first.sent
assert any(node.target == torch.Tensor.to for node in last.nodes)
"""


def test_a_cast_of_a_mask_is_repeated_on_stages_and_not_sent_after_the_import() -> None:
    result = forked.run(["-c", CUT])
    assert result.codes == [0], result.errors
