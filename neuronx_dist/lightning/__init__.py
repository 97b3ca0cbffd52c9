"""Parallel models, ZeRO-1 and checkpoints of any layout under Lightning's `Trainer`: for any module, and NxD's classes.

    Trainer(strategy=NxDStrategy(tp=2, pp=2), precision="bf16-true").fit(module, loader)    # docs/lightning.md

NxD's, for its scripts:

    config = neuronx_dist.neuronx_distributed_config(tensor_parallel_size=2, ...)
    module = NeuronLTModule(config, torch.optim.AdamW, scheduler, model_fn=build, opt_kwargs={"lr": 1e-3})
    Trainer(strategy=NeuronXLAStrategy(config), plugins=[NeuronXLAPrecisionPlugin()]).fit(module, loader)

Started by torchrun or `neuronx-dist run`, one process for each rank. Needs the package lightning.

nxd_strategy.py `NxDStrategy`: any `LightningModule`; zero1.py: ZeRO-1 of the optimizer that a module returns
mesh_strategy.py    the part of both strategies that joins the job and makes the mesh
strategy.py     `NeuronXLAStrategy`: saves each rank's part
module.py       `NeuronLTModule`: model, optimizer and training step by a configuration of the trainer
accelerator.py  the device of this rank; precision_plugin.py: the step of an optimizer
checkpoint_io.py  a folder with a file for each rank
logger.py, progress_bar.py   TensorBoard and tqdm on the rank that reports the loss
neuron_hooks_callback.py     files with inputs, outputs and gradients of layers
"""

try:
    from .accelerator import NeuronXLAAccelerator
    from .checkpoint_io import NeuronCheckpointIO
    from .logger import NeuronTensorBoardLogger
    from .module import NeuronLTModule
    from .neuron_hooks_callback import NeuronHooksCallback
    from .nxd_strategy import NxDStrategy
    from .precision_plugin import NeuronXLAPrecisionPlugin
    from .progress_bar import NeuronTQDMProgressBar
    from .strategy import NeuronXLAStrategy
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "neuronx_dist.lightning needs the package lightning, 2.6 or later: pip install lightning tensorboardX",
        name="lightning",
    ) from error

__all__ = [
    "NeuronCheckpointIO",
    "NeuronHooksCallback",
    "NeuronLTModule",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
    "NeuronXLAAccelerator",
    "NeuronXLAPrecisionPlugin",
    "NeuronXLAStrategy",
    "NxDStrategy",
]
