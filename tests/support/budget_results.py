"""A results folder of several budgets with made-up losses: branches of schedule wsd at two depths, also with LNS.

L = 1 + .5 (C / 4e12)^-a + .01 seed,  a = .3 at 4 layers and .4 at 16;  LNS: as with 1.3 times the compute
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from support.made_up_runs import MANIFEST, make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import Cells
from sparsedepth.store.setting import Configuration, Settings

FLOPS = (1e12, 2e12, 4e12, 8e12, 1.6e13)


def budget_results(
    folder: Path, budgets=FLOPS, seeds=(0, 1, 2), settings=("none", "lns"), rises=False, device="cuda (H200)", **fields
) -> Path:
    """Tokens go with FLOPs; LNS trains at 8/10 of the speed."""
    for n_layers in (4, 16):
        for scale in settings:
            for number, flops in enumerate(budgets):
                tokens = 8192 * 20 * 2**number
                for seed in seeds:
                    config = RunConfig(
                        n_layers=n_layers, depth_scale=scale, seed=seed, train_tokens=tokens, schedule="wsd",
                        warmup_tokens=8192, **fields,
                    )  # fmt: skip
                    worth = flops * (1.3 if scale == "lns" else 1.0)
                    exponent = (0.3 if n_layers == 4 else 0.4) * (-1 if rises else 1)
                    loss = 1 + 0.5 * (worth / 4e12) ** -exponent + 0.01 * seed
                    # A little noise of each run, so that seeds are not copies of one curve.
                    loss += 0.0005 * ((7 * number + 3 * seed + n_layers + (scale == "lns")) % 5 - 2)
                    speed = {"step": 10, "tokens": 81920, "tokens_per_second": 800.0 if scale == "lns" else 1000.0}
                    summary = {"val_loss": loss, "train_flops": flops, "tokens_trained": tokens}
                    manifest = {**MANIFEST, "device": device, "training_seconds": tokens / speed["tokens_per_second"]}
                    make_run(folder, config, summary, curves=[speed], manifest=manifest)
    return folder


def rows_of(runs: Iterable[tuple[int, str, int, float, float, float | None]]) -> pd.DataFrame:
    """Rows of `scaling.points.budget_rows` without a store, from n_layers, setting, seed, train_flops, loss and
    tokens_per_second; a token costs 1e9 FLOPs."""
    names = ["n_layers", "setting", "seed", "train_flops", "loss", "tokens_per_second"]
    rows = pd.DataFrame(list(runs), columns=names).astype({"tokens_per_second": float})
    tokens = (rows["train_flops"] / 1e9).round().astype(int)
    return rows.assign(
        train_tokens=tokens,
        device="cpu",
        outcome="ok",
        training=[f"run {number}" for number in range(len(rows))],
        effect=np.nan,
        effect_sd=np.nan,
        lr_variance=0.0,
        started=None,
    )


def cells_of_rows(rows: pd.DataFrame) -> Cells:
    """The cells of such rows, at every budget; a setting is its label, and lr was not tuned."""
    known = rows.rename(columns={"loss": "value", "train_flops": "flops", "train_tokens": "tokens"})
    known = known.assign(
        run_id=[f"run {number}" for number in range(len(rows))], lr=np.nan, tuning=None, role="result",
        loss=known["value"], value=known["value"].where(known["outcome"] == "ok"),
        diverged=known["outcome"] == "diverged",
        changes=[*map(_changes, rows["setting"], rows["train_tokens"])],
        setting=rows["setting"] + rows["train_tokens"].map(", train_tokens={}".format),
    )  # fmt: skip
    fields = sorted({name for changes in known["changes"] for name, _ in changes})
    settings = Settings(
        baseline=Configuration(cell_id="", tuned=frozenset(), knobs={}), varying=(), tuned=(),
        label_fields=tuple(fields), data=(), by_depth={},
    )  # fmt: skip
    return Cells(
        runs=known, rows=known, settings=settings, outcome="val_loss", unit="nat/token", n_tuning=0, tuned=(),
        tuned_by=frozenset(),
    )  # fmt: skip


def _changes(setting: str, tokens: int) -> frozenset[tuple[str, object]]:
    fields = [] if setting == "baseline" else [tuple(setting.split("="))]
    return frozenset([*fields, ("train_tokens", tokens)])
