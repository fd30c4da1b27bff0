"""A results folder for tests of the report: an effect, a diverged and a failed run, and a name that means harm."""

import json
from pathlib import Path

from support.made_up_runs import MANIFEST, make_run
from support.runs_frame import config_of

HOSTILE = "<script>window.hostile = 1</script>\"'>=cmd()"


def fill(results: Path, corpus: str = "stdlib") -> None:
    """LNS lowers the loss by 0.3 at both depths; one run diverged, one failed."""
    for n_layers in (2, 4):
        for scale in ("none", "lns"):
            for seed in (0, 1, 2):
                config = config_of(n_layers=n_layers, depth_scale=scale, seed=seed, corpus=corpus)
                variance = {"none": 10.0, "lns": 2.0}[scale] * n_layers + 0.1 * seed
                loss = 3 - 0.3 * (scale == "lns") + 0.01 * seed + 0.002 * (seed == 1) * (scale == "lns")
                summary = {"val_loss": loss, "residual_variance_last": variance, "causal_score": 1 / variance}
                summary |= {"tokens_trained": config.train_tokens, "train_flops": 1e12 * n_layers}
                summary |= {"params_total": 1_234_567, "params_active": 1_234_567}
                layers = [
                    {"step": 5, "layer": layer, "metric": "residual_variance", "value": variance * layer, "n": 10}
                    for layer in range(1, n_layers + 1)
                ]
                manifest = {**MANIFEST, "code": {"version": "0.1", "commit": "abc", "changed": True}, "token": "secret"}
                make_run(results, config, summary, layers=layers, manifest=manifest)
    lost = {"outcome": "diverged", "diverged_cause": HOSTILE}
    make_run(results, config_of(n_layers=2, seed=3, corpus=corpus), lost)
    failed = results / "work" / "0123456789ab"
    failed.mkdir(parents=True)
    (failed / "config.yaml").write_text("{}")
    (failed / "failures.json").write_text(json.dumps(["out of memory", HOSTILE]))
