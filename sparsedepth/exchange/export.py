"""Export of a complete run as a Hugging Face folder that transformers loads without custom code.

    DIR/  model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json  README.md

A ViT has a preprocessor_config.json in place of the tokenizer's files and generation_config.json (`vit`).

The folder is first written under another name, loaded like any third-party model, and compared with the run: all logits
of random tokens and of held-out text must agree to 1e-4 in fp32. Only then is it renamed.
"""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageClassification, GenerationConfig
from transformers.utils import logging

from sparsedepth.data.images import ImageSource
from sparsedepth.exchange.architecture import Architecture, architecture, weights
from sparsedepth.exchange.card import card
from sparsedepth.exchange.parity import TOLERANCE, random_documents
from sparsedepth.exchange.tokenizer import save_tokenizer
from sparsedepth.exchange.vit import FAMILY, save_processor, vit_architecture, vit_parity, vit_weights
from sparsedepth.files import atomic_folder, write_text
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import CONFIG, weight_files
from sparsedepth.probe.load import LoadedModel, load_model
from sparsedepth.probe.text import measure_source, tokenizer_of
from sparsedepth.store.run_record import check_place, read_run
from sparsedepth.train.checkpoint import errors_of_system

N_RANDOM = 2
"""Sequences of random tokens, each seq_len long; and one of held-out text."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    folder: Path
    family: str
    """model_type of transformers"""
    parity: dict[str, float]
    """the largest difference of a logit between exported model and run, both in fp32, by name of the input"""
    notes: tuple[str, ...]


def export(run: Path, out: Path) -> Exported:
    """Write the run folder `run` to `out`, completely or not at all. Raises ValueError for an incomplete or unsupported
    run, an `out` that exists, and if logits or token ids differ from the run's."""
    record = read_run(run)
    config = record.config
    target = vit_architecture(config) if config.architecture == "vit" else architecture(config)
    check_place(out)
    loaded = load_model(run)
    model = loaded.probed.model
    assert isinstance(model, Decoder)
    data = run.resolve().parent.parent / "data"
    source = measure_source(loaded, None, config.seq_len, config.seq_len, data)
    held_out_1T = torch.from_numpy(source.held_out(config.seq_len, config.seq_len)[:1].inputs)
    with atomic_folder(out) as unfinished:
        if isinstance(source, ImageSource):
            names = dict(enumerate(source.classes))
            save_model(model, target, unfinished, id2label=names, label2id={name: id for id, name in names.items()})
            save_processor(config, unfinished)
            random_NT = model.embed.random_inputs(N_RANDOM, config.seq_len, torch.Generator().manual_seed(0))
            parity = vit_parity(model, unfinished, {"random pixels": random_NT, "a held-out image": held_out_1T})
        else:
            tokenizer = tokenizer_of(loaded, data)
            ends = (held_out_1T[0] == tokenizer.eod).nonzero()
            if config.mask_documents and len(ends):  # only the first document, as transformers has no such mask
                held_out_1T = held_out_1T[:, : int(ends[0])]
            save_model(model, target, unfinished, eos_token_id=tokenizer.eod)
            save_tokenizer(tokenizer, unfinished, config.seq_len, tokenizer.decode(held_out_1T[0].tolist()))
            exported = load_model(unfinished)
            inputs = {"random tokens": random_documents(config, N_RANDOM), "held-out text": held_out_1T}
            parity = {name: _difference(loaded, exported, tokens_NT) for name, tokens_NT in inputs.items()}
        if not all(difference <= TOLERANCE for difference in parity.values()):  # also false for NaN
            largest = f"{max(parity.values()):.1e} from the run's, expected at most {TOLERANCE:.0e}"
            raise ValueError(f"the exported model's logits are up to {largest}; nothing was written")
        write_text(unfinished / "README.md", card(record, target, parity))
    return Exported(folder=out, family=target.family, parity=parity, notes=target.notes)


def save_model(model: Decoder, target: Architecture, folder: Path, **fields: Any) -> None:
    """Save weights, config and, for text, generation config; transformers renames experts as in its own checkpoints.
    `fields` are those of the config that depend on the data."""
    logging.disable_progress_bar()  # it would mix with our output
    config_class: Any = CONFIG_MAPPING[target.family]
    config = config_class(**target.values, **fields, dtype="float32")
    is_vit = target.family == FAMILY
    auto_class: Any = AutoModelForImageClassification if is_vit else AutoModelForCausalLM
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")  # a missing shared expert has width 0
        exported: Any = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    own = vit_weights(model) if is_vit else weights(model)
    own = {name: weight.clone() for name, weight in own.items()}  # looped blocks share weights, files cannot
    missing, unexpected = exported.load_state_dict(own, strict=False, assign=True)
    tied = {"lm_head.weight"} if model.config.tie_embeddings and target.family != "gemma2" else set()
    assert not unexpected and set(missing) == tied, f"{target.family}: {missing}, {unexpected}"
    exported.tie_weights()
    if not is_vit:
        exported.generation_config = GenerationConfig(eos_token_id=fields["eos_token_id"])
    with errors_of_system():
        exported.save_pretrained(folder)
    for path in weight_files(folder):  # safetensors makes them readable for the owner only
        shutil.copymode(folder / CONFIG, path)


@torch.no_grad()
def _difference(loaded: LoadedModel, exported: LoadedModel, tokens_NT: Tensor) -> float:
    """The largest difference of logits, NaN if any is not finite; sequence by sequence, since logits are large."""
    with loaded.probed.exact(), exported.probed.exact():
        differences = [
            (loaded.probed.model(tokens_1T) - exported.probed.model(tokens_1T).logits).abs().max()
            for tokens_1T in tokens_NT.split(1)
        ]
    return torch.stack(differences).max().item()
