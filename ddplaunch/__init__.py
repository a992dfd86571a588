"""ddplaunch: a launcher for PyTorch distributed training."""

__version__ = "0.1.0"

TYPE_CHECKING = False
"""What ``typing.TYPE_CHECKING`` is: to load typing takes 3 ms, and a start needs none of it."""

if TYPE_CHECKING:
    from ddplaunch.errors import LaunchError as LaunchError
    from ddplaunch.python.job import RankFailed as RankFailed
    from ddplaunch.python.launching import launch as launch
    from ddplaunch.python.launching import launch_async as launch_async
    from ddplaunch.python.session import Session as Session

_HOMES = {
    "LaunchError": "errors",
    "RankFailed": "python.job",
    "Session": "python.session",
    "launch": "python.launching",
    "launch_async": "python.launching",
    "load_ipython_extension": "python.magic",
}

__all__ = ["LaunchError", "RankFailed", "Session", "launch", "launch_async"]


def __getattr__(name: str) -> object:
    """Import the public API lazily (PEP 562): the command and its ranks do not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ddplaunch.{_HOMES[name]}"), name)
