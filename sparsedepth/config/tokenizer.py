"""What the name of a tokenizer tells before it is loaded: whether it is learned from the text, and its size."""

BYTE_SIZE = 257
"""All bytes, and one id that ends a document."""


def is_learned(name: str) -> bool:
    """Whether a tokenizer of this name is learned from the corpus."""
    return name.partition(":")[0] == "bpe"


def known_size(name: str) -> int | None:
    """The number of tokens that the name tells; None for a tokenizer that has to be loaded."""
    if name == "byte":
        return BYTE_SIZE
    if not is_learned(name):
        return None
    size = name.partition(":")[2]
    if not (size.isascii() and size.isdigit()) or int(size) <= 256:
        raise ValueError(f"tokenizer={name!r} must be 'bpe:SIZE' with SIZE over 256, such as 'bpe:4096'")
    return int(size)


def check_size(name: str, size: int, vocab_size: int) -> None:
    """Raises ValueError if ids of the tokenizer exceed the embedding."""
    if size > vocab_size:
        raise ValueError(
            f"tokenizer={name!r} has {size} tokens and the model vocab_size={vocab_size}; "
            f"set vocab_size to at least {size}"
        )
