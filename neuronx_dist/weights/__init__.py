"""How parameters are laid out over ranks, models of which a rank holds a part, and initial values.

shard_spec.py    how one parameter is sharded, and what marks it so
partial_model.py a model of which this rank holds a part: `PartialModel`
host_memory.py   bytes of tensors, and tensors of bytes
materialize.py   values for a model that was built on meta
"""
