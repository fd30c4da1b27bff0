"""`sparsedepth recipe`: recommend a configuration from results, and verify it.

`sparsedepth recipe DIR...` is short for `sparsedepth recipe derive DIR...`. Only `verify` imports torch."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from sparsedepth.cli import calls, option
from sparsedepth.words.plain_text import counted


class _DeriveByDefault(TyperGroup):
    """`derive` is the default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["derive", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DeriveByDefault,
    rich_markup_mode=None,
    help="Recommend a configuration from results, or verify it on fresh seeds. "
    "`recipe DIR` means `recipe derive DIR`; see `recipe derive --help` for its options.",
)


@option.of_call(calls.recipe)
def derive(
    given: option.Given,
    format: Annotated[Literal["text", "json"], typer.Option(help="text, or the card as JSON")] = "text",
) -> None:
    """Recommend a configuration from the effects at one depth, with its evidence; or abstain and explain why."""
    from sparsedepth.recipe.card import card_path
    from sparsedepth.recipe.text import card_text, page_path, pair_path
    from sparsedepth.store.records import is_pack

    folders, out = given["folders"], given["out"]
    card = calls.recipe(*folders, **{name: value for name, value in given.items() if name != "folders"})
    if format == "json":
        print(card.model_dump_json(indent=1, by_alias=True))
        return
    print(card_text(card))
    if out is None:
        print("\n-o recipe.yaml writes the configuration, and a card with the full evidence for each setting")
        return
    data = card_path(out)
    kind = "recipe" if card.recipe.changes else "baseline"
    store = "DIR" if is_pack(folders[0]) else str(folders[0])  # a pack is only read
    command = shlex.join(["sparsedepth", "train", str(out), "--out", store])
    print(f"\n{kind}: {out}; train it with: {command}\ncard: {page_path(out)} and {data}")
    if card.recipe.untested:
        pair = shlex.quote(str(pair_path(out)))
        print(f"test {' with '.join(card.recipe.untested)}: sparsedepth sweep {pair} --out DIR")
    if card.recipe.defaulted:
        n_defaults = counted(len(card.recipe.defaulted), "field")
        print(f"first set what the imported table does not state: {n_defaults}, named in {out}, at our defaults")
    if card.recipe.changes:
        print(f"verify it on fresh seeds: sparsedepth recipe verify {shlex.quote(str(data))} --out DIR")


@option.of_call(calls.sweep, only=("out", "workers", "gpus", "device", "runtime", "max_attempts", "retry_failed"))
def verify(
    given: option.Given,
    card: Annotated[Path, typer.Argument(metavar="CARD", help="recipe card (.card.json), or the recipe YAML")],
    seeds: Annotated[int, typer.Option(min=3, help="fresh seeds of each configuration")] = 3,
) -> None:
    """Train baseline, recipe, and recipe without each change on fresh seeds; write the verified card into --out."""
    from sparsedepth.config.load import build
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.recipe.card import card_path, read_card
    from sparsedepth.recipe.text import ingredient_texts, verification_text, write_page
    from sparsedepth.recipe.verify import after, configurations, verification_fields, verified
    from sparsedepth.store.connection import open_store

    derived, out = read_card(card), given["out"]  # errors are reported before torch is imported
    definition = build(SweepDefinition, verification_fields(derived, seeds), "the card's verification")

    from sparsedepth.sweep.driver import Driver

    driver = Driver(Plan(definition), out, calls.machine_of(given))
    names, expected = ", ".join(configurations(derived)), driver.plan.expected
    print(f"{definition.question}\n{expected} runs into {out}: {names}; seeds {definition.seeds}")
    result = calls.run_driver(driver, retry_failed=given["retry_failed"])
    if result.stop() or result.unfinished:
        complete = sum(state.state == "complete" for state in result.states)
        print(f"{complete} of {expected} runs complete; run the same command again to resume", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code if result.stop() else 1)
    if (written := out / card_path(card).name).exists():
        derived = after(derived, read_card(written), definition.seeds)
    with open_store(out) as store:
        verified_card = verified(derived, store.frame("select * from runs"), definition.seeds)
    print(f"recipe vs baseline: {verification_text(verified_card)}")
    print("".join(f"{line}\n" for line in ingredient_texts(verified_card)), end="")
    data, page = write_page(written, verified_card)
    print(f"verified card: {page} and {data}; {card_path(card)} is unchanged")
