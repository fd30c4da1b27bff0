"""Export of a complete run as a Hugging Face folder that transformers loads without custom code.

    DIR/  model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json  README.md

The folder is first written under another name, loaded like any third-party model, and compared with the run: all logits
of random tokens and of held-out text must agree to 1e-4 in fp32. Only then is it renamed.

The tokenizer becomes a PreTrainedTokenizerFast that gives every text the same ids: as in training, no token is added to
a text, and special tokens written in a text are ordinary text. Bytes become a BPE without merges on the byte-level
alphabet, id = byte.

Shapes: N sequences, T tokens."""

import shutil
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from sparsedepth import __version__
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer as OurTokenizer
from sparsedepth.exchange.architecture import TOLERANCE, Architecture, architecture, random_documents, weights
from sparsedepth.files import atomic_folder, write_json, write_text
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import CONFIG, read_json, weight_files
from sparsedepth.probe.load import LoadedModel, load_model
from sparsedepth.probe.text import measure_source, tokenizer_of
from sparsedepth.store.run_record import check_place, read_run
from sparsedepth.train.checkpoint import errors_of_system
from sparsedepth.words.export import export_card

N_RANDOM = 2
"""Sequences of random tokens, each seq_len long; and one of held-out text."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    folder: Path
    family: str
    parity: dict[str, float]
    """the largest difference of a logit between exported model and run, both in fp32, by name of the input"""
    notes: tuple[str, ...]
    transformers: str
    """the version that was compared"""


def export(run: Path, out: Path) -> Exported:
    """Write the run folder `run` to `out`, completely or not at all. Raises ValueError for an incomplete or unsupported
    run, an `out` that exists, and if logits or token ids differ from the run's."""
    record = read_run(run)
    config = record.config
    target = architecture(config)
    check_place(out)
    loaded = load_model(run)
    model = loaded.probed.model
    assert isinstance(model, Decoder)
    data = run.resolve().parent.parent / "data"
    source = measure_source(loaded, None, config.seq_len, config.seq_len, data)
    held_out_1T = torch.from_numpy(source.held_out(config.seq_len, config.seq_len)[:1].inputs)
    with atomic_folder(out) as unfinished:
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
            told = (
                f"the exported model's logits are up to {max(parity.values()):.1e} from the run's, "
                f"expected at most {TOLERANCE:.0e}; nothing was written"
            )
            raise ValueError("; ".join([told, *target.notes]))
        versions = {"sparsedepth": __version__, **{name: version(name) for name in ("torch", "transformers")}}
        write_text(unfinished / "README.md", export_card(record, target, parity, versions))
    return Exported(
        folder=out, family=target.family, parity=parity, notes=target.notes, transformers=versions["transformers"]
    )


def save_model(model: Decoder, target: Architecture, folder: Path, eos_token_id: int) -> None:
    """Save weights, config and generation config; transformers renames experts as in its own checkpoints."""
    logging.disable_progress_bar()  # it would mix with our output
    config_class: Any = CONFIG_MAPPING[target.family]
    config = config_class(**target.values, eos_token_id=eos_token_id, dtype="float32")
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")  # a missing shared expert has width 0
        exported: Any = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    own = {name: weight.clone() for name, weight in weights(model).items()}
    missing, unexpected = exported.load_state_dict(own, strict=False, assign=True)
    tied = {"lm_head.weight"} if model.config.tie_embeddings and target.family != "gemma2" else set()
    assert not unexpected and set(missing) == tied, f"{target.family}: {missing}, {unexpected}"
    exported.tie_weights()
    exported.generation_config = GenerationConfig(eos_token_id=eos_token_id)
    with errors_of_system():
        exported.save_pretrained(folder)
    values = read_json(folder / CONFIG)
    of_version_4 = {"rope_theta": (values.get("rope_parameters") or {}).get("rope_theta")}  # and of other engines
    if target.family == "qwen3_moe":
        of_version_4["num_experts"] = values["num_local_experts"]
    write_json(folder / CONFIG, {**values, **of_version_4})
    for path in weight_files(folder):  # safetensors makes them readable for the owner only
        shutil.copymode(folder / CONFIG, path)


@torch.no_grad()
def _difference(loaded: LoadedModel, exported: LoadedModel, tokens_NT: Tensor) -> float:
    """The largest difference of logits, relative to the largest of a sequence or 1; NaN if any is not finite."""
    with loaded.probed.exact(), exported.probed.exact():
        differences = [
            (own - exported.probed.model(tokens_1T).logits).abs().max() / own.abs().max().clamp(min=1)
            for tokens_1T in tokens_NT.split(1)
            for own in [loaded.probed.model(tokens_1T)]
        ]
    return torch.stack(differences).max().item()


ODD = "a\x00b\r\n\r\n  can't\tnaïve 東京 \u2028 🙂👩\u200d👧 <|endoftext|></s>\ufffd \x7f"
"""Difficult text for tokenizers: control characters, line ends, joined emoji, special tokens in a text."""

_CONFIG = "tokenizer_config.json"


def save_tokenizer(tokenizer: OurTokenizer, folder: Path, max_len: int, sample: str) -> None:
    """Write the tokenizer's files. Raises ValueError if the ids of `sample`, read back, are not the run's."""
    backend = _backend(tokenizer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=backend.id_to_token(tokenizer.eod),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    ).save_pretrained(folder)
    # The class name that every release of transformers knows; version 5 writes its own.
    write_json(folder / _CONFIG, {**read_json(folder / _CONFIG), "tokenizer_class": "PreTrainedTokenizerFast"})
    exported: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    exported.model_max_length = int(1e30)  # avoids a warning for long samples
    for text in (ODD, sample):
        if exported(text)["input_ids"] != tokenizer.encode([text])[0]:
            raise ValueError(
                f"the exported tokenizer gives other ids than the run's for {text[:40]!r}...; use the run's own"
            )


def _backend(tokenizer: OurTokenizer) -> Tokenizer:
    """The tokenizer as one of the library `tokenizers`: the one that training saved, or a BPE of single bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        saved = Path(scratch) / TOKENIZER_FILE
        if saved.exists():
            backend = Tokenizer.from_file(str(saved))
            # No token was added in training. A processor that adds none may still be needed, for offsets.
            if backend.num_special_tokens_to_add(False):
                backend.post_processor = None
            return backend
    assert tokenizer.size == tokenizer.eod + 1 == 257, "only bytes save nothing"
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return backend
