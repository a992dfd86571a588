"""Jobs over SSH: ``--hosts``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, ReplacementLauncher
from ddplaunch.features.ssh.options import SshHosts

if TYPE_CHECKING:
    from ddplaunch.base.options import Options


class Ssh(Feature):
    requires = ("code",)
    options = (SshHosts,)
    locators = ("job_records",)

    def run_instead(self, options: Options) -> ReplacementLauncher | None:
        if not options[SshHosts].is_used:
            return None
        from ddplaunch.features.ssh.ssh_launch import SshLaunch

        return SshLaunch(options)


FEATURE = Ssh()
