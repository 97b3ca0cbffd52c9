"""`CheckpointConverterBase` by NeuronX Distributed's name, flags and hooks: state dicts into NxD's files, and back.

    converter = CheckpointConverterLlama()       # a subclass, which overrides what its model needs
    converter.run(converter.get_arg_parser().parse_args())

The name of a tensor decides how it is divided, as upstream. `neuronx-dist convert` asks the model's layers instead, and
has one tensor in memory at a time, where hooks here get the whole state dict.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.convert.convert_command import progress_bar
from ..checkpoint.nxd.nxd_writing import DividedTensor, Part, as_it_is, write_files
from ..checkpoint.nxd.parameter_layout import part_rows
from ..checkpoint.nxd.rank_files import NxdFiles, StoredTensor, Writer, file_of
from ..checkpoint.storage import open_storage
from ..hf.sources import has_weights, open_source
from ..model_shape import stage_layers
from ..weights.shard_spec import ShardSpec
from ..weights.torch_files import read_plain
from .naming import NamingRules, StateDict

__all__ = ["CheckpointConverterBase"]

_ACTIONS = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")


class CheckpointConverterBase(NamingRules):
    """Converts a model's weights between a whole state dict and NeuronX Distributed's files.

    A subclass overrides the hooks, and the rules of `NamingRules`.
    """

    # --- what subclasses override -------------------------------------------------------------------------------------

    def pre_process_full_state_before_tp_conversion(self, full_state: StateDict, args: Any) -> StateDict:
        """Changes the whole state dict before it is divided."""
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state: StateDict, args: Any) -> StateDict:
        """Changes the whole state dict before it is saved."""
        return full_state

    def load_full_state(self, args: Any) -> StateDict:
        """Loads the state dict to divide: a file, a folder of Hugging Face's, or `args.hf_model_name`."""
        if not args.input_dir:
            if not args.hf_model_name:
                raise ValueError("pass --input_dir, a file or folder with weights, or --hf_model_name")
            from transformers import AutoModelForCausalLM

            return dict(AutoModelForCausalLM.from_pretrained(args.hf_model_name, dtype="auto").state_dict())
        path = Path(args.input_dir)
        if path.suffix == ".safetensors" or (path.is_dir() and has_weights(path)):
            source = open_source(path)
            return {name: source.read(name) for name in source.names()}
        if path.is_dir():
            path = path / "checkpoint.pt"  # as `save_full` writes it
        if not path.is_file():
            raise FileNotFoundError(f"--input_dir {args.input_dir}: no file with weights found")
        state = read_plain(path, mmap=True)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} has a {type(state).__name__} in place of a state dict")
        inner = state.get(args.model_key) if args.model_key else None
        return dict(inner if isinstance(inner, Mapping) else state)

    def get_output_filename(self, args: Any, tp_rank: int, pp_rank: int, ep_rank: int, xser: bool) -> str:
        """The file of a rank."""
        return os.path.join(
            args.output_dir, file_of("model", tp_rank, pp_rank, 0, ep_rank if args.ep_size > 1 else None)
        )

    def save_full(self, args: Any, full_state: StateDict) -> None:
        """Writes `checkpoint.pt`, which `torch.load` reads."""
        path = Path(args.output_dir) / "checkpoint.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name("checkpoint.pt.partial")
        torch.save(full_state, partial_path)
        os.replace(partial_path, path)

    # --- conversions --------------------------------------------------------------------------------------------------

    def run(self, args: Any) -> None:
        """Runs the conversion that the flags select.

        Raises:
            ValueError: flags that do not go together, or that are not supported.
        """
        chosen = [action for action in _ACTIONS if getattr(args, action)]
        if len(chosen) != 1:
            flags = ", ".join(f"--{action}" for action in chosen or _ACTIONS)
            raise ValueError(f"pass exactly one of the --convert_* flags, not {len(chosen)}: {flags}")
        if args.model_style != "hf" or args.nxdt_yaml_config:
            raise ValueError(
                "--model_style megatron and --nxdt_yaml_config are not supported: convert the names in hooks"
            )
        if args.hw_backend not in ("trn1", "trn2"):
            raise ValueError(f"--hw_backend must be trn1 or trn2, got {args.hw_backend!r}")
        getattr(self, chosen[0])(args)
        print(f"{args.output_dir}: written")

    def convert_from_full_state(self, args: Any) -> None:
        """Divides a whole state dict over tp, pp and ep."""
        config = self._config(args)
        full_state = self.load_full_state(args)
        if args.coalesce_qkv:
            full_state = self.coalesce_qkv(full_state, config, args.tp_size)
        full_state = self.pre_process_full_state_before_tp_conversion(full_state, args)
        tensors = [
            DividedTensor(dtype, read, list(self._parts(args, name, spec, full_state)))
            for name, spec, dtype, read in self._named(args, config, full_state)
        ]
        constants: dict[str, dict[Any, Any]] = {
            self._file(args, tp, pp, ep): {}
            for pp in range(args.pp_size)
            for ep in range(args.ep_size)
            for tp in range(args.tp_size)
        }
        folder = Path(args.output_dir)
        write_files(tensors, constants, folder, progress_bar(args.output_dir), xser=args.save_xser)

    def convert_to_full_state(self, args: Any) -> None:
        """Joins NxD's files to a whole state dict."""
        self.save_full(args, self.merge_tp_checkpoints(args))

    def merge_tp_checkpoints(self, args: Any) -> StateDict:
        """Joins the files in `args.input_dir` to a whole state dict."""
        config, files = self._config(args), self._opened(args)
        if (files.tp, files.pp) != (args.tp_size, args.pp_size):
            raise ValueError(
                f"{files.name} has tp={files.tp} and pp={files.pp}, not --tp_size {args.tp_size} and --pp_size "
                f"{args.pp_size}"
            )
        full_state: StateDict = {}
        for stage in range(files.pp):
            states = [files.model[Writer(tp, stage, 0)] for tp in range(files.tp)]
            for name in states[0]:
                if isinstance(states[0][name], StoredTensor):
                    shards = [state[name].tensor() for state in states]
                    for joined, value in self._joined(args, config, name, shards):
                        full_state.setdefault(joined, value)
        return self.post_process_full_state_after_tp_conversion(full_state, args)

    def convert_from_xser(self, args: Any) -> None:
        """Writes files of torch_xla's serialization as files of `torch.save`."""
        self._rewrite(args, xser=False)

    def convert_to_xser(self, args: Any) -> None:
        """The inverse of `convert_from_xser`."""
        self._rewrite(args, xser=True)

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """Returns a parser with upstream's flags; subclasses may add more."""
        parser = argparse.ArgumentParser(description=type(self).__doc__)
        add = parser.add_argument
        add("--input_dir", help="a state dict's file, a folder of Hugging Face's, or the folder with NxD's files")
        add("--hf_model_name", help="of transformers, in place of --input_dir")
        add("--output_dir", required=True, help="where to write")
        add("--config", help="the model's config.json")
        add("--hw_backend", default="trn1", help="order of repeated key/value heads: trn1 (0 1 0 1) or trn2 (0 0 1 1)")
        add("--model_key", default="model", help="key of the model's state dict in the file")
        for size in ("tp", "pp", "ep", "virtual_pp"):
            add(f"--{size}_size", type=int, default=1, help=f"the {size} degree of NxD's files")
        add("--n_layers", type=int, default=0, help="without effect: names say how many layers there are")
        add("--kv_size_multiplier", type=int, default=1, help="how often key/value heads are repeated")
        add("--coalesce_qkv", type=_flag, default=False, help="one projection qkv_proj.weight")
        add("--qkv_linear", type=_flag, default=False, help="names of GQAQKVColumnParallelLinear")
        add("--fuse_qkv", type=_flag, default=False, help="one projection qkv_proj.weight_qkv; with --qkv_linear")
        add("--load_xser", type=_flag, default=False, help="without effect: the files say how they were saved")
        add("--save_xser", type=_flag, default=False, help="write as torch_xla's serialization does")
        for action in _ACTIONS:
            add(f"--{action}", action="store_true", help=str(getattr(self, action).__doc__))
        add("--model_style", choices=["hf", "megatron"], default="hf", help="hf; megatron is not supported")
        add("--nxdt_yaml_config", help="not supported")
        return parser

    # --- how names are divided ----------------------------------------------------------------------------------------

    def _named(
        self, args: Any, config: Mapping[str, Any], state: StateDict
    ) -> Iterator[tuple[str, ShardSpec, torch.dtype, Callable[[], torch.Tensor]]]:
        """NxD's parameters: name, layout over tp, dtype, and a function that returns the whole tensor."""
        to_nxd, to_hf = self.get_hf_to_nxd_model_keys(args.qkv_linear, self._is_gqa(config))
        heads = self._heads(args, config) if args.qkv_linear else None
        fused: set[str] = set()
        for name, value in state.items():
            dim = self._divided_dim(name, value)
            up = name.replace("gate_proj", "up_proj")
            if name in fused:
                continue
            if dim is None:
                yield name, ShardSpec(full_shape=tuple(value.shape)), value.dtype, partial(as_it_is, value)
            elif "gate_proj" in name and up in state:
                fused.add(up)
                yield (
                    name.replace("gate_proj", "gate_up_proj"),
                    _spec(args.tp_size, name, dim, value.shape, 2),
                    value.dtype,
                    partial(torch.cat, [value, state[up]], dim),
                )
            elif "up_proj" in name and name.replace("up_proj", "gate_proj") in state and "gate_up_proj" not in name:
                continue  # fused with the other one
            elif heads is not None and args.fuse_qkv and name.endswith("q_proj.weight"):
                parts = [state[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
                rows = value.shape[0] + 2 * heads.multiplier * parts[1].shape[0]
                target = name.removesuffix("q_proj.weight") + self.get_fused_qkv_key()
                spec = _spec(args.tp_size, name, 0, (rows, *value.shape[1:]))
                yield target, spec, value.dtype, partial(heads.fused, parts, args.tp_size)
            elif heads is not None and args.fuse_qkv and name.endswith(("k_proj.weight", "v_proj.weight")):
                continue  # fused with the query projection
            else:
                shape, read = list(value.shape), partial(as_it_is, value)
                if heads is not None and ("q_proj" in name or "o_proj" in name):
                    read = partial(heads.ordered, value, dim)
                elif heads is not None and self.is_qkv_weight(name):
                    read = partial(heads.repeated, value)
                    shape[0] *= heads.multiplier
                target = self.get_weight_key(to_nxd, to_hf, name, True) if args.qkv_linear else name
                yield target, _spec(args.tp_size, name, dim, shape), value.dtype, read

    def _joined(
        self, args: Any, config: Mapping[str, Any], name: str, shards: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Converts a parameter of NxD's to the parameters of the whole state dict."""
        dim = self._divided_dim(name, shards[0])
        to_nxd, to_hf = self.get_hf_to_nxd_model_keys(args.qkv_linear, self._is_gqa(config))
        if dim is None:
            yield name, shards[0]
        elif "gate_up_proj" in name:
            for part, halves in zip(("gate_proj", "up_proj"), zip(*(shard.chunk(2, dim) for shard in shards))):
                yield name.replace("gate_up_proj", part), torch.cat(halves, dim)
        elif name.endswith((self.get_fused_qkv_key(), "qkv_proj.weight")):
            sizes = part_rows(shards[0].shape[0], self._query_rows(config) // len(shards), 3)
            path = name.rpartition(".")[0].removesuffix("qkv_proj")
            for letter, parts in zip("qkv", zip(*(shard.split(sizes) for shard in shards))):
                joined = f"{path}{letter}_proj.weight"
                yield joined, self._natural(args, config, joined, torch.cat(parts), 0)
        else:
            joined = self.get_weight_key(to_nxd, to_hf, name, False)
            yield joined, self._natural(args, config, joined, torch.cat(list(shards), dim), dim)

    def _natural(self, args: Any, config: Mapping[str, Any], name: str, value: torch.Tensor, dim: int) -> torch.Tensor:
        """A projection with its heads in the model's order, each once."""
        if not args.qkv_linear:
            return value
        heads = self._heads(args, config)
        if "q_proj" in name or "o_proj" in name:
            return heads.natural(value, dim)
        return heads.single(value) if self.is_qkv_weight(name) else value

    def _parts(self, args: Any, name: str, spec: ShardSpec, state: StateDict) -> Iterator[Part]:
        """Parts of a parameter for all files."""
        experts = args.ep_size if "expert_mlps" in name else 1
        if spec.full_shape and spec.full_shape[0] % experts:
            raise ValueError(f"{name}: {spec.full_shape[0]} experts are not divisible by --ep_size {experts}")
        shape = (spec.local_shape[0] // experts, *spec.local_shape[1:]) if experts > 1 else spec.local_shape
        for pp in self._stages(args, name, state):
            for ep in range(experts):
                for tp in range(args.tp_size):
                    cut = partial(_shard, spec, tp, ep, experts)
                    yield Part(self._file(args, tp, pp, ep), (name,), shape, cut, experts > 1)

    def _stages(self, args: Any, name: str, state: StateDict) -> Sequence[int]:
        """Stages of a parameter: by its layer's number, as NxD divides layers; outside of layers by its name."""
        numbers = sorted(
            {
                int(re.findall(r"\d+", match[0])[-1])
                for key in state
                if (match := re.match(self.layer_name_pattern, key))
            }
        )
        match = re.match(self.layer_name_pattern, name)
        if match is not None:
            number = numbers.index(int(re.findall(r"\d+", match[0])[-1]))
            if args.pp_size * args.virtual_pp_size > len(numbers):
                raise ValueError(
                    f"--pp_size {args.pp_size} times --virtual_pp_size {args.virtual_pp_size} is more than the "
                    f"{len(numbers)} layers"
                )
            pieces = stage_layers(len(numbers), args.pp_size * args.virtual_pp_size)
            return [next(piece for piece, layers in enumerate(pieces) if number in layers) % args.pp_size]
        if any(part in name for part in ("embed_tokens", "word_embeddings", "wte")):
            return [0]
        if any(part in name for part in ("lm_head", "model.norm", "norm_f", "final_layernorm")):
            return [args.pp_size - 1]
        return range(args.pp_size)

    def _file(self, args: Any, tp: int, pp: int, ep: int) -> str:
        """The path of a rank's file in the folder."""
        return os.path.relpath(self.get_output_filename(args, tp, pp, ep, args.save_xser), args.output_dir)

    def _rewrite(self, args: Any, xser: bool) -> None:
        """Writes the same state dicts in another serialization."""
        files = self._opened(args)
        if files.ep > 1:
            raise ValueError(f"{files.name} has experts on {files.ep} ranks of ep: convert it to a full state first")
        tensors: list[DividedTensor] = []
        constants: dict[str, dict[Any, Any]] = {}
        for writer, state in files.model.items():
            file = self._file(args, writer.tp, writer.pp, 0)
            constants[file] = {name: value for name, value in state.items() if not isinstance(value, StoredTensor)}
            tensors += [
                DividedTensor(value.dtype, value.tensor, [Part(file, (name,), value.shape)])
                for name, value in state.items()
                if isinstance(value, StoredTensor)
            ]
        write_files(tensors, constants, Path(args.output_dir), xser=xser)

    def _opened(self, args: Any) -> NxdFiles:
        if not args.input_dir:
            raise ValueError("pass --input_dir, the folder with NxD's files")
        return NxdFiles(
            open_storage(args.input_dir), ".", lambda name: "expert_mlps" in name, args.model_key or "model"
        )

    def _config(self, args: Any) -> dict[str, Any]:
        if not args.config:
            raise ValueError("pass --config, the model's config.json, which has the number of heads")
        config: dict[str, Any] = json.loads(Path(args.config).read_text())
        return config


def _shard(spec: ShardSpec, tp: int, ep: int, experts: int, whole: torch.Tensor) -> torch.Tensor:
    shard = spec.local_slice(whole, tp)
    return shard if experts == 1 else shard.chunk(experts)[ep]


def _spec(tp: int, name: str, dim: int, shape: Sequence[int], stride: int = 1) -> ShardSpec:
    """The layout of a parameter over tp; `shape` is the shape of one of `stride` fused blocks."""
    if shape[dim] % tp:
        raise ValueError(f"{name}: dim {dim} of {tuple(shape)} is not divisible by --tp_size {tp}")
    full = tuple(size * stride if index == dim else size for index, size in enumerate(shape))
    return ShardSpec("tp", dim, stride, tp, full)


def _flag(text: str) -> bool:
    """Parses a truth value; upstream takes any text, "False" and "0" too, as true."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be 1 or 0, true or false, got {text!r}")
    return known[text.lower()]
