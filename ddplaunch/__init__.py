"""ddplaunch: a launcher for PyTorch distributed training."""

__version__ = "0.1.0"

TYPE_CHECKING = False
"""What ``typing.TYPE_CHECKING`` is: to load typing takes 3 ms, and a start needs none of it."""

if TYPE_CHECKING:
    from ddplaunch.errors import LaunchError as LaunchError
    from ddplaunch.python import RankFailed as RankFailed
    from ddplaunch.python import Session as Session
    from ddplaunch.python import launch as launch
    from ddplaunch.python import launch_async as launch_async

__all__ = ["LaunchError", "RankFailed", "Session", "launch", "launch_async"]


def __getattr__(name: str) -> object:
    """Load what programs use when they ask for it; the command and its ranks do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddplaunch import errors, python

    return getattr(errors if name == "LaunchError" else python, name)
