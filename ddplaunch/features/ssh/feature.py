"""Jobs over SSH: ``--hosts``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature
from ddplaunch.features.ssh.options import SshHosts

if TYPE_CHECKING:
    from ddplaunch.core.control_socket.run_locator import RunLocator


class Ssh(Feature):
    options = (SshHosts,)

    def make_locator(self) -> RunLocator:
        from ddplaunch.features.ssh.job_records import SshJobLocator

        return SshJobLocator()


FEATURE = Ssh()
