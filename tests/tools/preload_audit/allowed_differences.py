"""Allowed differences: module state and actions that were reviewed, and that an audit does not report.

Standard library only; also loaded in the interpreters of an audit.
"""

import re

REMADE_NAMES: dict[str, frozenset[str]] = {
    "transformers.utils.hub": frozenset({"SESSION_ID"}),
    "diffusers.utils.hub_utils": frozenset({"SESSION_ID"}),
    "psutil": frozenset({"_last_cpu_times", "_last_cpu_times_2", "_last_per_cpu_times", "_last_per_cpu_times_2"}),
}
"""Names whose values fork_fixups.py makes anew in each rank, by module: an audit checks that all forks differ."""

IGNORED_NAMES: dict[str, frozenset[str]] = {
    # The time, in a comment of the C code that f2py writes.
    "numpy.f2py.rules": frozenset({"generationtime", "module_rules"}),
    # Types of ctypes for its own tests, which exist once for all modules.
    "scipy._lib._ccallback_c": frozenset(
        {"plus1_ctypes", "plus1b_ctypes", "plus1bc_ctypes", "plus1_t", "plus1b_t", "plus1bc_t"}
    ),
    # Variables of a loop over a set of functions, whose order is that of addresses.
    "scipy.sparse._data": frozenset({"name", "npfunc"}),
    "pandas.core.computation.expr": frozenset(
        {"PARSERS", "BaseExprVisitor", "PandasExprVisitor", "PythonExprVisitor", "unsupported_nodes"}
    ),
    # None in a fork: set by fsspec's own function for forks.
    "fsspec.asyn": frozenset({"lock"}),
    # The initial working folder, which forks share, and random bytes, which fork_fixups.py makes anew.
    "multiprocess.process": frozenset({"ORIGINAL_DIR", "_current_process"}),
    # The random number of the first link in a terminal.
    "rich.style": frozenset({"_id_generator"}),
    # Of a semaphore that was made to test whether they work, and removed.
    "joblib._multiprocessing_helpers": frozenset({"name"}),
    # The folder of sources for a check by its developers.
    "transformers.utils.auto_docstring": frozenset({"PATH_TO_TRANSFORMERS"}),
    # Whether the root logger has handlers, which ranks compare.
    **dict.fromkeys(
        ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"),
        frozenset({"_logger", "_root_logger"}),
    ),
    # A cache of the parameters of classes, which filelock's own function for forks empties.
    "filelock._api": frozenset({"_INIT_PARAMETER_MODELS"}),
}
"""Names that are not compared, by module."""

IGNORED_ATTRIBUTES: dict[str, frozenset[str]] = {
    # Numbered in the order of their definition, torch's own among them.
    "torch.autograd.function": frozenset({"_autograd_function_id", "_backward_cls"}),
    # A filesystem compares its pid with that of its process, and empties its cache if they differ.
    "fsspec.spec": frozenset({"_pid", "_fs_token", "_fs_token_", "_cache", "_latest"}),
}
"""Attributes of objects and classes that are not compared, by the module of one of their base classes."""

_ALLOWED_ACTIONS: tuple[tuple[str, str], ...] = (
    # Opens an IPv6 socket to test whether that works, and closes it.
    ("urllib3.util.connection", "binds a socket"),
    # The folder of sources for a check by its developers.
    ("transformers.utils.auto_docstring", "looks for src in the working folder"),
    # Closes or unlocks at exit what the process itself has opened, cached or locked: each rank does that.
    ("", r"registers PIL\._imaging\.clear_cache to run at exit"),
    ("", r"registers filelock\._api\._release_live_locks to run at exit"),
    ("", r"registers huggingface_hub\.utils\._http\.close_session to run at exit"),
    ("", r"registers pyarrow\._s3fs\.ensure_s3_finalized to run at exit"),
    ("", r"registers multiprocess\.util\._exit_function to run at exit"),
    ("", r"registers matplotlib\._pylab_helpers\.Gcf\.destroy_all to run at exit"),
    # Resets in a fork what the import has not begun to store.
    ("", r"registers (filelock|fsspec)\.\S+ to run at a fork"),
    ("", r"registers huggingface_hub\.utils\._http\.close_session to run at a fork"),
    ("", r"registers joblib\.externals\.loky\.\S+\.ResourceTracker\._after_fork_in_child to run at a fork"),
    ("", r"registers None\._lru_cache_wrapper\.cache_clear to run at a fork"),
    # For its cache of fonts: the first of several processes makes the folder, and all may read it.
    ("matplotlib", r"makes the folder ~/\.(config|cache)/matplotlib"),
    # Unregisters torch's operators: the zygote disables that (core/rank/atexit_cleanup.py).
    ("", r"registers torch\.\S+ to run at exit"),
    # A file that would list more folders of this package: a program's folder has none.
    ("databricks", r"looks for databricks\.pkg in the program's folder"),
    # Exits a context manager that has created no file, if packages are in folders.
    ("", r"registers certifi\.core\.exit_cacert_ctx to run at exit"),
)
"""Modules ("" for any), and patterns of what they may do."""

SETTABLE = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"})
"""Variables of native code that an import may set: how OpenMP is loaded and forked (scikit-learn)."""

_PATTERNS = tuple((module, re.compile(pattern)) for module, pattern in _ALLOWED_ACTIONS)


def is_allowed(action: str, stack: tuple[str, ...]) -> bool:
    """Whether an action is allowed while these modules were being executed."""
    return any(module in ("", *stack) and pattern.fullmatch(action) for module, pattern in _PATTERNS)


HIDDEN_IMPORTS: dict[str, frozenset[str]] = {
    "transformers.integrations.integration_utils": frozenset({"comet_ml"}),
}
"""Optional modules that a module imports only after it has found their metadata: where they are not installed, an audit
does not see that."""
