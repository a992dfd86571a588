"""ddplaunch: a launcher for PyTorch distributed training."""

__version__ = "0.1.0"

TYPE_CHECKING = False
"""Stands for ``typing.TYPE_CHECKING``: to load typing takes 3 ms, and a start does not need it."""

if TYPE_CHECKING:
    from ddplaunch.base.errors import LaunchError as LaunchError
    from ddplaunch.features.python.launch_function import launch as launch
    from ddplaunch.features.python.launch_function import launch_async as launch_async
    from ddplaunch.features.python.launched_job import RankFailed as RankFailed
    from ddplaunch.features.python.session import Session as Session

_HOMES = {
    "LaunchError": "base.errors",
    "RankFailed": "features.python.launched_job",
    "Session": "features.python.session",
    "launch": "features.python.launch_function",
    "launch_async": "features.python.launch_function",
    "load_ipython_extension": "features.python.notebook_magic",
}

__all__ = ["LaunchError", "RankFailed", "Session", "launch", "launch_async"]


def __getattr__(name: str) -> object:
    """Import the public API lazily (PEP 562): the command and its ranks do not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ddplaunch.{_HOMES[name]}"), name)
