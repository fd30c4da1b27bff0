"""Exported families, read by another release of transformers: the same logits and the same ids of text.

    exports_elsewhere.py write FOLDER   a run of each family, exported, with the run's own logits     (this environment)
    exports_elsewhere.py read FOLDER    loads each, compares, prints a line; exit 1 if one differs    (any environment)

`make exports` reads with the release installed here and with 4.57, the last that many engines are built on, in an
environment of its own that shares torch. Reading imports nothing of ours."""

import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 1e-4


def write(folder: Path) -> None:
    import shutil

    import torch
    from exchange.test_export import FAMILIES
    from support.run_folders import loud_run

    from sparsedepth.exchange.architecture import random_documents
    from sparsedepth.exchange.export import ODD, export
    from sparsedepth.probe.load import load_model
    from sparsedepth.probe.text import tokenizer_of

    # Beside the families: what only one release may read otherwise.
    others = {
        "llama_theta": {"rope_theta": 500_000.0, "n_layers": 3},
        "llama_geglu": {"activation": "geglu", "tie_embeddings": True, "norm_eps": 1e-3},
        "gemma2_window": {"norm": "peri", "sliding_window": 5},
    }
    for name, fields in {**FAMILIES, **others}.items():
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run = loud_run(place, **fields)
        found = export(run, place / "exported")
        loaded = load_model(run)
        tokens_NT = random_documents(loaded.config, 2)
        with torch.no_grad(), loaded.probed.exact():
            np.save(place / "logits.npy", loaded.probed.model(tokens_NT).numpy())
        np.save(place / "tokens.npy", tokens_NT.numpy())
        ids = tokenizer_of(loaded, run.parent.parent / "data").encode([ODD])[0]
        (place / "text.json").write_text(json.dumps({"text": ODD, "ids": [int(each) for each in ids]}))
        print(f"{name}: exported as {found.family}")


def read(folder: Path) -> bool:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if hasattr(transformers.logging, "disable_progress_bar"):
        transformers.logging.disable_progress_bar()
    is_right = True
    for place in sorted(path.parent for path in folder.glob("*/logits.npy")):
        exported, said = place / "exported", json.loads((place / "text.json").read_text())
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                exported, local_files_only=True, attn_implementation="eager", dtype=torch.float32
            ).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
            with torch.no_grad():
                logits = model(torch.from_numpy(np.load(place / "tokens.npy"))).logits.numpy()
        except Exception as error:
            print(
                f"{place.name}: transformers {transformers.__version__} cannot read it: {type(error).__name__}: {error}"
            )
            is_right = False
            continue
        own = np.load(place / "logits.npy")
        difference = float(np.abs(logits - own).max() / max(1.0, np.abs(own).max()))
        has_ids = tokenizer(said["text"])["input_ids"] == said["ids"]
        is_right &= difference <= TOLERANCE and has_ids
        told = f"logits differ by {difference:.1e}, ids of text are {'equal' if has_ids else 'OTHERS'}"
        print(f"{place.name}: transformers {transformers.__version__}: {told}")
    return is_right


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "write":
        write(folder)
    elif not read(folder):
        sys.exit(1)
