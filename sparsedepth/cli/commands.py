"""The table of commands, each with the example that its --help ends with."""

import inspect

from typer import Exit, Option, Typer

from sparsedepth import __version__
from sparsedepth.cli import (
    describe,
    doctor,
    evaluate,
    exchange,
    figures,
    judge,
    measure,
    plan,
    read,
    recipe,
    scaling,
    status,
    train_sweep,
)

app = Typer(
    name="sparsedepth",
    help="Measure which kinds of sparsity make the deep layers of a language model worth their cost.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = Option(False, "--version", help="Print the version and exit."),
    plugin: str | None = Option(None, metavar="FILE", help="Your own measure, task or figure (docs/adding.md)."),
) -> None:
    """`--plugin` is read by `plugins`, before the tables of measures are made."""
    if version:
        print(f"sparsedepth {__version__}")
        raise Exit


COMMANDS = {
    "init": (describe.init, "init sweep mine.yaml --like depth"),
    "plan": (plan.plan, "plan mine.yaml --on h100 --workers 4"),
    "sweep": (
        train_sweep.sweep,
        "sweep mine.yaml -o results/mine --scale tiny --set seeds=3",
    ),
    "work": (train_sweep.work, "work results/mine --workers 2"),
    "train": (train_sweep.train, "train run.yaml -o results/mine --set lr=1e-3"),
    "status": (status.status, "status results/mine --watch"),
    "logs": (status.logs, "logs results/mine 0123456789ab --follow"),
    "stop": (train_sweep.stop, "stop results/mine"),
    "measure": (measure.measure, "measure models/llama --data held-out.txt -o results/models/llama"),
    "export": (exchange.export, "export results/mine/runs/0123456789ab -o models/mine"),
    "evaluate": (evaluate.evaluate, "evaluate results/mine/runs/0123456789ab --tasks lambada_openai --limit 100"),
    "import": (exchange.import_, "import runs.csv --map map.yaml -o results/theirs"),
    "judge": (judge.judge, "judge runs.csv --baseline adamw"),
    "query": (read.query, 'query results/mine "select n_layers, avg(val_loss) from runs group by all" -o losses.csv'),
    "best": (read.best, "best results/mine --by usefulness --depth 24"),
    "effects": (read.effects, "effects results/mine --by loss --knob n_kv_heads"),
    "plot": (figures.plot, "plot results/mine -o figure.png --figure pareto"),
    "report": (figures.report, "report results/mine -o report.html"),
    "pack": (exchange.pack, "pack results/mine -o mine.pack"),
    "sync": (exchange.sync, "sync results/mine --to mlflow --watch"),
    "metrics": (describe.metrics, "metrics usefulness"),
    "schema": (describe.schema, "schema sweep"),
    "presets": (describe.presets, "presets llama-130m"),
    "doctor": (doctor.doctor, "doctor --format json"),
    "recipe derive": (recipe.derive, "recipe results/mine --depth 24 -o recipe.yaml"),
    "recipe verify": (recipe.verify, "recipe verify recipe.card.json -o results/trial"),
    "scaling fit": (scaling.fit, "scaling fit results/mine"),
    "scaling depth": (scaling.depth, "scaling depth results/mine"),
    "scaling carry": (scaling.carry, "scaling carry results/mine --at n_layers=12"),
    "scaling check": (scaling.check, "scaling check run.yaml --vary n_layers=3,6,12 --vary d_model=32,64"),
    "scaling plot": (scaling.plot, "scaling plot results/mine -o law.png"),
}
"""Command -> (function, example)."""


def _summary(text: str | None) -> str:
    """The whole first paragraph; typer would cut it to one line."""
    return inspect.cleandoc(text or "").partition("\n\n")[0].replace("\n", " ")


_groups = {"recipe": recipe.app, "scaling": scaling.app}
for _name, _group in _groups.items():
    app.add_typer(_group, name=_name, short_help=_summary(_group.info.help))
for _full_name, (_function, _example) in COMMANDS.items():
    _group_name, _, _name = _full_name.rpartition(" ")
    _groups.get(_group_name, app).command(
        _name,
        cls=read.QueryCommand if _name == "query" else None,
        epilog=f"\b\nExample: sparsedepth {_example}",  # \b: one line, to copy
        short_help=_summary(_function.__doc__),
    )(_function)
