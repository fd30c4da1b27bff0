"""`sparsedepth recipe`: recommend a configuration from results, and verify it.

`sparsedepth recipe DIR...` is short for `sparsedepth recipe derive DIR...`. Only `verify` imports torch."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, Typer
from typer.core import TyperGroup

from sparsedepth.cli import option
from sparsedepth.cli.option import Folder, FolderOptions, Objective, RecipeDepth, ResultOptions, WorkerOptions
from sparsedepth.cli.start_sweep import machine_of, run_driver
from sparsedepth.words.plain_text import commas, counted, in_shell
from sparsedepth.words.runs import search_text

if TYPE_CHECKING:
    from sparsedepth.recipe.card import Card


class _DeriveByDefault(TyperGroup):
    """`derive` is the default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["derive", *args]
        return super().parse_args(ctx, args)


app = Typer(
    cls=_DeriveByDefault,
    rich_markup_mode=None,
    help="Recommend a configuration from results, or verify it on fresh seeds. "
    "`recipe DIR` means `recipe derive DIR`; see `recipe derive --help` for its options.",
)


@dataclass(frozen=True)
class RecipeCommand(FolderOptions):
    """Recommend a configuration from the effects at one depth; returns its card. `out` also writes the RunConfig (YAML)
    and the card (.md, .json). Raises ValueError if there is neither a recommendation nor a baseline."""

    _: KW_ONLY
    out: Annotated[
        Folder | None,
        Option("-o", "--out", help="run configuration to write (YAML), with its card (.md, .json)"),
    ] = None
    depth: RecipeDepth = None
    objective: Objective = "loss"
    matched: Annotated[
        str | None, Option(help="a setting may use no more of this than its baseline (default: tokens or flops)")
    ] = None
    holdout_depth: Annotated[int | None, Option(help="test the recipe of the smaller n_layers at this one")] = None

    def compute(self) -> "Card":
        """An output that cannot be written is refused first."""
        from sparsedepth.effects.cells import read_runs
        from sparsedepth.files import check_parent
        from sparsedepth.quantities import rankable
        from sparsedepth.recipe.build_card import derive_card
        from sparsedepth.recipe.card import card_path
        from sparsedepth.recipe.files import write_recipe
        from sparsedepth.scaling.speedup import worth
        from sparsedepth.store.comparable_loss import loss_in
        from sparsedepth.store.packs import no_run
        from sparsedepth.store.search import search_of
        from sparsedepth.store.setting import pending
        from sparsedepth.words.differences import pending_text

        out = option.path_of_file(self.out)
        paths = self.paths
        if out is not None:
            check_parent(out)
            if out.suffix not in (".yaml", ".yml"):
                raise ValueError(f"-o {str(out)!r} must end in .yaml: a recipe is a run configuration in YAML")
            if out.exists() and not card_path(out).exists():
                raise ValueError(f"{out} already exists and is not a recipe (it has no card); give another file name")
        with self.open() as store:
            search = search_of(store.roots)
            objective = loss_in(store) if self.objective == "loss" else rankable(self.objective).name
            runs = read_runs(store, objective)
            if runs.empty:
                raise no_run(store.roots)
            compute = worth(store, objective)
            told = pending_text(pending(store))
        if search is not None:
            names = in_shell(*paths)
            raise ValueError(
                f"{names} holds {search_text(search)}; sparsedepth best {names} shows how to rerun the best points"
            )
        card = derive_card(
            runs,
            self.depth,
            objective,
            self.matched,
            holdout_depth=self.holdout_depth,
            folders=paths,
            compute=compute,
            told=told,
        )
        if card.recipe.config is None:
            at = f" at {card.recipe.depth} layers" if card.recipe.depth else ""
            raise ValueError(f"{' '.join(map(str, paths))}: no recipe{at}: {card.recipe.abstained}")
        if out is not None:
            write_recipe(out, card)
        return card


@option.command
def derive(
    given: RecipeCommand,
    format: Annotated[Literal["text", "json"], Option(help="text, or the card as JSON")] = "text",
) -> None:
    """Recommend a configuration from the effects at one depth, with its evidence; or abstain and explain why."""
    from sparsedepth.recipe.card import card_path, recipe_table
    from sparsedepth.recipe.files import page_path, pair_path
    from sparsedepth.store.packs import is_pack
    from sparsedepth.words.recipe import FINDINGS, ROWS, card_text

    out = given.out
    card = given.compute()
    if format == "json":
        print(card.model_dump_json(indent=1, by_alias=True))
        return
    print(card_text(card, recipe_table(card, ROWS), findings=FINDINGS))
    if out is None:
        if card.recipe.changes:
            print("\n-o recipe.yaml writes the configuration, and a card with the full evidence for each setting")
        return
    out = Path(out)
    data = card_path(out)
    kind = "recipe" if card.recipe.changes else "baseline"
    store = "DIR" if is_pack(given.paths[0]) else str(given.paths[0])  # a pack is only read
    command = f"sparsedepth train {in_shell(out)} --out {in_shell(store)}"
    print(f"\n{kind}: {out}; train it with: {command}\ncard: {page_path(out)} and {data}")
    if card.recipe.untested:
        pair = in_shell(pair_path(out))
        print(f"test {' with '.join(card.recipe.untested)}: sparsedepth sweep {pair} --out DIR")
    if card.recipe.defaulted:
        n_defaults = counted(len(card.recipe.defaulted), "field")
        print(f"first set what the imported table does not state: {n_defaults}, named in {out}, at our defaults")
    if card.recipe.changes:
        print(f"verify it on fresh seeds: sparsedepth recipe verify {in_shell(data)} --out DIR")


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(WorkerOptions, ResultOptions):
    """A verification's runs."""


@option.command
def verify(
    given: VerifyCommand,
    card: Annotated[Path, Argument(metavar="CARD", help="recipe card (.card.json), or the recipe YAML")],
    seeds: Annotated[int, Option(min=3, help="fresh seeds of each configuration")] = 3,
) -> None:
    """Train baseline, recipe, and recipe without each change on fresh seeds; write the verified card into --out."""
    from sparsedepth.config.load import build
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.recipe.card import card_path, read_card
    from sparsedepth.recipe.files import write_page
    from sparsedepth.recipe.verify import after, configurations, verification_fields, verified
    from sparsedepth.store.connection import open_store
    from sparsedepth.words.recipe import ingredient_texts, verification_text

    derived = read_card(card)
    out = option.path(given.out)  # errors are reported before torch is imported
    definition = build(SweepDefinition, verification_fields(derived, seeds), "the card's verification")

    from sparsedepth.sweep.driver import Driver

    driver = Driver(Plan(definition), out, machine_of(given, given.max_attempts))
    names = commas(configurations(derived))
    expected = driver.plan.expected
    print(f"{definition.question}\n{expected} runs into {out}: {names}; seeds {definition.seeds}")
    result = run_driver(driver, retry_failed=given.retry_failed)
    if result.stop() or result.unfinished:
        complete = sum(state.state == "complete" for state in result.states)
        code = result.stop.exit_code if result.stop() else 1
        option.stop(f"{complete} of {expected} runs complete; run the same command again to resume", code)
    if (written := out / card_path(card).name).exists():
        derived = after(derived, read_card(written), definition.seeds)
    with open_store(out) as store:
        verified_card = verified(derived, store.frame("select * from runs"), definition.seeds)
    print(f"recipe vs baseline: {verification_text(verified_card)}")
    print("".join(f"{line}\n" for line in ingredient_texts(verified_card)), end="")
    data, page = write_page(written, verified_card)
    print(f"verified card: {page} and {data}; {card_path(card)} is unchanged")
