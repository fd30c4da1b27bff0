"""When in training does depth come into use? Our own text models, watched at eight steps of their training.

    python analysis/depth_over_training.py OUT [--seeds 0,1,2]     trains what is missing, then prints
    python analysis/depth_over_training.py OUT --only-read         prints what is there (--format csv: all scores)

12 layers of width 64 on byte text, with and without LNS, each at lr .0015, which tuning chose for both at more tokens
(results/text_flops, text_flops_lns). A point is measured by `sparsedepth.watch` on held-out text. The table has the
mean over seeds at each step, and the difference of LNS to the baseline with Student's interval over paired seeds. A
training that was killed goes on from its checkpoint.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from script import read_runs, run_script

from sparsedepth.store.small_sample import mean_interval

STEPS = (25, 50, 100, 200, 400, 800, 1200, 1600)
SCORES = ("val_loss", "needed_layers", "usefulness", "causal_score", "residual_variance_last")
SCALES = ("none", "lns")
BASE = {
    "corpus": "stdlib", "tokenizer": "byte", "vocab_size": 264, "n_layers": 12, "d_model": 64, "n_heads": 4,
    "d_ff": 176, "seq_len": 128, "batch_tokens": 1024, "train_tokens": 1024 * STEPS[-1], "schedule": "wsd",
    "warmup_tokens": 30720, "lr": 1.5e-3, "weight_decay": 0.1, "precision": "fp32", "observe_every": 25,
}  # fmt: skip
HELD_OUT = 128
"""Sequences: half are scored, half fit the maps of usefulness."""


def train_one(out: Path, scale: str, seed: int) -> None:
    """Trains and watches a run, from its last checkpoint if there is one."""
    import torch

    import sparsedepth as sd
    from sparsedepth.config.load import build
    from sparsedepth.config.run import RunConfig
    from sparsedepth.data.sequences import open_source
    from sparsedepth.model.decoder import Decoder
    from sparsedepth.train.loop import train
    from sparsedepth.train.runtime import resolve

    config = build(RunConfig, {**BASE, "depth_scale": scale, "seed": seed}, "depth_over_training")
    source = open_source(config, out / "data")
    held = source.held_out(config.seq_len, HELD_OUT * config.seq_len)
    tokens_NS = np.concatenate([held.inputs, held.targets[:, -1:]], axis=1)
    model = Decoder(config, seed)
    watched = {name: BASE[name] for name in ("lr", "weight_decay", "train_tokens", "schedule", "warmup_tokens")}
    watch = sd.watch(
        model,
        torch.from_numpy(tokens_NS),
        out=out,
        name=f"{scale}-{seed}",
        seed=seed,
        settings={"depth_scale": scale, **watched},
        tokens_per_step=config.batch_tokens,
        measures=["loss", "variance", "usefulness", "causal"],
    )

    def observe(model: Decoder, step: int) -> list:
        if step in STEPS:
            watch(step, now=True)
            print(f"{scale}, seed {seed}: step {step} of {STEPS[-1]}", flush=True)
        return []

    train(model, config, resolve(config), lambda step: source.batch(config, step),
          checkpoints=out / "training" / f"{scale}-{seed}", observe=observe)  # fmt: skip
    watch(STEPS[-1], now=True)


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each step and score: means of both settings, and LNS less the baseline over the seeds of both."""
    rows = []
    found = runs.melt(["steps", "depth_scale", "seed"], SCORES)
    for step, score in found[["steps", "variable"]].drop_duplicates().itertuples(index=False, name=None):
        part = found[(found["steps"] == step) & (found["variable"] == score)]
        by_seed = part.pivot(index="seed", columns="depth_scale", values="value").reindex(columns=[*SCALES]).dropna()
        if score == "residual_variance_last":
            by_seed = np.log(by_seed)
        mean, lo, hi = mean_interval((by_seed["lns"] - by_seed["none"]).tolist())
        numbers = [*by_seed.mean()[[*SCALES]], mean, lo, hi]
        if score == "residual_variance_last":
            numbers = [None if number is None else float(np.exp(number)) for number in numbers]
        rows.append((score, step, *numbers, len(by_seed)))
    columns = ["score", "steps", "baseline", "lns", "effect", "lo", "hi", "seeds"]
    order = pd.Categorical([row[0] for row in rows], SCORES)
    return pd.DataFrame(rows, columns=columns).assign(score=order).sort_values(["score", "steps"], ignore_index=True)


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each step: of each score the baseline's mean, and the effect of LNS with its interval; 'in each' where
    it is the same in each seed, so that there is no noise to judge by."""
    ratio = rows["score"] == "residual_variance_last"
    form = ratio.map({True: "x{:.2g} ({:.2g} to {:.2g})", False: "{:+.2g} ({:+.2g} to {:+.2g})"})
    texts = [
        "not known" if pd.isna(lo) else f"{effect:+g} in each" if lo == hi else text.format(effect, lo, hi)
        for text, effect, lo, hi in zip(form, rows["effect"], rows["lo"], rows["hi"], strict=True)
    ]
    wide = rows.assign(lns=texts).pivot(index="steps", columns="score", values=["baseline", "lns"])
    parts = {}
    for score in ("val_loss", "needed_layers", "residual_variance_last"):
        parts[score] = wide["baseline", score].map("{:.3g}".format)
        parts[f"LNS: {score}"] = wide["lns", score]
    return pd.DataFrame(parts).reset_index()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python analysis/depth_over_training.py", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only-read", action="store_true")
    parser.add_argument("--format", choices=["table", "csv"], default="table", help="csv: all scores, numbers in full")
    given = parser.parse_args(arguments)
    for seed in [] if given.only_read else map(int, given.seeds.split(",")):
        for scale in SCALES:
            train_one(given.out, scale, seed)
    rows = table(read_runs([str(given.out)]))
    print(rows.to_csv(index=False) if given.format == "csv" else shown(rows).to_string(index=False))


if __name__ == "__main__":
    run_script(main)
