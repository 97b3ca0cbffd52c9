"""The process that executes programs of many devices: jaxlib's CPU client, a virtual device for each rank."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .traces import Array
from .worker import serve

__all__ = ["ExecutionRequest", "ProgramExecutor", "environment"]


def environment(devices: int) -> dict[str, str]:
    return {
        # Compilation takes most of the time, and half as long without optimisation.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_ENABLE_X64": "1",  # ids are int64
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }


class ExecutionRequest(NamedTuple):
    """A program to run: its fingerprint, the ranks that run it together, and each rank's arguments."""

    fingerprint: str
    proto: bytes
    ranks: tuple[int, ...]
    arguments: list[list[Array]]


class ProgramExecutor:
    def __init__(self) -> None:
        self._compiled: dict[tuple[str, tuple[int, ...]], Any] = {}

    def __call__(self, request: ExecutionRequest) -> list[list[Array]]:
        """Returns each rank's results."""
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices("cpu")[: len(request.ranks)]
        executable = self._executable(request, devices)
        # "Replicated" only means that every rank's buffer has the same shape.
        sharding = NamedSharding(Mesh(np.array(devices), ("ranks",)), PartitionSpec())
        parameters = []
        for parameter in zip(*request.arguments):
            buffers = [jax.device_put(_to_jax(value), device) for value, device in zip(parameter, devices)]
            parameters.append(jax.make_array_from_single_device_arrays(buffers[0].shape, sharding, buffers))
        results = executable.execute_sharded(parameters).disassemble_into_single_device_arrays()
        return [[_from_jax(shards[index]) for shards in results] for index in range(len(devices))]

    def _executable(self, request: ExecutionRequest, devices: list[Any]) -> Any:
        import numpy as np
        from jax._src import xla_bridge
        from jax._src.lib import xla_client

        key = (request.fingerprint, request.ranks)
        if key not in self._compiled:
            options = xla_client.CompileOptions()
            options.num_replicas, options.num_partitions = len(devices), 1
            assignment = np.arange(len(devices)).reshape(len(devices), 1)
            options.device_assignment = xla_client.DeviceAssignment.create(assignment)
            module = _renumbered(xla_client._xla.mlir.hlo_to_stablehlo(request.proto), request.ranks)
            client = xla_bridge.get_backend("cpu")
            self._compiled[key] = client.compile_and_load(module, xla_client.DeviceList(tuple(devices)), options)
        return self._compiled[key]


def _renumbered(module: Any, ranks: tuple[int, ...]) -> Any:
    """Returns the module for `ranks` only: its replica groups inside of `ranks`, renumbered by position in `ranks`."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    position = {rank: index for index, rank in enumerate(ranks)}

    def renumber(operation: Any) -> Any:
        for name in ("replica_groups", "source_target_pairs"):
            if name in operation.attributes:
                groups = np.array(operation.attributes[name])
                if not groups.size:  # all ranks
                    continue
                ours = [[position[r] for r in group] for group in groups.tolist() if set(group) <= position.keys()]
                operation.attributes[name] = ir.DenseIntElementsAttr.get(
                    np.array(ours, np.int64).reshape(-1, groups.shape[-1])
                )
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        parsed.operation.walk(renumber)
        return mlir.module_to_bytecode(parsed)


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
    serve(ProgramExecutor())
