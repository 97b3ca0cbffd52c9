"""Several tensors of one message between two pipeline stages: each for itself, or all in one buffer.

Two real processes over gloo on loopback: one sends, the other receives and answers with one number, so that the two do
not run ahead of each other. The buffer is packed by `cat` and taken apart into views; what the verbs do is in both.
Wall time of the slower rank and CPU time of both, per message, medians, and the median of the rounds' ratios.

    python benchmarks/one_buffer.py [--quick] [--tensors 2 4] [--sizes 1K 64K 1M] [--repeats N]

The last line is JSON: `{"2 tensors of 64K": {"one_over_each": wall, "one_over_each_cpu": CPU}, ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from common import Seconds, compared, heading, num_bytes, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist

import neuronx_dist as nxd
from neuronx_dist import comm

MESSAGES = 10  # in a round


def time_messages(tensors: int, size: int, repeats: int) -> dict[str, list[Seconds]]:
    """Seconds per message of `tensors` tensors of `size` bytes each, round by round."""
    nxd.initialize_model_parallel(pipeline_model_parallel_size=2)
    group, sends = comm.communicator("pp"), dist.get_rank() == 0
    values = [torch.full((size // 4,), float(index)) for index in range(tensors)]
    answer = torch.zeros(1)

    def one_by_one() -> list[torch.Tensor]:
        if sends:
            handles = [comm.send(x, group, dst=1, async_op=True) for x in values]
        else:
            handles = [comm.recv(torch.empty_like(x), group, src=0, async_op=True) for x in values]
        return [handle.wait() for handle in handles]

    def one() -> list[torch.Tensor]:
        if sends:
            comm.send(torch.cat(values), group, dst=1, async_op=True).wait()
            return values
        buffer = torch.empty(tensors * size // 4)
        return list(comm.recv(buffer, group, src=0, async_op=True).wait().split(size // 4))

    def messages(transfer: Callable[[], list[torch.Tensor]]) -> None:
        for _ in range(MESSAGES):
            arrived = transfer()
            (comm.recv if sends else comm.send)(answer, group, **{"src" if sends else "dst": 1 - dist.get_rank()})
        assert all(torch.equal(x, expected) for x, expected in zip(arrived, values))

    seconds = take_turns({"each": partial(messages, one_by_one), "one": partial(messages, one)}, repeats)
    nxd.destroy_model_parallel()
    return {name: [Seconds(x.wall / MESSAGES, x.cpu / MESSAGES) for x in rounds] for name, rounds in seconds.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tensors", type=int, nargs="+", default=[2, 4], help="of a message")
    options.add_argument("--sizes", nargs="+", default="1K 64K 1M".split(), help="bytes of each tensor")
    options.add_argument("--repeats", type=int, default=40, help="rounds")
    args = options.parse_args()
    heading("Tensors of a message: each for itself, and all in one buffer, float32, per message")
    print(f"{'':<14}{'wall ms':^34}{'CPU ms, both ranks':^34}")
    print(f"{'tensors':<8}{'bytes':>6}" + f"{'each':>9}{'one':>9}{'/ each':>8}{'±':>7} " * 2, flush=True)
    report: dict[str, dict[str, float]] = {}
    for tensors in args.tensors:
        for text in args.sizes:
            seconds = on_ranks(time_messages, 2, tensors, num_bytes(text), 6 if args.quick else args.repeats)
            line = f"{tensors:<8}{text:>6}"
            ratios = report[f"{tensors} tensors of {text}"] = {}
            for key, ratio in compared(seconds["one"], seconds["each"]).items():
                line += f"{ratio.base * 1e3:>9.3f}{ratio.seconds * 1e3:>9.3f}{ratio.ratio:>8.2f}{ratio.interval:>7.2f} "
                ratios[f"one_over_each{key}"] = round(ratio.ratio, 3)
            print(line, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
