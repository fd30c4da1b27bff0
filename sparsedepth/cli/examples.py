"""What `--help` of every command ends with: an example that can be typed; and whole summaries in lists of commands."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

EXAMPLES: Mapping[str, str] = {
    "init": "sparsedepth init sweep mine.yaml",
    "plan": "sparsedepth plan sweeps/depth.yaml --on h100 --budget-hours 24",
    "sweep": "sparsedepth sweep sweeps/quickstart.yaml -o results/mine --scale tiny --set seeds=3",
    "work": "sparsedepth work results/mine --workers 2",
    "train": "sparsedepth train run.yaml -o results/mine --set lr=1e-3 --dry-run",
    "status": "sparsedepth status results/mine --watch",
    "logs": "sparsedepth logs results/mine 0123456789ab --follow",
    "stop": "sparsedepth stop results/mine",
    "measure": "sparsedepth measure models/llama --data held-out.txt -o results/models/llama",
    "export": "sparsedepth export results/mine/runs/0123456789ab -o models/mine",
    "evaluate": "sparsedepth evaluate results/mine/runs/0123456789ab --tasks lambada_openai --limit 100",
    "toy": "sparsedepth toy sweeps/toy.yaml -o results/toy --scale micro",
    "query": 'sparsedepth query results/mine "select n_layers, avg(val_loss) from runs group by all" -o losses.csv',
    "best": "sparsedepth best results/mine --by usefulness --depth 24",
    "compare": "sparsedepth compare results/mine results/theirs --by val_loss",
    "effects": "sparsedepth effects results/mine --by loss --knob n_kv_heads",
    "recipe derive": "sparsedepth recipe results/mine --depth 24 -o recipe.yaml",
    "recipe verify": "sparsedepth recipe verify recipe.card.json -o results/trial",
    "recipe compare": "sparsedepth recipe compare recipe.card.json",
    "plot": "sparsedepth plot results/mine -o figure.png --figure pareto",
    "report": "sparsedepth report results/mine -o report.html",
    "scaling fit": "sparsedepth scaling fit results/mine",
    "scaling plot": "sparsedepth scaling plot results/mine -o law.png",
    "scaling optimum": "sparsedepth scaling optimum results/mine --params 1e8",
    "import": "sparsedepth import runs.csv --map map.yaml -o results/theirs",
    "pack": "sparsedepth pack results/mine -o mine.pack",
    "unpack": "sparsedepth unpack mine.pack -o results/mine",
    "serve": "sparsedepth serve results/mine --port 8421",
    "sync": "sparsedepth sync results/mine --to mlflow --watch",
    "metrics": "sparsedepth metrics usefulness",
    "schema": "sparsedepth schema sweep",
    "presets": "sparsedepth presets llama-130m",
    "doctor": "sparsedepth doctor --format json",
}
"""By the words of the command."""


def commands_of(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


def with_examples(group: Any) -> Any:
    """The commands, each with its example below its options and its first sentence in the list."""
    for words, command in commands_of(group):
        command.epilog = f"Example: {EXAMPLES[words]}"
        _keep_summary(command)
    for command in group.commands.values():
        _keep_summary(command)
    return group


def _keep_summary(command: Any) -> None:
    """Have lists of commands wrap the summary instead of cutting it."""
    command.short_help = inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ")
