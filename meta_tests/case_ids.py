"""Give parametrized cases ids that a text search in the source finds: the beginning of the value,
as it is written there.

pytest names a list, a dict or a long text after its argument and its position: ``words0``,
``line12``. A search for such an id does not find the row.
"""

#: pytest shows a text of at most this length in full.
_LONGEST = 100
#: The number of characters that are shown of a longer text. A line of the source has 100 characters
#: with its indentation.
_SHOWN = 80


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return an id for a value. Return None if pytest's own id is already good."""
    if isinstance(val, str) and len(val) > _LONGEST:
        return val[:_SHOWN]
    if isinstance(val, list | tuple | dict) and _is_plain(val):
        return _as_written(val)[:_SHOWN]
    return None


def _is_plain(value: object) -> bool:
    """Return whether a value consists of texts, numbers and lists, so that its text is the same in
    every process."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in (*value, *value.values()))
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    return value is None or type(value) in (str, int, float, bool)


def _as_written(value: object) -> str:
    """Return the source text of a plain value, with the quotes that ruff uses."""
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
