"""Declarations of users about tensors: contradictions are errors, and a single type is meant for all axes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.declared import input_type
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.axes import atoms_of

MESH = Mesh(8, tp=2, cp=2)  # dp 2 x cp 2 x tp 2
SPEC = spmd.ShardSpec("tp", 0, 1, 2, (8, 4))


@pytest.mark.parametrize(
    "types, axis",
    [
        ({"dp": R, ("dp", "cp"): V}, "dp"),
        ({("dp", "cp"): V, "cp": S(0)}, "cp"),
        ({"world": R, "tp": S(1)}, "tp"),
        ({"tp": S(0), ("cp", "tp"): S(1)}, "tp"),
    ],
)
def test_entries_that_contradict_each_other_are_an_error_that_names_both(types, axis):
    first, second = types
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode(), pytest.raises(SpmdTypeError) as error:
        spmd.assert_type(torch.ones(4, 4), types)
    assert error.value.axis == axis and repr(first) in str(error.value) and repr(second) in str(error.value)
    with comm.as_rank(MESH, 0), pytest.raises(SpmdTypeError, match="both are about"):
        spmd.assert_type(torch.ones(4, 4), types)  # also without a check
    with pytest.raises(SpmdTypeError, match="both are about"):
        input_type(torch.ones(4, 4), MESH, types)


def test_entries_that_agree_are_fine():
    with comm.as_rank(MESH, 0):
        x = spmd.assert_type(torch.ones(4, 4), {"dp": S(1), ("dp", "cp"): S(-1), "tp": I})
        assert spmd.get_local_type(x) == {"dp": S(1), "cp": S(1), "tp": I}
    assert input_type(torch.ones(4, 4), MESH, {"tp": S(-1), ("tp",): S(1)}).get("tp") == S(1)


def test_the_types_of_inputs_that_contradict_each_other_are_a_problem_of_the_report():
    def step(model, optimizer, inputs):
        return model(inputs).sum()

    report = spmd.check(lambda: nn.Linear(4, 4), torch.ones(4, 4), MESH, step=step, in_types={"dp": R, ("dp", "cp"): V})
    assert "'dp' says R and ('dp', 'cp') says V" in str(report)


@pytest.mark.parametrize("kind", [R, I, V, P, S(1)])
def test_one_type_alone_is_that_on_all_axes(kind):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        spmd.assert_type(x, kind)
        assert spmd.get_local_type(x) == {"dp": kind, "cp": kind, "tp": kind}
        spmd.assert_type(y, R)
        with pytest.raises(SpmdTypeError, match="not P"):
            spmd.assert_type(y, P)
    with pytest.raises(ValueError, match="there is no mesh"):
        spmd.assert_type(torch.ones(4), R)


def test_a_part_of_a_shard_is_told_as_a_shard():
    x = torch.ones(4, 4)
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        spmd.assert_type(x, {"dp": S(0), "cp": R, "tp": R})
        assert spmd.get_local_type(x.chunk(2)[0]) == {"dp": S(0), "cp": R, "tp": R}


@pytest.mark.parametrize("dim", [2, -3, 7])
def test_a_dim_that_a_tensor_does_not_have_is_a_type_error(dim):
    def x(kind):
        with spmd.no_typecheck():
            return spmd.assert_type(torch.ones(2, 4), {"tp": kind})

    calls = {
        "assert_type": lambda: spmd.assert_type(x(V), {"tp": S(dim)}),
        "all_gather": lambda: spmd.all_gather(x(S(0)), "tp", src=S(dim), dst=R),
        "reduce_scatter": lambda: spmd.reduce_scatter(x(P), "tp", dst=S(dim)),
        "all_to_all": lambda: spmd.all_to_all(x(S(0)), "tp", src=S(0), dst=S(dim)),
        "convert": lambda: spmd.convert(x(R), "tp", src=R, dst=S(dim)),
        "in_types": lambda: input_type(torch.ones(2, 4), MESH, {"tp": S(dim)}),
    }
    for checked in (nullcontext, spmd.SpmdTypeMode):
        for name, call in calls.items():
            words = f"dim {dim} is out of range"
            with comm.as_rank(MESH, 0), checked(), pytest.raises(SpmdTypeError, match=words) as error:
                call()
            assert error.value.rule == "dim", name


@pytest.mark.parametrize("checked", [False, True])
def test_the_dim_of_a_gather_or_scatter_must_be_that_of_its_shard(checked):
    def main():
        x, p = torch.ones(2, 4), torch.ones(2, 4)
        spmd.assert_type(x, {"tp": S(1)})
        spmd.assert_type(p, {"tp": P})
        with spmd.SpmdTypeMode() if checked else nullcontext():
            with pytest.raises(SpmdTypeError, match=r"S\(1\) concatenates dim 1, and gather_dim names dim 0"):
                spmd.all_gather(x, "tp", src=S(1), dst=R, gather_dim=0)
            with pytest.raises(ValueError, match=r"S\(-1\) splits dim 1, and scatter_dim names dim 0"):
                spmd.reduce_scatter(p, "tp", dst=S(-1), scatter_dim=0)
            gathered = spmd.all_gather(x, "tp", src=S(1), dst=R, gather_dim=-1)
            scattered = spmd.reduce_scatter(p, "tp", dst=S(1), scatter_dim=-1)
        return [list(gathered.shape), list(scattered.shape)]

    assert threads.run(Mesh(2, tp=2), main) == [[[2, 8], [2, 2]]] * 2


def test_a_negative_dim_to_stack_on_counts_from_the_end():
    x, last = torch.ones(2, 4), torch.ones(2, 4)
    with comm.as_rank(Mesh(4, tp=2), 0), spmd.SpmdTypeMode():
        spmd.assert_type(x, {"dp": S(0), "tp": V})
        stacked = spmd.all_gather(x, "tp", src=V, dst=R, gather_dim=-1)
        assert spmd.get_local_type(stacked) == {"dp": S(0), "tp": R}
        spmd.assert_type(last, {"dp": S(1), "tp": V})
        assert spmd.get_local_type(spmd.all_gather(last, "tp", src=V, dst=R, gather_dim=-2)) == {"dp": S(2), "tp": R}


# --- local and forget


def parameter():
    module = nn.Linear(4, 4, bias=False)
    spmd.set_spec(module, "weight", SPEC)
    return module.weight


@pytest.mark.parametrize("give_up", [spmd.local, lambda x: spmd.forget(x, "tp")], ids=["local", "forget"])
def test_what_is_no_longer_followed_is_listed_with_its_line_and_works_on_parameters_that_nothing_touched(give_up):
    param = parameter()
    with comm.as_rank(Mesh(2, tp=2), 0), spmd.SpmdTypeMode() as mode:
        x = give_up(param)
        assert spmd.get_local_type(x) == {"tp": V}
        assert spmd.get_local_type(param) == {"tp": S(0)}
        (text, line), times = next(iter(mode.trusted.items()))
    assert "sharding over tp is not followed" in text and __file__ in line and times == 1


def test_local_of_what_is_not_sharded_says_nothing():
    x = torch.ones(4)
    with comm.as_rank(Mesh(2, tp=2), 0), spmd.SpmdTypeMode() as mode:
        spmd.assert_type(x, {"tp": R})
        assert spmd.local(x) is x and not mode.trusted
    plain = torch.ones(2)
    assert spmd.local(plain) is plain and spmd.forget(plain, "tp") is plain


def test_an_atom_that_is_no_axis_is_named_by_itself():
    """Experts over more ranks than cp has: ep is cp and a piece of dp, which no axis names."""
    mesh = Mesh(16, tp=2, ep=4, cp=2)
    assert atoms_of("ep", mesh) == ("ep/cp", "cp")
    assert atoms_of("ep/cp", mesh) == ("ep/cp",) == atoms_of(("ep/cp", "ep/cp"), mesh)
    with pytest.raises(ValueError, match="ep/tp"):
        atoms_of("ep/tp", mesh)


def test_a_communicator_stands_for_its_axes():
    mesh = Mesh(4, tp=2)
    with comm.as_rank(mesh, 0):
        assert atoms_of(comm.communicator("tp"), mesh) == ("tp",)
        assert atoms_of(comm.communicator("world"), mesh) == ("dp", "tp")
        assert atoms_of(comm.communicator("cp"), mesh) == ()


def test_a_tensor_without_a_type_is_told_how_to_get_one():
    with pytest.raises(SpmdTypeError) as error:
        spmd.get_local_type(torch.ones(2, 3))
    assert str(error.value) == (
        "a tensor of shape [2, 3] has no type: nobody declared one, and it was made outside of a type check\n"
        '  repair: assert_type(x, {"tp": R}) declares it'
    )
    assert error.value.rule == "no_type" and not spmd.has_local_type(torch.ones(2))
