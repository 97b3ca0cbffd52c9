"""Layouts of parameters over ranks, models of which a rank holds a part, and initial values.

shard_spec.py    the layout of one parameter: `ShardSpec`, `ShardedModule`
partial_model.py a model of which this rank holds a part: `PartialModel`
wrappers.py      refusal of DistributedDataParallel, FSDP and torch's checkpoints where ranks hold different shards
parametrized.py  refusal of torch's parametrizations and pruning where they need more than a rank's shard
equal_shards.py  a warning where two ranks hold one shard
host_memory.py   bytes of tensors, and tensors of bytes
torch_files.py   files of `torch.save`, read without running code
sums_file.py     checksums of a folder's files
materialize.py   initial values that no layout changes, for a model that was built on meta; init_device.py: building it
module_tree.py   a model's modules and parameters, cached until the model changes
"""

from __future__ import annotations

from ..lazy_names import lazy_names

__getattr__ = lazy_names(__name__, dict.fromkeys(("equal_shards", "parametrized", "wrappers"), "weights"))
