"""Item 12: a comparison of two runs that differ in something that is not recorded."""

import itertools
from typing import Any

from meta_tests.fakes.fingerprinted_runs import TAKEN_OUT, run
from meta_tests.two_steps import in_two_steps
from sm121.checkpoint.identity import identity
from sm121.core import errors, profile
from sm121.report import comparison
from sm121.run import verdict_file
from sm121.run.fingerprint import Fingerprint, profile_label
from sm121.session import fingerprinting

from . import Case, Kit, Outcome

_NUMBERS = itertools.count()

_CPU = "cpu-tiny-gpt-oss"


@in_two_steps
def _compared(kit: Kit, **changed: Any) -> Outcome:
    folders = [kit.tmp_path / f"compared-{next(_NUMBERS)}.json" for _ in range(2)]
    for path, file in zip(folders, (run(), run(**changed)), strict=True):
        verdict_file.write(file, path)
    try:
        comparison.refuse_mixed([comparison.read_results(path) for path in folders])
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    return Outcome("PASS", "side by side")


@in_two_steps
def _named(kit: Kit, changed: bool) -> Outcome:
    text = profile.shipped()[_CPU].read_text("utf-8")
    if changed:
        text = text.replace("repeats = 3", "repeats = 1")
    file = kit.tmp_path / "mine.toml"
    file.write_text(text)
    mine = fingerprinting.is_shipped(profile.load(str(file)))
    label = profile_label(_CPU, Fingerprint(profile="12ab", profile_shipped=mine))
    return Outcome("PASS" if mine else "another profile", label)


@in_two_steps
def _weights(kit: Kit, changed: bool) -> Outcome:
    folder = kit.tmp_path / f"checkpoint-{changed}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\0" * (3 << 20))
    before = identity(str(folder))
    weights.write_bytes(b"\0" * ((3 << 20) - 1) + (b"\1" if changed else b"\0"))
    same = identity(str(folder)) == before
    return Outcome("PASS" if same else "another model", f"digest {'same' if same else 'differs'}")


CASES = [
    Case(
        item="12 What was certified is not written down",
        name="compare: a profile of one's own under the name of another",
        fault=_compared(asked={"profile": "p2"}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="differ in profile's digest: p1 and p2",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: another machine",
        fault=_compared(asked={"machine": {"gpu": "H200"}}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="machine's gpu",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: one round instead of five",
        fault=_compared(asked={"options": {"--rounds": "1"}}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="--rounds",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: another checkpoint",
        fault=_compared(asked={"model": "m2"}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="differ in model",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: a run whose fingerprint was taken out",
        fault=_compared(fingerprint=TAKEN_OUT),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="has no record of its settings",
    ),
    Case(
        item="12 What was certified is not written down",
        name="a profile of one's own under a shipped name",
        fault=_named(True),
        clean=_named(False),
        expected="not the shipped one",
    ),
    Case(
        item="12 What was certified is not written down",
        name="other weights in the same folder",
        fault=_weights(True),
        clean=_weights(False),
        expected="differs",
    ),
]
