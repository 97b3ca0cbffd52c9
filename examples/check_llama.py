"""Checks a large Llama in one process: no processes, no weights, no accelerator, in seconds.

    python examples/check_llama.py --size 70b --tp 8 --pp 4 --sequence-parallel

plays a training step of every rank that can differ from the others on tensors that have shapes and no values, and
compares what all ranks communicate. It prints the report, the time and the memory that it took.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch

import neuronx_dist as nxd
from neuronx_dist import hf, spmd
from neuronx_dist.checking.report import Report
from neuronx_dist.pipeline.schedule.selection import NAMES as SCHEDULES

SIZES: dict[str, dict[str, Any]] = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}
MICROBATCHES = 16


def build(
    size: str, sequence_parallel: bool, schedule: str | None = None, virtual_pipeline_size: int = 1
) -> tuple[Any, Any]:
    """Builds the objects of a training script, up to the point where weights would be needed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SIZES[size],
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=size == "1b",
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hf.swap(module, sequence_parallel=sequence_parallel, inplace_logits=True)
    model = nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=MICROBATCHES,
        virtual_pipeline_size=virtual_pipeline_size,
        schedule=schedule,
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=True,
    )
    params = [param for param in model.local_parameters() if param.requires_grad]
    return model, nxd.NeuronZero1Optimizer(params, torch.optim.AdamW, lr=1e-4)


def check(
    size: str,
    tp: int = 8,
    pp: int = 1,
    dp: int = 1,
    seq_len: int = 4096,
    rows: int = 2,
    sequence_parallel: bool = False,
    schedule: str | None = None,
    virtual_pipeline_size: int = 1,
) -> Report:
    """Checks one training step of all ranks, with `rows` sequences of `seq_len` tokens in a microbatch."""

    def inputs() -> dict[str, torch.Tensor]:
        ids = torch.zeros(rows * MICROBATCHES, seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "num_items_in_batch": nxd.global_num_items(ids, MICROBATCHES)}

    options = dict(
        size=size,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        virtual_pipeline_size=virtual_pipeline_size,
    )
    return spmd.check(build, inputs, {"pp": pp, "dp": dp, "tp": tp}, options=options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b", help="of the model (8b)")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size (8)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (1)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size (1)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the pipeline (1f1b; with several chunks interleaved)")
    parser.add_argument("--virtual-pipeline-size", type=int, default=1, help="pieces of the model on each stage (1)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split activations along the sequence")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a microbatch (2)")
    parser.add_argument("--details", action="store_true", help="print what was assumed, trusted and left out, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()

    started, started_cpu = time.perf_counter(), time.process_time()
    report = check(
        args.size,
        args.tp,
        args.pp,
        args.dp,
        args.seq_len,
        args.rows,
        args.sequence_parallel,
        args.schedule,
        args.virtual_pipeline_size,
    )
    seconds = time.perf_counter() - started
    if args.json:
        print(report.to_json(indent=2))
    else:
        report.show(details=args.details, hint="--details")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024) / 1024
    cost = f"{seconds:.1f} s, {memory:.2f} GiB at most, {time.process_time() - started_cpu:.1f} s of CPU"
    print(cost, file=sys.stderr if args.json else sys.stdout)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
