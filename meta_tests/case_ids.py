"""Ids of parametrized cases that a search finds: the beginning of the value, as the source has it.

pytest names a list, a dict or a long text after its argument and its place: ``words0``, ``line12``.
No search leads from there to the row that failed.
"""

#: pytest shows a text of this length as it is.
_LONGEST = 100
#: How much of a longer one is shown. A line of the source has 100 characters with its indentation.
_SHOWN = 80


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return the id of a value that has none of its own, or None for what pytest names well."""
    if isinstance(val, str) and len(val) > _LONGEST:
        return val[:_SHOWN]
    if isinstance(val, list | tuple | dict) and _is_plain(val):
        return _as_written(val)[:_SHOWN]
    return None


def _is_plain(value: object) -> bool:
    """Whether a value is text, numbers, and lists of them: the same in every process."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in (*value, *value.values()))
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    return value is None or type(value) in (str, int, float, bool)


def _as_written(value: object) -> str:
    """Return a plain value with the quotes that ruff gives it."""
    if isinstance(value, dict):
        pairs = [f"{_as_written(key)}: {_as_written(of)}" for key, of in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_written, value)) + "]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return "(" + ", ".join(map(_as_written, value)) + comma + ")"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr(value)[1:-1].replace("\\'", "'") + '"'
    return repr(value)
