"""Jobs over SSH: ``--hosts``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature
from ddplaunch.features.ssh.options import SshHosts


class Ssh(Feature):
    options = (SshHosts,)


FEATURE = Ssh()
