"""`neuronx-dist train`: a Hugging Face causal LM, trained on text in any layout; checkpoints, figures, one-line errors.

command.py             the subcommand: joins a launcher's job, or starts ranks on this host
flags.py               flags in groups, their defaults and refusals, sizes of the model, `run.json` and back
auto_layout.py         `--auto`: the fastest layout by `nxd.plan`
training_run.py        the run of a rank, from its flags to the saved folder
loop.py                `train_step`, and the loop around it: evaluation, checkpoints, signals, non-finite values
causal_lm.py           config, model, optimizer and learning rate of a rank; the check of its program
text_stream.py         `TextStream`: text files as one stream of tokens, batches by (seed, step)
run_folder.py          choice of the folder that a run writes to
run_checkpoints.py     `RunCheckpoints`: saving, resuming in another layout
progress.py            `Progress`: a line or lines of a terminal, `metrics.jsonl`, the loss curve
layout_comparison.py   `--verify`: losses of several layouts beside those of one process
rank_exit.py           ends of a rank: refusals, signals, exit codes

`neuronx-dist train --help` lists all flags. Where a loop of your own begins: `loop.train_step` and `causal_lm.build`.
"""

from ..call_site import USER, hide

hide(__name__, USER)  # a program that uses the package: messages name its lines
