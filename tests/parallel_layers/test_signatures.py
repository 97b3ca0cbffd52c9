"""Calls that are written for NeuronX Distributed's release, for its API guide, or with Megatron's names."""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import init

from neuronx_dist import NxDPPModel, comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    layer_norm,
    mappings,
    pad,
    parallel_cross_entropy,
    parallel_state,
    signatures,
    utils,
)
from neuronx_dist.parallel_layers.layers import linear_with_async_allreduce
from neuronx_dist.pipeline.partition import create_partitions
from tests.parallel_layers.layer_parity import F64, IN, OUT, close, draw, full_parameters, linear_reference, tp_mesh

# The release's signatures, and those of its API guide where their order is another one.
RELEASE = {
    ParallelEmbedding: """num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0,
        scale_grad_by_freq=False, sparse=False, init_method=init.normal_, device=None, dtype=torch.float32,
        shard_across_embedding=False, pad=False, sequence_parallel_enabled=False, tensor_model_parallel_group=None,
        use_spmd_rank=False, sequence_dimension=None, tile_cc=False, rank_ordering=None, collect_output=True""",
    ColumnParallelLinear: """input_size, output_size, bias=True, gather_output=True, dtype=torch.float32, device=None,
        stride=1, init_method=None, sequence_parallel_enabled=False, sequence_dimension=None,
        keep_master_weight=False, skip_bias_add=False, pad=False, pad_alignment_size_per_rank=1,
        keep_padded_output=False, tensor_model_parallel_group=None, reduce_dtype=torch.float32, rank_ordering=None""",
    RowParallelLinear: """input_size, output_size, bias=True, input_is_parallel=False, dtype=torch.float32, device=None,
        stride=1, init_method=None, sequence_parallel_enabled=False, sequence_dimension=None,
        keep_master_weight=False, skip_bias_add=False, pad=False, reduce_output=True,
        tensor_model_parallel_group=None, reduce_dtype=torch.float32, tile_cc=False, rank_ordering=None""",
    NxDPPModel: """module, transformer_layer_cls=None, num_microbatches=1, virtual_pipeline_size=1,
        output_loss_value_spec=None, return_mb_loss=False, broadcast_and_average_loss=False,
        use_zero1_optimizer=False, use_model_wrapper=False, use_optimizer_wrapper=False, pipeline_cuts=None,
        input_names=None, leaf_module_cls=None, autowrap_functions=None, autowrap_modules=None,
        autowrap_obj_methods=None, tracer_cls=None, param_init_fn=None, trace_file_path=None, return_loss_on_cpu=True,
        deallocate_pipeline_outputs=False, auto_partition=False, fuse_microbatches=False, manual_pp_partition=False,
        manual_pp_stage_partition_fn=None, manual_pp_loss_fn=None, _delay_tracing=False,
        _turn_off_odd_even_scheduler=False, _all_reduce_send_recv=False, _fused_send_recv=False, _fused_fwd_bwd=False,
        _mark_step_before_pp_runtime=True, _mark_step_after_pp_runtime=True, _deallocate_send_tensors=True,
        _use_gloo_for_metadata_comm=False, _debug_mode=False, _debug_pp_size=8, _debug_pp_rank=0""",
}
GUIDE = {
    ParallelEmbedding: "num_embeddings, embedding_dim, init_method=init.normal_, dtype=torch.float32, device=None",
    ColumnParallelLinear: """input_size, output_size, bias=True, gather_output=True, sequence_parallel_enabled=False,
        dtype=torch.float32, device=None""",
    RowParallelLinear: """input_size, output_size, bias=True, input_is_parallel=False, sequence_parallel_enabled=False,
        dtype=torch.float32, device=False""",
    NxDPPModel: """module, transformer_layer_cls=None, num_microbatches=1, virtual_pipeline_size=1,
        output_loss_value_spec=None, return_mb_loss=False, broadcast_and_average_loss=False, pipeline_cuts=None,
        input_names=None, leaf_module_cls=None, autowrap_functions=None, autowrap_modules=None, tracer_cls=None,
        param_init_fn=None, trace_file_path=None, use_zero1_optimizer=False, auto_partition=False,
        deallocate_pipeline_outputs=False""",
}
# Values other than the defaults, of parameters that have an effect.
SAMPLES = {
    ParallelEmbedding: dict(
        num_embeddings=12, embedding_dim=6, padding_idx=3, max_norm=0.5, norm_type=1.0, sparse=True,
        init_method=init.ones_, device="meta", dtype=F64, sequence_parallel_enabled=True,
        tensor_model_parallel_group="cp", sequence_dimension=1, collect_output=False,
    ),
    ColumnParallelLinear: dict(
        input_size=8, output_size=12, bias=False, gather_output=False, dtype=F64, device="meta", stride=2,
        init_method=init.ones_, sequence_parallel_enabled=True, sequence_dimension=1, skip_bias_add=True,
        tensor_model_parallel_group="cp", reduce_dtype=None,
    ),
    RowParallelLinear: dict(
        input_size=12, output_size=8, bias=False, input_is_parallel=True, dtype=F64, device="meta", stride=2,
        init_method=init.ones_, sequence_parallel_enabled=True, sequence_dimension=1, skip_bias_add=True,
        reduce_output=False, tensor_model_parallel_group="cp", reduce_dtype=None,
    ),
    NxDPPModel: dict(
        module=nn.Sequential(nn.Linear(2, 2)), transformer_layer_cls=nn.Linear, num_microbatches=2,
        output_loss_value_spec=True, broadcast_and_average_loss=True, use_zero1_optimizer=True, use_model_wrapper=True,
        use_optimizer_wrapper=True, input_names=["input"], return_loss_on_cpu=False, auto_partition=True,
    ),
}  # fmt: skip


def parameters(text):
    return inspect.signature(eval(f"lambda {' '.join(text.split())}: 0", dict(torch=torch, init=init))).parameters


def state(built):
    """Attributes that a layer set from its arguments."""
    values = {name: value for name, value in vars(built).items() if not name.startswith("_") and name != "recorder"}
    values.pop("placement_is_open", None)  # asking for parameters closes it
    values.pop("comparison", None)  # with the other ranks: of the model itself, not of its arguments
    tensors = {name: (tuple(p.shape), p.dtype, p.device.type) for name, p in built.named_parameters()}
    return {**values, **tensors}


def values_of(cls, order):
    """A value for each parameter of an order: a sample, or else the default."""
    return [SAMPLES[cls].get(name, parameter.default) for name, parameter in parameters(order).items()]


ORDERS = [(cls, order) for orders in (RELEASE, GUIDE) for cls, order in orders.items()]


@pytest.mark.parametrize("cls, order", ORDERS, ids=lambda value: getattr(value, "__name__", "order"))
def test_positional_arguments_mean_what_their_keywords_do(cls, order):
    names, values = [*parameters(order)], values_of(cls, order)
    required = 2 if cls is not NxDPPModel else 1
    with comm.as_rank(tp_mesh(2), 1):
        for count in range(required, len(names) + 1):
            given = dict(zip(names[:count], values))
            options = {name: given[name] for name in given if name in inspect.signature(cls).parameters}
            if options.get("device") is False:
                options["device"] = None
            try:
                want = state(cls(**options))
            except ValueError as refused:  # sequence parallelism needs what comes after it
                with pytest.raises(ValueError, match="needs|must be") as error:
                    cls(*values[:count])
                assert str(error.value) == str(refused)
                continue
            assert state(cls(*values[:count])) == want, names[count - 1]
            assert state(cls(**given)) == want, names[count - 1]


@pytest.mark.parametrize("cls", RELEASE, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("error")
def test_every_default_may_be_given(cls, monkeypatch):
    monkeypatch.setattr(signatures, "_warned", set())
    for order in (RELEASE[cls], GUIDE[cls]):
        every = {name: p.default for name, p in parameters(order).items() if p.default is not p.empty}
        required = [SAMPLES[cls][name] for name, p in parameters(order).items() if p.default is p.empty]
        with comm.as_rank(tp_mesh(2), 1):
            torch.manual_seed(0)
            want = cls(*required)
            for options in ({name: value} for name, value in every.items()):
                assert state(cls(*required, **options)) == state(want)
            assert state(cls(*required, **every)) == state(cls(*required, *every.values())) == state(want)


def test_types_decide_where_the_orders_part():
    normal = partial(init.normal_, std=0.5)
    with comm.as_rank(tp_mesh(2), 0):
        assert ParallelEmbedding(8, 4, normal, torch.bfloat16).weight.dtype == torch.bfloat16
        assert ParallelEmbedding(8, 4, normal).init_method is normal
        assert ParallelEmbedding(8, 4, 3).padding_idx == 3
        assert ParallelEmbedding(8, 4, None).padding_idx is None
        column = ColumnParallelLinear(8, 4, True, False, True, torch.bfloat16, "meta")
        assert column.sequence_parallel_enabled and column.weight.dtype == torch.bfloat16 and column.weight.is_meta
        assert not ColumnParallelLinear(8, 4, True, False, torch.bfloat16).sequence_parallel_enabled
        row = RowParallelLinear(8, 4, True, True, True, torch.bfloat16, False)
        assert row.sequence_parallel_enabled and row.weight.device.type == "cpu"
        assert RowParallelLinear(8, 4, device=False).weight.device.type == "cpu"
        for value in (1, 2.0, "bfloat16", [True]):
            with pytest.raises(TypeError) as error:
                ColumnParallelLinear(8, 4, True, False, value)
            message = str(error.value)
            assert f"(int, int, bool, bool, {type(value).__name__}) match no order" in message
            assert "release: input_size, output_size, bias, gather_output, dtype, device, stride" in message
            assert "guide: input_size, output_size, bias, gather_output, sequence_parallel_enabled, dtype" in message
            assert "after gather_output by keyword" in message
        with pytest.raises(TypeError, match="num_embeddings, embedding_dim, init_method, dtype, device"):
            ParallelEmbedding(8, 4, True)
        with pytest.raises(TypeError, match=r"\(int, int, None, dtype\) match no order"):  # it is no max_norm
            ParallelEmbedding(8, 4, None, torch.bfloat16)
        assert ParallelEmbedding(8, 4, None, 1.0).max_norm == 1.0


@pytest.mark.parametrize("cls", [ParallelEmbedding, ColumnParallelLinear, RowParallelLinear])
def test_the_signature_that_help_shows_has_the_releases_positions(cls):
    ours = [name for name, p in inspect.signature(cls).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours == [*parameters(RELEASE[cls])][: len(ours)]


def test_what_no_type_tells_is_refused(monkeypatch):
    """Neither of two orders that both fit is chosen."""
    both = signatures.Signature("a stride device dtype", guide="a device stride")
    monkeypatch.setitem(signatures.SIGNATURES, "both", both)

    @signatures.accepts("both")
    def function(a, stride=1, device=None, dtype=None):
        return a, stride, device, dtype

    with pytest.raises(TypeError, match="match several orders.*\n.*a, stride, device, dtype\n.*a, device, stride"):
        function(0, 1, 2)
    assert function(0, 2, "cpu", F64) == function(0, device="cpu", stride=2, dtype=F64) == (0, 2, "cpu", F64)


def test_errors_of_calls_are_pythons():
    with comm.as_rank(tp_mesh(2), 0):
        with pytest.raises(TypeError, match="unexpected keyword argument 'inputsize'; nearest: input_size"):
            ColumnParallelLinear(8, 4, inputsize=3)
        with pytest.raises(TypeError, match=r"ColumnParallelLinear\(\) got .* 'gather'; nearest: gather_output"):
            ColumnParallelLinear(8, 4, gather=True)
        with pytest.raises(TypeError, match="'num_micro_batches'; nearest: num_microbatches"):
            NxDPPModel(torch.nn.Linear(2, 2), num_micro_batches=2)
        with pytest.raises(TypeError, match="multiple values for argument 'bias'"):
            ColumnParallelLinear(8, 4, True, False, True, bias=True)
        with pytest.raises(TypeError, match="multiple values for argument 'labels'"):
            parallel_cross_entropy(torch.zeros(2, 4), target=torch.zeros(2), labels=torch.zeros(2))
        with pytest.raises(TypeError, match="output_size"):
            ColumnParallelLinear(8)
        for cls in RELEASE:
            with pytest.raises(TypeError, match="match no order"):
                cls(*values_of(cls, RELEASE[cls]), None)


@pytest.mark.parametrize("cls", [cls for cls in RELEASE if cls is not NxDPPModel], ids=lambda cls: cls.__name__)
def test_what_would_change_values_is_refused_by_name(cls):
    wrong = dict(rank_ordering=[1, 0])
    names = [name for name in wrong if name in parameters(RELEASE[cls])]
    required = [SAMPLES[cls][name] for name, p in parameters(RELEASE[cls]).items() if p.default is p.empty]
    assert names
    for name in names:
        with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError, match=rf"{cls.__name__}: {name}=.*, and \w+"):
            cls(*required, **{name: wrong[name]})
    with pytest.raises(ValueError, match=r"rank_ordering=\[1, 0\] is not supported"):
        utils.set_tensor_model_parallel_attributes(torch.zeros(2), True, 0, 1, rank_ordering=[1, 0])


def test_what_has_no_meaning_here_is_ignored_with_one_warning(monkeypatch):
    monkeypatch.setattr(signatures, "_warned", set())
    wanted = {*signatures.IGNORED}
    calls = [
        (cls, [SAMPLES[cls][key] for key, p in parameters(RELEASE[cls]).items() if p.default is p.empty], name, default)
        for cls in RELEASE
        for name, default in signatures.IGNORED.items()
        if name in parameters(RELEASE[cls])
    ]
    weight = torch.zeros(4, 8)
    calls.append((linear_with_async_allreduce, [torch.zeros(2, 8), weight, None], "save_for_backward", True))
    with comm.as_rank(tp_mesh(2), 0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for _ in range(2):
            for function, required, name, default in calls:
                function(*required, **{name: not default})
        signatures._warned.remove("tile_cc")
        for tile_cc in (False, True, True):
            mappings.gather_from_sequence_parallel_region(torch.zeros(2, 2), tile_cc=tile_cc)
    messages = [str(warning.message) for warning in caught]
    assert {message.partition("=")[0] for message in messages} == wanted and len(messages) == len(wanted) + 1
    assert all(message.endswith("has no effect here and is ignored") for message in messages)
    assert {warning.filename for warning in caught} == {__file__}


# --- functions ---

FUNCTIONS = {
    mappings: """copy_to_tensor_model_parallel_region(input_, process_group)
        reduce_from_tensor_model_parallel_region(input_, process_group)
        scatter_to_tensor_model_parallel_region(input_, process_group)
        gather_from_tensor_model_parallel_region(input_, process_group)
        scatter_to_sequence_parallel_region(input_, sequence_dimension, process_group)
        gather_from_sequence_parallel_region(input_, sequence_dimension, to_model_parallel, process_group, tile_cc)
        reduce_scatter_to_sequence_parallel_region(input_, sequence_dimension, process_group, dtype)
        reduce_scatter_to_tensor_model_parallel_region_with_dim(input_, partition_dim, process_group)
        gather_from_tensor_model_parallel_region_with_dim(input_, gather_dim, process_group)
        scatter_input_channels_to_tensor_model_parallel_region(input_)
        reduce_from_context_model_parallel_region(input_)
        enter_expert_parallel_region(x, scatter_gather)
        exit_expert_parallel_region(x, scatter_gather)""",
    utils: """set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride, num_partitions, rank_ordering)
        copy_tensor_model_parallel_attributes(destination_tensor, source_tensor)
        set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
        split_tensor_along_dim(tensor, dim, num_partitions, contiguous_split_chunks)
        split_tensor_along_last_dim(tensor, num_partitions, contiguous_split_chunks)
        move_model_to_device(model, device)""",
    parallel_state: """initialize_token_shuffle_group(token_shuffle_group_size)
        initialize_kv_group(kv_shared_group_size, sequential_ranks_in_group)
        initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size,
            expert_model_parallel_size, skip_collective_init, lnc_size, mesh_only)
        get_token_shuffle_group(as_list) get_token_shuffle_group_size() get_token_shuffle_replica_groups()
        get_kv_shared_group(as_list) get_kv_shared_group_size() get_kv_shared_replica_groups()
        get_next_rank_replica_groups() get_prev_rank_replica_groups()""",
    layer_norm: """LayerNorm(normalized_shape, eps, elementwise_affine, bias, device, dtype, sequence_parallel_enabled)
        RMSNorm(normalized_shape, eps, sequence_parallel_enabled)""",
    pad: """get_number_of_extra_heads(n_head, tp_degree)
        pad_model(model, tp_degree, n_heads, wrapped_classes, pad_hook_fn)""",
}


@pytest.mark.parametrize("module", FUNCTIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_functions_bind_the_releases_arguments(module):
    text = " ".join(FUNCTIONS[module].split())
    for call in text.replace(") ", ")\n").splitlines():
        name, _, rest = call.rstrip(")").partition("(")
        names = [option.strip() for option in rest.split(",")] if rest else []
        signature = inspect.signature(getattr(module, name))
        by_position = signature.bind(*names).arguments
        assert by_position == signature.bind(**dict(zip(names, names))).arguments == dict(zip(names, names)), name


FORWARDS = {
    "input": [lambda: ColumnParallelLinear(4, 4), lambda: layer_norm.LayerNorm(4), lambda: layer_norm.RMSNorm(4)],
    "input_": [lambda: RowParallelLinear(4, 4), lambda: ParallelEmbedding(4, 4)],
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_have_the_names_of_the_release(name, tp):
    def work():
        for build in FORWARDS[name]:
            with torch.random.fork_rng():
                layer = build()
            x = torch.tensor([[1, 3]]) if isinstance(layer, ParallelEmbedding) else torch.ones(1, 2, 4)
            assert torch.equal(layer(**{name: x}), layer(x))

    threads.run(tp_mesh(tp), work)


def test_cross_entropy_takes_both_pairs_of_names():
    logits, labels = draw(3, 8, seed=1), torch.tensor([1, 5, 7])

    def work():
        mine = logits.chunk(2, -1)[comm.rank("tp")]
        return [
            parallel_cross_entropy(mine, labels, 0.1),
            parallel_cross_entropy(parallel_logits=mine, labels=labels, label_smoothing=0.1),
            parallel_cross_entropy(vocab_parallel_logits=mine, target=labels, label_smoothing=0.1),
            parallel_cross_entropy(mine, target=labels, label_smoothing=0.1),
        ]

    for losses in threads.run(tp_mesh(2), work):
        assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("reduce_scattered", [True, False])
def test_megatrons_name_of_the_gathers_backward(reduce_scattered):
    def work():
        grads = []
        for name in ("to_model_parallel", "tensor_parallel_output_grad"):
            x = torch.ones(2, 3, requires_grad=True)
            out = mappings.gather_from_sequence_parallel_region(input_=x, **{name: reduce_scattered})
            (out * (comm.rank("tp") + 1)).sum().backward()
            grads.append(x.grad)
        with pytest.raises(TypeError, match="sequence_dimension must be an integer, got False.*by keyword"):
            mappings.gather_from_sequence_parallel_region(x, reduce_scattered and False)
        return grads

    for rank, (ours, megatrons) in enumerate(threads.run(tp_mesh(2), work)):
        assert torch.equal(ours, megatrons)
        assert torch.equal(ours, torch.full((2, 3), 3.0 if reduce_scattered else rank + 1.0))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_functional_form_takes_the_releases_arguments(sequence_parallel, by_keyword):
    full, x, g = full_parameters(), draw(4, 2, IN, seed=2), draw(4, 2, OUT, seed=3)
    want_out, want_x, _ = linear_reference(x, full, g)

    def work():
        rank = comm.rank("cp")
        weight, bias = full["weight"].chunk(2)[rank], full["bias"].chunk(2)[rank]
        given = (x.chunk(2, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
        names = "async_grad_allreduce sequence_parallel_enabled sequence_dimension autograd_func_class".split()
        names += ["save_for_backward", "process_group", "reduce_dtype"]
        values = (not sequence_parallel, sequence_parallel, 1, None, True, comm.communicator("cp"), torch.float32)
        if by_keyword:
            out = linear_with_async_allreduce(input=given, weight=weight, bias=bias, **dict(zip(names, values)))
        else:
            out = linear_with_async_allreduce(given, weight, bias, *values)
        out.backward(g.chunk(2, -1)[rank])
        return out.detach(), given.grad

    outs, xs = zip(*threads.run(Mesh(2, cp=2), work))
    close(torch.cat(outs, -1), want_out)
    for dx in xs:
        close(torch.cat(xs, 1) if sequence_parallel else dx, want_x)


def test_the_functional_form_leaves_the_sum_to_the_caller():
    full, x, g = full_parameters(), draw(4, IN, seed=2), draw(4, OUT, seed=3)
    _, want_x, _ = linear_reference(x, full, g)

    def work():
        given, rank = x.clone().requires_grad_(), comm.rank("tp")
        with comm.record() as calls:
            linear_with_async_allreduce(given, full["weight"].chunk(2)[rank], None, False, False).backward(
                g.chunk(2, -1)[rank]
            )
        assert not calls
        return given.grad

    parts = threads.run(tp_mesh(2), work)
    close(torch.stack(parts).sum(0), want_x)
    with comm.as_rank(tp_mesh(2), 0):
        with pytest.raises(ValueError, match="reduce-scattered.*async_grad_allreduce=False"):
            linear_with_async_allreduce(x, full["weight"], None, True, True)
        with pytest.raises(ValueError, match="autograd_func_class=.*is not supported"):
            linear_with_async_allreduce(x, full["weight"], None, True, False, 0, torch.autograd.Function)


def test_other_functions_by_keyword():
    assert create_partitions(pipeline_parallel_size=2, model_layer_names=["a", "b", "c"]) == ["a"]
    assert len(utils.split_tensor_along_dim(torch.zeros(4, 2), dim=0, num_partitions=2)) == 2


# --- attributes ---


def test_attributes_that_scripts_read():
    def work():
        rank = comm.rank("tp")
        column = ColumnParallelLinear(8, 12, gather_output=False, dtype=F64, keep_master_weight=True)
        row = RowParallelLinear(12, 8, bias=False, init_method=init.ones_)
        for layer in (column, row):
            assert layer.tensor_parallel_group.size == 2 and layer.device.type == "cpu"
            assert (layer.pad, layer.rank_ordering, layer.stride) == (False, None, 1)
            assert not layer.sequence_parallel_enabled and not layer.skip_bias_add and layer.sequence_dimension == 0
            assert layer.weight_shape == tuple(layer.weight.shape)
        assert (column.dtype, row.dtype) == (F64, torch.float32)
        assert (column.weight_partition_dim, row.weight_partition_dim) == (0, 1)
        assert (column.bias_shape, row.bias_shape) == ((6,), None) and (column.add_bias, row.add_bias) == (True, False)
        assert (column.arg_init_method, row.arg_init_method) == (None, init.ones_)
        assert (column.keep_master_weight, row.keep_master_weight) == (True, False)
        assert column.output_size_per_partition == row.input_size_per_partition == 6
        table = ParallelEmbedding(10, 6, dtype=F64)
        assert table.tensor_model_parallel_group.size == table.tensor_model_parallel_size == 2
        assert (table.num_embeddings_per_partition, table.embedding_dim_per_partition) == (5, 6)
        assert (table.start_index, table.end_index) == (5 * rank, 5 * rank + 5)
        assert (table.weight_partition_dim, table.dtype, table.pad, table.stride) == (0, F64, False, 1)
        assert ParallelEmbedding(10, 6, shard_across_embedding=True).embedding_dim_per_partition == 3
        column.arg_init_method = init.zeros_  # a script's own value
        assert column.arg_init_method is init.zeros_ and row.arg_init_method is init.ones_

    threads.run(tp_mesh(2), work)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding])
def test_true_is_no_device(layer):
    """False is the guide's default, and means torch's."""
    with comm.as_rank(tp_mesh(2), 0):
        assert layer(4, 8, device=False).weight.device.type == "cpu"
        with pytest.raises(
            ValueError, match=rf"^{layer.__name__}: device=True is not a device: pass a torch.device or its"
        ):
            layer(4, 8, device=True)


def test_attributes_of_a_pipeline_model():
    with comm.as_rank(tp_mesh(2), 0):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = NxDPPModel(module, nn.Linear, use_model_wrapper=True)
        assert model.original_torch_module is module and model.transformer_layer_cls is nn.Linear
        assert (model.pipeline_parallel_rank, model.pipeline_parallel_size, model.virtual_pipeline_size) == (0, 1, 1)
        assert model.use_model_wrapper


# --- names ---

EXPORTED = {
    "parallel_layers": """PARALLEL_FUNCTIONS PARALLEL_MODULES ColumnParallelLinear ParallelEmbedding RowParallelLinear
        clip_grad_norm copy_tensor_model_parallel_attributes copy_to_tensor_model_parallel_region
        gather_from_tensor_model_parallel_region get_xla_rng_tracker initialize_model_parallel load
        model_parallel_xla_manual_seed move_model_to_device parallel_cross_entropy
        reduce_from_tensor_model_parallel_region save scatter_to_tensor_model_parallel_region
        set_defaults_if_not_set_tensor_model_parallel_attributes set_tensor_model_parallel_attributes
        split_tensor_along_last_dim
        checkpointing grads layers loss_functions mappings pad parallel_state random utils""",
    "parallel_layers.parallel_state": "move_model_to_device",  # in the API guide
    "": "CheckpointIOState finalize_checkpoint has_checkpoint load_checkpoint save_checkpoint",
}


@pytest.mark.parametrize("module", EXPORTED)
def test_modules_have_the_names_that_nxds_export(module):
    package = importlib.import_module(f"neuronx_dist.{module}".rstrip("."))
    assert [name for name in EXPORTED[module].split() if not hasattr(package, name)] == []
    names = set(EXPORTED[module].split())
    assert {name for name in names if not hasattr(package, name)} == set()
    assert names - {"loss_functions"} <= set(getattr(package, "__all__", names))
