"""What `watch` says of its tokens and its cost."""


def few_tokens_text(n_fit: int, width: int, times: int) -> str:
    """Of too few tokens for usefulness's maps."""
    of_maps = f"the error of the maps is {width / n_fit:.0%} of what they leave"
    fix = f"give watch {times} times as many sequences of tokens"
    return f"sparsedepth: {n_fit} tokens fit maps of width {width}, and {of_maps}; {fix}"


def cost_text(seconds: float, share: float, every: int, kept: int | None, n_sequences: int) -> str:
    """'sparsedepth: measuring takes 0.11 s, 1.8% of a step's time at every=1000'."""
    cost = f"sparsedepth: measuring takes {seconds:.2g} s, {100 * share:.3g}% of a step's time at every={every}"
    limit = "" if kept is None else f"; from now on {kept} of {n_sequences} sequences, to stay within the budget"
    return f"{cost}{limit}"
