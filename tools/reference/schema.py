"""Write the page about the keys of verdict.json and of a profile, from their JSON Schemas."""

from typing import Any

from sm121.core import described_schema
from sm121.core.profile import Profile
from sm121.run import verdict_file
from tools.reference.markdown import MADE_BY, cell, table


def page() -> str:
    """Return docs/tables/schema.md."""
    lines = [
        "# Keys of verdict.json and of a profile",
        "",
        MADE_BY.format(source="the models"),
        "The machine-readable form: [verdict.schema.json](../verdict.schema.json), "
        "[profile.schema.json](../profile.schema.json). How they may change: "
        "[contracts](../contracts.md).",
    ]
    for title, schema in (
        ("verdict.json", verdict_file.json_schema()),
        ("A profile", described_schema.json_schema(Profile, "validation")),
    ):
        lines += ["", f"## {title}", *_tables(schema, title)]
    return "\n".join(lines) + "\n"


def _tables(schema: dict[str, Any], title: str) -> list[str]:
    lines: list[str] = []
    parts = {title: schema, **schema.get("$defs", {})}
    for name, part in parts.items():
        if "properties" not in part:
            continue
        if name != title:
            lines += ["", f"### {title}: {name}"]
        lines.append("")
        if name != title and part.get("description"):
            lines += [" ".join(str(part["description"]).split()), ""]
        required = set(part.get("required", ()))
        rows = []
        for key, value in part["properties"].items():
            rows.append(
                (
                    f"`{key}`",
                    cell(_type(value)),
                    "yes" if key in required else "",
                    cell(str(value.get("description", ""))),
                )
            )
        lines += table(("key", "type", "required", "meaning"), rows)
    return lines


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "anyOf" in value:
        return " or ".join(_type(item) for item in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    kind = str(value.get("type", "any"))
    if kind == "array":
        items = value.get("items")
        if isinstance(items, dict) and items:
            return f"list of {_type(items)}"
        return "list"
    if kind == "object":
        items = value.get("additionalProperties")
        if isinstance(items, dict) and items:
            return f"table of {_type(items)}"
        return "table"
    return kind
