"""Makes job configs for tests: by fields of ``JobConfig``, and by options of the core."""

from msgspec.structs import replace

from ddplaunch.base.options import OptionGroup, Options, OptionSource
from ddplaunch.cli.run_options import CORE_GROUPS
from ddplaunch.core.job_config import JobConfig


def make_job_config(**values: object) -> JobConfig:
    """Return a job config; ``inspect=False`` is ``--no-inspect``, ``options`` has groups of features."""
    if "inspect" in values:
        values["no_inspect"] = not values.pop("inspect")
    added = values.pop("options", Options({}, {}))
    assert isinstance(added, Options)
    groups: dict[type[OptionGroup], OptionGroup] = {**added._groups}
    for kind in CORE_GROUPS:
        own = {name: values.pop(name) for name in kind.__struct_fields__ if name in values}
        groups[kind] = replace(kind(), **own)
    sources = {name: OptionSource.DEFAULT for kind in groups for name in kind.__struct_fields__}
    return JobConfig(**values, options=Options(groups, sources))  # type: ignore[arg-type]
