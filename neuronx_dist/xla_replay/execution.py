"""The process that executes programs of many devices: jaxlib's CPU client, a virtual device for each rank."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from .worker import serve

__all__ = ["Executor", "environment"]

Array = tuple[str, Any]  # dtype, and a numpy array (of 16-bit integers for bf16)


def environment(devices: int) -> dict[str, str]:
    return {
        # Compiling takes longer than anything else here, and half as long without optimisation.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_ENABLE_X64": "1",  # ids are int64
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }


class Executor:
    def __init__(self) -> None:
        self._compiled: dict[tuple[str, int], Any] = {}

    def __call__(self, request: tuple[bytes, list[list[Array]]]) -> list[list[Array]]:
        """Runs a program with each rank's arguments; gives each rank's results."""
        proto, arguments = request
        world_size = len(arguments)
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices("cpu")[:world_size]
        executable = self._executable(proto, devices)
        # Every rank's buffer has the same shape; that it is "replicated" says no more than this.
        sharding = NamedSharding(Mesh(np.array(devices), ("ranks",)), PartitionSpec())
        given = []
        for parameter in zip(*arguments):
            buffers = [jax.device_put(_to_jax(value), device) for value, device in zip(parameter, devices)]
            given.append(jax.make_array_from_single_device_arrays(buffers[0].shape, sharding, buffers))
        results = executable.execute_sharded(given).disassemble_into_single_device_arrays()
        return [[_from_jax(shards[rank]) for shards in results] for rank in range(world_size)]

    def _executable(self, proto: bytes, devices: list[Any]) -> Any:
        import numpy as np
        from jax._src import xla_bridge
        from jax._src.lib import xla_client

        key = (hashlib.sha256(proto).hexdigest(), len(devices))
        if key not in self._compiled:
            options = xla_client.CompileOptions()
            options.num_replicas, options.num_partitions = len(devices), 1
            assignment = np.arange(len(devices)).reshape(len(devices), 1)
            options.device_assignment = xla_client.DeviceAssignment.create(assignment)
            module = xla_client._xla.mlir.hlo_to_stablehlo(proto)
            client = xla_bridge.get_backend("cpu")
            self._compiled[key] = client.compile_and_load(module, xla_client.DeviceList(tuple(devices)), options)
        return self._compiled[key]


def _to_jax(value: Array) -> Any:
    dtype, array = value
    if dtype == "bfloat16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _from_jax(value: Any) -> Array:
    import numpy as np

    array = np.asarray(value)
    name = re.sub(r"_$", "", array.dtype.name)
    return (name, array.view(np.int16)) if name == "bfloat16" else (name, array)


def main() -> None:
    serve(Executor())
