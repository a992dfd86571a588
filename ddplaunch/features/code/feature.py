"""Copies of the code: ``--code``, which jobs over SSH and ``submit`` use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddplaunch.base.errors import UsageError
from ddplaunch.core.feature import Feature
from ddplaunch.features.code.options import Code

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class CodeCopies(Feature):
    options = (Code,)

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> Iterable[str]:
        return () if is_remote else self.check(options, plan)

    def check(self, options: Options, plan: Plan) -> Iterable[str]:
        """Raise UsageError for ``--code`` where this launcher itself runs the ranks: then nothing is copied."""
        if (folder := options[Code].code) is not None:
            raise UsageError(f"--code {folder} copies nothing: the job runs on this machine", "add --hosts n1:4,n2:4")
        return ()


FEATURE = CodeCopies()
