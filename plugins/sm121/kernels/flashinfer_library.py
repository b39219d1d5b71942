"""FlashInfer's package and the GPU, as the parts of the provider `flashinfer` use them."""

import importlib
from typing import Any

import torch

from sm121.core.verdict import NotRun
from sm121.evidence.failure import classify_lines
from sm121.kernels import flashinfer_releases


class FlashInferLibrary:
    """The installed FlashInfer, on this GPU.

    Attributes:
        package: FlashInfer's package.
        capability: The compute capability of the GPU, for example 121.

    Raises:
        NotRun: FlashInfer cannot be imported, or there is no GPU.
    """

    def __init__(self) -> None:
        try:
            self.package: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise NotRun(
                f"provider flashinfer needs FlashInfer, which cannot be imported here ({error}); "
                "pip install flashinfer-python"
            ) from error
        except Exception as error:  # FlashInfer checks versions when it is imported
            words = f"{type(error).__name__}: {error}"
            remedy = classify_lines([words]).remedy or "repair the environment of FlashInfer"
            raise NotRun(
                f"provider flashinfer: expected that FlashInfer can be imported, got {words}. "
                f"What to do: {remedy}"
            ) from error
        if not torch.cuda.is_available():
            raise NotRun("provider flashinfer needs a GPU that PyTorch can use, there is none here")
        major, minor = torch.cuda.get_device_capability()
        self.capability = 10 * major + minor

    @property
    def version(self) -> str | None:
        """The release; None for a build without a version."""
        text = str(getattr(self.package, "__version__", ""))
        if not text or text.startswith("0.0.0"):
            return None
        return text

    def find(self, module: str, name: str, *arguments: str) -> Any:
        """Return a function of FlashInfer.

        Args:
            module: The name of its module.
            name: Its name.
            *arguments: The names of arguments that it must take.

        Raises:
            NotRun: The release lacks the function or an argument.
        """
        return flashinfer_releases.find_function(module, name, arguments, self.version)

    def require_sm100(self, operation: str) -> None:
        """Require a GPU for which a quantiser is compiled.

        Args:
            operation: The name of the quantiser.

        Raises:
            NotRun: The GPU is older than sm100.
        """
        if self.capability < 100:
            raise NotRun(
                f"FlashInfer's {operation} has no code before sm100: on this sm{self.capability} "
                "it launches an empty kernel and returns what was in memory, without an error"
            )

    def experts_module(self) -> Any:
        """Return the module with which FlashInfer computes the experts."""
        return importlib.import_module("flashinfer.fused_moe.core")
