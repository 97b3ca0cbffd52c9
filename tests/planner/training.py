"""Training steps of a candidate's model on ranks as threads, and of the same model in one process."""

from __future__ import annotations

from typing import Any

import torch

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.planner.candidate import Candidate
from tests.support.llama_training import mean_loss, without_float32_inside

__all__ = ["ROWS", "SEQ", "batch", "build", "one_process", "train", "trained"]

ROWS, SEQ, LR = 8, 8, 1e-2
SGD = torch.optim.SGD


def _model(config: Any, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    return without_float32_inside(model, model.dtype)


def _rows(config: Any) -> torch.Tensor:
    return torch.arange(ROWS * SEQ).mul(7).reshape(ROWS, SEQ) % config.vocab_size


def build(candidate: Candidate, config: Any, optimizer_class: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    """Returns the rank's model, on meta, and its optimizer."""
    layout = candidate.layout
    module = _model(config, layout.dtype)
    hf.swap(
        module,
        sequence_parallel=layout.sequence_parallel,
        pad_heads=layout.pad_heads,
        pad_vocab=layout.pad_vocab,
        fused_loss=candidate.fused_loss,
    )
    model = nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=layout.num_microbatches,
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=layout.zero1,
        schedule=layout.schedule if layout.pp > 1 else None,
        virtual_pipeline_size=layout.virtual_pipeline_size,
    )
    if candidate.recompute:
        nxd.recompute(model, candidate.recompute)
    params = [param for param in model.local_parameters() if param.requires_grad]
    wrapper = nxd.NeuronZero1Optimizer if layout.zero1 else nxd.MasterWeightsOptimizer
    return model, wrapper(params, optimizer_class, lr=LR)


def batch(candidate: Candidate, config: Any) -> dict[str, torch.Tensor]:
    """Returns the rank's rows, and the number of labels."""
    layout = candidate.layout
    rows = _rows(config).chunk(layout.dp)[comm.rank("dp")]
    of_rank = {"input_ids": rows, "labels": rows.clone()}
    if layout.cp > 1:
        of_rank = {**nxd.get_batch_on_this_context_parallel_rank(of_rank, "zigzag")}
    items = nxd.global_num_items(of_rank["labels"], layout.num_microbatches, dtype=torch.float64)
    return {**of_rank, "num_items_in_batch": items}


def train(candidate: Candidate, config: Any, steps: int = 2) -> tuple[int, list[float], list[comm.Call]]:
    """Returns the rank's stage, the losses of the job, and the collectives of the last step."""
    model, optimizer = build(candidate, config)
    hf.materialize(model, seed=0)
    optimizer.init_zero()
    inputs, losses = batch(candidate, config), []
    for _ in range(steps):
        with comm.record() as calls:
            losses.append(float(model.run_train(**inputs)))
            optimizer.step()
        optimizer.zero_grad()
    return int(comm.rank("pp")), losses, calls


def trained(candidate: Candidate, config: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of steps of SGD, and the whole model's weights after them."""
    model, optimizer = build(candidate, config, SGD)
    hf.materialize(model, seed=0)
    optimizer.init_zero()
    losses = []
    for _ in range(steps):
        losses.append(float(model.run_train(**batch(candidate, config))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: weight.clone() for name, weight in hf.full_state_dict(model).items()}


def one_process(config: Any, steps: int = 3, dtype: str = "float64") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns what `trained` does, of the model in one process, with the same initial weights."""

    def rank_main() -> tuple[list[float], dict[str, torch.Tensor]]:
        module = _model(config, dtype)
        hf.materialize(module, seed=0)
        optimizer = SGD(module.parameters(), lr=LR)
        rows, losses = _rows(config), []
        for _ in range(steps):
            loss = mean_loss(module(input_ids=rows).logits, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, module.state_dict()

    return comm.threads.run(nxd.Mesh(1), rank_main)[0]
