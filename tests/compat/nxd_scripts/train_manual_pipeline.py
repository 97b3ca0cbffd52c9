"""A pipeline of a list of layers, which the script puts on stages, in the style of NxD's manual partition."""

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from data import arguments, create_dataloader, options_of
from modeling_llama import Config, LlamaForCausalLM
from neuronx_distributed.parallel_layers import grads, parallel_state
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn


class Rotated(nn.Module):
    """A decoder layer with its own angles."""

    def __init__(self, layer, config):
        super().__init__()
        self.layer, self.dim = layer, config.hidden_size // config.num_attention_heads

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).float()
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angles = torch.cat((angles, angles), dim=-1)[None]
        return self.layer(x, angles.cos(), angles.sin())


def loss_of(logits, labels):
    losses = parallel_cross_entropy(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())
    return losses.sum() / labels.numel()


def stages_of(layers, stages):
    return {layer: min(i * stages // len(layers), stages - 1) for i, layer in enumerate(layers)}


def train(args):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_parallel_size, pipeline_model_parallel_size=args.pipeline_parallel_size
    )
    config = Config(**options_of(args))
    llama = LlamaForCausalLM(config)
    layers = [llama.embed_tokens, *(Rotated(layer, config) for layer in llama.layers), llama.norm, llama.lm_head]
    model = NxDPPModel(
        layers,
        num_microbatches=args.num_microbatches,
        manual_pp_partition=True,
        manual_pp_stage_partition_fn=stages_of,
        manual_pp_loss_fn=loss_of,
        broadcast_and_average_loss=True,
    )
    model.move_model_to_device()
    named = list(model.local_named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n and p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for n, p in named if "norm" in n or p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    for batch in create_dataloader():
        optimizer.zero_grad()
        loss = model.run_train(inputs=batch["input_ids"], labels=batch["labels"])
        norm = grads.clip_grad_norm(model.local_parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if xm.is_master_ordinal(local=False):
            print(f"LOG {loss.detach().cpu().item():.7f} {norm.cpu().item():.6f}", flush=True)
    xm.rendezvous("finished")


if __name__ == "__main__":
    flags = arguments()
    dist.init_process_group("xla")
    train(flags)
