"""What a section says of its fields, and when its validator is built."""

import subprocess
import sys
from typing import Annotated

from pydantic import Field
from support.tiny_sweep import ENVIRONMENT

from sparsedepth.config.section import Count, Section


class First(Section):
    """One."""

    width: Annotated[Count, Field(description="said in the field")] = 1
    """not this"""
    depth: Count = 2
    """said below it,
    on two lines"""
    height: Count = 3


class Second(First):
    """Two."""

    height: Count = 4
    """said in the heir"""


def test_a_description_is_the_text_below_the_field():
    said = {name: field.description for name, field in Second.model_fields.items()}
    assert said == {"width": "said in the field", "depth": "said below it,\non two lines", "height": "said in the heir"}
    assert First.model_fields["height"].description is None
    assert Second.model_json_schema()["properties"]["height"]["description"] == "said in the heir"


def test_a_validator_is_built_when_it_is_first_used():
    """To build those of all sections takes longer than to answer a query."""
    code = (
        "import sparsedepth.store.best, sparsedepth.cli.commands; from sparsedepth.config.section import Section\n"
        "def heirs(section): return [heir for one in section.__subclasses__() for heir in (one, *heirs(one))]\n"
        "print(len(heirs(Section)) > 10, [heir.__name__ for heir in heirs(Section) if heir.__pydantic_complete__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.strip() == "True []"
