"""`sparsedepth recipe`: from results to a configuration with its card; its verification; its place in the literature.

`sparsedepth recipe DIR...` is short for `sparsedepth recipe derive DIR...`. Only `verify` imports torch.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from sparsedepth.cli import calls
from sparsedepth.cli.query import Folders, Objective, SkipDamaged
from sparsedepth.cli.train_sweep import Device, Gpus, MaxAttempts, Out, RetryFailed, Runtime, Workers

if TYPE_CHECKING:
    from sparsedepth.recipe.card import Card

CardFile = Annotated[Path, typer.Argument(metavar="CARD", help="recipe card (.card.json), or the recipe beside it")]


class _DeriveByDefault(TyperGroup):
    """Arguments that begin with no command are those of `derive`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["derive", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DeriveByDefault,
    rich_markup_mode=None,
    help="Derive a configuration from results, with its evidence; verify it on fresh seeds; compare it with papers. "
    "`recipe DIR` is short for `recipe derive DIR`, whose --help has its options.",
)


def derive(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="write the RunConfig here (YAML), its card (.md, .json) beside it"),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="n_layers to advise on; default the deepest")] = None,
    objective: Objective = "loss",
    matched: Annotated[str, typer.Option(help="a setting may spend no more of this than its baseline")] = "tokens",
    holdout_depth: Annotated[
        int | None, typer.Option(help="fit on smaller n_layers only, predict this one, and score against its runs")
    ] = None,
    holdout: Annotated[
        Literal["params", "tokens"] | None,
        typer.Option(help="fit on the smaller widths (params) or budgets (tokens), predict the largest, and score"),
    ] = None,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Derive a configuration from paired effects, with its evidence; or abstain and say why."""
    from sparsedepth.recipe.card import card_path
    from sparsedepth.recipe.card_markdown import page_path
    from sparsedepth.recipe.card_text import card_text

    advice: dict[str, Any] = {"depth": depth, "objective": objective, "matched": matched, "holdout": holdout}
    card = calls.recipe(*folders, out=out, **advice, holdout_depth=holdout_depth, skip_damaged=skip_damaged)
    print(card_text(card))
    if out is None:
        print("\nWith -o recipe.yaml: the configuration, and its card with each setting's evidence in full")
    else:
        data, page = card_path(out), page_path(out)
        kind = "the baseline" if card.recipe.abstained else "the recipe"
        command = shlex.join(["sparsedepth", "train", str(out), "--out", str(folders[0])])
        print(f"\n{kind} is in {out}: {command}\nits card: {page} and {data}")
        if not card.recipe.abstained:
            print(f"verify it on fresh seeds: sparsedepth recipe verify {shlex.quote(str(data))} --out DIR")


def verify(
    card: CardFile,
    out: Out,
    seeds: Annotated[int, typer.Option(min=3, help="fresh seeds of each configuration")] = 3,
    workers: Workers = None,
    gpus: Gpus = None,
    device: Device = "auto",
    runtime: Runtime = None,
    max_attempts: MaxAttempts = 2,
    retry_failed: RetryFailed = False,
) -> None:
    """Train baseline, recipe, and recipe less each change on fresh seeds; write the verified card into --out."""
    from sparsedepth.recipe.card import card_path, read_card
    from sparsedepth.recipe.card_markdown import write_page
    from sparsedepth.recipe.verify import configurations

    claimed = read_card(card)  # a mistake is told before torch is imported
    names = list(configurations(claimed))

    from sparsedepth.cli.progress import Watcher
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.verify import verification_sweep
    from sparsedepth.sweep.verify import verify as run_verification

    definition = verification_sweep(claimed, seeds)
    used = calls.machine_of(calls.runtime_of(runtime, device=device), workers, gpus, max_attempts=max_attempts)
    expected = Plan(definition).expected
    print(f"{definition.question}\n{expected} runs into {out}: {', '.join(names)}; seeds {definition.seeds}")
    with Watcher(definition, expected, out) as watcher:
        result = run_verification(claimed, definition, out, used, watcher, retry_failed=retry_failed)
    if result.card is None:
        complete = sum(state.state == "complete" for state in result.states)
        print(f"{complete} of {expected} runs complete; the same command continues", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code if result.stop() else 1)
    _print_verification(claimed, result.card)
    data, page = write_page(out / card_path(card).name, result.card)
    print(f"the verified card: {page} and {data}; {card_path(card)} is as it was")


def _print_verification(before: "Card", after: "Card") -> None:
    from sparsedepth.recipe.card_text import gain_text, grade_text

    verification = after.held_out.verification
    assert verification is not None
    print(f"recipe against baseline: {verification.outcome}: {after.recipe.objective} {gain_text(verification.gain)}")
    for ingredient in verification.ingredients:
        print(
            f"recipe against recipe without {ingredient.left_out}: {ingredient.verdict}: {gain_text(ingredient.gain)}"
        )
    print(f"grade {before.grade} -> {after.grade}: {grade_text(after)}")


def compare(
    card: CardFile,
    literature: Annotated[str, typer.Argument(metavar="papers", help="papers: the published tables")] = "papers",
) -> None:
    """Lay a card beside the published tables: agrees, contradicts, or not comparable, with the reason."""
    from sparsedepth.recipe.card import read_card
    from sparsedepth.recipe.card_text import literature_lines
    from sparsedepth.recipe.literature import compare_with_papers

    if literature != "papers":
        raise ValueError(f"{literature!r} is nothing to compare with; give papers")
    for line in literature_lines(compare_with_papers(read_card(card).recipe)):
        print(line)
