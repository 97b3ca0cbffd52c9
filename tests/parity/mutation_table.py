"""The case that covers each call site: the smallest one that does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from neuronx_dist.mesh import Mesh
from tests.attention.test_batch import gathered_positions
from tests.attention.test_context_parallel import by_heads
from tests.checkpoint import exchanges
from tests.compat.test_stand_ins import compare_collectives as collectives_of_scripts
from tests.hf.parity import compare as swapped
from tests.hf.trainer_runs import exchanges as around_trainer
from tests.lightning.exchanges import accelerator_collectives, strategy_collectives
from tests.modules.test_lora import compare as adapters
from tests.modules.test_lora import compare_row
from tests.modules.test_moe import compare as experts
from tests.modules.test_moe import counted_rows, moved_bias, shuffled
from tests.optimizer.test_muon import compare as matrices_of_muon
from tests.optimizer.test_muon import test_a_gradient_that_one_tp_rank_lacks_counts_as_zeros as missing_gradients
from tests.parallel_layers.test_conv import compare as convolution
from tests.parallel_layers.test_nxd_names import (
    test_collectives_by_the_arguments_of_torch_xla as collectives_of_torch_xla,
)
from tests.parallel_layers.test_transposed_linear import compare as conv1d
from tests.parallelize.cli.test_trainer import test_sums_over_the_units as sums_over_units
from tests.parallelize.support import mutations as composites
from tests.parallelize.support import pipelines, sent_weights
from tests.parity.mutation_cases import (
    _column,
    _joined_features,
    _joined_sequence,
    _own_features,
    _own_sequence,
    _row,
    _sum_of_partials,
    _whole,
    compared_values,
    conformance,
    cross_entropy,
    embedding,
    exchange_of_a_plan,
    expert_regions,
    flags_of_a_scaler,
    full_logits,
    hybrid_step,
    layer,
    megatron_all_to_all,
    norms,
    number_of_labels,
    one_step,
    python_objects,
    redistribution,
    region,
    routed_rows,
    several_tensors,
    signal_of_one_rank,
    steps_in_rounds,
    steps_of_a_pipeline,
    tensor_of_one_rank,
    tied_copies,
    turn_of_a_ring,
    unequal_pieces,
    unequal_values,
    verbs_on_threads,
    written_folder,
)
from tests.pipeline.test_comm import exchange_by_hand
from tests.planner.test_cluster_measure import test_all_ranks_measure_the_same_cluster as measured_cluster
from tests.shard_tensor.physicsnemo import mutations as physicsnemo
from tests.shard_tensor.support import mutations
from tests.sharded_functions import mutations as functions_of_shards
from tests.support.llama_training import Case

__all__ = ["CASES", "MESSAGES", "VERBS"]

VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send", "recv", "exchange")
KERNELS = (
    "_sum:comm.all_reduce",
    "_gather:comm.all_gather",
    "_gather_stack:comm.all_gather",
    "_scatter_sum:comm.reduce_scatter",
    "_scatter_sum_unbind:comm.reduce_scatter",
    "_transpose_stack:comm.all_to_all",
)
REDISTRIBUTED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "convert")
REGION_OPERATORS = {
    "copy_to_tensor_model_parallel_region": "convert",
    "reduce_from_tensor_model_parallel_region": "all_reduce",
    "scatter_to_tensor_model_parallel_region": "convert",
    "gather_from_tensor_model_parallel_region": "all_gather",
    "scatter_to_sequence_parallel_region": "convert",
    "gather_from_sequence_parallel_region": "all_gather",
    "reduce_scatter_to_sequence_parallel_region": "reduce_scatter",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim": "reduce_scatter",
    "gather_from_tensor_model_parallel_region_with_dim": "all_gather",
    "scatter_input_channels_to_tensor_model_parallel_region": "convert",
    "all_gather_last_dim_from_tensor_parallel_region": "all_gather",
    "reduce_scatter_last_dim_to_tensor_parallel_region": "reduce_scatter",
    "reduce_from_context_model_parallel_region": "all_reduce",
}
MESSAGES = ("_post:comm.recv", "_send:comm.send")
TP, TP_SP = Case(tp=2), Case(tp=2, sequence_parallel=True)
UNFUSED = Case(tp=2, sequence_parallel=True, optimizer="master")  # with the loss of the logits
_EMBEDDING = "ParallelEmbedding.forward:"

CASES: dict[str, Callable[[], None]] = {
    "_step:comm.all_reduce#1": compared_values,
    **{f"{v}:comm.start_{v}#1": verbs_on_threads for v in VERBS},
    **{
        f"Communicator.start_coalesced:self.start_{v}#1": verbs_on_threads
        for v in ("all_reduce", "all_gather", "reduce_scatter")
    },
    "AggregatedOutputs.aggregate:comm.all_reduce#1": sums_over_units,
    "_gather:comm.gather_objects#1": verbs_on_threads,
    "_communicate:comm.exchange#1": exchange_of_a_plan,
    "_start_passing:comm.exchange#1": turn_of_a_ring,
    **{f"{kernel}#1": conformance for kernel in KERNELS},
    "_gather_pieces:comm.all_gather#1": unequal_pieces,
    "_scatter_pieces:comm.reduce_scatter#1": unequal_pieces,
    "_exchange_rows:comm.exchange#1": routed_rows,
    "_transpose:comm.all_to_all#1": redistribution,
    **{f"_values:comm.{v}#1": several_tensors for v in ("all_reduce", "all_gather", "reduce_scatter")},
    **{f"redistribute:{v}#1": redistribution for v in REDISTRIBUTED},
    **{f"{name}:spmd.{operator}#1": partial(region, name) for name, operator in REGION_OPERATORS.items()},
    "all_to_all:spmd.all_to_all#1": megatron_all_to_all,
    **{
        f"{way}_expert_parallel_region:spmd.{operator}#1": partial(expert_regions, operator != "all_to_all")
        for way in ("enter", "exit")
        for operator in ("convert", "all_to_all", "all_gather")
    },
    "ColumnLinear.forward:comm.all_gather#1": partial(
        layer,
        partial(_column, gather_output=False, sequence_parallel_enabled=True),
        split=_own_sequence,
        join=_joined_features,
    ),
    "ColumnLinear.backward:comm.all_gather#1": partial(one_step, UNFUSED),
    "ColumnLinear.backward:comm.all_reduce#1": partial(one_step, TP),
    "ColumnLinear.backward:comm.reduce_scatter#1": partial(one_step, UNFUSED),
    "RowLinear.forward:comm.all_reduce#1": partial(one_step, TP),
    "RowLinear.forward:comm.reduce_scatter#1": partial(one_step, TP_SP),
    "RowLinear.backward:comm.all_gather#1": partial(
        layer,
        partial(_row, input_is_parallel=True, sequence_parallel_enabled=True),
        split=_own_features,
        join=_joined_sequence,
    ),
    **{
        f"gathered:spmd.all_gather#{number}": partial(
            layer, partial(_column, gather_output=True, stride=stride), split=_whole, join=_whole
        )
        for number, stride in ((1, 2), (2, 1))
    },
    "used_parameter:spmd.reinterpret#1": partial(one_step, Case(tp=2, heads="one kv")),
    "RowParallelLinear.forward:spmd.convert#1": partial(
        layer, partial(_row, input_is_parallel=False), split=_whole, join=_whole
    ),
    "RowParallelLinear.forward:spmd.convert#2": partial(
        layer, partial(_row, input_is_parallel=True, reduce_output=False), split=_own_features, join=_sum_of_partials
    ),
    "Dispatch.__init__:comm.all_to_all#1": counted_rows,
    "exchange_rows:spmd.all_to_all#1": experts,
    "_Journey.start:comm.exchange#1": partial(experts, shared=True),
    "ExpertFusedLinear._used_bias:spmd.convert#1": partial(experts, ep=1, tp=2, bias=True),
    "GroupLimitedRouter.update_bias:comm.all_reduce#1": moved_bias,
    "MoE.forward:spmd.all_gather#1": partial(experts, ep=1, tp=2, sequence_parallel=True),
    "MoE.forward:spmd.all_reduce#1": partial(experts, ep=1, tp=2),
    "MoE.forward:spmd.convert#1": partial(experts, ep=1, tp=2, sequence_parallel=True),
    "MoE.forward:spmd.convert#2": partial(experts, ep=1, tp=2),
    "MoE.forward:spmd.convert#3": partial(experts, ep=1, tp=2),
    "MoE.forward:spmd.reduce_scatter#1": partial(experts, ep=1, tp=2, sequence_parallel=True),
    "load_balancing_loss_func:spmd.all_reduce#1": experts,
    "load_balancing_loss_func:spmd.all_reduce#2": experts,
    "router_z_loss_func:spmd.all_reduce#1": experts,
    "router_z_loss_func:spmd.all_reduce#2": experts,
    "all_to_all_for_shuffle:spmd.all_to_all#1": shuffled,
    "gather_full:comm.all_gather#2": experts,
    "LoraParallelLinear._row:spmd.convert#1": compare_row,
    "LoraParallelLinear._row:spmd.convert#2": partial(compare_row, reduce_output=False, input_is_parallel=True),
    "LoraParallelLinear._row:spmd.all_reduce#1": partial(adapters, Mesh(2, tp=2), False),
    "LoraParallelLinear._row:spmd.reduce_scatter#1": partial(adapters, Mesh(2, tp=2), True),
    "_whole_input:spmd.all_gather#1": partial(adapters, Mesh(2, tp=2), True),
    "_whole_input:spmd.convert#1": partial(adapters, Mesh(2, tp=2), False),
    "_replicated:spmd.convert#1": partial(adapters, Mesh(2, tp=2), False),
    "all_to_all:comm.all_to_all#1": collectives_of_scripts,
    "collective_broadcast:comm.broadcast#1": collectives_of_scripts,
    "collective_permute:comm.permute#1": collectives_of_scripts,
    "mesh_reduce:comm.gather_objects#1": collectives_of_scripts,
    "rendezvous:comm.gather_objects#1": collectives_of_scripts,
    **{
        f"MeshStrategy.{name}:comm.all_reduce#1": strategy_collectives for name in ("reduce", "reduce_boolean_decision")
    },
    "Accelerator.gather_for_metrics:comm.gather_objects#1": accelerator_collectives,
    "Accelerator.reduce.summed:comm.all_reduce#1": accelerator_collectives,
    "rows_of_all:comm.all_gather#1": accelerator_collectives,
    "by_data_rank:comm.all_reduce#1": around_trainer,
    "mean_over_data:comm.all_reduce#1": around_trainer,
    **{f"whole_logits:comm.all_gather#{number}": around_trainer for number in (1, 2, 3)},
    "from_last_stage:comm.broadcast#1": around_trainer,
    "compare_batches:comm.gather_objects#1": around_trainer,
    "ParallelTrainerMixin.store_flos:comm.gather_objects#1": around_trainer,
    **{f"_gather_over_data:comm.{verb}#1": strategy_collectives for verb in ("gather_objects", "all_gather")},
    "send:comm.send#1": exchange_by_hand,
    "recv_from:comm.recv#1": exchange_by_hand,
    "OutputChannelParallelConv2d.forward:spmd.convert#1": partial(convolution, "output", 2),
    "OutputChannelParallelConv2d.forward:spmd.convert#2": partial(convolution, "output", 2, groups=4),
    "OutputChannelParallelConv2d.forward:spmd.all_gather#1": partial(convolution, "output", 2),
    "InputChannelParallelConv2d.forward:spmd.convert#1": partial(convolution, "input", 2, groups=2),
    "InputChannelParallelConv2d.forward:spmd.convert#2": partial(convolution, "input", 2),
    "InputChannelParallelConv2d.forward:spmd.all_reduce#1": partial(convolution, "input", 2),
    **{f"{verb}:comm.{verb}#1": collectives_of_torch_xla for verb in ("all_reduce", "all_gather", "reduce_scatter")},
    f"{_EMBEDDING}spmd.all_gather#1": partial(embedding, shard_across_embedding=True),
    f"{_EMBEDDING}spmd.all_to_all#1": partial(embedding, shard_across_embedding=True, sequence_parallel_enabled=True),
    f"{_EMBEDDING}spmd.all_reduce#1": embedding,
    f"{_EMBEDDING}spmd.reduce_scatter#1": partial(embedding, sequence_parallel_enabled=True),
    "_ParallelCrossEntropy.forward:comm.all_reduce#1": cross_entropy,
    "_ParallelCrossEntropy.forward:comm.all_reduce#2": cross_entropy,
    "_Highest.forward:comm.all_reduce#1": partial(cross_entropy, transform=True),
    "_loss_of:comm.all_reduce#1": functions_of_shards.linear_cross_entropy,
    "_loss_of:comm.all_reduce#2": functions_of_shards.linear_cross_entropy,
    "_Gradients.take:comm.all_reduce#1": functions_of_shards.linear_cross_entropy,
    "_Gradients.take:comm.reduce_scatter#1": partial(functions_of_shards.linear_cross_entropy, sequence=True),
    "_gathered:comm.all_gather#1": partial(functions_of_shards.linear_cross_entropy, sequence=True),
    "_by_operators:spmd.convert#1": partial(functions_of_shards.linear_cross_entropy, transform=True),
    "_by_operators:spmd.all_gather#1": partial(functions_of_shards.linear_cross_entropy, sequence=True, transform=True),
    "entropy_of_shard:spmd.all_reduce#1": functions_of_shards.entropy_of_shards,
    "_merged:spmd.all_gather#1": functions_of_shards.softmax_of_shards,
    "_with_total:spmd.convert#1": functions_of_shards.transformed_softmax_of_shards,
    "_OneNode.backward:spmd.all_reduce#1": functions_of_shards.softmax_of_shards,
    "merged_moments:spmd.all_gather#1": functions_of_shards.moments_of_shards,
    "for_shards:spmd.convert#1": functions_of_shards.moments_of_shards,
    "scaled_by_rms:spmd.all_reduce#1": functions_of_shards.rms_of_shards,
    "_update_channels:spmd.all_gather#1": composites.running_statistics,
    "ring_attention:spmd.all_gather#1": composites.checked_ring,
    "_by_operators:spmd.all_reduce#1": partial(cross_entropy, transform=True),
    "norm_of:comm.all_reduce#1": norms,
    "share_found_inf:comm.all_reduce#1": flags_of_a_scaler,
    "global_num_items:comm.all_reduce#1": number_of_labels,
    "largest_on_any_rank:comm.all_reduce#1": signal_of_one_rank,
    "start_sum:comm.all_reduce#1": partial(one_step, Case(dp=2)),
    "gather_full:comm.all_gather#1": partial(one_step, TP),
    "gather_full:comm.broadcast#1": tensor_of_one_rank,
    "gather_python_object:comm.gather_objects#1": python_objects,
    "_scatter_embedding.scatter:spmd.reduce_scatter#1": partial(one_step, TP_SP),
    "_gather_sequence.gather:spmd.all_gather#1": partial(one_step, TP_SP),
    "_gather_vocabulary:spmd.all_gather#1": full_logits,
    "ParallelConv1D.summed:spmd.all_reduce#1": partial(conv1d, row=True),
    "ParallelConv1D.summed:spmd.reduce_scatter#1": partial(conv1d, row=True, sequence=True),
    "ParallelConv1D.used_input:spmd.reinterpret#1": partial(conv1d, row=False),
    "_add_once.hide:spmd.convert#1": partial(swapped, "gpt-oss"),
    "_sum_of_parts:spmd.all_reduce#1": partial(swapped, "Mixtral"),
    "_with_summed_gradient:spmd.reinterpret#1": partial(swapped, "Mixtral"),
    "_identity_expert.once:spmd.convert#1": partial(swapped, "LongcatFlashConfig"),
    "_take:spmd.convert#1": partial(swapped, "Phi 3", sequence_parallel=True),
    "_gather:spmd.all_gather#1": partial(swapped, "Phi 3", sequence_parallel=True),
    "measure_speeds:comm.gather_objects#1": measured_cluster,
    "_agreed_seconds:comm.gather_objects#2": measured_cluster,
    "save_pretrained:comm.gather_objects#1": written_folder,
    "full_state_dict:comm.gather_objects#1": partial(steps_of_a_pipeline, Case(pp=2)),
    "start_reduce_scatter:comm.reduce_scatter#1": partial(one_step, Case(dp=2, optimizer="zero1")),
    "start_all_gather:comm.all_gather#1": partial(one_step, Case(dp=2, optimizer="zero1")),
    "MatrixOwners._exchange:comm.exchange#1": partial(matrices_of_muon, Mesh(2), "defaults", "zero1"),
    "MatrixOwners.fill_gradients:comm.all_reduce#1": missing_gradients,
    "finish_reduce_scatter:comm.all_reduce#1": hybrid_step,
    "report_loss:comm.all_reduce#1": partial(steps_of_a_pipeline, Case(dp=2)),
    "report_loss:comm.broadcast#1": partial(steps_of_a_pipeline, Case(pp=2)),
    "Lockstep._transfer:comm.permute#1": partial(steps_in_rounds, Case(pp=2)),
    **{f"Messages.{call}#1": partial(steps_of_a_pipeline, Case(pp=2)) for call in MESSAGES},
    "StageModule.sync_tied_weights:comm.broadcast#1": tied_copies,
    "_exchange:comm.gather_objects#1": unequal_values,
    "agree:comm.gather_objects#1": exchanges.a_rank_that_fails,
    "Save.settle:comm.gather_objects#1": exchanges.a_rank_that_cannot_write,
    "Save.settle:comm.gather_objects#2": exchanges.a_checkpoint_that_cannot_be_completed,
    "_same_everywhere:comm.gather_objects#1": exchanges.ranks_with_other_tags,
    "load_nxd:comm.gather_objects#1": exchanges.parameters_of_other_stages,
    "plan:comm.gather_objects#1": exchanges.what_each_rank_holds,
    "_compare:comm.gather_objects#1": exchanges.a_model_that_fits_on_one_rank_only,
    "save:comm.gather_objects#1": exchanges.a_rank_that_cannot_write_its_file,
    "load_checkpoint:comm.gather_objects#1": exchanges.the_newest,
    **{
        f"{move}#1": mutations.even_moves
        for move in (
            "gather:spmd.all_gather",
            "split:spmd.convert",
            "scatter_sum:spmd.reduce_scatter",
            "transpose:spmd.all_to_all",
        )
    },
    "_around:comm.exchange#1": mutations.halos_by_one_program,
    "_exchanged:comm.exchange#1": mutations.uneven_moves,
    "start_move:comm.exchange#1": mutations.moved_to_another_mesh,
    "_used:spmd.convert#1": mutations.weights,
    "_Together.backward:comm.all_reduce#1": mutations.gradients_together,
    "_Together.backward:spmd.all_reduce#1": mutations.gradients_with_a_graph,
    "_summed:spmd.all_reduce#1": mutations.summed,
    "_as_summand:spmd.convert#1": mutations.summand,
    "total:spmd.all_reduce#1": mutations.totals,
    "_SumOfShards.forward:comm.all_reduce#1": mutations.sums_with_a_graph,
    **{f"_Extreme.forward:comm.all_reduce#{number}": mutations.extremes for number in (1, 2)},
    "counts.call:comm.all_reduce#1": mutations.counted,
    "_of_ranks_before:spmd.convert#1": mutations.running_totals,
    "unscale:comm.all_reduce#1": mutations.not_finite,
    "local_view:spmd.convert#1": mutations.local_part,
    **{f"ask:comm.{call}#1": mutations.asked_rows for call in ("all_gather", "exchange")},
    "_Fetch.forward:comm.exchange#1": mutations.asked_rows,
    "_fetched:spmd.convert#1": mutations.replicated_points,
    "_masked:comm.all_gather#1": mutations.masked_rows,
    "_inferred:comm.gather_objects#1": mutations.inferred_shapes,
    "_broadcast_object:comm.broadcast_object#1": mutations.one_ranks_tensor,
    **{f"_sent:comm.{verb}#1": mutations.one_ranks_tensor for verb in ("exchange", "broadcast")},
    "sync_module_over_mesh:comm.broadcast#1": mutations.synchronised,
    "_reduce_parts:comm.broadcast#1": mutations.parts_of_the_first_rank,
    "_compare_ranks:comm.gather_objects#1": physicsnemo.compared_ranks,
    "_compare_ranks:comm.gather_objects#2": physicsnemo.compared_ranks,
    "all_gather_v:spmd.all_gather#1": physicsnemo.pieces,
    "all_gather_v_bwd_wrapper:spmd.reduce_scatter#1": physicsnemo.summed_pieces,
    "copy_to_parallel_region:spmd.convert#1": physicsnemo.mappings,
    "reduce_from_parallel_region:spmd.all_reduce#1": physicsnemo.mappings,
    "gather_from_parallel_region:spmd.all_gather#1": physicsnemo.mappings,
    "_started:comm.all_reduce#1": physicsnemo.fused,
    "reduce_loss:comm.all_reduce#1": physicsnemo.losses,
    "mark_module_as_shared.summed:comm.all_reduce#1": physicsnemo.shared_gradients,
    "_Passing.__init__:comm.exchange#1": mutations.attention_by_ring,
    "_by_heads:spmd.all_to_all#1": by_heads,
    "_by_heads:spmd.all_to_all#2": by_heads,
    "_gathered_split:comm.all_gather#1": gathered_positions,
    "_merged:comm.all_gather#1": mutations.attention_merged,
    "_merged:comm.all_gather#2": mutations.attention_merged_with_a_mask,
    "_merged:comm.all_reduce#1": mutations.attention_merged,
    "broadcast_weights:comm.broadcast#1": sent_weights.from_rank_0,
    "_check_values:comm.gather_objects#1": sent_weights.a_sender_without_values,
    "_received:comm.broadcast#1": sent_weights.deduped,
    "Pipelined._everywhere:comm.broadcast#1": pipelines.tied_step,
    "Pipelined.train:comm.all_reduce#1": pipelines.tied_step,
}
