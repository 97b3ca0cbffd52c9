"""`TrainingArguments(layout="auto")`: the layout that `nxd.plan` predicts to be the fastest for a model and rows."""

from __future__ import annotations

from typing import Any

import transformers

from ...pipeline.schedule import training_schedule
from ...planner.cluster import Cluster
from ...planner.plans import CONSTRAINTS, plan
from ...planning.layout import Layout
from ..swap import is_swapped

__all__ = ["choose_layout", "kept_arguments"]

_ROWS = 64  # that are read for the length of sequences
# Arguments that stay where they are not their defaults, with the planner's names.
_KEPT = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "virtual_pipeline_size"), 1),
    **dict.fromkeys(("sequence_parallel", "zero1"), False),
    **dict.fromkeys(("schedule", "recompute", "fused_loss"), None),
}


def kept_arguments(args: Any) -> dict[str, Any]:
    """Returns the arguments that are not their defaults, which the plan keeps, as the planner's constraints.

    Raises:
        ValueError: no plan can have an argument; the message names it.
    """
    kept = {name: getattr(args, name) for name, default in _KEPT.items() if getattr(args, name) != default}
    if args.microbatches is not None:
        raise ValueError(
            f"TrainingArguments: layout='auto' chooses microbatches, and microbatches={args.microbatches} is given: "
            "leave one of the two out"
        )
    for name, value in kept.items():
        known = CONSTRAINTS[name]
        if known is not None and value not in known:
            words = ", ".join(repr(word) for word in known if word != "")
            raise ValueError(
                f"TrainingArguments: layout='auto' with {name}={value!r}: the planner knows {words}: use one of them, "
                "or pass tp, pp, ... in place of layout"
            )
    try:
        Layout(args.world_size, args.tp, args.pp, args.cp, args.ep, global_batch=args.world_size).check()
        stages = max(2, args.pp)
        training_schedule(stages, 2 * stages, schedule=args.schedule, num_chunks=args.virtual_pipeline_size)
    except ValueError as error:
        words = ", ".join(f"{name}={value!r}" for name, value in kept.items())
        raise ValueError(f"TrainingArguments: layout='auto' keeps {words}: {error}") from None
    return kept


def choose_layout(args: Any, model: Any, rows: Any, **limits: Any) -> None:
    """Sets the arguments of the fastest plan, for the rows of a step that there are without it; rank 0 logs why.

    Args:
        args: `TrainingArguments`, which is changed.
        model: the whole model, of any device.
        rows: the training data.
        limits: values of the planner's constraints, which hold besides those of the arguments.

    Raises:
        ValueError: the model or the length of its sequences is not known, or no plan fits; the message says what works.
    """
    if model is None or is_swapped(model) or not hasattr(model, "config"):
        what = (
            "model_init" if model is None else f"a swapped {type(model).__name__}" if is_swapped(model) else repr(model)
        )
        raise ValueError(
            f"TrainingArguments: layout='auto' plans by the config of a model of transformers, got {what:.80}: pass "
            "model=..., or the tp, pp, ... of `neuronx-dist plan` in place of layout"
        )
    fixed = kept_arguments(args)
    lengths = _lengths(rows)
    if len(lengths) > 1:  # a batch may have any length, which nothing need divide
        limits |= dict(cp=1, sequence_parallel=False)
    world, steps = args.world_size, args.gradient_accumulation_steps
    cluster = Cluster.of_this_host(world, args.device.type)
    dtype = "bfloat16" if args.bf16 and "bfloat16" in cluster.flops else str(model.dtype).removeprefix("torch.")
    job = dict(global_batch=args.per_device_train_batch_size * steps * world, seq_len=max(lengths))
    plans = plan(model, **job, cluster=cluster, constraints={"dtype": dtype, **limits, **fixed}, top_k=2)
    best = plans[0].layout
    options = plans[0].train_options()
    for name in ("tp", "pp", "cp", "ep", "sequence_parallel", "zero1", "pad_heads", "pad_vocab"):
        setattr(args, name, options[name])
    args.schedule, args.virtual_pipeline_size = options["schedule"], options["virtual_pipeline_size"]
    args.recompute = plans[0].candidate.recompute or None
    in_pipeline = best.num_microbatches if best.pp > 1 else 1
    args.microbatches = in_pipeline if best.pp > 1 else None
    args.per_device_train_batch_size = best.micro_batch * in_pipeline
    args.gradient_accumulation_steps = best.num_microbatches // in_pipeline
    args.per_device_eval_batch_size *= world // best.dp  # so that a batch has its rows in evaluation too
    args.layout = None
    if args.process_index == 0:
        transformers.logging.get_logger("transformers.trainer").warning(f"layout='auto': {plans.why()}")


def _lengths(rows: Any) -> set[int]:
    """Returns the different numbers of tokens of the first rows.

    Raises:
        ValueError: the rows cannot be read by number, or have no input_ids.
    """
    try:
        lengths = {len(rows[number]["input_ids"]) for number in range(min(_ROWS, len(rows)))}
    except (TypeError, KeyError, IndexError, NotImplementedError):
        lengths = set()
    if not lengths:
        raise ValueError(
            f"TrainingArguments: layout='auto' reads the length of sequences from input_ids of train_dataset, which "
            f"this {type(rows).__name__} does not have: pass the tp, pp, ... of `neuronx-dist plan` in place of layout"
        )
    return lengths
