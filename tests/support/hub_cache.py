"""Models laid out as the hub's cache has them, and trainings as folders of checkpoints."""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from support.hf_families import WORDS, save_tokenizer, tiny


def cached(cache: Path, name: str, revisions: dict[str, Path]) -> None:
    """The folders as revisions of a model of the hub: blobs by hash, snapshots of links, refs of commits."""
    place = cache / f"models--{name.replace('/', '--')}"
    for revision, folder in revisions.items():
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        snapshot, ref = place / "snapshots" / commit, place / "refs" / revision
        for made in (snapshot, ref.parent, place / "blobs"):
            made.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        for file, content in files.items():
            blob = place / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            if not (snapshot / file).exists():
                (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))


def training(folder: Path, steps: list[int], family: str = "llama", prefix: str = "checkpoint-", **fields) -> Path:
    """Checkpoints of a model whose weights grow with the step."""
    model = tiny(family, **{"vocab_size": len(WORDS), **fields})
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    for step in steps:
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                weight.copy_(first[name] * (0.5 + 0.02 * step) if weight.ndim > 1 else first[name])
        place = folder / f"{prefix}{step}"
        model.save_pretrained(place)
        save_tokenizer(place, WORDS)
    return folder


def copied(folder: Path, old: str, new: str) -> None:
    """A checkpoint that serves the weights of another."""
    shutil.rmtree(folder / new, ignore_errors=True)
    shutil.copytree(folder / old, folder / new)
