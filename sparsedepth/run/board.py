"""Many models on the same bytes of one text: a record each in OUT/models, ranked by the depth that they use.

Scored are the first documents that a run on the text holds out, in as many whole sequences of the model's tokens as
have the asked number of bytes. Maps are fitted on at least FIT_PER_DIMENSION tokens per dimension of the stream, as far
as the text has them."""

from pathlib import Path

from sparsedepth.config.models_file import ModelsFile
from sparsedepth.config.section import Fields
from sparsedepth.files import digest, local_path
from sparsedepth.probe.load import LoadedModel, load_model
from sparsedepth.probe.revisions import files_key
from sparsedepth.probe.text import tokens_to_measure
from sparsedepth.run.measure_existing_model import measure_existing_model, measured_model, measuring_config
from sparsedepth.run.one_by_one import Known, Ledger, Tell, one_by_one
from sparsedepth.run.publish import Stopwatch
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.run_record import MODELS, is_complete, read_record
from sparsedepth.train.runtime import find_device, measuring_device

FIT_PER_DIMENSION = 16
COLUMNS = (
    "family, n_layers, needed_equal_rise, needed_layers, val_loss, usefulness_loss_increase, causal_score, "
    "residual_variance_last"
)


def measure_models(file: ModelsFile, out: Path, measuring: Fields, device: str, tell: Tell) -> QueryResult:
    """A row per model, in the order of the file. Raises ValueError for other settings than before."""
    ledger = Ledger(out, MODELS, {**file.model_dump(exclude={"models"}), **measuring})
    entries = {entry.source: entry for entry in file.models}

    def work(name: str) -> Known:
        entry, stopwatch = entries[name], Stopwatch()
        on = measuring_device(find_device(device))
        loaded = load_model(name, device=on, dtype=entry.dtype, memory=entry.memory and entry.memory * 1e9)
        weights = f"{loaded.weights_hash} {loaded.facts.family}"  # another type makes another model of them
        return ledger.measured(name, loaded, weights, lambda: _measure(loaded, file, out, measuring, stopwatch))

    keys = {}
    for name, entry in entries.items():
        folder = local_path(entry.name)
        keys[name] = digest([entry.model_dump(), files_key(folder) if folder.is_dir() else None])
    one_by_one(keys, ledger, work, tell)
    return ledger.table(COLUMNS, {name: {"licence": entry.licence} for name, entry in entries.items()})


def _measure(loaded: LoadedModel, file: ModelsFile, out: Path, measuring: Fields, stopwatch: Stopwatch) -> str:
    """The run_id of its record, which is written unless it is there. Raises ValueError for another record there."""
    sizes = {"seq_len": file.seq_len, "val_tokens": file.seq_len, "measure_tokens": file.seq_len}
    first = measuring_config(loaded, {**sizes, **measuring, "fit_tokens": file.seq_len})
    with tokens_to_measure(loaded, first, file.text, root=out / "data") as tokens:
        scored = max(1, round(file.bytes / (tokens.source.bytes_per_token or 1) / file.seq_len)) * file.seq_len
        there = tokens.source.held_out(file.seq_len, 2**62).n_tokens - scored
        if there < file.seq_len:
            raise ValueError(
                f"bytes={file.bytes} are {scored:,} of its tokens, and the held-out part of {file.text!r} has "
                f"{scored + there:,}, of which others fit maps; lower bytes, or name a longer text"
            )
    fit = min(there, -(-max(FIT_PER_DIMENSION * loaded.facts.d_model, scored) // file.seq_len) * file.seq_len)
    amounts = {"val_tokens": scored, "measure_tokens": scored, "fit_tokens": fit}
    config = measuring_config(loaded, {**sizes, **amounts, **measuring})
    folder = out / MODELS / loaded.source.strip("/").replace("/", "--").lstrip(".-")  # a hidden folder is not read
    with tokens_to_measure(loaded, config, file.text, root=out / "data") as tokens:
        run_id = measured_model(loaded, config, tokens.source.data_hash).run_id
        if not is_complete(folder):
            measure_existing_model(loaded, tokens, config, out=folder, watch=stopwatch)
        elif read_record(folder).run_id != run_id:
            raise ValueError(f"{str(folder)!r} is the record of another model or measurement; give another -o")
    return run_id
