"""torch's debug server: ``--torch-debug``."""

from __future__ import annotations

from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from ddplaunch.base.errors import UsageError
from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.torch_debug.options import TorchDebug
from ddplaunch.system.target.target import TargetKind

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan

MIN_TORCH = 2, 11
_LEAVE_OUT = "leave --torch-debug out; `ddplaunch stacks` needs none of that"


class TorchDebugServer(Feature):
    options = (TorchDebug,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if not options[TorchDebug].torch_debug:
            return ()
        from ddplaunch.system.target.versions import read_versions

        if plan.target.kind is TargetKind.PROGRAM:
            raise UsageError("--torch-debug works only with Python", "leave --torch-debug out")
        if plan.nnodes > 1:
            what = (
                f"--torch-debug works on one node, as torch protects its pages by nothing; this job has {plan.nnodes}"
            )
            raise UsageError(what, _LEAVE_OUT)
        torch = read_versions(torch=True).torch
        if torch is None or tuple(map(int, torch.split(".")[:2])) < MIN_TORCH:
            found = f"this is {torch}" if torch else "none is installed"
            raise UsageError(f"--torch-debug needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or later: {found}", _LEAVE_OUT)
        has_client = any(PathFinder.find_spec(name) for name in ("requests", "aiohttp"))
        missing = [name for name in ("jinja2", "tabulate") if PathFinder.find_spec(name) is None]
        missing += [] if has_client else ["requests"]
        if missing:
            raise UsageError(f"torch's debug server needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")
        return ()

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.options[TorchDebug].torch_debug:
            return None
        from ddplaunch.features.torch_debug.node import DebugServerSide

        return DebugServerSide(context)


FEATURE = TorchDebugServer()
