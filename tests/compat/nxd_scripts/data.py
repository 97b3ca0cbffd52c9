"""Batches of Python's sources as bytes, by `MpDeviceLoader`."""

import argparse
import sysconfig
from pathlib import Path

import neuronx_distributed.utils.random
import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch.utils.data import DataLoader, DistributedSampler

SEQ, STEPS, GLOBAL_BATCH = 32, 3, 16


def create_dataloader():
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    ids = torch.tensor(list(text[: SEQ * GLOBAL_BATCH * STEPS])).view(-1, SEQ)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    sampler = DistributedSampler(rows, num_replicas=dp_size, rank=dp_rank, shuffle=False, drop_last=True)
    return DataLoader(rows, batch_size=GLOBAL_BATCH // dp_size, sampler=sampler, drop_last=True)


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("tensor", "pipeline", "context", "expert"):
        parser.add_argument(f"--{name}_parallel_size", type=int, default=1)
    for name in ("use_zero_1", "sequence_parallel_enabled", "selective_checkpoint_enabled", "qkv_linear"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("use_flash_attention", "use_meta_device_init", "fuse_qkv"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--virtual_pipeline_size", type=int, default=1)
    parser.add_argument("--num_microbatches", type=int, default=2)
    parser.add_argument("--kv_replicator", type=int, default=1)
    parser.add_argument("--checkpoint_dir")
    parser.add_argument("--model", default="llama")
    args = parser.parse_args()
    neuronx_distributed.utils.random.set_random_seed(1234)
    return args


def options_of(args):
    names = (
        "sequence_parallel_enabled",
        "selective_checkpoint_enabled",
        "qkv_linear",
        "use_flash_attention",
        "fuse_qkv",
    )
    return {**{name: getattr(args, name) > 0 for name in names}, "kv_shared_group_size": args.kv_replicator}
