"""torch_xla's and torch_neuronx's functions that training scripts call, on any device, for machines without them.

xla_model.py             torch_xla.core.xla_model: device, rendezvous, collectives, steps, files
runtime.py               torch_xla.runtime: ranks and their number
xla_multiprocessing.py   `xmp.spawn`
parallel_loader.py       `MpDeviceLoader`
small_modules.py         checkpoint, serialization, metrics, autocast
top.py                   torch_xla itself; neuronx.py: torch_neuronx
groups.py                the mesh that these functions communicate on, before a script has made one too
"""
