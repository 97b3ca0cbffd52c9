"""Pipeline parallelism: record a forward (`trace`), cut it into stages (`partition`), and run them by a schedule."""

from .cut.partition import create_partitions
from .model import NxDPPModel
from .record.recording import TracingError
from .schedule import Kind, Task, format_schedule, inference, one_f_one_b, simulate

__all__ = [
    "Kind",
    "NxDPPModel",
    "Task",
    "TracingError",
    "create_partitions",
    "format_schedule",
    "inference",
    "one_f_one_b",
    "simulate",
]
