"""Every collective of a torch ProcessGroup is guarded while types are checked: it takes no typed tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.raw_collectives import refuse
from neuronx_dist.mesh import Mesh

MOVES_NO_TENSORS = """abort barrier bound_device_id boxed get_backend get_group_store get_reconfigure_handle group_desc
group_name merge_remote_group monitored_barrier name rank reconfigure register_abort_hook register_post_hook
register_pre_hook set_timeout shutdown size split_group supports_abort_hooks supports_completion_hooks
supports_reconfigure supports_window unbox unregister_abort_hook unregister_post_hook unregister_pre_hook
use_pg_for_symm_mem_rendezvous""".split()
# The verb that is advised in place of a method's, where its name does not say it.
VERBS = {"reduce": "all_reduce", "scatter": "broadcast", "recv_anysource": "recv", "new_window": "send"}
VERBS |= dict.fromkeys(("gather", "gather_single", "gather_into_tensor"), "all_gather")


def collectives() -> dict[str, object]:
    names = [name for name in dir(dist.ProcessGroup) if name[0] != "_" and name[0].islower()]
    names = [name for name in names if name not in MOVES_NO_TENSORS]
    return {name: getattr(dist.ProcessGroup, name) for name in (*names, "_allgather_base", "_reduce_scatter_base")}


def test_every_method_that_moves_tensors_is_guarded_and_put_back():
    before = collectives()
    with comm.as_rank(Mesh(2, tp=2), 0), spmd.SpmdTypeMode():
        inside = collectives()
        x = spmd.assert_type(torch.ones(2), {"tp": spmd.R})
        for name, method in inside.items():
            assert method is not before[name], name
            with pytest.raises(spmd.SpmdTypeError, match="the checker does not see") as caught:
                method(None, x)
            plain = name.strip("_").replace("allreduce", "all_reduce").replace("allgather", "all_gather")
            plain = plain.replace("alltoall", "all_to_all")
            verb = VERBS.get(name) or next(verb for verb in ADVISED if plain.startswith(verb))
            assert any(repair.startswith(f"comm.{verb}(") for repair in caught.value.repairs), (
                name,
                caught.value.repairs,
            )
    assert collectives() == before


ADVISED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")


@pytest.mark.parametrize("verb", ADVISED)
@pytest.mark.parametrize("form", ["{}", "i{}", "{}_tensor", "_{}_"])
def test_the_verb_of_a_function_is_found_by_its_name(verb, form):
    if form == "i{}" and verb not in ("send", "recv"):
        return
    with comm.as_rank(Mesh(2, tp=2), 0), spmd.SpmdTypeMode():
        x = spmd.assert_type(torch.ones(2), {"tp": spmd.R})
        with pytest.raises(spmd.SpmdTypeError) as caught:
            refuse(form.format(verb), (x,))
        refuse(form.format(verb), (3, "sum"))
    assert caught.value.repairs[0].startswith(f"comm.{verb}(")
    assert (", out=" in caught.value.repairs[0]) == (verb in ("all_reduce", "broadcast"))
    advised = any(repair.startswith(f"spmd.{verb}(") for repair in caught.value.repairs)
    assert advised == (verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))


def test_a_group_is_no_axis_where_there_is_no_mesh_of_this_process() -> None:
    """A mode with a mesh of its own: the error does without the axis."""
    with spmd.SpmdTypeMode(Mesh(2, tp=2)):
        x = spmd.assert_type(torch.ones(2), {"tp": spmd.R})
        with pytest.raises(spmd.SpmdTypeError, match="the checker does not see"):
            refuse("all_reduce", (x,))
