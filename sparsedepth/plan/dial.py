"""Sizes by one dial, depth: `init sweep --ladder N` writes them into a definition, where each number can be changed.

    width = PER_LAYER x layers,  tokens = PER_PARAMETER x parameters in blocks,  weight decay ~ 1 / layers^2

as nanochat's `--depth` (64 a layer, 12 tokens per parameter), smaller for CPUs. From FIRST layers on one layer
more is about twice the FLOPs, since these go with the sixth power of depth; tokens then make budgets double exactly."""

from string import Template
from typing import NamedTuple

from sparsedepth.config.cost import cost
from sparsedepth.config.model import ModelConfig

PER_LAYER, HEAD, PER_PARAMETER = 4, 16, 12
FIRST = 8
"""Layers of the first rung."""
MIN_RUNGS, MAX_RUNGS = 3, 8
WEIGHT_DECAY = 0.1
"""Of the first rung."""
BATCH_TOKENS = 1024


class Rung(NamedTuple):
    n_layers: int
    d_model: int
    n_heads: int
    train_tokens: int
    weight_decay: float


def rungs(number: int) -> list[Rung]:
    """Budgets that double, a layer more at each. Raises ValueError for fewer than three, or more than eight."""
    if not MIN_RUNGS <= number <= MAX_RUNGS:
        raise ValueError(
            f"--ladder {number}: give {MIN_RUNGS} to {MAX_RUNGS} sizes, each of twice the compute of the one before"
        )
    found = []
    budget = 0.0
    for n_layers in range(FIRST, FIRST + number):
        d_model = PER_LAYER * n_layers
        n_heads = _heads(d_model)
        # Of bytes, in sequences as long as the template's.
        price = cost(ModelConfig(n_layers=n_layers, d_model=d_model, n_heads=n_heads, vocab_size=264, seq_len=128))
        budget = 2 * budget if found else float(price.train_flops(PER_PARAMETER * price.params_blocks))
        steps = round(budget / price.train_flops(BATCH_TOKENS))
        decay = float(f"{WEIGHT_DECAY * (FIRST / n_layers) ** 2:.2g}")
        found.append(Rung(n_layers, d_model, n_heads, steps * BATCH_TOKENS, decay))
    return found


def _heads(d_model: int) -> int:
    """As near to heads of HEAD as an even head size allows."""
    allowed = [n for n in range(1, d_model) if d_model % n == 0 and d_model // n % 2 == 0]
    return min(allowed, key=lambda n: abs(d_model / n - HEAD))


def ladder_definition(template: str, number: int) -> str:
    """The template with its rungs."""
    values = zip(Rung._fields, zip(*rungs(number), strict=True), strict=True)
    columns = {name: ", ".join(map(str, of_rungs)) for name, of_rungs in values}
    return Template(template).substitute(
        columns, number=number, first=FIRST, per_layer=PER_LAYER, head=HEAD, per_parameter=PER_PARAMETER
    )
