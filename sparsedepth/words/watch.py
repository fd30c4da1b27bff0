"""What `watch` says of its cost."""


def cost_text(seconds: float, share: float, every: int, kept: int | None, n_sequences: int) -> str:
    """'sparsedepth: measuring takes 0.11 s, 1.8% of a step's time at every=1000'."""
    cost = f"sparsedepth: measuring takes {seconds:.2g} s, {100 * share:.3g}% of a step's time at every={every}"
    limit = "" if kept is None else f"; from now on {kept} of {n_sequences} sequences, to stay within the budget"
    return f"{cost}{limit}"
