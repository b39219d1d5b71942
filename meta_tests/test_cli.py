"""``sm121``: a wrong request is one line and status 4, whoever finds it."""

from __future__ import annotations

import pytest

from sm121 import cli


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "sm121: the following arguments are required: COMMAND"),
        (["nothing"], "sm121: argument COMMAND: invalid choice: 'nothing'"),
        (["box", "--wrong"], "sm121: unrecognized arguments: --wrong"),
        (["merge"], "sm121 merge: the following arguments are required: DIR"),
        (["canary-train", "f", "--steps", "0"], "argument --steps: expected at least 1, got 0"),
        (["matrix", "--strength", "x"], "sm121 matrix: --strength x: expected 1, 2 (pairs)"),
        (["matrix", "--strength", "99"], "sm121 matrix: --strength 99: expected at most"),
        (["matrix", "--strength", "1", "--axis", "x"], "sm121 matrix: --axis x: expected one of"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, line, capsys):
    assert cli.main(arguments) == 4
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and line in said.err


def test_help_is_no_wrong_request(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge", "--help"])
    assert ended.value.code == 0 and "DIR" in capsys.readouterr().out
