"""Data of language models: rows for each data-parallel rank, packed documents, labels of instructions.

sampling.py    `DataParallelBatchSampler` for data sets with a length, `DataParallelStream` for iterables: every
               data-parallel rank gets its rows of a global batch, all tp, pp and cp ranks of a replica the same ones;
               a position that is saved at one dp size and loaded at another
packing.py     `pack`: documents of unequal lengths as rows of one length, with `position_ids` and labels
supervised.py  `encode_chat`, `encode_completion`: labels of assistants' turns and of completions alone

Files (arrow, parquet, jsonl) are read by `datasets`, batches loaded by `torch.utils.data.DataLoader`, or torchdata's
`StatefulDataLoader`, whose state contains the position: `docs/data.md` shows them together.
"""

from .packing import pack
from .sampling import DataParallelBatchSampler, DataParallelStream
from .supervised import encode_chat, encode_completion

__all__ = ["DataParallelBatchSampler", "DataParallelStream", "encode_chat", "encode_completion", "pack"]
