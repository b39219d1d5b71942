"""Fixtures for the tests of compilation: the compiler, the reader of SASS, FlashInfer."""

from __future__ import annotations

import pytest

from sm121.compilation import gb10
from sm121.compilation.gb10 import Compilation
from sm121.session.session import Session


@pytest.fixture(scope="session")
def compilation(conformance: Session, tmp_path_factory: pytest.TempPathFactory) -> Compilation:
    """Compiling for GB10. NotRun without nvcc and cuobjdump, with what pip would install."""
    found = gb10.find(conformance.settings.engine_python, tmp_path_factory.mktemp("compilation"))
    conformance.file.environment["compilation"] = {
        "compiler": str(found.tools.compiler),
        "disassembler": str(found.tools.disassembler),
    }
    return found
