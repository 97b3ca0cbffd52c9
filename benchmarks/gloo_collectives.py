"""gloo's own all_gather and reduce_scatter against ours, made of messages and of all_to_all (`comm/backends/c10d.py`).

Real processes on loopback, the two taking turns; wall time of the slowest rank and CPU time of all ranks together, per
call, medians, with the median of the rounds' ratios. Sizes are of the larger side: the gathered tensor, or the one that
is scattered. Both are called as a backend's primitives are; what the verbs around them cost is in `overhead.py`.

    python benchmarks/gloo_collectives.py [--quick] [--ranks 2 4] [--sizes 4K 64K 1M 4M 16M 64M] [--repeats N]

The last line is JSON: `{"all_gather 2 ranks 64M": {"ours_over_gloo": wall, "ours_over_gloo_cpu": CPU}, ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Seconds, compared, heading, num_bytes, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends.c10d import C10dCommunicator

VERBS = ("all_gather", "reduce_scatter")
# torch 2.13 renamed these.
gloo_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
gloo_reduce_scatter = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


def repeat(run: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        run()


def time_verb(verb: str, size: int, repeats: int) -> dict[str, list[Seconds]]:
    """Seconds per call of `ours` and `gloo`, round by round."""
    world = dist.get_world_size()
    nxd.initialize_model_parallel(tensor_model_parallel_size=world)
    axis = comm.communicator("tp")
    assert isinstance(axis, C10dCommunicator)
    torch.manual_seed(dist.get_rank())
    whole = torch.randn(size // 4)
    piece = whole[: whole.numel() // world].clone()

    def gloo() -> torch.Tensor:
        if verb == "all_gather":
            out = torch.empty_like(whole)
            gloo_all_gather(out, piece, group=axis.group, async_op=True).wait()
        else:
            out = torch.empty_like(piece)
            gloo_reduce_scatter(out, whole, group=axis.group, async_op=True).wait()
        return out

    def ours() -> torch.Tensor:
        if verb == "all_gather":
            out = torch.empty_like(whole)
            axis.start_all_gather(out.view(world, -1), piece).wait()
        else:
            out = torch.empty_like(piece)
            axis.start_reduce_scatter(out, whole.view(world, -1), "sum").wait()
        return out

    torch.testing.assert_close(ours(), gloo())
    calls = max(1, min(50, (4 << 20) // size))  # a round of small ones takes milliseconds
    seconds = take_turns({"ours": partial(repeat, ours, calls), "gloo": partial(repeat, gloo, calls)}, repeats)
    nxd.destroy_model_parallel()
    return {name: [Seconds(one.wall / calls, one.cpu / calls) for one in rounds] for name, rounds in seconds.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    options.add_argument("--sizes", nargs="+", default="4K 64K 1M 4M 16M 64M".split(), help="bytes of the larger side")
    options.add_argument("--repeats", type=int, help="rounds (default: 60, from 16M on 20)")
    args = options.parse_args()
    heading("gloo's own collectives and ours, float32, per call")
    print(f"{'':<33}{'wall ms':^34}{'CPU ms, all ranks':^34}")
    print(f"{'verb':<15}{'ranks':>6}{'bytes':>8}    " + f"{'gloo':>9}{'ours':>9}{'/ gloo':>8}{'±':>7} " * 2, flush=True)
    report: dict[str, dict[str, float]] = {}
    for verb in VERBS:
        for ranks in args.ranks:
            for text in args.sizes:
                size = num_bytes(text)
                repeats = args.repeats or (6 if args.quick else 60 if size < 16 << 20 else 20)
                seconds = on_ranks(time_verb, ranks, verb, size, repeats)
                line = f"{verb:<15}{ranks:>6}{text:>8}    "
                ratios = report[f"{verb} {ranks} ranks {text}"] = {}
                for key, ratio in compared(seconds["ours"], seconds["gloo"]).items():
                    line += (
                        f"{ratio.base * 1e3:>9.3f}{ratio.seconds * 1e3:>9.3f}{ratio.ratio:>8.2f}{ratio.interval:>7.2f} "
                    )
                    ratios[f"ours_over_gloo{key}"] = round(ratio.ratio, 3)
                print(line, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
