"""A file of models to measure and rank (`measure --models`): each on the same bytes of one text."""

from typing import Annotated, Literal

from pydantic import Field

from sparsedepth.config.section import Count, Mistakes, Section, Sentence, check


class ModelEntry(Section):
    name: Sentence
    """folder, or name on the hub"""
    revision: Sentence | None = None
    """branch, tag or commit of the hub"""
    licence: Sentence | None = None
    """as its page states it"""
    dtype: Literal["checkpoint", "fp32"] = "checkpoint"
    """of the layers' weights: as in the files, or fp32; they are computed in fp32"""
    memory: Annotated[float, Field(gt=0)] | None = None
    """GB on the device: a model with larger weights is moved there block by block"""

    @property
    def source(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


class ModelsFile(Section):
    text: Sentence = "stdlib"
    """held-out documents of this corpus"""
    bytes: Count = 65_536
    """of text that is scored, about the same for every tokenizer: whole sequences"""
    seq_len: Count = 256
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]

    @check
    def _check_twice(self) -> None:
        sources = [entry.source for entry in self.models]
        if twice := {source for source in sources if sources.count(source) > 1}:
            raise Mistakes(f"{source} is named twice" for source in sorted(twice))
