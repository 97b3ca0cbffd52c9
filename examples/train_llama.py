"""Trains a causal LM in any layout: `neuronx-dist train`, under the name that it had as an example.

neuronx-dist run --nproc-per-node 4 examples/train_llama.py --tp 2 --pp 2      # or: make train, or torchrun
"""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported

from neuronx_dist.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
