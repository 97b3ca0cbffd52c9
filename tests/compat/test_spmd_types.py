"""Programs that import `spmd_types` run on this package: its quick start and the modules of its guide, in our words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.paths import ROOT

HEAD = """
import neuronx_dist.compat.spmd_types
import torch, torch.distributed as dist, torch.nn.functional as F
import spmd_types as spmd
import spmd_types.checker
from spmd_types import S
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group(backend="fake", rank=0, world_size=8, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
tp_group = mesh.get_group("tp")

def tensor(*shape, **types):
    return spmd.assert_type(torch.randn(shape, requires_grad=True), {"dp": spmd.R, **types})

def refused(call, *args):
    try:
        call(*args)
    except spmd.SpmdTypeError as error:
        return str(error)
    raise AssertionError("accepted")

assert spmd.__name__ == "neuronx_dist.spmd"
"""

QUICK_START = """
dp_group = mesh.get_group("dp")
with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
    summands = spmd.assert_type(torch.randn(4), {dp_group: spmd.R, tp_group: spmd.P})
    assert "P" in refused(torch.mul, summands, summands)
    total = spmd.all_reduce(summands, tp_group, src=spmd.P, dst=spmd.R)
    product = spmd.assert_type(total * total, {dp_group: spmd.R, tp_group: spmd.R})
    assert "R" in refused(lambda: spmd.all_reduce(product, tp_group, dst=spmd.R))
"""

MODULES = """
def norm(x, weight):
    return F.rms_norm(spmd.assert_type(x, {"tp": spmd.I}), (8,), spmd.assert_type(weight, {"tp": spmd.I}))

def column(x, weight):
    x = spmd.invariant_to_replicate(x, tp_group)
    return spmd.assert_type(F.linear(spmd.assert_type(x, {"tp": spmd.R}), weight), {"tp": spmd.V})

def row(x, weight):
    summands = spmd.assert_type(F.linear(x, weight), {"tp": spmd.P})
    return spmd.all_reduce(summands, tp_group, dst=spmd.I)

with spmd.set_current_mesh(mesh), typecheck(local=True):
    x, weight = tensor(4, 8, tp=spmd.I), tensor(8, tp=spmd.I)
    up, down = tensor(16, 8, tp=spmd.V), tensor(8, 16, tp=spmd.V)
    y = row(F.gelu(column(norm(x, weight), up)), down)
    spmd.assert_type(x + y, {"tp": spmd.I})
    assert "I" in refused(F.linear, norm(x, weight), up)  # without f

def column_of_sequence(x, weight):
    return F.linear(spmd.all_gather(x, tp_group, src=S(0), dst=spmd.R), weight)

def row_to_sequence(x, weight):
    return spmd.reduce_scatter(spmd.assert_type(F.linear(x, weight), {"tp": spmd.P}), tp_group, dst=S(0))

with spmd.set_current_mesh(mesh), typecheck(local=True):
    x = tensor(4, 8, tp=spmd.V)
    for types in (spmd.R, spmd.I):  # who sums the gradient of the norm's weight: a wrapper, or the module
        weight = tensor(8, tp=types)
        if types is spmd.I:
            assert "I" in refused(F.rms_norm, x, (8,), weight)
            weight = spmd.invariant_to_replicate(weight, tp_group)
        normed = spmd.assert_type(F.rms_norm(x, (8,), weight), {"tp": spmd.V})
    y = row_to_sequence(F.gelu(column_of_sequence(normed, up)), down)
    spmd.assert_type(x + y, {"tp": spmd.V})
"""

GLOBAL = """
from spmd_types import PartitionSpec
with spmd.set_current_mesh(mesh), typecheck(local=False):
    x = spmd.assert_type(torch.randn(4, 6, 8), {}, PartitionSpec("dp", None, "tp"))
    assert spmd.get_partition_spec(x) == PartitionSpec("dp", None, "tp")
    weight = spmd.assert_type(torch.randn(8, 8), {"dp": spmd.R}, PartitionSpec(None, "tp"))
    y = F.linear(x, weight)
    assert spmd.get_axis_local_type(y, "tp") is spmd.P, "a contraction"
    assert "P" in refused(F.gelu, y)
    spmd.assert_type(spmd.reduce_scatter(y, tp_group, dst=S(2)), {}, PartitionSpec("dp", None, "tp"))
"""

EXPERTS = """
# Megatron's dispatch: counts are gathered, rows are routed, gathered over expert tensor parallelism, and back.
experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("edp", "ep", "etp"))
ep, etp = experts.get_group("ep"), experts.get_group("etp")
with spmd.set_current_mesh(experts), typecheck(local=True):
    rows = spmd.assert_type(torch.randn(5, 8), {"edp": spmd.V, "ep": spmd.V, "etp": spmd.V})
    w = spmd.assert_type(torch.randn(8, 8), {"edp": spmd.R, "ep": spmd.V, "etp": spmd.V})
    sent, received, pieces = [2, 3], [2, 1], [3, 4]
    routed = spmd.all_to_all(rows, ep, src=S(0), dst=S(0), input_split_sizes=sent, output_split_sizes=received)
    whole = spmd.all_gather(routed, etp, src=S(0), dst=spmd.R, split_sizes=pieces)
    assert whole.shape == (7, 8)
    summands = spmd.assert_type(whole @ w, {"etp": spmd.P})
    own = spmd.reduce_scatter(summands, etp, dst=S(0), split_sizes=pieces)
    back = spmd.all_to_all(own, ep, src=S(0), dst=S(0), input_split_sizes=received, output_split_sizes=sent)
    spmd.assert_type(back, {"edp": spmd.V, "ep": spmd.V, "etp": spmd.V})
    assert back.shape == rows.shape
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(QUICK_START, id="quick"),
        pytest.param(MODULES, id="modules", marks=pytest.mark.full),
        pytest.param(GLOBAL, id="global", marks=pytest.mark.full),
        pytest.param(EXPERTS, id="moe"),
    ],
)
@pytest.mark.slow
def test_a_program_written_for_spmd_types(program):
    code = HEAD + program + "\ndist.destroy_process_group()\nprint('ran')\n"
    result = forked.run(["-c", code])
    assert result.outputs == ["ran\n"], result.errors[0][-3000:]


def test_the_checker_by_its_name_in_spmd_replaces_nothing_of_torch():
    code = "import sys\nfrom neuronx_dist.spmd import checker\nprint('neuronx_dist.compat' in sys.modules)"
    assert forked.run(["-c", code]).outputs == ["False\n"]


def test_two_packages_under_one_name_are_refused():
    pytest.importorskip("spmd_types")
    code = "import spmd_types\nimport neuronx_dist.compat.spmd_types"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert "spmd_types is imported already" in result.stderr
