"""Tensor, pipeline and data parallelism, in the style of NxD's `run_llama_nxd.py`."""

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from data import arguments, create_dataloader, options_of
from modeling_llama import Config, CoreAttention, DecoderLayer, LlamaForCausalLM, RMSNorm, init_weights
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.parallel_state import (
    get_pipeline_model_parallel_rank,
    get_tensor_model_parallel_rank,
)
from neuronx_distributed.utils.logger import get_logger

logger = get_logger()


def train(args):
    config = Config(**options_of(args))
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        pipeline_config={
            "transformer_layer_cls": DecoderLayer,
            "num_microbatches": args.num_microbatches,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "attention_mask", "labels"],
            "virtual_pipeline_size": args.virtual_pipeline_size,
            "auto_partition": True,
            "param_init_fn": None,
            "leaf_module_cls": [RMSNorm.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": args.use_zero_1 > 0,
            "use_optimizer_wrapper": True,
        },
        optimizer_config={"zero_one_enabled": args.use_zero_1 > 0, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=args.sequence_parallel_enabled > 0,
        activation_checkpoint_config=CoreAttention if args.selective_checkpoint_enabled else "full",
        model_init_config={"meta_device_init": True, "param_init_fn": init_weights}
        if args.use_meta_device_init
        else None,
    )
    model = nxd.initialize_parallel_model(nxd_config, lambda c: LlamaForCausalLM(c), True, config)
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, groups, lr=0.01, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    last = get_pipeline_model_parallel_rank() == args.pipeline_parallel_size - 1
    prints = last and get_tensor_model_parallel_rank() == 0  # the loss of each data-parallel rank
    loader, steps = create_dataloader(), 0
    if args.checkpoint_dir and nxd.has_checkpoint(args.checkpoint_dir):
        content = nxd.load_checkpoint(args.checkpoint_dir, None, model, optimizer, scheduler)
        logger.info("loaded step %s", content["steps"])
    for batch in loader:
        loss = model.run_train(**batch)
        optimizer.step()
        norm = optimizer.grad_norm
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
        xm.mark_step()
        if prints:
            print(f"LOG {loss.detach().cpu().item():.7f} {norm.cpu().item():.6f}", flush=True)
    if args.checkpoint_dir:
        content = {"steps": steps}
        nxd.save_checkpoint(
            args.checkpoint_dir,
            tag=f"step_{steps}",
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            user_content=content,
            num_kept_ckpts=-1,
            async_save=True,
        )
        nxd.finalize_checkpoint()


if __name__ == "__main__":
    flags = arguments()
    dist.init_process_group("xla")
    train(flags)
    xm.rendezvous("finished")
