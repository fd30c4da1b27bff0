"""Results folders of every kind that a report is made of, small and made up."""

from pathlib import Path

import yaml
from support.budget_results import budget_results
from support.made_up_runs import MANIFEST, make_run
from support.report_folder import fill

from sparsedepth.config.run import RunConfig
from sparsedepth.measure.measurements import Measurements
from sparsedepth.store.import_table import import_table
from sparsedepth.watch.points import Points, Training

ASKED = {"question": "Does LNS lower the loss at 2 and 4 layers?", "hypothesis": "By .3 at both depths, as published."}


def definition(folder: Path, **fields) -> None:
    (folder / "sweep.yaml").write_text(yaml.safe_dump(ASKED | {"name": folder.name} | fields))


def grid(folder: Path) -> list[Path]:
    fill(folder)
    definition(folder, space={"depth_scale": ["none", "lns"], "n_layers": [2, 4]}, seeds=[0, 1, 2])
    return [folder]


def several_folders(folder: Path) -> list[Path]:
    """Each with the same question."""
    folders = []
    for number, settings in enumerate((("none",), ("lns",))):
        folders.append(budget_results(folder / f"part{number}", settings=settings))
        definition(folders[-1], space={"depth_scale": [*settings], "n_layers": [4, 16]}, seeds=[0, 1, 2])
    return folders


def search(folder: Path, objectives: tuple[str, ...] = ("val_loss", "residual_variance_last")) -> list[Path]:
    """Twelve proposals; the loss falls with lr, and the variance rises."""
    for number in range(12):
        lr = 0.001 * 1.2**number
        config = RunConfig(n_layers=(4, 8)[number % 2], lr=lr, depth_scale=("none", "lns")[number % 3 == 0])
        found = {
            "val_loss": 3 - 100 * lr + 0.1 * (number % 4),
            "residual_variance_last": 1000 * lr,
            "train_flops": 1e12,
        }
        started = {"started": f"2026-01-02T03:{number:02}:05+00:00"}
        make_run(folder, config, found, manifest=MANIFEST | started)
    space = {"lr": {"low": 0.001, "high": 0.01, "log": True}, "n_layers": [4, 8], "depth_scale": ["none", "lns"]}
    sampler = {"sampler": "nsga2" if len(objectives) > 1 else "tpe", "n_trials": 12, "objectives": [*objectives]}
    definition(folder, space=space, **sampler)
    return [folder]


def search_of_one_objective(folder: Path) -> list[Path]:
    return search(folder, ("val_loss",))


def single_run(folder: Path) -> list[Path]:
    layers = [
        {"step": step, "layer": layer, "metric": metric, "value": value * layer, "n": 10}
        for step in (1, 5)
        for layer in range(1, 7)
        for metric, value in (("residual_variance", 2.0), ("affine_loss_increase", 0.01))
    ]
    summary = {"val_loss": 2.5, "residual_variance_last": 12.0, "needed_layers": 4.0, "train_flops": 1e12}
    make_run(folder, RunConfig(n_layers=6), summary, layers=layers)
    return [folder]


def imported(folder: Path) -> list[Path]:
    import_table(Path("sparsedepth/examples/maps/example.csv"), Path("sparsedepth/examples/maps/example.yaml"), folder)
    return [folder]


def ladder(folder: Path) -> list[Path]:
    """One seed at many sizes."""
    for size, depth in enumerate((4, 6, 8, 12)):
        for scale in ("none", "lns"):
            config = RunConfig(n_layers=depth, d_model=32 * (size + 1), depth_scale=scale, train_tokens=81920 * 2**size)
            loss = 3 - 0.3 * size - 0.05 * (scale == "lns")
            measured = {"val_loss": loss, "residual_variance_last": 2.0 * depth, "train_flops": 1e12 * 4**size}
            make_run(folder, config, measured)
    return [folder]


def series(folder: Path) -> list[Path]:
    """Three points of two watched trainings with two seeds each."""
    for setting, gain in (("none", 0.0), ("lns", 0.2)):
        for seed in (0, 1):
            fields = {"n_layers": 4, "d_model": 16, "vocab_size": 32, "depth_scale": setting, "seed": seed}
            training = Training(
                name=f"{setting}-{seed}", fields=fields, tokens_per_step=64, n_params=1000, data_hash="0" * 12
            )
            points = Points(folder, training)
            for step in (10, 20, 30):
                found = Measurements(step=step)
                found.summary.update(residual_variance_last=float(step), val_loss=3 - gain - 0.01 * step + 0.01 * seed)
                found.add_layers("residual_variance", [1.0, 2.0, 3.0, 4.0, float(step)], 128, first=0)
                points.write(step, {"measure_tokens": 128, "fit_tokens": 128}, found, 0.1, "cpu")
    return [folder]


def many_runs(folder: Path) -> list[Path]:
    """216 runs: six settings at six depths, six seeds each."""
    for n_layers in (2, 4, 6, 8, 12, 16):
        for decay in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            for seed in range(6):
                noise = 0.01 * ((7 * seed + 3 * n_layers) % 5)
                found = {"val_loss": 3 - 0.05 * n_layers + decay * 0.1 + noise, "train_flops": 1e12 * n_layers}
                found |= {
                    "residual_variance_last": n_layers * (1 + decay) + noise,
                    "weight_sparsity": decay / 10 + noise,
                }
                make_run(folder, RunConfig(n_layers=n_layers, weight_decay=decay, seed=seed), found)
    definition(folder, space={"weight_decay": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}, seeds=[*range(6)])
    return [folder]


KINDS = (grid, several_folders, search, search_of_one_objective, single_run, imported, ladder, series, many_runs)
