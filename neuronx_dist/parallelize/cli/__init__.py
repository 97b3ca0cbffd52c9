"""nnScaler's trainer: a configuration, and training by it.

    torchrun --nproc-per-node 2 -m neuronx_dist.parallelize.cli.train -f config.yaml --max_epochs 4

trainer.py        `Trainer`; train.py: the command
trainer_args.py   `TrainerArgs`, the configuration; component_args.py: its parts; arg_parser.py: its text
mixed_module.py   the parallel model, or a model with parallel submodules
checkpoints.py    files of each rank, and merged ones
train_hook.py, loggers.py   what a run calls at its events, and with its figures

Names are nnScaler's, of files too: `nnscaler.cli.trainer` is `neuronx_dist.parallelize.cli.trainer`.
"""

from .component_args import AggregatedOutputs
from .loggers import LoggerBase, TensorBoardLogger, WandbLogger
from .train_hook import TrainHook
from .trainer import Trainer, TrainStatus
from .trainer_args import TrainerArgs

__all__ = [
    "AggregatedOutputs",
    "LoggerBase",
    "TensorBoardLogger",
    "TrainHook",
    "TrainStatus",
    "Trainer",
    "TrainerArgs",
    "WandbLogger",
]
