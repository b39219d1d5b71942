"""Compare the text or JSON of an answer with the expected one, ignoring formatting."""

import json
import math
import re
import unicodedata
from typing import Any

#: Variants of hyphens, dashes and minus signs, the fraction slash, and quotation marks, mapped to
#: ASCII characters.
_SIGNS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\u2044\u2018\u2019\u201c\u201d", "------/''\"\""
)
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|operatorname|ce)\s*\{([^{}]*)\}")
#: Maximum nesting depth of LaTeX commands that are removed.
_LATEX_DEPTH = 3
_LATEX_SPACES = re.compile(r"\\[()\[\],;:! ]")
_SUBSCRIPT = re.compile(r"_\{?(\d+)\}?")
_MARKUP = re.compile(r"[*`$]|(?<!\w)_|_(?!\w)")
#: Separators between groups of digits.
_GROUPS = re.compile(r"(?<=\d)[ ,'](?=\d{3}(?!\d))")
_FENCE = re.compile(r"\A\s*```\w*\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)
#: Numbers count as equal up to this relative error.
_PRECISION = 1e-6


def plain(text: str) -> str:
    """Return a text without formatting.

    Markup, LaTeX commands, thin spaces and separators of digit groups are removed; superscript and
    subscript digits, upper case and line breaks are normalised.

    Args:
        text: The text, for example a model's answer.
    """
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    for _ in range(_LATEX_DEPTH):
        text = _LATEX.sub(r"\1", text)
    text = _SUBSCRIPT.sub(r"\1", _LATEX_SPACES.sub(" ", text))
    text = " ".join(_MARKUP.sub("", text).split())
    return _GROUPS.sub("", text).casefold()


def parsed(text: str) -> Any:
    """Parse an answer as JSON.

    Args:
        text: The answer. A code fence around all of it is ignored.

    Returns:
        The JSON value; None if the text is not JSON.
    """
    fenced = _FENCE.match(text)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None


def agrees(expected: Any, observed: Any) -> bool:
    """Return whether a JSON value matches the expected one.

    Args:
        expected: The expected value. Texts in it are patterns for whole texts (see `plain`).
        observed: The value.
    """
    if isinstance(expected, str):
        return isinstance(observed, str) and bool(
            re.fullmatch(expected, plain(observed), re.IGNORECASE)
        )
    if isinstance(expected, bool) or isinstance(observed, bool):
        return expected is observed
    if isinstance(expected, int | float):
        return isinstance(observed, int | float) and math.isclose(
            expected, observed, rel_tol=_PRECISION
        )
    if isinstance(expected, dict):
        if not isinstance(observed, dict) or expected.keys() != observed.keys():
            return False
        return all(agrees(value, observed[key]) for key, value in expected.items())
    if not isinstance(observed, list) or len(expected) != len(observed):
        return False
    return all(map(agrees, expected, observed))
