"""Complete run folders whose weights are large enough that every part of a model shows in its logits."""

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file
from support.made_up_runs import MANIFEST
from support.tiny_sweep import BASE, corpus

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.store import run_record


def loud(model: Decoder) -> Decoder:
    """Weights large enough that an error in any part shows in the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("streams.weight"):
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
            elif weight.ndim > 1:
                weight.mul_(8)
            else:
                weight.add_(torch.linspace(-0.3, 0.3, len(weight)) * (1 + len(name) % 3))
    return model


def loud_run(folder: Path, **fields) -> Path:
    """FOLDER/results/runs/<run_id>, complete, over the small text."""
    config = build(RunConfig, {**BASE, "n_layers": 2, "corpus": str(corpus(folder)), **fields}, "test")
    run = run_record.run_folder(folder / "results", config.run_id)
    run.mkdir(parents=True)
    run_record.write_config(run, config)
    run_record.write_manifest(run, MANIFEST)
    model = loud(Decoder(config))
    n_params = sum(weight.numel() for weight in model.parameters())
    run_record.write_summary(
        run, {"outcome": "ok", "params_total": n_params, "val_loss": 2.5, "val_loss_lo": 2.4, "val_loss_hi": 2.6}
    )
    save_file({name: weight.detach() for name, weight in model.named_parameters()}, run / "model.safetensors")
    run_record.finish(run)
    return run


def break_weights(run: Path, value: float) -> None:
    """A run, complete again, whose first weight is this."""
    weights = load_file(run / "model.safetensors")
    weights["embed.weight"][0, 0] = value
    save_file(weights, run / "model.safetensors")
    (run / "complete").unlink()
    run_record.finish(run)


def write_task(folder: Path, name: str, documents: list[dict], **fields) -> None:
    """A task of lm-evaluation-harness over JSON lines."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1.5},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
