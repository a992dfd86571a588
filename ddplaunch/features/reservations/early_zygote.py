"""The zygote of a run that is next in line: it imports while the run waits, so that ranks are forked at its turn."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

from ddplaunch.base.errors import LaunchError
from ddplaunch.base.options import Options
from ddplaunch.cli.node_start import plan_node_zygotes
from ddplaunch.core.agent.process_tree import make_zygote_start_settings
from ddplaunch.core.agent.zygote_process import ChildZygote, ZygoteStartSettings, spawn_child_zygote
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.rank import zygote_channel
from ddplaunch.core.rank.zygote_messages import ZygoteConfig
from ddplaunch.system.devices.machine import read_machine
from ddplaunch.system.plan.planner import PlanSpec, make_plan
from ddplaunch.system.target.target import Target

EXIT_TIMEOUT_S = 1.0
_SERVER = "features/reservations/rank/waiting_zygote"  # the file that the zygote loads


class EarlyZygote:
    """Starts a zygote before it is known which GPUs the run gets, and provides it once that is known."""

    unavailable_reason: str | None = None

    def __init__(self, start: ZygoteStartSettings) -> None:
        """Start the zygote. Raises OSError if there can be no more processes."""
        self._config, self._environment, _ = start
        waiting: ZygoteConfig = {**start.config, "server": {"file": _SERVER, "settings": None}}
        self._zygote: tuple[ChildZygote, socket.socket] | None = spawn_child_zygote(start._replace(config=waiting))

    @property
    def child_pid(self) -> int | None:
        return self._zygote[0].pid if self._zygote else None

    def get_zygote(
        self, config: ZygoteConfig, environment: Mapping[str, str]
    ) -> tuple[ChildZygote, socket.socket] | None:
        """Return the zygote with its socket; None if it has ended, or if the run now needs other imports."""
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return None
        process, control = zygote
        if config == self._config and not self._may_have_read_changed(environment):
            with suppress(OSError), open(os.memfd_create("environment"), "wb") as file:
                file.write(json.dumps(dict(environment)).encode())
                file.flush()
                zygote_channel.send_message(control, {"op": "begin"}, [file.fileno()])
                return zygote
        control.close()
        process.kill()
        process.wait(EXIT_TIMEOUT_S)
        return None

    def _may_have_read_changed(self, environment: Mapping[str, str]) -> bool:
        """Whether native code may have read a variable that has changed since. The zygote checks what Python reads."""
        before = self._environment
        others = [name for name in before.keys() | environment.keys() if before.get(name) != environment.get(name)]
        return any(re.fullmatch(self._config["native_reads"], name) for name in others)


def start_early(options: Options, spec: PlanSpec, target: Target) -> EarlyZygote | None:
    """Start the zygote of a run that waits; None if it imports nothing, or another feature provides it.

    ``spec``: the planner's input, with GPUs that are only assumed. An error in it is reported at the run's turn.
    """
    with suppress(LaunchError, OSError):
        machine, _ = read_machine(os.environ, spec, runs_here=True)
        plan = make_plan(spec, target, machine, os.environ, "")
        settings, environ = plan_node_zygotes(options, plan)
        if plan.nnodes > 1 or not settings.plan.modules or settings.plan.user_modules:
            return None
        if load_features().make_zygote_source(options):
            return None
        return EarlyZygote(make_zygote_start_settings(settings, environ, plan))
    return None
