"""The effects that docs/findings.md states, from the committed results: a row each, by rule of the page; and the page's
table of all settings and depths.

    python analysis/findings.py [--format csv]
    python analysis/findings.py --page docs/findings.md      writes the table into the page

Effects and verdicts are those of `sparsedepth effects FOLDER...`, with val_loss the loss that compares the runs
(`store.comparable_loss`); for `compute`, those of `effects --as speedup`. Depth: against the shallowest.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from script import run_script

from sparsedepth.effects.cells import BASELINE, cells_of, changes_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.scaling.points import budget_rows
from sparsedepth.scaling.speedup import speedups
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store, open_store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.formats import encode, to_markdown
from sparsedepth.words.table import fitted_table

RESULTS = Path(__file__).parent.parent / "results"
BUNDLE, LNS = "n_kv_heads=1, n_experts=8, weight_decay=1", "depth_scale=lns"
EXPERTS, DECAY = "n_experts=8", "weight_decay=0.3"
SCALARS, MHC = "preset=nanochat-scalars", "preset=mhc"
GATED, VALUES = "gated_attention=channel", "value_residual=True"
BOTH = f"{SCALARS}, {VALUES}"
CARRIED = "lr_transfer_narrow lr_transfer_narrow_deep"
SHALLOW, COMPLETEP_6 = "lr_transfer_shallow lr_transfer_beyond", "parametrisation=completep, base_depth=6"
SHAPES = "depth_shape depth_shape_batch"
REMEDIES_12 = "remedies_tuned remedies_tuned_more"
REMEDIES_24 = "remedies_deep_tuned remedies_deep_tuned_more"
COMPLETEP_12, LOOPS = "parametrisation=completep, base_width=32", "loops=2"
COMPLETEP_48, HEAD = "parametrisation=completep, base_width=48, base_depth=6", "n_kv_heads=1"
COMPLETEP = f"{COMPLETEP_12}, base_depth=6"
LOSS, NEEDED, VARIANCE, COMPUTE = "val_loss", "needed_layers", "residual_variance_last", "compute"
COLUMNS = ("rule", "outcome", "n_layers", "effect", "lo", "hi", "verdict", "question", "folders", "setting", "baseline")


class Stated(NamedTuple):
    rule: int
    folders: str
    n_layers: int | None
    """None: an effect over depths, such as a slope."""
    setting: str = "depth"
    outcome: str = LOSS
    question: str = "setting"
    baseline: str = ""
    """The setting that stands in the baseline's place."""


FULL_STUDY = " ".join(
    f"depth_study_{part}" for part in ("two_depths", "middle_depths", "remedies", "fresh_seeds", "finer_lr")
)
TEXT_12 = "text_flops text_flops_experts text_flops_lns text_flops_decay text_flops_heads"
TEXT_12_TRIALS = (
    "text_flops text_flops_lns text_flops_decay text_flops_heads text_flops_trial_middle text_flops_trial_finer"
)
TEXT_24 = "text_flops text_flops_experts text_flops_deep"
TEXT_6 = "text_flops text_flops_shallow text_flops_shallow_experts"
STATED = (
    *(Stated(1, folders, n, EXPERTS, of) for of in (LOSS, COMPUTE)
      for folders, n in ((TEXT_6, 6), (TEXT_12, 12), (TEXT_24, 24))),
    Stated(1, "text_flops_trial_heads text_flops_trial_experts", 24, EXPERTS),
    *(Stated(2, "text_deep text_optimum", n, setting)
      for n, setting in ((12, BUNDLE), (24, BUNDLE), (24, LNS), (12, "seq_len=256"))),
    *(Stated(3, "text_deep text_optimum", 24, setting, VARIANCE) for setting in (BUNDLE, LNS)),
    Stated(3, "text_deep text_optimum", 24, LNS, NEEDED),
    Stated(3, TEXT_24, 24, EXPERTS, VARIANCE),
    *(Stated(4, "depth_study", n, LNS, question="beside") for n in (24, 32)),
    Stated(4, "depth_study_fresh_seeds", 32, "depth_scale=lns, lr=0.012"),
    Stated(4, FULL_STUDY, 32, LNS),
    *(Stated(4, "equal_flops equal_flops_lns", 32, LNS, of) for of in (VARIANCE, NEEDED)),
    Stated(5, "text_flops", 12), Stated(5, "text_flops", 24), Stated(5, "text_flops_trial", 24),
    Stated(5, "text_flops text_flops_experts text_flops_shallow_experts", 24, baseline=EXPERTS),
    *(Stated(5, "depth_shape", n) for n in (8, 16, 32)),
    *(Stated(5, SHAPES, 8, baseline=f"batch_tokens={batch}") for batch in (512, 2048)),
    *(Stated(5, SHAPES, n, f"batch_tokens={batch}") for n in (4, 8) for batch in (512, 2048)),
    *(Stated(5, "depth_shape_batch", n, "batch_tokens=512") for n in (4, 8)),
    Stated(5, "depth_shape_batch", None, "batch_tokens=512", question="depth slope"),
    *(Stated(6, f"equal_flops_{name}", 32)
      for name in ("trial_tuned", "fourfold", "fourfold_tuned", "longer", "operations")),
    Stated(6, "equal_flops", 16),
    *(Stated(7, "text_flops_trial_middle", 12, *of) for of in ((LNS,), (LNS, NEEDED), (DECAY,))),
    *(Stated(7, folders, 12, setting)
      for folders in ("text_flops_trial_finer", TEXT_12_TRIALS) for setting in (LNS, DECAY)),
    Stated(7, "text_flops text_flops_shallow", 6, DECAY),
    *(Stated(8, REMEDIES_12, 12, setting)
      for setting in (SCALARS, VALUES, GATED, MHC, BOTH, EXPERTS, COMPLETEP_48, HEAD, LNS)),
    Stated(8, REMEDIES_12, 12, VALUES, question="beside"),
    *(Stated(8, REMEDIES_24, 24, setting)
      for setting in (SCALARS, VALUES, BOTH, LNS, EXPERTS, GATED, LOOPS, COMPLETEP_12)),
    *(Stated(8, REMEDIES_24, 24, setting, VARIANCE) for setting in (VALUES, LNS, GATED, COMPLETEP_12, EXPERTS)),
    *(Stated(8, REMEDIES_12, 12, setting, VARIANCE) for setting in (VALUES, GATED, LNS, COMPLETEP_48, EXPERTS)),
    Stated(8, "remedies", 12, LOOPS),
    Stated(8, CARRIED, None, COMPLETEP, question="depth slope"), Stated(8, CARRIED, 24, COMPLETEP),
    Stated(8, SHALLOW, None, COMPLETEP_6, question="depth slope"), Stated(8, SHALLOW, 12, COMPLETEP_6),
    Stated(8, SHALLOW, 3, COMPLETEP_6), Stated(8, SHALLOW, 12, COMPLETEP_6, VARIANCE),
)  # fmt: skip


GROUPS = (
    ("text, width 32", "text_deep text_optimum", (12, 24)),
    ("text, width 64", TEXT_6, (6,)),
    ("text, width 64", TEXT_12, (12,)),
    ("text, width 64", TEXT_24, (24,)),
    ("text, 0.35 M in the blocks", SHAPES, (4, 8, 16, 32)),
    ("text, width 48", REMEDIES_12, (12,)),
    ("text, width 32, equal FLOPs", REMEDIES_24, (24,)),
    ("text, width 48, lr carried", "remedies", (12,)),
    ("text, width 32, 4 to 24 layers", CARRIED, (4, 6, 8, 12, 24)),
    ("text, width 64, 3 to 12 layers", SHALLOW, (3, 6, 12)),
    ("task", "depth_study", (12, 32)),
    ("task", "equal_flops equal_flops_lns", (32,)),
    ("task", "equal_flops_trial_tuned", (32,)),
)
"""What the table of the page has, from which folders, at which depths."""
START, END = "<!-- The table of analysis/findings.py -->", "<!-- Its end -->"


def page_table() -> str:
    """Setting by depth, in Markdown: the settings of one or several fields that were run at the baseline, and depth."""
    rows = [row for group in GROUPS for row in _group(*group)]
    frame = pd.DataFrame(rows).drop_duplicates(["data", "n_layers", "setting", "effect"])
    return to_markdown(QueryResult.of_frame(frame))


def _group(data: str, folders: str, depths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    with open_store(*(RESULTS / name for name in folders.split())) as store:
        runs = store.frame("select * from runs")
    cells = cells_of(runs, loss_of(runs))
    found = effects_frame(cells)
    per_parameter = (runs["tokens_trained"] / runs["params_total"])[runs["outcome"] == "ok"]
    of_baseline = cells.rows[cells.rows["setting"] == BASELINE].groupby("n_layers").groups
    found = found[found["question"].isin(["setting", "depth"]) & found["n_layers"].isin(depths) & found["lo"].notna()]
    for row in found.to_dict("records"):
        own = per_parameter.reindex(of_baseline.get(row["n_layers"], [])).dropna()
        yield {
            "data": data,
            "n_layers": row["n_layers"],
            "setting": row["setting"] if row["question"] == "setting" else "depth itself",
            "effect": f"{row['estimate']:+.3f} ({row['lo']:+.3f} to {row['hi']:+.3f})",
            "verdict": row["verdict"],
            "detectable": f"{row['detectable']:.3f}",
            "equal": row["basis"],
            "tokens/parameter": f"{own.mean():.2g}" if len(own) else "",
            "folders": ", ".join(folders.split()),
        }


def write_page(path: Path) -> None:
    """The table between its two marks. Raises ValueError for a page without them."""
    text = path.read_text()
    head, start, rest = text.partition(START)
    _, end, tail = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{path} has not the lines {START!r} and {END!r}, between which the table stands")
    path.write_text(f"{head}{START}\n{page_table()}\n{END}{tail}")


def stated(effects: Sequence[Stated] = STATED) -> pd.DataFrame:
    """Raises ValueError for an effect that the results do not have."""
    by_folders = defaultdict[str, list[Stated]](list)
    for one in effects:
        by_folders[one.folders].append(one)
    rows: list[dict[str, Any]] = []
    for folders, wanted in by_folders.items():
        with open_store(*(RESULTS / name for name in folders.split())) as store:
            runs = store.frame("select * from runs")
            for of in dict.fromkeys((one.outcome, one.baseline) for one in wanted):
                found = _worth(store) if of[0] == COMPUTE else _effects(runs, *of)
                rows += [_row(one, found) for one in wanted if (one.outcome, one.baseline) == of]
    return pd.DataFrame(rows, columns=[*COLUMNS]).sort_values("rule", kind="stable", ignore_index=True)


def _effects(runs: pd.DataFrame, outcome: str, baseline: str) -> pd.DataFrame:
    cells = cells_of(runs, loss_of(runs) if outcome == LOSS else outcome, baseline=changes_of(runs, baseline))
    found = effects_frame(cells)
    if cells.unit == "ln ratio":
        found[["estimate", "lo", "hi"]] = found[["estimate", "lo", "hi"]].map(math.exp)
    return found


def _worth(store: Store) -> pd.DataFrame:
    found = speedups(budget_rows(store))
    found = found[found["train_tokens"] == found.groupby(["n_layers", "setting"])["train_tokens"].transform("max")]
    return found.rename(columns={"multiplier": "estimate"}).assign(question="setting", verdict="")


def _row(one: Stated, found: pd.DataFrame) -> dict[str, Any]:
    question, setting = ("depth", f"n_layers={one.n_layers}") if one.setting == "depth" else (one.question, one.setting)
    is_it = (found["setting"] == setting) & (found["question"] == question)
    if one.n_layers is not None:
        is_it &= found["n_layers"] == one.n_layers
    if found.loc[is_it, "estimate"].count() != 1:
        raise ValueError(f"{one}: {int(is_it.sum())} such effects; there are: {sorted(set(found['setting']))}")
    effect = found[is_it].iloc[0].to_dict()
    return {**effect, **one._asdict(), "setting": setting, "question": question, "effect": effect["estimate"]}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="findings.py", description="The effects that docs/findings.md states")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table")
    parser.add_argument("--page", type=Path, help="write the table of all settings and depths into this page")
    options = parser.parse_args(arguments)
    if options.page is not None:
        write_page(options.page)
        return
    result = QueryResult.of_frame(stated())
    text = (
        fitted_table(result, ("folders",)).text
        if options.format == "table"
        else encode(result, options.format).decode()
    )
    print(text, end="")


if __name__ == "__main__":
    run_script(main)
