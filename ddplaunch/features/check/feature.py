"""The check of every node before an attempt: ``--check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.core.feature import Feature
from ddplaunch.features.check.options import Checking

if TYPE_CHECKING:
    from ddplaunch.core.job_config import JobConfig
    from ddplaunch.core.options import Options


class Check(Feature):
    options = (Checking,)

    def configure_job(self, config: JobConfig, options: Options) -> JobConfig:
        timeout = options[Checking].gpu_memory_timeout
        return replace(
            config,
            checks_nodes=options[Checking].check,
            gpu_memory_timeout=config.gpu_memory_timeout if timeout is None else timeout,
        )


FEATURE = Check()
