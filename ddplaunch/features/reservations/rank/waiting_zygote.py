"""The zygote of a run that waits for its turn: it imports meanwhile, and checks at the turn that nothing has changed.

By then a file that it has imported may have changed, and the run may get other variables than were assumed, like
``CUDA_VISIBLE_DEVICES``. If a file has, or if an import has read such a variable, a fresh zygote replaces this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

    from ddplaunch.core.rank import atexit_cleanup, file_dependencies, import_recorder, zygote_channel
    from ddplaunch.core.rank.zygote_messages import ZygoteConfig
    from ddplaunch.system.processes import proc_utils

_MAX_ENVIRONMENT_BYTES = 1 << 26


def _load_modules(load_module: Callable[[str], Any]) -> None:
    """Load the modules that this file needs; ``load_module``: ``rank_runner.load_private_module``."""
    global file_dependencies, proc_utils, zygote_channel
    file_dependencies = load_module("core/rank/file_dependencies")
    proc_utils = load_module("system/processes/proc_utils")
    zygote_channel = load_module("core/rank/zygote_channel")


class WaitingZygote:
    """The zygote of a run that waits for its turn; it exists from before its imports until that turn."""

    runs_served = 1  # as the time of its imports is not the run's

    def __init__(
        self,
        config: ZygoteConfig,
        settings: object,
        control: socket.socket,
        ignored_signals: Sequence[int],
        rank_runner: Any,
    ) -> None:
        """Called in the zygote before its imports; every server of zygotes has the same arguments."""
        _load_modules(rank_runner.load_private_module)
        proc_utils.die_with_parent(signal.SIGKILL)  # during the imports the socket is not read
        if os.getppid() != config["parent_pid"]:
            os._exit(1)
        self._config, self._control, self._rank_runner = config, control, rank_runner
        self._environment = dict(os.environ)
        self.origins = file_dependencies.FileDependencies(rank_runner)

    def serve(
        self, fit: bool, cleanup: atexit_cleanup.AtexitCleanup, recorder: import_recorder.ImportRecorder
    ) -> tuple[socket.socket, ZygoteConfig]:
        """Wait for the turn, and take over the variables of the run.

        If this process is not ``fit`` for the run, the caller replaces it by one that waits again.
        """
        if not fit:
            return self._control, self._config
        changed = self.origins.record(self._rank_runner.PACKAGE_DIR)
        proc_utils.die_with_parent(0)
        try:
            _, (fd,) = zygote_channel.receive_message(self._control)
        except (EOFError, OSError, ValueError):  # the launcher has ended: it does not wait any more
            cleanup.run()
            os._exit(0)
        environment: dict[str, str] = json.loads(os.pread(fd, _MAX_ENVIRONMENT_BYTES, 0))
        os.close(fd)
        proc_utils.die_with_parent(signal.SIGKILL)  # until it is ready, like a zygote that imports now
        if os.getppid() != self._config["parent_pid"]:
            cleanup.run()
            os._exit(1)
        before, config = self._environment, {**self._config, "server": None}
        others = [name for name in before.keys() | environment if before.get(name) != environment.get(name)]
        if changed or self.origins.find_changed() or recorder.has_read_variable(others):
            cleanup.run()
            self._exec_new_interpreter(config, environment)
        for name in others:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)
        return self._control, config  # type: ignore[return-value]

    def _exec_new_interpreter(self, config: Mapping[str, object], environment: Mapping[str, str]) -> NoReturn:
        """Replace this process by a zygote that imports now, with the same socket."""
        self._control.set_inheritable(True)
        script = os.path.join(os.path.dirname(self._rank_runner.__file__), "zygote.py")
        words = [sys.executable, script, str(self._control.fileno()), json.dumps(config), *sys.argv[3:]]
        os.execve(sys.executable, words, environment)


make_server = WaitingZygote  # called by the zygote
