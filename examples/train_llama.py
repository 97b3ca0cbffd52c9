"""Trains a Hugging Face causal LM on text, with tensor, sequence, pipeline and data parallelism and ZeRO-1.

    torchrun --nproc-per-node 4 examples/train_llama.py --tp 2 --pp 2      # or: make train
    python examples/train_llama.py                                         # one process

Without --model it is a small byte-level Llama. The data-parallel size is what tp and pp leave of the processes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from reporting import Report
from text_data import TextData, data_parallel_rows

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.layout import Layout, LayoutError
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer

INPUTS = ["input_ids", "labels", "num_items_in_batch"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hugging Face folder: its weights if it has any, else its config.json alone; default: a small Llama")
    add("--tp", type=int, default=1, help="tensor-parallel size (1)")
    add("--pp", type=int, default=1, help="pipeline-parallel size (1)")
    add("--sequence-parallel", action="store_true", help="shard activations between tp blocks along the sequence")
    add("--zero1", action="store_true", help="shard optimizer state over data-parallel ranks")
    add("--pad-heads", action="store_true", help="add zero heads where tp does not divide the heads")
    add("--microbatches", type=int, default=4, help="microbatches per step and data-parallel rank (4)")
    add("--global-batch", type=int, default=16, help="sequences per step, over all ranks (16)")
    add("--seq-len", type=int, default=128, help="tokens per sequence (128)")
    add("--steps", type=int, default=250, help="optimizer steps (250)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (2e-3); it decays to a tenth along a cosine")
    add("--warmup", type=int, default=20, help="steps of linear warm-up (20)")
    add("--weight-decay", type=float, default=0.1, help="AdamW's, on matrices (0.1)")
    add("--grad-clip", type=float, default=1.0, help="clip the gradient norm at this; 0 is off (1.0)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: bf16 parameters, fp32 masters")
    add("--seed", type=int, default=0, help="of weights and batches (0)")
    add("--device", choices=["auto", "cpu", "cuda", "xla"], default="auto", help="auto: cuda where there is one")
    add("--data", nargs="+", metavar="PATH", help="text files or folders; default: Python's library sources")
    add("--out", default="runs/llama", help="folder to write, which must not exist (runs/llama; a free name is found)")
    add("--log-every", type=int, default=10, help="steps between lines where there is no terminal (10)")
    add("--verify", action="store_true", help="train several layouts for --steps (at most 20), and compare their losses")
    args = parser.parse_args(argv)
    if "--out" not in " ".join(argv if argv is not None else sys.argv):
        args.out = next(str(p) for p in map(Path, [args.out, *(f"{args.out}-{i}" for i in range(2, 10**6))]) if not p.exists())
    return args


def load_config(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model's config, and its tokenizer if its folder has one."""
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig

    if args.model is None:
        sizes = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
        return LlamaConfig(vocab_size=256, max_position_embeddings=1024, bos_token_id=None, eos_token_id=0, **sizes), None
    if not (Path(args.model) / "config.json").is_file():
        raise LayoutError([f"--model {args.model} is no Hugging Face folder: it has no config.json; give a folder that has"])
    folder = Path(args.model)
    has_tokenizer = (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists()
    return AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def build(args: argparse.Namespace, config: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Model, optimizer and learning-rate schedule of this rank: nothing but its own shards is ever allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    hf.swap(module, sequence_parallel=args.sequence_parallel, pad_heads=args.pad_heads)
    model = nxd.NxDPPModel(
        module, transformer_layer_cls=hf.transformer_layer_class(module), num_microbatches=args.microbatches, input_names=INPUTS,
        output_loss_value_spec={"loss": True, "logits": False}, auto_partition=True, broadcast_and_average_loss=True,
        use_zero1_optimizer=args.zero1,
    )
    if args.model is not None and hf.has_weights(args.model):
        hf.load_pretrained(model, args.model, device=device)
    else:
        hf.materialize(model, args.seed, device=device)
    params = [p for p in model.local_parameters() if p.requires_grad]
    groups = [dict(params=[p for p in params if p.dim() > 1]), dict(params=[p for p in params if p.dim() <= 1], weight_decay=0.0)]
    optimizer = (NeuronZero1Optimizer if args.zero1 else MasterWeightsOptimizer)(
        [group for group in groups if group["params"]], torch.optim.AdamW, max_norm=args.grad_clip or math.inf,
        lr=args.lr, weight_decay=args.weight_decay, betas=(0.9, 0.95),
    )

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(args: argparse.Namespace, config: Any, data: TextData, device: torch.device, report: Report) -> Any:
    """The training loop, of this rank."""
    model, optimizer, schedule = build(args, config, device)

    def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mine = {name: rows.to(device) for name, rows in data_parallel_rows(batch, comm.rank("dp"), comm.size("dp")).items()}
        return {**mine, "num_items_in_batch": nxd.global_num_items(mine["labels"], args.microbatches)}

    for step in range(1, args.steps + 1):
        loss = model.run_train(**inputs(data.batch(step)))
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report.step(step, loss=float(loss), grad_norm=float(optimizer.grad_norm), lr=lr)
        if step % max(1, args.steps // 5) == 0:
            report.held_out(sum(float(model.run_eval(**inputs(data.held_out_batch(i)))) for i in range(4)) / 4)
    return model


def sample(folder: Path, data: TextData, prompt: str, count: int = 160) -> str:
    """Text that the saved model goes on with: it is loaded as any Hugging Face model is."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([data.encode(prompt)])
    found = model.generate(ids, max_new_tokens=count, do_sample=True, temperature=0.7, top_k=20, pad_token_id=0)
    return data.decode(found[0].tolist())


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:  # refuse what cannot work before anything is allocated
        config, tokenizer = load_config(args)
        layout = Layout(
            world, tp=args.tp, pp=args.pp, sequence_parallel=args.sequence_parallel, zero1=args.zero1, pad_heads=args.pad_heads,
            num_microbatches=args.microbatches, global_batch=args.global_batch, seq_len=args.seq_len, dtype=args.dtype,
        )
        layout.check(config, data=args.data or (), out=None if args.verify else args.out)
        data = TextData(args.data, seq_len=args.seq_len, global_batch=args.global_batch, seed=args.seed, tokenizer=tokenizer)
        device = nxd.init_distributed(args.device)
    except ValueError as error:
        sys.exit(f"train_llama: {error}" if rank == 0 else 1)
    if args.verify:
        import verify

        sys.exit(verify.main(args, config, data, device, layout))
    nxd.initialize_model_parallel(args.tp, args.pp)
    say = print if rank == 0 else lambda *_: None
    say(layout.picture(config))
    comm.barrier()  # every rank has checked --out before rank 0 makes it
    with Report(
        args.steps, args.global_batch * args.seq_len, out=args.out, log_every=args.log_every, active=rank == 0,
        title=f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp}",
    ) as report:
        model = train(args, config, data, device, report)
    folder = Path(args.out) / "model"
    hf.save_pretrained(model, folder, tokenizer=tokenizer)
    comm.barrier()
    say(f"mean loss of the last 20 steps {report.mean_loss(20):.4f}; metrics.jsonl, loss.png and model/ are in {args.out}")
    if rank == 0:
        say("\nthe model goes on:\n" + sample(folder, data, "def "))
    comm.barrier()
    nxd.destroy_model_parallel()


if __name__ == "__main__":
    main()
