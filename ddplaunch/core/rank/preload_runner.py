"""Preloads modules in the zygote for all ranks, and checks that the zygote can still be forked safely."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.core.rank.zygote_messages import Auditor, ZygoteConfig

_DISABLE_THREADS_ENV = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps libraries from starting threads at import (pyarrow's jemalloc, and so pandas)."""


def run_preload(config: ZygoteConfig, make_auditor: Callable[[], Auditor]) -> tuple[str | None, str | None]:
    """Import the preload modules; return an error in the user's ``--preload``, and why the process is not fork-safe.

    ``make_auditor`` makes the auditor for modules other than torch that the user has not named. During the imports the
    environment has the variables that the program itself sets before its imports; ranks do not inherit them.
    """
    unset = {name: value for name, value in _DISABLE_THREADS_ENV.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in (*unset, *config["import_environment"])}
    os.environ.update({**unset, **config["import_environment"]})
    try:
        return _import(config, make_auditor)
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


def _import(config: ZygoteConfig, make_auditor: Callable[[], Auditor]) -> tuple[str | None, str | None]:
    modules = config["modules"]
    if config["fallback"]:
        __import__("torch")  # known packages import it too
        auditor = make_auditor()
        try:
            for name in [each for each in modules if each not in config["fallback"]]:
                try:
                    __import__(name)
                except BaseException as error:
                    auditor.violation = f"importing {name} failed: {type(error).__name__}"
                auditor.check_import(name)
                if auditor.violation:
                    break
        finally:
            auditor.finish()
        if auditor.violation:
            return None, auditor.violation
        modules = config["fallback"]
    for name in modules:
        is_user_module = name in config["user_modules"]
        if is_user_module:
            sys.path.insert(0, config["sys_path_0"])
        try:
            __import__(name)
        except BaseException as error:
            absent = isinstance(error, ModuleNotFoundError)
            if is_user_module:
                return f"--preload {name}: {'' if absent else f'{type(error).__name__}: '}{error}", None
            if not absent:
                return None, f"importing {name} failed"
        finally:
            if is_user_module and sys.path[0] == config["sys_path_0"]:
                sys.path.pop(0)
    return None, None


def why_not_forkable(config: ZygoteConfig, failed: str | None) -> str | None:
    """Return why this process must not be forked as a rank; ``failed``: why the imports are not as expected."""
    if not config["forks"]:
        return None
    if failed:
        return failed
    try:
        probe = os.fork()  # OpenBLAS stops its threads before a fork and restarts them when it computes
        if probe == 0:
            os._exit(0)
        os.waitpid(probe, 0)
    except OSError:  # no rank will get a process either, and that is reported
        pass
    try:
        threads, opened = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    except OSError as error:
        return f"{error.filename} cannot be read"
    after = f"after importing {', '.join(config['modules'])}"
    if len(threads) != 1:
        return f"{len(threads)} threads run {after}"
    for path in [os.path.realpath(f"/proc/self/fd/{fd}") for fd in opened]:
        if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/render")):
            return f"{path} is open {after}"
    return None
