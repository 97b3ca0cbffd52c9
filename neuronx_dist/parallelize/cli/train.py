"""The trainer as a command: `torchrun --nproc-per-node 2 -m neuronx_dist.parallelize.cli.train -f config.yaml`."""

from __future__ import annotations

import logging

from .trainer import Trainer

__all__ = ["main"]


def main() -> None:
    """Trains by the arguments of the command line; progress is logged by rank 0."""
    logging.basicConfig(level=logging.INFO)
    Trainer().run()


if __name__ == "__main__":
    main()
