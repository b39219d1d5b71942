"""The folders that the tests read."""

from pathlib import Path

#: The folder of the project.
ROOT = Path(__file__).resolve().parents[1]
META = ROOT / "meta_tests"
DATA = META / "data"
FAKES = META / "fakes"
FAULTS = META / "faults"
IN_VLLM = FAULTS / "in_vllm"
SCENARIOS = META / "whole" / "scenarios"
