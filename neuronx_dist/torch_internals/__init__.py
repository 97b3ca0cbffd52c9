"""The private names of torch that this package uses, each once, under a public name.

Adapting a new release of torch begins here: `tests/test_torch_internals.py` shows that every name exists in the
installed torch, and that no other file of the package names a private of torch. Each comment says what breaks without
the name.

    versions.py     versions that the tests ran on, and a warning for newer ones
    tensors.py      attributes and functions of tensors and storages; containers of tensors
    modules.py      members of `nn.Module`, and methods of torch's classes that ours extend
    weight_norms.py norms of weights, parametrizations and pruning
    autograd.py     the running backward, nodes of the graph, hooks on saved tensors, custom functions
    operators.py    operators of the dispatcher, of compiled code and of TorchScript
    low_level.py    forms of functions that compiled programs name, and those of a list of tensors
    fake_tensors.py tensors without values
    transforms.py   `torch.func`, `torch.vmap` and forward-mode AD
    dual_numbers.py the functions that make dual numbers of forward-mode AD, and take them apart
    data_parallel.py  parameters of `fully_shard`, of DistributedDataParallel and of whole state dicts
    distributed.py  process groups; files of `torch.distributed.checkpoint`

`torch_xla` has private names of its own, which `comm/host.py`, `comm/backends/` and `xla_replay/` use.
"""
