"""The same training twice: a plain Hugging Face Llama in one process, and ours on every rank of a layout.

`reference(options)` knows nothing of this package: a torch loop over the global batch, its loss the mean over the valid
labels. `train(case, ...)` is what one rank runs. Both report, for SGD and AdamW (`Case.updates`): the loss, gradient
norm and gradients of steps, the weights after the last one, and the loss of a further batch in evaluation.
"""

from __future__ import annotations

import functools
import math
import os
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.support.llama import tiny_llama
from tests.support.pipeline_training import CHUNKS

__all__ = ["Case", "Options", "Report", "distance", "reference", "train", "worst_difference"]

VOCAB, ROWS, SEQ = 60, 16, 8  # 16 rows: up to 4 data-parallel ranks of up to 4 microbatches
# The second step starts from updated weights, gathered, and has momentum; a third one is in tests/pipeline.
STEPS = 3 if os.environ.get("NXD_FULL") == "1" else 2
IGNORED = -100

# Sizes that are odd where they can be: at dp 2 and 4 the shards of ZeRO-1 are padded.
HEADS = {
    "gqa": dict(num_attention_heads=8, num_key_value_heads=4, hidden_size=32, head_dim=4),
    "padded": dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=27, head_dim=4),
    "replicated": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=24, head_dim=4),
    "one kv": dict(num_attention_heads=4, num_key_value_heads=1, hidden_size=24, head_dim=4, attention_bias=True),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "adamw": (torch.optim.AdamW, dict(lr=1e-3, weight_decay=0.1)),
}


@dataclass(frozen=True)
class Options:
    """Options of one process.

    Attributes:
        heads: "gqa" (8 query, 4 key/value heads); "padded" (9 and 3, which tp 2 and 4 do not divide); "replicated" (6
            and 2: at tp 4 each of these is on two ranks, and its group is padded); "one kv" (4 and 1, with biases).
        labels: "even"; "uneven" (rows with 0 to all labels); "empty" (the second half of the batch has none at all: a
            whole data-parallel rank, or a microbatch); "none" (no label anywhere).
        clip: norm to clip at; None: not.
    """

    heads: str = "gqa"
    tied: bool = False
    layers: int = 2
    labels: str = "uneven"
    clip: float | None = None
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Case:
    """A layout, and all the rest that must not change what one process computes.

    `optimizer` is "plain" torch, "master" weights, or "zero1"; `schedule` the pipeline's, None: 1F1B; `device` where
    the ranks and the one process compute.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    optimizer: str = "plain"
    microbatches: int = 1
    tied: bool = False
    heads: str = "gqa"
    labels: str = "uneven"
    clip: float | None = None
    dtype: torch.dtype = torch.float64
    calls: int = 1  # of run_train in a step: gradients are accumulated
    checkpointed: bool = False
    evaluate: bool = False  # run_eval as well; it records the model a second time, which takes as long as all steps
    schedule: str | None = None
    device: str = "cpu"
    updates: tuple[str, ...] = tuple(OPTIMIZERS)  # training runs once with each

    @property
    def mesh(self) -> nxd.Mesh:
        return nxd.Mesh(self.tp * self.pp * self.dp, tp=self.tp, pp=self.pp)

    @property
    def steps(self) -> int:
        """Three in float32, where AdamW's first step of gradients that are rounding alone shows in the second one."""
        return STEPS if self.dtype == torch.float64 else 3

    @property
    def chunks(self) -> int:
        return CHUNKS[self.schedule or "1f1b"]

    @property
    def options(self) -> Options:
        layers = {1: 2, 2: 3, 4: 4, 8: 8}[self.pp * self.chunks] + (self.chunks > 1 and self.pp == 2)
        return Options(self.heads, self.tied, layers, self.labels, self.clip, self.dtype)

    def __str__(self) -> str:
        words = [f"tp{self.tp}-pp{self.pp}-dp{self.dp}", f"mb{self.microbatches}", self.optimizer, self.labels]
        words += ["sp"] * self.sequence_parallel + ["tied"] * self.tied + [self.heads] * (self.heads != "gqa")
        words += [f"calls{self.calls}"] * (self.calls > 1) + ["checkpointed"] * self.checkpointed
        words += [self.schedule] * (self.schedule is not None) + ["clip"] * (self.clip is not None)
        words += ["fp32"] * (self.dtype == torch.float32) + [*self.updates] * (len(self.updates) == 1)
        return "-".join(words)


@dataclass
class Report:
    """Results of a run. Tensors are those of the whole model, by Hugging Face's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[int, dict[str, torch.Tensor]]  # by step, as the optimizer used them (after clipping)
    weights: dict[str, torch.Tensor]
    held_out: float | None = None


def config(options: Options) -> LlamaConfig:
    return tiny_llama(
        vocab_size=VOCAB,
        intermediate_size=44,
        num_hidden_layers=options.layers,
        max_position_embeddings=SEQ,
        tie_word_embeddings=options.tied,
        use_cache=False,
        initializer_range=0.2,
        **HEADS[options.heads],
    )


def _norm_in_its_own_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@functools.lru_cache
def _is_rms_norm(norm_class: type[nn.Module]) -> bool:
    """Returns whether a norm of this class is x / sqrt(mean(x^2) + variance_epsilon) * weight, tried on numbers."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        norm: Any = norm_class(4)
        x, _ = torch.randn(3, 4), norm.weight.copy_(torch.randn(4))
        return hasattr(norm, "variance_epsilon") and torch.allclose(norm(x), _norm_in_its_own_dtype(norm, x))


def without_float32_inside(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Hugging Face's norm rounds to float32 in the middle, where a last bit of float64 may become one of float32.

    Raises:
        TypeError: a norm computes something else than Llama's, as Gemma's does.
    """
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                if not _is_rms_norm(type(module)):
                    raise TypeError(f"{type(module).__name__} computes something else than LlamaRMSNorm")
                module.forward = types.MethodType(_norm_in_its_own_dtype, module)  # type: ignore[method-assign]
    return model


def optimizer_of(options: Options, name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    optimizer_class, arguments = OPTIMIZERS[name]
    if name == "adamw" and options.dtype == torch.float32:
        # A gradient of 1e-8 is rounding there; it is not to become a whole step.
        arguments = {**arguments, "eps": 1e-6}
    return optimizer_class, arguments


@functools.lru_cache(maxsize=256)
def initial_state(heads: str, tied: bool, layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of a whole model, the norms' too away from their trivial initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config(Options(heads, tied, layers))).to(dtype)
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.add_(torch.randn_like(param) * 0.1)
    return {name: value.detach() for name, value in model.state_dict().items()}


@functools.lru_cache(maxsize=64)
def batch(labels: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and (unshifted) labels of the whole global batch, `[ROWS, SEQ]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets = ids.clone()
    if labels in ("uneven", "empty"):
        share = torch.rand(ROWS, 1, generator=generator) ** 3  # many rows with few, few with many
        targets[torch.rand(ROWS, SEQ, generator=generator) > share] = IGNORED
        targets[0] = ids[0]
    if labels == "empty":
        targets[ROWS // 2 :] = IGNORED
    if labels == "none":
        targets[:] = IGNORED
    return ids, targets


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log p over the valid labels, each predicted from the tokens before it; 0 if there are none."""
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (labels[:, 1:] != IGNORED).sum().clamp(min=1)


@functools.lru_cache(maxsize=512)
def reference(options: Options, name: str, steps: int = STEPS, device: str = "cpu") -> Report:
    """One process on the device, plain torch and transformers, whose cosines of positions are float32 in any model."""
    model = LlamaForCausalLM(config(options)).to(options.dtype)
    model.load_state_dict(initial_state(options.heads, options.tied, options.layers, options.dtype))
    model.to(device)
    without_float32_inside(model, options.dtype)
    optimizer_class, arguments = optimizer_of(options, name)
    optimizer = optimizer_class(model.parameters(), **arguments)
    report = Report([], [], {}, {})
    for step in range(steps):
        ids, labels = (x.to(device) for x in batch(options.labels, step))
        loss = mean_loss(model(input_ids=ids).logits, labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if options.clip is None else options.clip)
        report.losses.append(float(loss.detach()))
        report.norms.append(float(norm))
        if step in (0, steps - 1):
            report.gradients[step] = {name: param.grad.clone().cpu() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    report.weights = {name: param.detach().clone().cpu() for name, param in model.named_parameters()}
    with torch.no_grad():
        ids, labels = (x.to(device) for x in batch(options.labels, steps))
        report.held_out = float(mean_loss(model.eval()(input_ids=ids).logits, labels))
    return report


# --- ours -------------------------------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    """This rank's part of the model, on meta."""
    options = case.options
    with torch.device("meta"):
        module = LlamaForCausalLM(config(options)).to(options.dtype)
    padded, fused = case.heads in ("padded", "replicated"), None if case.optimizer != "master" else False
    hf.swap(module, sequence_parallel=case.sequence_parallel, pad_heads=padded, fused_loss=fused)
    without_float32_inside(module, options.dtype)
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=case.microbatches,
        input_names=["input_ids", "labels", "num_items_in_batch"],
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=case.optimizer == "zero1",
        schedule=case.schedule,
        virtual_pipeline_size=case.chunks,
    )


def inputs(case: Case, step: int) -> dict[str, torch.Tensor]:
    """This rank's rows, and what the summed loss of a microbatch is divided by."""
    rank = comm.rank("dp")
    ids, labels = (rows.chunk(case.dp)[rank].to(case.device) for rows in batch(case.labels, step))
    items = nxd.global_num_items(labels, case.microbatches, dtype=case.dtype)
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": items}


def run_train(case: Case, model: Any, step: int) -> torch.Tensor:
    """The loss of a step: of `case.calls` calls, of which the last one reduces the gradients of all."""
    whole = inputs(case, step)
    rows = [
        {name: whole[name].chunk(case.calls)[call] for name in ("input_ids", "labels")} for call in range(case.calls)
    ]
    items = {"num_items_in_batch": whole["num_items_in_batch"]}
    with model.no_sync():
        losses = [model.run_train(**piece, **items) for piece in rows[:-1]]
    return sum([*losses, model.run_train(**rows[-1], **items)])


def make_optimizer(case: Case, name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer_class, arguments = optimizer_of(case.options, name)
    if case.optimizer == "plain":
        return optimizer_class(params, **arguments)
    wrapper = NeuronZero1Optimizer if case.optimizer == "zero1" else MasterWeightsOptimizer
    return wrapper(params, optimizer_class, max_norm=math.inf if case.clip is None else case.clip, **arguments)


def step_of(case: Case, optimizer: Any, params: list[nn.Parameter]) -> torch.Tensor:
    """One optimizer step; the norm before clipping. Leaves in `param.grad` what the optimizer used."""
    if case.optimizer == "plain":
        norm = grads.clip_grad_norm(iter(params), math.inf if case.clip is None else case.clip)
        optimizer.step()
        return norm
    seen: list[torch.Tensor] = []

    def look(base: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(shard.grad.clone() for group in base.param_groups for shard in group["params"])

    hook = optimizer.base_optimizer.register_step_pre_hook(look)
    optimizer.step()
    hook.remove()
    for param, shard in zip(params, seen):
        axis = ("dp", "cp") if case.optimizer == "zero1" else ()
        param.grad = comm.all_gather(shard, axis)[: param.shape[0]].clone()
    return optimizer.grad_norm


def train(case: Case, names: tuple[str, ...] = (), steps: int = 0) -> dict[str, Report]:
    """Returns this rank's results, by optimizer; the model is built once and loaded again for each.

    `steps`: 0: those of the case.
    """
    options, steps = case.options, steps or case.steps
    state = initial_state(options.heads, options.tied, options.layers, options.dtype)
    model = build(case)
    reports = {}
    for name in names or case.updates:
        hf.load_pretrained(model, state, device=case.device)
        model.train()
        if case.checkpointed:
            nxd.recompute(model)
        params = [param for param in model.local_parameters() if param.requires_grad]
        optimizer = make_optimizer(case, name, params)
        report = reports[name] = Report([], [], {}, {})
        for step in range(steps):
            loss = run_train(case, model, step)
            norm = step_of(case, optimizer, params)
            report.losses.append(float(loss.detach()))
            report.norms.append(float(norm))
            if step in (0, steps - 1):
                report.gradients[step] = _on_cpu(hf.full_state_dict(model, gradients=True))
            optimizer.zero_grad()
        report.weights = _on_cpu(hf.full_state_dict(model))
        if case.evaluate:
            report.held_out = float(model.run_eval(**inputs(case, steps)))
    return reports


def _on_cpu(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.cpu() for name, x in table.items()}


# --- comparing --------------------------------------------------------------------------------------------------------


def distance(actual: Any, expected: Any) -> float:
    """||a - b|| / ||b||, and ||a|| where b is zero; a NaN anywhere is infinitely far."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    if a.shape != b.shape:
        return math.inf
    result = float((a - b).norm() / (b.norm() or 1.0))
    return math.inf if math.isnan(result) else result


def differences(actual: Report, expected: Report) -> dict[str, float]:
    """Distance of every figure and tensor."""
    found = {}
    if actual.held_out is not None:
        found["held-out loss"] = distance(actual.held_out, expected.held_out)
    for what in ("losses", "norms"):
        a, b = getattr(actual, what), getattr(expected, what)
        assert len(a) == len(b)
        found.update({f"{what} of step {step}": distance(x, y) for step, (x, y) in enumerate(zip(a, b))})
    assert actual.gradients.keys() == expected.gradients.keys()
    tables = [
        (f"gradient of step {step}", actual.gradients[step], expected.gradients[step]) for step in actual.gradients
    ]
    for what, a, b in (*tables, ("weight", actual.weights, expected.weights)):
        for name in a.keys() | b.keys():
            found[f"{what}: {name}"] = distance(a[name], b[name]) if name in a and name in b else math.inf
    return found


def worst_difference(case: Case, results: list[dict[str, Report]]) -> tuple[float, str]:
    """The largest distance of any rank from one process, and what it is of."""
    worst = (0.0, "")
    for rank, reports in enumerate(results):
        for name, report in reports.items():
            expected = reference(case.options, name, len(report.losses), case.device)
            for what, value in differences(report, expected).items():
                worst = max(worst, (value, f"{what} ({name}, rank {rank})"))
    return worst
