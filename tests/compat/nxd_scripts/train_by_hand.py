"""A loop of its own, without the trainer, in the style of NxD's scripts for BERT, and by ZeRO-1 for GPT-NeoX."""

import os

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from data import arguments, create_dataloader, options_of
from modeling_llama import Config, LlamaForCausalLM
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import checkpointing, grads, parallel_state
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from neuronx_distributed.utils.model_utils import move_model_to_device


def train(args):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel_size)
    device = xm.xla_device()
    model = LlamaForCausalLM(Config(**options_of(args)))
    move_model_to_device(model, device)
    model.train()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    if args.use_zero_1:
        optimizer = NeuronZero1Optimizer(
            groups,
            AdamW_FP32OptimParams,
            lr=0.01,
            eps=1e-8,
            pin_layout=False,
            sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
            grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
            grad_clipping=True,
            max_norm=1.0,
        )
    else:
        optimizer = AdamW_FP32OptimParams(groups, lr=0.01, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    step = 0
    for batch in pl.MpDeviceLoader(create_dataloader(), device):
        optimizer.zero_grad()
        loss, _ = model(**batch)
        loss.backward()
        xm.mark_step()
        if args.sequence_parallel_enabled:
            grads.allreduce_sequence_parallel_gradients(optimizer)
        if args.use_zero_1:
            optimizer.step()
            norm = optimizer.grad_norm
        else:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            grads.bucket_allreduce_gradients(gradients)
            norm = grads.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        step += 1
        reduced = loss.detach() / parallel_state.get_data_parallel_size()
        xm.all_reduce(xm.REDUCE_SUM, [reduced], groups=parallel_state.get_data_parallel_group(as_list=True))
        if xm.is_master_ordinal(local=False):
            print(f"LOG {reduced.cpu().item():.7f} {norm.cpu().item():.6f}", flush=True)
    if args.checkpoint_dir:
        state = {"model": model.state_dict(), "global_step": step, "scheduler": scheduler.state_dict()}
        checkpointing.save(state, os.path.join(args.checkpoint_dir, f"step_{step}"), save_xser=True)
        if args.use_zero_1:
            optimizer.save_sharded_state_dict(args.checkpoint_dir)
    xm.rendezvous("finished")


if __name__ == "__main__":
    flags = arguments()
    dist.init_process_group("xla")
    train(flags)
