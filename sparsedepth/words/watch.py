"""What `watch` says of its measures and its cost."""

from collections.abc import Mapping
from typing import Literal

from sparsedepth.words.plain_text import commas

Lack = Literal["parts", "head", "loss", "stream"]
LACK: Mapping[Lack, str] = {
    "parts": "reads parts of a block that are not known of this module",
    "head": "needs the logits of next tokens; name the head of a model that has them by head=",
    "stream": "calls blocks by themselves, and this module's read more than the stream (x_0, other blocks, tokens): "
    "give those of its own pass, such as measures='variance, loss, weights, geometry'",
    "loss": "needs a loss; give loss=, a function of the model's output and targets that returns a loss per input",
}
"""What a measure asks for that a module does not have, and how to give it."""


def left_out_text(left_out: Mapping[str, Lack]) -> str:
    """'sparsedepth: left out of the measures: experts (reads parts of a block, ...); lens, gradients (needs ...)'."""
    by_lack = {lack: [name for name, own in left_out.items() if own == lack] for lack in LACK}
    told = (f"{commas(names)} ({LACK[lack]})" for lack, names in by_lack.items() if names)
    return f"sparsedepth: left out of the measures: {'; '.join(told)}"


def cost_text(seconds: float, share: float, every: int, kept: int | None, n_sequences: int) -> str:
    """'sparsedepth: measuring takes 0.11 s, 1.8% of a step's time at every=1000'."""
    cost = f"sparsedepth: measuring takes {seconds:.2g} s, {100 * share:.3g}% of a step's time at every={every}"
    limit = "" if kept is None else f"; from now on {kept} of {n_sequences} sequences, to stay within the budget"
    return f"{cost}{limit}"
