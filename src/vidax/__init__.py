"""Video generation with open video diffusion models in JAX.

    engine = vidax.load("demo")
    engine.generate("a red circle moves right").save("circle.mp4")

Names are imported when they are first used, so `import vidax` is quick and does not start JAX.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vidax.engine.clip import Result
    from vidax.engine.engine import Engine, load
    from vidax.engine.request import Request
    from vidax.engine.work import Job
    from vidax.errors import UserError
    from vidax.models.registry import CARDS, Card

__version__ = version("vidax")

_HOMES = {
    "load": "vidax.engine.engine",
    "Engine": "vidax.engine.engine",
    "Job": "vidax.engine.work",
    "Result": "vidax.engine.clip",
    "Request": "vidax.engine.request",
    "UserError": "vidax.errors",
    "Card": "vidax.models.registry",
    "CARDS": "vidax.models.registry",
}

__all__ = ["CARDS", "Card", "Engine", "Job", "Request", "Result", "UserError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vidax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
