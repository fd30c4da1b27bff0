"""`judge`: the verdict on the variants of anyone's table of runs. Imports no torch."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import Deadline, Folder, Format, OutFile, Settings
from sparsedepth.cli.read import show
from sparsedepth.words.formats import choose_format

if TYPE_CHECKING:
    from sparsedepth.recipe.judge import Judgement
    from sparsedepth.recipe.judge_target import TargetJudgement


@dataclass(frozen=True)
class JudgeCommand:
    """The verdict on each variant in a table of runs: `verdict`, and a row for each in `table`, a QueryResult. With
    `target` [nat/token] its losses are compared with that number, else with those of the baseline.

    Raises ValueError for a table that cannot be read, columns that are not found, or a baseline that is not there."""

    table: Annotated[Folder, Argument(metavar="TABLE", help="one run per row: .csv, .tsv, .json, .jsonl, .parquet")]
    _: KW_ONLY
    baseline: Annotated[str | None, Option(help="variant to compare with; default the one called so")] = None
    variant: Annotated[str | None, Option(help="only this variant; all of them stay in the correction")] = None
    column: Annotated[Settings | None, Option(help="a column that is not guessed: loss=val_bpb")] = None
    asymptote: Annotated[float | None, Option(help="L_inf of a ladder's law, pinned [nat/token]; default: fitted")] = (
        None
    )
    target: Annotated[float | None, Option(help="is each variant's mean loss below this one? p < .01, one-sided")] = (
        None
    )
    where: Annotated[str | None, Option(help="only rows that satisfy this condition: \"variant != 'old'\"")] = None
    deadline: Deadline = 60.0

    def compute(self) -> "Judgement | TargetJudgement":
        from sparsedepth.recipe.judge import judge as judgement_of
        from sparsedepth.recipe.judge_target import judge_target

        if not isinstance(self.table, str | Path):
            told = f"the table is a {type(self.table).__name__}, and judge reads a file"
            raise ValueError(f"{told}; write it first: table.to_csv('runs.csv', index=False), then judge('runs.csv')")
        given = self.column or {}
        pairs = given.items() if isinstance(given, Mapping) else [text.partition("=")[::2] for text in given]
        if wrong := [name for name, value in pairs if not (name and value)]:
            raise ValueError(f"--column {wrong[0]!r} must be WHAT=COLUMN, such as --column loss=val_bpb")
        if self.target is None:
            return judgement_of(
                Path(self.table), dict(pairs), self.baseline, self.variant, self.asymptote, self.deadline, self.where
            )
        if beside := [name for name in ("baseline", "asymptote") if getattr(self, name) is not None]:
            raise ValueError(f"--{beside[0]} is for comparing variants, and --target compares with a number; drop one")
        return judge_target(Path(self.table), dict(pairs), self.target, self.variant, self.deadline, self.where)


@option.command
def judge(
    given: JudgeCommand,
    format: Format = None,
    out: OutFile = None,
    plot: Annotated[Path | None, Option(help="of a ladder: draw loss and worth into this .png, .svg or .pdf")] = None,
) -> None:
    """Say of each variant in a table of runs whether it is better than the baseline, or a lucky seed.

    Exit code 0: one is better, 3: not shown, 4: one is worse and none better."""
    from sparsedepth.recipe.judge import EXIT_CODES
    from sparsedepth.recipe.judge_target import TargetJudgement
    from sparsedepth.words.judge import judgement_lines, target_lines

    format = choose_format(format, out)
    found = given.compute()
    if out is not None and out.exists() and out.samefile(given.table):
        raise ValueError(f"-o {out} is the table itself, which would be replaced by its verdicts; name another file")
    lines = target_lines(found) if isinstance(found, TargetJudgement) else judgement_lines(found)
    if plot is not None:
        if isinstance(found, TargetJudgement) or found.ladder is None:
            raise ValueError(f"--plot {plot} is of a ladder, one run at each of three budgets or more; leave it out")
        from sparsedepth.plots.ladder import draw_ladder  # imports matplotlib

        loss = found.columns["loss"]
        draw_ladder(found.ladder.laws, found.baseline, plot, loss, found.currency, Path(given.table))
    show(found.table, lines, format, out)
    raise Exit(EXIT_CODES[found.verdict])
