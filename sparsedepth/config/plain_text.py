"""Text that comes from anyone and ends up in terminals: a definition's sentences, what a run said of its failure."""


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, changes of direction) as escapes, but for
    those in `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )
