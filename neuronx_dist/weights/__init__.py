"""Layouts of parameters over ranks, models of which a rank holds a part, and initial values.

shard_spec.py    the layout of one parameter: `ShardSpec`, `ShardedModule`
partial_model.py a model of which this rank holds a part: `PartialModel`
host_memory.py   bytes of tensors, and tensors of bytes
materialize.py   initial values for a model that was built on meta; init_device.py: building it there
module_tree.py   a model's modules and parameters, cached until the model changes
"""
