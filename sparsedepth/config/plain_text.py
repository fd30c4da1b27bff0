"""Make untrusted text safe for terminals: a definition's sentences, a run's error message."""


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, text direction) escaped, except `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )
