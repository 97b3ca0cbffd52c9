"""A plan's program, type-checked before the plan is shown: the same layout and architecture, with few layers and ranks.

The checker plays a step of all ranks that differ, without values, so that hidden sizes, heads and vocabulary stay those
of the model. Layers, ranks, microbatches and tokens become few, and no degree above 1 becomes 1. Plans that differ in
these numbers alone are of one kind, which is checked once: kinds that have passed are remembered in a file of the
user's cache folder ($XDG_CACHE_HOME or ~/.cache), for these sources of the package and these versions.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..attention.batch import get_batch_on_this_context_parallel_rank
from ..checking.api import check
from ..gradients.reduce import global_num_items
from ..model_shape import padded_heads
from ..optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from ..planning.memory import pipelined
from ..planning.recompute import recompute
from .candidate import Candidate
from .workload import Workload

__all__ = ["problem_of", "small_candidate", "small_config"]

_ONE_BUCKET = 1e9  # MB: each bucket has the same program
_known: dict[str, tuple[str, str]] = {}


def problem_of(
    candidate: Candidate,
    workload: Workload,
    config: Any = None,
    begins: Callable[[], None] | None = None,
    unproven: Callable[[str], object] | None = None,
) -> str:
    """Returns what the checker finds wrong with a plan's program; "": nothing.

    Args:
        config: the model's Hugging Face config; None: that of the architecture with the weights of the workload.
        begins: called before a check, which takes seconds; not where the answer is known.
        unproven: called with the reason if types are not checked: transformers is not installed, or the checker
            refuses the model on two data ranks too, so that programs and collectives alone are compared.
    """
    if find_spec("transformers") is None:
        if unproven is not None:
            unproven("transformers is not installed")
        return ""
    small = small_candidate(candidate, workload)
    kind = repr((_sources(), small, replace(workload, name="", source=""), type(config).__name__))
    key = hashlib.sha256(kind.encode()).hexdigest()
    if key not in _known:
        passed = _passed_file()
        if passed.is_file() and key in passed.read_text().split():
            _known[key] = "", ""
        else:
            if begins is not None:
                begins()
            _known[key] = _checked(small, small_config(workload, small, config))
            if not any(_known[key]):
                _remember(passed, key)
    problem, reason = _known[key]
    if reason and unproven is not None:
        unproven(reason)
    return problem


@cache
def _sources() -> str:
    """Returns what identifies the code that is checked, and that checks."""
    package = Path(__file__).parents[1]
    files = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(package.rglob("*.py"))]
    return repr((files, torch.__version__, version("transformers")))


def _passed_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuronx_dist" / "checked_plans.txt"


def _remember(file: Path, key: str) -> None:
    """Adds a line to the file of kinds that have passed, if it can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(key + "\n")
    except OSError:
        pass  # the next process checks again


def small_candidate(candidate: Candidate, workload: Workload) -> Candidate:
    """Returns the candidate of a plan's kind on few ranks; where tp pads or replicates, it stays."""
    layout = candidate.layout
    heads = padded_heads(workload.heads, workload.kv_heads, layout.tp)
    is_even = heads == (workload.heads, workload.kv_heads, 1) and not layout.pad_vocab
    tp = _least_factor(layout.tp) if is_even or not workload.divides_attention else layout.tp
    pp, cp, ep = (_least_factor(getattr(layout, name)) for name in ("pp", "cp", "ep"))
    dp = min(layout.dp, 2)
    if dp * cp % ep:
        dp *= ep
    microbatches = min(layout.num_microbatches, 2)
    small = replace(
        layout,
        world_size=tp * pp * cp * dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        num_microbatches=microbatches,
        global_batch=dp * microbatches,
        seq_len=4 * tp * cp,
        virtual_pipeline_size=min(layout.virtual_pipeline_size, 2),
    )
    return replace(candidate, layout=small, compiled=False)


def small_config(workload: Workload, small: Candidate, config: Any = None) -> Any:
    """Returns a config of the model with as many layers as there are pieces of a pipeline, at least 2."""
    config = _config_of(workload) if config is None else copy.deepcopy(config)
    text = config.get_text_config()
    layers = max(2, small.schedule.num_virtual_stages)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = 1
    text.use_cache = False
    return config


def _config_of(workload: Workload) -> Any:
    """Returns a config with the weights of a workload, of which no config is known."""
    import transformers

    weights = [weight for block in workload.blocks for weight in block.weights]
    has_norms = any(weight.split == "partial" for weight in weights)
    names = ("vocab", "hidden", "intermediate")
    sizes: dict[str, Any] = {f"{name}_size": getattr(workload, name) for name in names}
    sizes |= dict(num_attention_heads=workload.heads, num_key_value_heads=workload.kv_heads)
    sizes |= dict(tie_word_embeddings=workload.tied, num_hidden_layers=workload.layers)
    experts, per_token = workload.experts, workload.experts_per_token
    if not workload.divides_attention:
        return transformers.DeepseekV3Config(**sizes, n_routed_experts=experts, num_experts_per_tok=per_token)
    sizes |= dict(head_dim=workload.key_dim)
    if experts and has_norms:
        width = next(weight.shape[-1] for weight in weights if weight.is_expert and weight.split == "columns")
        moe = dict(num_experts=experts, num_experts_per_tok=per_token, moe_intermediate_size=width)
        return transformers.Qwen3MoeConfig(**sizes, **moe)
    if experts:
        return transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=per_token)
    if has_norms:
        return transformers.Qwen3Config(**sizes)
    has_bias = any(weight.split == "query" and len(weight.shape) == 1 for weight in weights)
    return transformers.LlamaConfig(**sizes, attention_bias=has_bias)


def _checked(small: Candidate, config: Any) -> tuple[str, str]:
    """Returns the first problem, and why types are not checked ("": they are)."""
    problem = _problem(small, config, "G")
    if problem:
        degrees: dict[str, Any] = dict(
            tp=1, pp=1, cp=1, ep=1, sequence_parallel=False, zero1=False, pad_heads=False, pad_vocab=False
        )
        batch: dict[str, Any] = dict(num_microbatches=1, global_batch=2, schedule=None, virtual_pipeline_size=1)
        plain = Candidate(replace(small.layout, world_size=2, **degrees, **batch), fused_loss=small.fused_loss)
        if untyped := _problem(plain, config, "G"):
            here, there = (text.partition("\n")[0] for text in (problem, untyped))
            reason = f"the checker refuses this model on two data ranks alone: {there}"
            return _problem(small, config, None), reason + f"; in the plan's layout: {here}" * (here != there)
    return problem, ""


def _problem(small: Candidate, config: Any, level: str | None) -> str:
    from transformers import AutoModelForCausalLM

    layout = small.layout

    def model_fn() -> tuple[Any, Any]:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=getattr(torch, layout.dtype))
        model: Any = pipelined(module, layout, fused_loss=small.fused_loss)
        if small.recompute:
            recompute(model, small.recompute)
        model.run_train = partial(_run_train, model, model.run_train)
        params = [param for param in model.local_parameters() if param.requires_grad]
        sgd = torch.optim.SGD  # any elementwise optimizer sends the same
        if not layout.zero1:
            return model, MasterWeightsOptimizer(params, sgd)
        return model, NeuronZero1Optimizer(
            params,
            sgd,
            overlap=small.overlap,
            bucket_cap_mb_all_gather=_ONE_BUCKET,
            bucket_cap_mb_reduce_scatter=_ONE_BUCKET,
        )

    ids = torch.zeros(layout.global_batch // layout.dp, layout.seq_len, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    if layout.cp > 1:
        inputs["position_ids"] = torch.arange(layout.seq_len).expand_as(ids)
    report = check(model_fn, inputs, layout.mesh(), level=level, confirm=False)
    return "" if report.ok else report.problems[0].message


def _run_train(model: Any, run_train: Callable[..., Any], **batch: torch.Tensor) -> Any:
    """Trains on this rank's part of the sequences.

    The optimizer's step is a phase of the check by itself: tp ranks, which differ in what they add to the norm of the
    gradients alone, play forward and backward once.
    """
    part = get_batch_on_this_context_parallel_rank(batch, balance="zigzag")
    return run_train(**part, num_items_in_batch=global_num_items(part["labels"], model.num_microbatches))


def _least_factor(number: int) -> int:
    """Returns the least divisor above 1, of 1 itself."""
    return next((n for n in range(2, number + 1) if number % n == 0), 1)
