"""Read and write configuration as YAML: data only, size-limited, with errors that name the key, the value and the fix.

`yaml.safe_load` semantics (no tags that build objects), no aliases (no alias bombs), and `1e-3` is a number (a string
in YAML 1.1)."""

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sparsedepth.config.mistakes import explain
from sparsedepth.config.section import Fields
from sparsedepth.files import read_regular, unreadable
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas

MAX_BYTES = 1_000_000
MAX_FILES = 8
"""In a chain of `extends`."""

Config = TypeVar("Config", bound=BaseModel)

_NOT_DECIMAL = re.compile(r"[-+]?0[\d_]|.*:")
"""010 (8 in YAML 1.1) and 1:30 (90)"""


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects aliases, duplicate keys and non-decimal numbers, and reads 1e-3 as a float."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*name) are not allowed {self.peek_event().start_mark}")
        return super().compose_node(parent, index)

    def construct_decimal(self, node: Any) -> Any:
        number = self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        if _NOT_DECIMAL.match(node.value) and not node.value.startswith(("0.", "-0.", "+0.")):
            raise yaml.YAMLError(
                f"{node.value} would be read as {number}; write that, or '{node.value}' in quotes for text, "
                f"or leave out the leading zero {node.start_mark}"
            )
        return number

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Rejects keys that are given twice, of which YAML would keep the last."""
        keys = set[Hashable]()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        told = [(key.value, value.value if isinstance(value.value, str) else "...") for key, value in pairs]
        if node.flow_style and "" in (values := [value for _, value in told][1:]):
            name, value = told[values.index("")]
            several = commas([value, *(key for key, empty in told if empty == "")])
            raise yaml.YAMLError(f"{name}: {several} must be a list: write [{several}] {node.start_mark}")
        for key_node, _ in pairs:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # rejected below, with its position
            if key in keys:
                mark = key_node.start_mark
                raise yaml.YAMLError(f"duplicate key {key!r} at line {mark.line + 1}, column {mark.column + 1}")
            keys.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)  # 2024-01-01 may name a folder
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_decimal)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `_Loader` would read as a number, such as the digest 12e345678901."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def yaml_text(values: Fields, **style: Any) -> str:
    """YAML that `parse_yaml` reads back as these values, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises ValueError with `source` and the position."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"{source} has {len(text):,} characters; a configuration may have {MAX_BYTES:,}")
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{source} is not plain YAML: {_parser_message(error)}") from None
    except (LookupError, TypeError):
        raise ValueError(f"{source} is not plain YAML: a tag, such as !!bool, is not that of its value") from None


def _parser_message(error: Exception) -> str:
    """The parser's message in one line, the position first."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) and error.problem:
        context = f", {error.context}" if error.context else ""
        fix = "; indent with spaces" if "'\\t'" in error.problem else ""
        fix = "; put the text in quotes" if error.problem.startswith(("mapping values", "expected ','")) else fix
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{fix}"
    return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())


def read_yaml(path: Path) -> Named:
    """The mapping in a YAML file. Raises ValueError for a missing file, other content, or more than 1 MB."""
    try:
        text = read_regular(path, MAX_BYTES, path.parent).decode()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name a YAML file") from None
    except (OSError, UnicodeError) as error:
        raise unreadable(path, error) from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        content = "nothing" if values is None else f"a {type(values).__name__}"
        fix = f"; this is a table: sparsedepth judge {path}" if path.suffix in (".csv", ".tsv") else ""
        raise ValueError(f"{path} must hold 'key: value' lines, and holds {content}{fix}")
    return values


def read_extended(path: Path, chain: tuple[Path, ...] = ()) -> Named:
    """The mapping in a YAML file, merged over the file that its key `extends` names (relative to it); `base` is merged
    too. `chain`: the files that extend this one. Raises ValueError for a cycle, or more than MAX_FILES files."""
    if path.resolve() in chain:
        raise ValueError(f"{chain[-1]}: extends {str(path)!r}, which extends this file: a cycle")
    if len(chain) == MAX_FILES:
        raise ValueError(f"{chain[-1]}: extends a chain of more than {MAX_FILES} files; put them together")
    values = read_yaml(path)
    if "extends" not in values:
        return values
    parent_path = values.pop("extends")
    if not isinstance(parent_path, str) or not parent_path or Path(parent_path).is_absolute():
        raise ValueError(f"{path}: extends={parent_path!r} must be the path of a YAML file, relative to this one")
    parent = read_extended(path.parent / parent_path, (*chain, path.resolve()))
    merged = {**parent, **values}
    if isinstance(parent.get("base"), dict) and isinstance(values.get("base"), dict):
        merged["base"] = {**parent["base"], **values["base"]}
    return merged


def parse_settings(settings: Iterable[str] | Fields, option: str = "--set") -> Fields:
    """`--set key=value` pairs (from Python also a mapping), each value read as YAML: 'lr=1e-3' -> {'lr': 0.001}."""
    if isinstance(settings, Mapping):
        return dict(settings)
    parsed: Named = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            example = ", such as --set n_layers=24" if option == "--set" else ""
            raise ValueError(f"{option} {setting!r} must have the form key=value{example}")
        parsed[key.strip()] = parse_yaml(value, f"{option} {key.strip()}")
    return parsed


def parse_lists(settings: Iterable[str] | Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """`--vary key=value,value` pairs: 'n_kv_heads=1,2,4' -> {'n_kv_heads': [1, 2, 4]}; or a mapping of lists."""
    if isinstance(settings, Mapping):
        return {key: [*values] for key, values in settings.items()}
    parsed: dict[str, list[Any]] = {}
    for setting in settings:
        key, _, values = (part.strip() for part in setting.partition("="))
        if not key or not values:
            raise ValueError(f"--vary {setting!r} must have the form key=value,value, such as --vary n_layers=4,12")
        if key in parsed:
            raise ValueError(f"--vary {key} is given twice; list all its values in one")
        parsed[key] = parse_yaml(f"[{values}]", f"--vary {key}")
    return parsed


def build(model: type[Config], values: Fields, source: str) -> Config:
    """A validated config from plain values, strictly typed. Raises ValueError with all mistakes, in one line."""
    try:
        return model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(f"{source}: " + "; ".join(explain(model, values, error))) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: a value is neither number, text, list nor mapping ({error})") from None
