"""The fields of a configuration (`schema`) and measured quantities (`metrics`)."""

from sparsedepth.quantities.quantity import Column, Row
from sparsedepth.words.effects import in_brackets


def column_text(column: Column) -> str:
    """'val_loss [nat/token]: mean loss (2001.08361)'."""
    source = f" ({column.source})" if column.source else ""
    return f"{column.name}{in_brackets(column.unit)}: {column.meaning}{source}"


def type_text(field: Row, definitions: Row) -> str:
    """A field's type: 'int or null', 'pre | post', 'list of float'."""
    if "$ref" in field:
        return type_text(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(type_text(kind, definitions) for kind in field["anyOf"]))
    if "enum" in field or "const" in field:
        return " | ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array" and "items" in field:
        return f"list of {type_text(field['items'], definitions)}"
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "text", "object": "mapping"}
    kind = field.get("type", "any")
    return names.get(kind, kind)
