"""Device types: which one this machine has, and its streams, events, random generator, pinned memory and autocast.

machine.py         the accelerator of this machine; the module of a device type, the current device; float64 and sums
                   under autocast on a device type, lists of tensors in its optimizers
streams.py         streams, events, waits, pinned memory
random_numbers.py  the state of the accelerator's generator

All other rooms ask here, and name no device. The answers come from `torch.accelerator` and from the module that torch,
or the package of a device, registers under the name of a device type: `torch.cuda`, `torch.xpu`, `torch.neuron`. A
module may lack any function, so each one is looked up before it is called. XLA devices, whose operations become
programs, have no such module; `comm/backends/xla.py` is theirs.
"""

from ..lazy_names import lazy_names

_FILES = {
    "machine": (
        *("current_device", "current_type", "in_torch", "in_use", "module_of"),
        *("autocast_sums_stay_wide", "has_double", "updates_lists"),
    ),
    "streams": ("has_streams", "is_copied_aside", "pins_memory", "synchronize", "timing_event"),
    "random_numbers": ("random_state", "random_state_restored", "set_random_state"),
}

__getattr__ = lazy_names(__name__, {name: f"accelerator.{file}" for file, names in _FILES.items() for name in names})
