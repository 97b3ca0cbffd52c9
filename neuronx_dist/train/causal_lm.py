"""Config, model, optimizer and learning rate of one rank, by the flags; and the check of all ranks' programs."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import comm, hf
from ..checking import api as checking
from ..comm.rank_selection import XLA
from ..optimizer import MasterWeightsOptimizer, MuonAdamW, NeuronZero1Optimizer, muon_groups
from ..parallel_layers.random import model_parallel_manual_seed
from ..pipeline.model import NxDPPModel
from ..planning.layout import Layout
from ..planning.memory import optimizer_bytes
from ..planning.recompute import recompute
from .flags import config_file, default_sizes, layout_of, recomputation_of

__all__ = ["TrainingState", "build", "check", "load_config", "make_optimizer"]

_INPUTS = ["input_ids", "labels", "num_items_in_batch"]


class TrainingState(NamedTuple):
    """State of a run that is saved, and replaced when the run is resumed."""

    model: Any
    optimizer: Any
    schedule: Any


def load_config(args: Namespace) -> tuple[Any, Any]:
    """Returns the model's config, and its tokenizer if its folder has one.

    Raises:
        ValueError: the folder of --model has no config.json.
    """
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, MixtralConfig

    if args.model is None:
        config_class = MixtralConfig if args.experts else LlamaConfig
        return config_class(**default_sizes(args), bos_token_id=None, eos_token_id=0), None
    folder = config_file(args).parent
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer_config.json", "tokenizer.json"))
    return AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def build(args: Namespace, config: Any, device: torch.device, say: Callable[[str], Any] | None = None) -> TrainingState:
    """Model, optimizer and learning-rate schedule of this rank; nothing but its own shards is ever allocated."""
    model = _assemble(args, config, say)
    if args.model is not None and hf.has_weights(args.model):
        hf.load_pretrained(model, args.model, device=device)
    else:
        hf.materialize(model, args.seed, device=device)
    optimizer = make_optimizer(args, model, device)

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        cosine = math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup))
        return (args.lr + args.min_lr + (args.lr - args.min_lr) * cosine) / (2 * args.lr)

    return TrainingState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def _assemble(args: Namespace, config: Any, say: Callable[[str], Any] | None = None) -> Any:
    """This rank's model, on the meta device: no values yet; `say` gets the table of --recompute auto."""
    from transformers import AutoModelForCausalLM

    model_parallel_manual_seed(args.seed)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    options = dict(pad_heads=args.pad_heads, pad_vocab=args.pad_vocab, fused_loss=args.fused_loss)
    hf.swap(module, sequence_parallel=args.sequence_parallel, inplace_logits=True, **options)
    model = NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=args.microbatches,
        virtual_pipeline_size=args.virtual_pipeline_size,
        schedule=args.schedule,
        input_names=[*_INPUTS, "position_ids"] if args.cp > 1 else _INPUTS,
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=args.zero1,
    )
    recomputation = recomputation_of(args)
    if recomputation is not None:
        layout = layout_of(args, comm.size("world"))
        bytes_of_state = optimizer_bytes(layout)
        inputs = _example_batch(args, layout)
        inputs = {name: x[:, : layout.seq_len // args.cp] if x.ndim else x for name, x in inputs.items()}
        table = recompute(model, inputs=inputs, optimizer_bytes=bytes_of_state, **recomputation)
        if args.recompute == "auto" and say is not None:
            say(str(table))
    return model


def make_optimizer(args: Namespace, model: Any, device: torch.device | None = None) -> Any:
    """AdamW or Muon on this rank's parameters, in ZeRO-1 or with master weights of its own."""
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    if args.optimizer == "muon":
        optimizer_class = MuonAdamW
        groups = muon_groups(model, muon=dict(weight_decay=args.weight_decay), adamw=dict(weight_decay=0.0))
    else:
        params = [p for p in model.local_parameters() if p.requires_grad]
        matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        groups = [dict(params=matrices, weight_decay=args.weight_decay), dict(params=vectors, weight_decay=0.0)]
    sharded = partial(NeuronZero1Optimizer, overlap=args.overlap) if args.zero1 else MasterWeightsOptimizer
    clip = args.grad_clip or math.inf
    options: dict[str, Any] = dict(lr=args.lr, betas=(0.9, 0.95))
    if device is not None and device.type == XLA:  # a host step number would be a constant
        options["capturable"] = True
    elif device is not None and not args.allow_nonfinite:  # the weights stay those of the last good step
        options["skip_nonfinite"] = True
    return sharded([g for g in groups if g["params"]], optimizer_class, max_norm=clip, **options)


def check(
    args: Namespace, config: Any, layout: Layout, step: Callable[..., Any], time_limit: float | None = None
) -> Any:
    """Plays a step of all ranks in this process, without values; any number of ranks, in seconds."""

    def model_fn() -> tuple[Any, Any]:
        model = _assemble(args, copy.deepcopy(config))
        return model, make_optimizer(args, model)

    batch = _example_batch(args, layout)
    return checking.check(model_fn, batch, layout.mesh(), step=step, time_limit=time_limit)


def _example_batch(args: Namespace, layout: Layout) -> dict[str, torch.Tensor]:
    """A batch of this rank by its shapes; its sequences are complete: `train_step` splits them over cp."""
    ids = torch.zeros(layout.global_batch // layout.dp, layout.seq_len, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.ones(())}
    if args.cp > 1:
        inputs["position_ids"] = torch.arange(layout.seq_len).expand_as(ids)
    return inputs
