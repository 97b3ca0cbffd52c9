"""Training by Lightning, in the style of NxD's `run_llama_nxd_ptl.py`, by Lightning's older name."""

import os

import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
from data import arguments, create_dataloader, options_of
from modeling_llama import Config, CoreAttention, DecoderLayer, LlamaForCausalLM, RMSNorm
from modeling_moe import (
    DbrxConfig,
    DbrxDecoderLayer,
    DbrxForCausalLM,
    MixtralConfig,
    MixtralDecoderLayer,
    MixtralForCausalLM,
)
from module_llama import NeuronLlamaLTModule
from neuronx_distributed.lightning import (
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.trainer import Trainer

MODELS = {
    "llama": (Config, DecoderLayer, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralDecoderLayer, MixtralForCausalLM),
    "dbrx": (DbrxConfig, DbrxDecoderLayer, DbrxForCausalLM),
}


class DataModule(LightningDataModule):
    def train_dataloader(self):
        assert self.trainer.strategy.data_parallel_size >= 1
        return create_dataloader()


def train(args):
    config_class, layer_class, model_class = MODELS[args.model]
    pipeline_config = None
    if args.pipeline_parallel_size > 1:
        pipeline_config = {
            "transformer_layer_cls": layer_class,
            "num_microbatches": args.num_microbatches,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "attention_mask", "labels"],
            "auto_partition": True,
            "param_init_fn": None,
            "leaf_module_cls": [RMSNorm.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": args.use_zero_1 > 0,
            "use_optimizer_wrapper": True,
            "broadcast_and_average_loss": False,
        }
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        context_parallel_size=args.context_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        pipeline_config=pipeline_config,
        optimizer_config={"zero_one_enabled": args.use_zero_1 > 0, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=args.sequence_parallel_enabled > 0,
        activation_checkpoint_config=CoreAttention if args.selective_checkpoint_enabled else layer_class,
    )
    model = NeuronLlamaLTModule(
        nxd_config=nxd_config,
        model_class=model_class,
        model_args=(config_class(**options_of(args)),),
        opt_cls=AdamW_FP32OptimParams,
        scheduler_cls=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, steps),
        opt_kwargs={"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.01},
        scheduler_args=(3,),
        train_batch_size=16,
        manual_opt=True,
    )
    callbacks = [NeuronTQDMProgressBar()]
    folder = args.checkpoint_dir
    if folder:
        saving = ModelCheckpoint(save_top_k=2, monitor="global_step", mode="max", every_n_train_steps=1, dirpath=folder)
        callbacks.append(saving)
    trainer = Trainer(
        strategy=NeuronXLAStrategy(nxd_config=nxd_config, save_load_xser=True),
        max_steps=3,
        plugins=[NeuronXLAPrecisionPlugin()],
        enable_checkpointing=bool(folder),
        logger=NeuronTensorBoardLogger(save_dir=os.path.join(folder, "logs")) if folder else False,
        log_every_n_steps=1,
        callbacks=callbacks,
    )
    trainer.fit(model=model, datamodule=DataModule())
    xm.master_print("Training finished!")


if __name__ == "__main__":
    train(arguments())
