"""Names that NxD's scripts import: equal values, or an error that says what to do instead."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import comm as nxd_comm
from neuronx_dist.parallel_layers import grads, layers, layers_utils, mappings, neuron_only, parallel_state, utils
from neuronx_dist.parallel_layers.loss_functions import DistributedLogprob, from_parallel_logits_to_logprobs
from neuronx_dist.spmd import ShardSpec

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_ranks(tp: int, function: Any, **sizes: int) -> list[Any]:
    return threads.run(Mesh(tp * sizes.pop("dp", 1), tp=tp, **sizes), function)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probabilities(tp: int) -> None:
    """Values and gradients of torch's, of the next tokens."""
    logits, ids, weights = draw(2, 5, 8).requires_grad_(), torch.arange(10).view(2, 5) % 8, draw(2, 4, seed=1)
    expected = F.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    (expected * weights).sum().backward()
    wanted = logits.grad

    def rank() -> None:
        local = logits.detach().chunk(tp, -1)[comm.rank("tp")].clone().requires_grad_()
        found = from_parallel_logits_to_logprobs(local, ids, False)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
        (found * weights).sum().backward()
        torch.testing.assert_close(local.grad, wanted.chunk(tp, -1)[comm.rank("tp")], rtol=1e-10, atol=1e-10)
        ignored = ids.clone()
        ignored[0, 0] = -100
        assert DistributedLogprob.apply(local, ignored, True)[0, 0] == 0

    on_ranks(tp, rank)


def test_log_probabilities_of_parts_of_sequences_are_refused() -> None:
    """The next token of a part's last one is on another cp rank."""

    def rank() -> None:
        with pytest.raises(ValueError, match=r'of cp=2 ranks: call distributed_logprob\(logits, part\["labels"\]\)'):
            from_parallel_logits_to_logprobs(draw(2, 5, 8), torch.zeros(2, 5, dtype=torch.long))

    threads.run(Mesh(2, cp=2), rank)


def test_plain_functions_below_mappings() -> None:
    x = draw(4, 6)

    def rank() -> None:
        number = comm.rank("tp")
        for dim, name in ((0, "first"), (1, "last")):
            piece = getattr(mappings, f"_split_along_{name}_dim")(x)
            assert torch.equal(piece, x.chunk(2, dim)[number]) and piece.is_contiguous()
            assert torch.equal(getattr(mappings, f"_gather_along_{name}_dim")(piece), x)
            summed = getattr(mappings, f"_reduce_scatter_along_{name}_dim")(x * (number + 1))
            torch.testing.assert_close(summed, 3 * piece)
        torch.testing.assert_close(mappings._reduce(x * (number + 1)), 3 * x)
        assert torch.equal(mappings._split_along_dim(x, 1, "dp"), x)
        swapped = mappings.nonzero_partition_dim_swap(lambda x, dim: x[:1] if dim == 0 else x)
        assert torch.equal(swapped(x, 1), x[:, :1])

    on_ranks(2, rank)


def test_collectives_by_the_arguments_of_torch_xla() -> None:
    x = draw(4, 6)

    class Words(Enum):
        SUM = 1

    def rank() -> None:
        number = comm.rank("tp")
        for groups in ("tp", parallel_state.get_tensor_model_parallel_replica_groups(), comm.communicator("tp")):
            mine = x * (number + 1)
            (result,) = nxd_comm.all_reduce("sum", mine, groups)
            assert result is mine
            torch.testing.assert_close(mine, 3 * x)
            (largest,) = nxd_comm.all_reduce("max", [x + number], groups)
            torch.testing.assert_close(largest, x + 1)
            assert torch.equal(nxd_comm.all_gather(x.chunk(2, 1)[number], 1, groups), x)
            out = torch.empty(4, 3, dtype=F64)
            found = nxd_comm.reduce_scatter(Words.SUM, x, 0.5, 1, 2, groups, out)
            assert found is out
            torch.testing.assert_close(out, x.chunk(2, 1)[number])
            rows = torch.empty(2, 6, dtype=F64)
            torch.testing.assert_close(nxd_comm.gloo_reduce_scatter(rows, x, "sum", groups), 2 * x.chunk(2, 0)[number])
        assert torch.equal(nxd_comm.all_gather(x, 0).chunk(4)[3], x)  # of all ranks
        with pytest.raises(ValueError, match="are not the replica groups of an axis"):
            nxd_comm.all_reduce("sum", x, [[0, 3], [1, 2]])
        with pytest.raises(ValueError, match="shard_count 3 is not the number of ranks, 2"):
            nxd_comm.reduce_scatter("sum", x, shard_count=3, groups="tp")

    on_ranks(2, rank, dp=2)


def test_rank_orders() -> None:
    hardware = Enum("hardware", {"TRN1": "trn1", "TRN2": "trn2"})
    logic = parallel_state.PG_Group_Logic
    assert parallel_state.get_logic_chosen(1, hardware.TRN2, 64) is logic.LOGIC2  # type: ignore[attr-defined]
    assert parallel_state.get_logic_chosen(1, hardware.TRN1, 64) is logic.LOGIC1  # type: ignore[attr-defined]
    grid = torch.arange(64).view(2, 1, 1, 32)
    arguments: Any = (1, grid, grid, 32, 1, 2, 1, 1)
    assert logic.LOGIC1(*arguments).pp_groups[1] == [1, 33]
    groups = logic.LOGIC2(*arguments)
    assert groups.tp_groups[0] == [*range(16), *range(48, 64)] and groups.pp_groups[16] == [48, 32]
    assert parallel_state.arrange_kv_groups(2, 4, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    adjacent = [[0, 1], [2, 3]]
    assert parallel_state.arrange_kv_groups(1, 4, 2, True) == adjacent
    assert parallel_state.arrange_kv_groups(1, 4, 2, hardware_type=hardware.TRN2) == adjacent  # type: ignore[attr-defined]


def test_sizes_follow_from_the_mesh() -> None:
    def rank() -> None:
        parallel_state.set_tensor_model_parallel_size(2)
        parallel_state.set_tensor_model_parallel_rank(comm.rank("tp"))
        parallel_state.set_expert_model_parallel_size(1)
        parallel_state.set_expert_model_parallel_rank(0)
        with pytest.raises(ValueError, match="set_tensor_model_parallel_size.4.: it is 2 in this mesh"):
            parallel_state.set_tensor_model_parallel_size(4)
        with pytest.raises(ValueError, match="comm.as_rank"):
            parallel_state.set_context_model_parallel_size(2)
        parallel_state.initialize_pp_gloo_groups()
        assert parallel_state.gather_python_object("a", parallel_state.get_pp_gloo_group()) == ["a"]
        assert not parallel_state.get_aot_mode() and parallel_state.is_tcp_store_available()
        parallel_state.set_aot_mode(False)
        with pytest.raises(NotImplementedError, match="ahead of time"):
            parallel_state.set_aot_mode(True)

    on_ranks(2, rank)


def test_utilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert utils.get_local_world_size() == 4 and not utils.requires_init_pg_override()
    state = {"a": [torch.zeros(2), 3], "b": (torch.zeros(2, dtype=F64), "x")}
    cast: Any = utils.cast_all(state)
    assert cast["a"][0].dtype == torch.bfloat16 and cast["b"][0].dtype == F64 and cast["b"][1] == "x"
    assert state["a"][0].dtype == torch.float32
    assert utils.indices_split_along_dim(torch.zeros(3, 8), 1, 1, 4).tolist() == [2, 3]
    assert utils.indices_split_along_dim(None, 0, 0, 1) is None
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="under autocast to torch.bfloat16"):
        utils.verify_casted_dtype([torch.zeros(2)])
    utils.verify_casted_dtype([torch.zeros(2)])
    with pytest.raises(RuntimeError, match="init_distributed"):
        utils.initialize_fallback_parallel_state()
    param = torch.zeros(1)
    assert grads.param_is_not_shared(param)
    param.shared = True
    assert not grads.param_is_not_shared(param)


def test_shards_of_weights() -> None:
    whole = draw(8, 4)

    def rank() -> None:
        out = torch.empty(4, 4)
        local = layers.create_local_weight(whole, 0, 4, 2, out)
        expected = ShardSpec("tp", 0, 2, 2, (8, 4)).local_slice(whole, comm.rank("tp"))
        assert local is out and torch.equal(local, expected.float())
        assert torch.equal(layers.create_local_weight(whole, 1, 2, 1), whole.chunk(2, 1)[comm.rank("tp")])
        with pytest.raises(ValueError, match="dim 0 of .8, 4. is not 2 partitions of 3"):
            layers.create_local_weight(whole, 0, 3, 1)
        column = layers.ColumnParallelLinear(4, 8)
        assert isinstance(column, layers.BaseParallelLinear) and isinstance(column, layers.BaseParallelLayer)

    on_ranks(2, rank)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_functional_forms(sequence_parallel: bool) -> None:
    def rank() -> None:
        number = comm.rank("tp")
        torch.manual_seed(0)
        layer = layers.ColumnParallelLinear(
            4, 8, gather_output=False, dtype=F64, sequence_parallel_enabled=sequence_parallel
        )
        x, y = (draw(2, 3, 4, seed=number * sequence_parallel).requires_grad_() for _ in range(2))
        arguments: Any = (y, layer.weight, layer.bias, not sequence_parallel, sequence_parallel, 0, True, None)
        expected, found = layer(x), layers.LinearWithAsyncCommunication.apply(*arguments)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-10)
        conv = layers.OutputChannelParallelConv2d(4, 6, 3, 2, 1, gather_output=False, dtype=F64)
        x, y = (draw(2, 4, 5, 5).requires_grad_() for _ in range(2))
        expected = conv(x)
        found = layers.Conv2dWithInputGradAllReduce.apply(y, conv.weight, conv.bias, 2, 1, True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-10)

    on_ranks(2, rank)


def test_names_of_neuron_devices_say_what_to_do() -> None:
    for name, advice in neuron_only.ADVICE.items():
        with pytest.raises(NotImplementedError) as caught:
            getattr(neuron_only, name)(1, key=2)
        assert str(caught.value) == f"{name} {advice}"
    assert layers.SPMDRank.__name__ == "SPMDRank"
    assert "for inference" in str(mappings.scatter_to_process_group_spmd.__doc__)
    assert parallel_state.initialize_speculative_draft_group and layers_utils._linear_autograd_base_setup_fwd
    for module in (neuron_only, layers, mappings, parallel_state):
        with pytest.raises(AttributeError):
            module.no_such_name  # noqa: B018
