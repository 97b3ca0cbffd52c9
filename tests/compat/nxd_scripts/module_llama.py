"""The module of `train_lightning.py`, in the style of NxD's `module_llama.py`."""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from neuronx_distributed.lightning import NeuronLTModule
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trainer import initialize_parallel_model, initialize_parallel_optimizer
from neuronx_distributed.utils.batch_utils import get_batch_on_this_context_parallel_rank


class NeuronLlamaLTModule(NeuronLTModule):
    def __init__(self, model_class, **options):
        super().__init__(**options)
        self.model_class = model_class

    def setup(self, stage=None):
        self.model = initialize_parallel_model(
            self.nxd_config, lambda config: self.model_class(config), True, *self.model_args, **self.model_kwargs
        )
        self.averaged_loss = torch.zeros(1, dtype=torch.double).to(xm.xla_device())
        self.print_pp_rank = 0 if self.log_rank0 else self.trainer.strategy.pipeline_parallel_size - 1

    def training_step(self, batch, batch_idx):
        xm.mark_step()
        for logger in self.trainer.loggers:
            logger.print_step = -1
        self.should_print = False
        batch = get_batch_on_this_context_parallel_rank(batch)
        if self.trainer.strategy.pipeline_parallel_size > 1:
            loss = self.model.run_train(**batch)
            last = self.trainer.strategy.pipeline_parallel_rank == self.print_pp_rank
            loss_detached = loss.detach() if last else None
        else:
            loss = self.model(**batch)[0] / self.grad_accum_steps
            loss.backward()
            self.averaged_loss += loss.detach()
            xm.mark_step()
        if not self.automatic_optimization and (batch_idx + 1) % self.grad_accum_steps == 0:
            self.should_print = True
            if self.trainer.strategy.pipeline_parallel_size == 1:
                loss_div = self.averaged_loss / self.trainer.strategy.data_parallel_size
                groups = parallel_state.get_data_parallel_replica_groups()
                loss_detached = xm.all_reduce(xm.REDUCE_SUM, loss_div, groups=groups).detach()
                self.averaged_loss.zero_()
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.step()
            self.global_norm = optimizer.grad_norm
            optimizer.zero_grad()
            scheduler.step()
            xm.mark_step()
            self.loss = loss_detached
            self.lr = self.lr_schedulers().get_last_lr()[0]
            self.input_ids = batch["input_ids"]
        return loss

    def configure_optimizers(self):
        groups = self.get_param_groups_by_weight_decay()
        optimizer = initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **self.opt_kwargs)
        optimizer.zero_grad()
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler}]

    def on_train_batch_end(self, *args, **kwargs):
        strategy = self.trainer.strategy
        prints = strategy.tensor_parallel_rank == 0 and strategy.pipeline_parallel_rank == self.print_pp_rank
        if self.trainer.strategy.pipeline_parallel_size == 1:  # elsewhere the loss of each data-parallel rank
            prints = prints and strategy.data_parallel_rank == 0
        if not self.automatic_optimization and self.should_print:
            if prints:
                loss = self.loss.detach().cpu().item()
                print(f"\nLOG {loss:.7f} {self.global_norm:.6f} {xr.global_ordinal()}", flush=True)
            loss = self.loss.detach().cpu().item() if self.loss is not None else torch.zeros(1, device="cpu")
            self.log("loss", loss, prog_bar=True)
            self.log("lr", self.lr, prog_bar=True)
            self.log("input_ids", torch.sum(self.input_ids.detach().cpu()).item(), prog_bar=True)
            self.log("global_step", self.global_step, prog_bar=True, on_step=True, on_epoch=True)
            for logger in self.trainer.loggers:
                logger.print_step = self.global_step
