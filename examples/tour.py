"""A notebook of marimo: eight ranks as threads of one kernel, types by example, schedules, a checked 70B model.

    marimo edit examples/tour.py      # in a browser; `pip install marimo`
    python examples/tour.py           # runs all cells, shows nothing

The cells need neuronx_dist and transformers, and no accelerator, processes or weights. The last one checks a step of
256 ranks, in half a minute.
"""

import marimo

app = marimo.App(width="medium", app_title="neuronx_dist: a tour")


@app.cell
def _():
    import marimo as mo
    import torch

    import neuronx_dist as nxd
    from neuronx_dist import Mesh, comm, spmd

    return Mesh, comm, mo, nxd, spmd, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Eight ranks in one kernel

    `comm.threads.run(mesh, function)` runs a function once for each rank, every rank in a thread. Collectives,
    parallel layers, pipelines and ZeRO-1 compute the values that they compute on eight processes. A mesh has an
    axis for each kind of parallelism; consecutive ranks are neighbours along tp.
    """)
    return


@app.cell
def _(Mesh, comm, mo):
    mesh = Mesh(8, tp=2, pp=2)

    def coordinates():
        return {"pp": comm.rank("pp"), "dp": comm.rank("dp"), "tp": comm.rank("tp")}

    ranks = comm.threads.run(mesh, coordinates)
    mo.ui.table([{"rank": rank, **place} for rank, place in enumerate(ranks)], selection=None)
    return mesh, ranks


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A tensor-parallel block equals one process

    A column-parallel and a row-parallel layer: each of the tp ranks holds a part of the hidden features, and one
    sum over the ranks makes the output whole. The weights are drawn whole and cut, so that any number of ranks
    begins with the same model.
    """)
    return


@app.cell
def _(Mesh, comm, nxd, torch):
    def block():
        torch.manual_seed(0)
        up = nxd.ColumnParallelLinear(16, 64, gather_output=False, dtype=torch.float64)
        down = nxd.RowParallelLinear(64, 16, input_is_parallel=True, dtype=torch.float64)
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
        with comm.record() as log:
            loss = down(torch.nn.functional.gelu(up(x))).square().mean()
            loss.backward()
        return loss.item(), list(up.weight.shape), [call.verb for call in log]

    losses = {tp: comm.threads.run(Mesh(tp, tp=tp), block) for tp in (1, 2, 4, 8)}
    assert all(abs(loss - losses[1][0][0]) < 1e-15 for ranks_ in losses.values() for loss, _, _ in ranks_)
    return (losses,)


@app.cell
def _(losses, mo):
    mo.ui.table(
        [
            {"tp": tp, "loss": f"{loss:.12f}", "rank 0's up weight": str(shape), "collectives": ", ".join(calls)}
            for tp, ((loss, shape, calls), *_) in losses.items()
        ],
        selection=None,
    )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Types

    Along each axis a tensor has a type, which says what the ranks' values mean: **R** equal on all ranks, **I**
    equal, and used by all ranks in the same way, **V** different on each rank, **P** a summand of the value.
    `S(dim)` is a V whose ranks hold the parts of one tensor. `SpmdTypeMode` follows the types through any torch
    code.
    """)
    return


@app.cell
def _(Mesh, comm, spmd, torch):
    def types():
        x = spmd.assert_type(torch.ones(4, 8), {"tp": spmd.R})
        w = spmd.assert_type(torch.ones(8, 4), {"tp": spmd.S(0)})  # this rank's rows of a weight with 16
        features = spmd.assert_type(torch.ones(4, 8), {"tp": spmd.S(1)})  # this rank's 8 of 16 features
        found = {}
        with spmd.SpmdTypeMode():
            found["x + 1"] = spmd.get_local_type(x + 1)["tp"]
            found["features * 2"] = spmd.get_local_type(features * 2)["tp"]
            product = features @ w  # a sum over features that are on other ranks
            found["features @ w"] = spmd.get_local_type(product)["tp"]
            found["all_reduce(features @ w)"] = spmd.get_local_type(spmd.all_reduce(product, "tp", dst=spmd.R))["tp"]
        return {name: str(type_) for name, type_ in found.items()}

    found_types = comm.threads.run(Mesh(2, tp=2), types)[0]
    return (found_types,)


@app.cell
def _(found_types, mo):
    mo.ui.table([{"expression": name, "type on tp": type_} for name, type_ in found_types.items()], selection=None)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A forgotten sum

    The block below has no collective after its second product. Every rank computes a number that looks like a loss.
    `spmd.check` plays all ranks on tensors without values, and says what is wrong, where, and how it is mended.
    """)
    return


@app.cell
def _(nxd, spmd, torch):
    class Forgotten(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nxd.ColumnParallelLinear(16, 64, gather_output=False)
            self.down = nxd.RowParallelLinear(64, 16, input_is_parallel=True, bias=False)

        def forward(self, x):
            features = torch.nn.functional.gelu(self.up(x))
            return (features @ self.down.weight.t()).square().mean()  # the sum over tp is missing

    report = spmd.check(Forgotten, torch.zeros(4, 16), mesh={"tp": 2, "dp": 4})
    assert not report.ok
    return (report,)


@app.cell
def _(mo, report):
    mo.md(f"```text\n{report}\n```")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # A pipeline's schedule

    Each row is a stage, each box the forward or backward pass of a microbatch. The slider changes the number of
    microbatches: more of them make the idle share, at the beginning and the end, smaller.
    """)
    return


@app.cell
def _(mo):
    microbatches = mo.ui.slider(4, 16, value=8, step=4, label="microbatches", show_value=True)
    microbatches
    return (microbatches,)


@app.cell
def _(microbatches):
    from neuronx_dist.pipeline import Costs, OneFOneB, ZeroBubbleV, simulate
    from neuronx_dist.pipeline.timeline.chart import simulated
    from neuronx_dist.pipeline.timeline.scene import draw
    from neuronx_dist.pipeline.timeline.svg import svg

    schedules = {"1f1b": OneFOneB(4, microbatches.value), "zb_v": ZeroBubbleV(4, microbatches.value)}
    idle = {name: simulate(schedule).bubble for name, schedule in schedules.items()}
    picture = svg(draw([simulated(name, schedule, Costs()) for name, schedule in schedules.items()]))
    return idle, picture


@app.cell
def _(idle, mo, picture):
    shares = ", ".join(f"{name} {share:.1%}" for name, share in idle.items())
    mo.vstack([mo.Html(picture), mo.md(f"Idle: {shares}")])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # A 70B model on 256 ranks, checked here

    A Llama with the sizes of 70B, built by transformers on the meta device, swapped to parallel layers, cut into
    four stages: one training step of every rank that can differ from the others, without weights.
    """)
    return


@app.cell
def _():
    import check_llama

    llama = check_llama.check("70b", tp=8, pp=4, dp=8, sequence_parallel=True)
    assert llama.ok
    return (llama,)


@app.cell
def _(llama, mo):
    mo.md(f"```text\n{llama}\n```")
    return


if __name__ == "__main__":
    app.run()
