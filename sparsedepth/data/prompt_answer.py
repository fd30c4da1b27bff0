"""Pairs of prompt and answer for supervised fine-tuning, `corpus: sft:PATH`, from JSON: a file, or a folder of them.

    {"prompt": ..., "answer": ...}                               unchanged
    {"instruction": ..., "input": ..., "output": ...}            Alpaca's template with the first two; the answer is
                                                                 `output` (Commonsense170K of 2304.01933)

A .jsonl file has one object a line; a .json file that, or one array of objects, as Commonsense170K is released. Other
fields are not read: the `answer` of Commonsense170K is the label within `output`.

A pair is one text: prompt, a space unless the prompt ends in white space, answer. It is tokenised as one text; white
space in between belongs to the answer, since tokenizers join a space with the next word.

Deviates: the code of 2304.01933 indents the template's lines by 16 spaces and keeps a '# noqa: E501' in it, both slips
of its layout; here the lines are Alpaca's.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sparsedepth.config.run import DataConfig
from sparsedepth.config.task import SFT
from sparsedepth.data.corpus import json_objects, kind_of, local_files, plain
from sparsedepth.data.tokenizer import Tokenizer

SHAPES = "prompt and answer, or instruction, input and output"

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{}\n\n{}### Response:\n"
)


class Pair(NamedTuple):
    prompt: str
    answer: str


def pair_texts(config: DataConfig) -> Iterator[str]:
    """Each pair of `config.corpus` as the JSON text [prompt, answer], which `split` can handle like a document.

    Raises ValueError, naming file and line, for what is no object, a missing field, and an empty prompt or answer.
    """
    for file in local_files(config.corpus.removeprefix(SFT)):
        if kind_of(file) != "lines":
            raise ValueError(f"{file} holds no pairs of prompt and answer; write them as JSON lines into a .jsonl file")
        for place, row in json_objects(file):
            yield json.dumps(_pair(row, place), ensure_ascii=False)


def _pair(row: Mapping[str, Any], place: str) -> Pair:
    names = ("instruction", "output") if "instruction" in row and "prompt" not in row else ("prompt", "answer")
    prompt, answer = (text_field(row, name, place) for name in names)
    if names[0] == "prompt":
        return Pair(prompt, answer)
    context = row.get("input") or ""
    if not isinstance(context, str):
        raise ValueError(f"{place} holds {type(context).__name__} in 'input', not text")
    note = ", paired with an input that provides further context" if context else ""
    return Pair(_ALPACA.format(note, prompt, f"### Input:\n{plain(context)}\n\n" if context else ""), answer)


def text_field(row: Mapping[str, Any], name: str, place: str) -> str:
    """A required text. Raises ValueError if it is missing, not text, or empty."""
    if name not in row:
        raise ValueError(f"{place} has no field {name!r}; an object holds {SHAPES}")
    if not isinstance(row[name], str):
        raise ValueError(f"{place} holds {type(row[name]).__name__} in {name!r}, not text")
    if not row[name].strip():
        raise ValueError(f"{place} has an empty {name!r}; fill it in, or leave the pair out")
    return plain(row[name])


def pair_text(pair: Pair) -> str:
    return pair.prompt + ("" if pair.prompt[-1].isspace() else " ") + pair.answer


def encode_pairs(tokenizer: Tokenizer, pairs: list[Pair]) -> list[tuple[list[int], list[int]]]:
    """The ids of each pair's text, split into the prompt's and the answer's, at least one."""
    texts = tokenizer.encode([pair_text(pair) for pair in pairs])
    prompts = tokenizer.encode([pair.prompt.rstrip() for pair in pairs])
    lengths = [min(len(prompt), len(ids) - 1) for prompt, ids in zip(prompts, texts, strict=True)]
    return [(ids[:length], ids[length:]) for ids, length in zip(texts, lengths, strict=True)]


def text_of(pair: str) -> str:
    """The text of a pair of `pair_texts`, from which a tokenizer learns."""
    return pair_text(Pair(*json.loads(pair)))


class PairTokenizer:
    """A tokenizer for the texts of `pair_texts`, which encodes them as prompt, eod, answer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.size, self.eod = tokenizer.size, tokenizer.eod

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Raises ValueError if the ids of a text contain the eod, which would cut it."""
        pairs = [Pair(*json.loads(text)) for text in texts]
        encoded = encode_pairs(self._tokenizer, pairs)
        for pair, (prompt, answer) in zip(pairs, encoded, strict=True):
            if self.eod in prompt or self.eod in answer:
                raise ValueError(
                    f"the tokenizer encodes its end of a document, token {self.eod}, in the text of the pair "
                    f"{' '.join(pair_text(pair).split())[:60]!r}...; leave the pair out, or name another tokenizer"
                )
        return [[*prompt, self.eod, *answer] for prompt, answer in encoded]
