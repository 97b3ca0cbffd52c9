"""Tensor parallelism with ZeRO-1, in the style of NxD's `tp_zero1_llama_hf_pretrain.py`."""

import os

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from data import arguments, create_dataloader, options_of
from modeling_llama import Config, LlamaForCausalLM, init_weights
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import requires_init_pg_override
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from neuronx_distributed.utils.batch_utils import get_batch_on_this_context_parallel_rank

torch.cuda.is_bf16_supported = lambda: True


def train(args):
    config = Config(**options_of(args))
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        context_parallel_size=args.context_parallel_size,
        optimizer_config={"zero_one_enabled": args.use_zero_1 > 0, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=args.sequence_parallel_enabled > 0,
        model_init_config={"meta_device_init": True, "param_init_fn": init_weights}
        if args.use_meta_device_init
        else None,
    )
    device = xm.xla_device()
    model = nxd.initialize_parallel_model(nxd_config, lambda: LlamaForCausalLM(config))
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW_FP32OptimParams, groups, lr=0.01, eps=1e-8)
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    loader = pl.MpDeviceLoader(create_dataloader(), device)
    usteps, ustep, running_loss = 2, 0, torch.zeros(1, dtype=torch.double).to(device)
    for batch in loader:
        pieces = [{name: x.chunk(usteps)[i] for name, x in batch.items()} for i in range(usteps)]
        for piece in pieces:
            if parallel_state.get_context_model_parallel_size() > 1:
                piece = get_batch_on_this_context_parallel_rank(piece)
            loss, _ = model(**piece)
            (loss / usteps).backward()
            running_loss += (loss / usteps).detach()
            ustep += 1
        xm.mark_step()
        reduced = running_loss / parallel_state.get_data_parallel_size()
        xm.all_reduce(xm.REDUCE_SUM, [reduced], groups=parallel_state.get_data_parallel_group(as_list=True))
        if parallel_state.get_context_model_parallel_size() > 1:
            reduced /= parallel_state.get_context_model_parallel_size()
            groups_of_cp = parallel_state.get_context_model_parallel_group(as_list=True)
            xm.all_reduce(xm.REDUCE_SUM, [reduced], groups=groups_of_cp)
        running_loss.zero_()
        optimizer.step()
        norm = optimizer.grad_norm
        optimizer.zero_grad()
        scheduler.step()

        def log(value, total_norm):
            if xm.is_master_ordinal(local=False):
                print(f"LOG {value.detach().cpu().item():.7f} {total_norm.cpu().item():.6f}", flush=True)

        xm.add_step_closure(log, (reduced.clone(), norm.detach()))
        xm.mark_step()
    if args.checkpoint_dir:
        nxd.save_checkpoint(args.checkpoint_dir, "last", model, optimizer, scheduler, {"ustep": ustep}, 8, True, -1)
    xm.master_print("ranks", xr.world_size())


def _mp_fn(index, args):
    train(args)
    xm.rendezvous("_mp_fn finished")


if __name__ == "__main__":
    flags = arguments()
    if os.environ.get("WORLD_SIZE"):
        if requires_init_pg_override():
            import torch_xla.experimental.pjrt_backend  # noqa: F401

            dist.init_process_group("xla", init_method="pjrt://")
        else:
            dist.init_process_group("xla")
        _mp_fn(0, flags)
    else:
        xmp.spawn(_mp_fn, args=(flags,))
