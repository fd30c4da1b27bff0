"""Training on two gloo processes: `train_on_two_processes.py FOLDER` trains in every way and records it. The processes
are forked with the variables that torchrun sets; torchrun itself is in `sweep/test_torchrun.py`.

FOLDER/one holds a checkpoint that a single process left half-way; FOLDER/fsdp is left for one to continue.
"""

import dataclasses
import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.devices import ALONE, Devices, process_group, world
from sparsedepth.train.loop import Interrupted, TrainingResult, train
from sparsedepth.train.runtime import resolve

FAMILIES = {
    "dense": {"depth_scale": "lns", "n_kv_heads": 1, "residual_scalars": True, "value_residual": True},
    "experts": {"n_experts": 4, "top_k": 2, "d_expert": 8, "attention_residuals": 2},
}
HALF_WAY = 6
CPU = RuntimeConfig(device="cpu")


def config(family: str) -> RunConfig:
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 64}
    steps = {"train_tokens": 64 * 12, "lr": 1e-2, "log_every": 1, "observe_every": 5, "precision": "fp32"}
    return build(RunConfig, {**shape, **steps, **FAMILIES[family]}, "test")


def counting(step: int) -> Sequences:
    """Sequences that count upwards modulo 12, then noise: some learnable, and a function of step alone."""
    rng = np.random.default_rng(step)
    return next_tokens(np.where(rng.random((8, 9)) < 0.8, (rng.integers(0, 12, (8, 1)) + np.arange(9)) % 12, 0))


def weight_norm(model: Decoder, step: int) -> list[dict]:
    return [
        {"step": step, "value": float(sum(weight.detach().double().square().sum() for weight in model.parameters()))}
    ]


def trained(
    family: str,
    devices: Devices = ALONE,
    micro_batch: int | None = None,
    checkpoints: Path | None = None,
    stop_step: int | None = None,
) -> tuple[Decoder, TrainingResult | None]:
    """Train from the seed, or from the checkpoint; None if it was stopped after stop_step."""
    cfg = config(family)
    model = Decoder(cfg, cfg.seed)
    runtime = dataclasses.replace(resolve(cfg, CPU), micro_batch=micro_batch)
    taken = iter(range(1, 100))
    # One process alone is asked to stop: all must.
    stop = (lambda: next(taken) == stop_step) if stop_step and devices.rank == devices.size - 1 else None
    try:
        result = train(
            model, cfg, runtime, counting, devices=devices, checkpoints=checkpoints, observe=weight_norm, stop=stop
        )
    except Interrupted:
        return model, None
    return model, result


def main(folder: Path) -> None:
    with process_group(RuntimeConfig(device="cpu", parallel="ddp")) as ddp:
        fsdp = Devices("fsdp", *world())
        found = {f"{family} {way.parallel}": trained(family, way) for family in FAMILIES for way in (ddp, fsdp)}
        found["dense ddp, micro-batches"] = trained("dense", ddp, micro_batch=3)
        found["dense fsdp, micro-batches"] = trained("dense", fsdp, micro_batch=3)
        found["dense one, then ddp"] = trained("dense", ddp, checkpoints=folder / "one")
        trained("experts", ddp, checkpoints=folder / "ddp", stop_step=HALF_WAY)
        found["experts ddp, then fsdp"] = trained("experts", fsdp, checkpoints=folder / "ddp")
        assert trained("experts", fsdp, checkpoints=folder / "fsdp", stop_step=HALF_WAY)[1] is None
        for name, (model, result) in found.items():
            if ddp.is_leader:
                (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(result)))
            weights = dict(model.named_parameters())
            save_file({key: w.detach().clone() for key, w in weights.items()}, folder / f"{name}.{ddp.rank}")


def as_rank(rank: int, port: int, folder: Path) -> None:
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()})
    main(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=as_rank, args=(rank, free, Path(sys.argv[1]))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
