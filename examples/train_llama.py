"""Trains a Hugging Face causal LM on text, with tensor, sequence, pipeline, context and data parallelism and ZeRO-1.

    neuronx-dist run --nproc-per-node 4 examples/train_llama.py --tp 2 --pp 2      # or: make train, or torchrun
    python examples/train_llama.py                                                 # one process
    python examples/train_llama.py --save-every 50 --out runs/mine --resume auto   # goes on where it was interrupted

Without --model it is a small byte-level Llama. The data-parallel size is what tp, pp and cp leave of the processes.
"""

from __future__ import annotations

import copy
import math
import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import job
import run_folder
import torch
from checkpoints import Checkpoints, Run
from options import arguments, check_flags, layout_of, recomputation_of, record_of
from reporting import Report
from text_data import TextData, data_parallel_rows

import neuronx_dist as nxd
from neuronx_dist import comm, hf, metrics, spmd
from neuronx_dist.checkpoint.errors import CheckpointMismatch
from neuronx_dist.comm.launch import end_step
from neuronx_dist.comm.launchers import export_place
from neuronx_dist.optimizer import MasterWeightsOptimizer, MuonAdamW, NeuronZero1Optimizer, muon_groups
from neuronx_dist.planning.layout import Layout, format_bytes
from neuronx_dist.planning.memory import estimate_memory, optimizer_bytes

INPUTS = ["input_ids", "labels", "num_items_in_batch"]


def load_config(args: Namespace) -> tuple[Any, Any]:
    """The model's config, and its tokenizer if its folder has one."""
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, MixtralConfig

    if args.model is None:
        sizes = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
        tokens = dict(vocab_size=256, bos_token_id=None, eos_token_id=0)
        if args.experts:
            sizes |= dict(intermediate_size=256, num_local_experts=args.experts, num_experts_per_tok=2)
            return MixtralConfig(num_key_value_heads=4, max_position_embeddings=1024, **sizes, **tokens), None
        return LlamaConfig(num_key_value_heads=4, max_position_embeddings=1024, **sizes, **tokens), None
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {folder} has no config.json: give the folder of a Hugging Face model")
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer_config.json", "tokenizer.json"))
    return AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def assemble(args: Namespace, config: Any, say: Callable[[str], Any] | None = None) -> Any:
    """This rank's model, on the meta device: no values yet; `say` gets the table of --recompute auto."""
    from transformers import AutoModelForCausalLM

    nxd.model_parallel_manual_seed(args.seed)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    options = dict(pad_heads=args.pad_heads, pad_vocab=args.pad_vocab, fused_loss=args.fused_loss)
    hf.swap(module, sequence_parallel=args.sequence_parallel, inplace_logits=True, **options)
    model = nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=args.microbatches,
        virtual_pipeline_size=args.virtual_pipeline_size,
        schedule=args.schedule,
        input_names=[*INPUTS, "position_ids"] if args.cp > 1 else INPUTS,
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=args.zero1,
    )
    recomputation = recomputation_of(args)
    if recomputation is not None:
        layout = layout_of(args, comm.size("world"))
        bytes_of_state = optimizer_bytes(layout)
        inputs = example_batch(args, layout)
        inputs = {name: x[:, : layout.seq_len // args.cp] if x.ndim else x for name, x in inputs.items()}
        found = nxd.recompute(model, inputs=inputs, optimizer_bytes=bytes_of_state, **recomputation)
        if args.recompute == "auto" and say is not None:
            say(str(found))
    return model


def example_batch(args: Namespace, layout: Layout) -> dict[str, torch.Tensor]:
    """A batch of this rank by its shapes; its sequences are complete: `train_step` splits them over cp."""
    ids = torch.zeros(layout.global_batch // layout.dp, layout.seq_len, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.ones(())}
    if args.cp > 1:
        inputs["position_ids"] = torch.arange(layout.seq_len).expand_as(ids)
    return inputs


def build(args: Namespace, config: Any, device: torch.device, say: Callable[[str], Any] | None = None) -> Run:
    """Model, optimizer and learning-rate schedule of this rank: nothing but its own shards is ever allocated."""
    model = assemble(args, config, say)
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

    return Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


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
    if device is not None and device.type == "xla":  # a host step number would be a constant
        options["capturable"] = True
    elif device is not None and not args.allow_nonfinite:  # the weights stay those of the last good step
        options["skip_nonfinite"] = True
    return sharded([g for g in groups if g["params"]], optimizer_class, max_norm=clip, **options)


def check(args: Namespace, config: Any, layout: Layout, time_limit: float | None = None) -> Any:
    """Plays a step of all ranks in this process, without values; any number of ranks, in seconds."""

    def model_fn() -> tuple[Any, Any]:
        model = assemble(args, copy.deepcopy(config))
        return model, make_optimizer(args, model)

    return spmd.check(model_fn, example_batch(args, layout), layout.mesh(), step=train_step, time_limit=time_limit)


def check_before_launch(args: Namespace, config: Any, layout: Layout) -> str | None:
    """Returns the error if the ranks' programs do not fit together: the job ends with it."""
    job.say(f"checking the program of {layout.world_size} ranks, {args.check_limit:g} s at most (--no-check) ...")
    report = check(args, config, layout, args.check_limit)
    if any(problem.kind != "program" for problem in report.problems):
        return f"{report}\n(--no-check starts it all the same)"
    if report.problems:  # it could not be played
        print(f"warning: not checked, going on all the same: {report}\n", flush=True)
    elif not report.finished:
        print(f"warning: not checked to the end in {args.check_limit:g} s (--check-limit), going on\n", flush=True)
    else:
        report.show(hint="--check")
    return None


def with_num_items(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the sequences, and what their summed loss is divided by."""
    part = nxd.get_batch_on_this_context_parallel_rank(batch, balance="zigzag")  # over cp > 1 labels are shifted
    return {**part, "num_items_in_batch": nxd.global_num_items(part["labels"], model.num_microbatches)}


def train_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One optimizer step on this rank's rows: what is trained with, and what is checked."""
    loss: torch.Tensor = model.run_train(**with_num_items(model, batch))
    optimizer.step()
    optimizer.zero_grad()
    end_step()
    return loss


def train(
    args: Namespace,
    run: Run,
    data: TextData,
    device: torch.device,
    report: Report,
    checkpoints: Checkpoints | None = None,
    profiler: Any = None,
) -> None:
    """The training loop, of this rank, from where the report is."""
    model, optimizer, schedule = run
    stages: list[int] = []  # with gradients that are not finite, in the last step
    optimizer.register_step_post_hook(lambda *_: stages.extend(stages_not_finite(optimizer, device)))

    def rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mine = data_parallel_rows(batch, comm.rank("dp"), comm.size("dp"))
        return {name: value.to(device) for name, value in mine.items()}

    for step in range(report.done + 1, args.steps + 1):
        lr = optimizer.param_groups[0]["lr"]
        loss, norm = float(train_step(model, optimizer, rows(data.batch(step)))), float(optimizer.grad_norm)
        schedule.step()
        if profiler is not None:
            profiler.step()
        report.step(step, loss=loss, grad_norm=norm, lr=lr)
        if not (args.allow_nonfinite or (math.isfinite(loss) and math.isfinite(norm))):
            report.interrupted()
            where = f" (gradients that are not finite: pipeline stage {', '.join(map(str, stages))})" if stages else ""
            saved = f"; {checkpoints.left()}" if checkpoints else ""
            leave_together(
                f"step {step} of {args.steps}: the loss is {loss}, the gradient norm {norm}{where}; this step is not "
                f"made{saved}. Try a lower --lr, a longer --warmup or another --seed; --allow-nonfinite trains on"
            )
        if args.eval_every and step % args.eval_every == 0:
            held_out = (with_num_items(model, rows(data.held_out_batch(i))) for i in range(4))
            report.held_out(sum(float(model.run_eval(**batch)) for batch in held_out) / 4)
        if checkpoints is not None:
            report.flush()
            end_if_asked(step, args, run, device, report, checkpoints)
            checkpoints.after_step(step, run)
            report.mark()


def stages_not_finite(optimizer: Any, device: torch.device) -> list[int]:
    """Pipeline stages that have a gradient which is not finite; all ranks call this after a step."""
    if math.isfinite(optimizer.grad_norm):
        return []
    grads = [shard.master.grad for shard in optimizer.shards if shard.master.grad is not None]
    found = torch.zeros(comm.size("pp"), device=device)
    found[comm.rank("pp")] = float(not all(grad.isfinite().all() for grad in grads))
    return comm.all_reduce(found, "world", op="max").nonzero().flatten().tolist()


def end_if_asked(
    step: int, args: Namespace, run: Run, device: torch.device, report: Report, checkpoints: Checkpoints
) -> None:
    """Ends all ranks after this step, with a checkpoint, if a signal has asked any of them to end."""
    signal = int(comm.all_reduce(torch.tensor(job.asked_to_end(), device=device), "world", op="max"))
    if signal:
        error = checkpoints.save(step, run, finish=True)
        done = report.interrupted()
        comm.barrier()  # the first rank that ends ends the others
        nxd.destroy_model_parallel()
        saved = f", not saved: {error}" if error else f" and saved; go on with --resume --out {args.out}"
        job.leave_interrupted(signal, done + saved)


def main() -> None:
    args = arguments(__doc__)
    rank = job.RANK
    try:  # refuse what cannot work before anything is allocated
        check_flags(args)
        export_place()
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if args.check is not None and world == 1:
            world = args.check or args.tp * args.pp * args.cp
        config, tokenizer = load_config(args)
        layout = layout_of(args, world)
        layout.check(config, data=args.data or ())
        if args.check is not None:
            report = check(args, config, layout)
            if rank == 0:
                report.show(details=True)
            job.leave(code=0 if report.ok else 1)
        text = dict(seq_len=args.seq_len, global_batch=args.global_batch, seed=args.seed, tokenizer=tokenizer)
        data = TextData(args.data, max_bytes=round(args.data_limit * 2**20) or None, **text)
        job.say(data.summary)
        if data.vocab_size > config.vocab_size:
            raise ValueError(f"the text has tokens up to {data.vocab_size}, the model knows {config.vocab_size}")
        device = nxd.init_distributed(args.device)  # before any backward: torch counts devices at the first
        recomputation = recomputation_of(args)
        memory = None
        if rank == 0:
            optimizer_class = MuonAdamW if args.optimizer == "muon" else torch.optim.AdamW
            options = dict(recomputation=recomputation, fused_loss=args.fused_loss, optimizer_class=optimizer_class)
            memory = estimate_memory(layout, config, **options)
    except ValueError as error:
        job.leave(str(error), job.WRONG_USE)
    if args.verify:
        import verify

        job.on_interrupt(lambda: "while layouts were compared; nothing was written")
        job.leave(code=verify.main(args, config, data, device))
    nxd.initialize_model_parallel(args.tp, args.pp, context_parallel_size=args.cp, expert_model_parallel_size=args.ep)
    try:
        run_in(args, config, layout, data, tokenizer, device, memory)
    except comm.RemoteRankError as error:
        job.leave_without(error.rank, str(error))
    comm.barrier()
    nxd.destroy_model_parallel()


def run_in(
    args: Namespace, config: Any, layout: Layout, data: TextData, tokenizer: Any, device: torch.device, memory: Any
) -> None:
    """The run, of this rank, in the folder that is its own."""
    rank = job.RANK
    try:
        launches = run_folder.choose(args, layout)
    except ValueError as error:
        leave_together(str(error), job.WRONG_USE)
    if layout.world_size > 1 and not args.no_check:
        refusal = comm.broadcast_object(check_before_launch(args, config, layout) if rank == 0 else None)
        if refusal:
            leave_together(refusal, job.WRONG_USE)
    job.say(f"{layout.picture(config)}\n\n{memory or ''}\n\nbuilding the model; the first step records it ...")
    checkpoints = Checkpoints(args, config, data.checksum, job.say)
    run = build(args, config, device, job.say)
    try:
        run_folder.make(args)
        done = checkpoints.resume(run)
    except ValueError as error:
        leave_together(str(error), job.WRONG_USE)
    except nxd.CheckpointError as error:  # of the newest checkpoint another attempt may read what this one could not
        named = args.resume not in (None, "", "auto")
        leave_together(str(error), job.WRONG_USE if named or isinstance(error, CheckpointMismatch) else 1)
    title = f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp}" + f" × cp {layout.cp}" * (layout.cp > 1)
    meter = make_meter(args, config, device, memory)
    shown = dict(out=args.out, log_every=args.log_every, active=rank == 0, title=title, done=done, meter=meter)
    shown |= dict(record=record_of(args, layout, launches), writers=writers_of(args, done))
    profile: Any = nullcontext()
    if args.profile:
        trace = Path(args.out) / f"profile.rank{rank}.json"
        profile = metrics.profile_steps(trace, args.profile, pipeline=run.model)
    with Report(args.steps, args.global_batch * args.seq_len, **shown) as report, profile as profiler:
        checkpoints.say = report.say
        job.end_after_step(lambda: f"{report.interrupted()}, not saved; earlier checkpoints stay")
        train(args, run, data, device, report, checkpoints, profiler)
    checkpoints.finish()
    folder = Path(args.out) / "model"
    try:
        hf.save_pretrained(run.model, folder, tokenizer=tokenizer)
    except OSError as error:
        leave_together(f"{error}; {checkpoints.left()}")
    comm.barrier()
    job.on_interrupt(lambda: f"after the last step; the weights are in {folder}: --model {folder} trains them further")
    job.say(f"mean loss of the last {min(20, args.steps)} steps {report.mean_loss(20):.4f}")
    say_memory(device, memory)
    job.say(f"metrics.jsonl, loss.png, run.json and model/ are in {args.out}")
    if not math.isfinite(report.mean_loss(1)):
        job.say("the last loss is not finite: the model writes no text")
    elif rank == 0:
        print("\nthe model goes on:\n" + data.continuation(folder, "def "))


def make_meter(args: Namespace, config: Any, device: torch.device, memory: Any) -> metrics.StepMeter:
    """The meter of this rank; rank 0 says by which numbers it counts FLOPs."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        flops = metrics.training_flops(AutoModelForCausalLM.from_config(config), args.seq_len)
    predicted = None if memory is None else memory.stages[comm.rank("pp")].peak
    meter = metrics.StepMeter(flops=flops, peak=args.peak, device=device, predicted_memory=predicted)
    peak = "not known (--peak)" if meter.peak is None else f"{meter.peak / 1e12:g} TFLOPs per second"
    job.say(f"{flops}; peak of a device {peak}")
    return meter


def writers_of(args: Namespace, done: int) -> list[Any]:
    """Writers of this rank, beside the report's: lines of other ranks than 0, TensorBoard of rank 0."""
    if job.RANK:
        return [metrics.JsonLines(Path(args.out) / f"metrics.rank{job.RANK}.jsonl", after=done)]
    return [metrics.TensorBoard(Path(args.out) / "tensorboard", after=done)] if args.tensorboard else []


def say_memory(device: torch.device, memory: Any) -> None:
    """Says the measured peak memory of a rank beside the predicted one; all ranks call it."""
    peaks = [peak for peak in comm.gather_objects(metrics.peak_memory(device)) if peak is not None]
    if peaks and memory is not None:
        of_process = " (of the process, with its imports)" if device.type == "cpu" else ""
        measured = f"{format_bytes(max(peaks))} measured{of_process}"
        job.say(f"peak memory of a rank: {measured}, {format_bytes(memory.peak)} predicted for tensors")


def leave_together(message: str, code: int = 1) -> NoReturn:
    """Ends all ranks, each of which calls this."""
    comm.barrier()  # the first rank that ends ends the others
    nxd.destroy_model_parallel()
    job.leave(message, code, together=True)


if __name__ == "__main__":
    main()
