"""Allowed differences: module state and actions that an audit would report and that were reviewed.

Standard library only; loaded inside the interpreters of an audit. Whatever is not here counts.
"""

import re

ANEW: dict[str, frozenset[str]] = {
    # Made anew in each rank: features/preload/rank/fork_fixups.py. An audit sees to it that no two forks have the same.
    "transformers.utils.hub": frozenset({"SESSION_ID"}),
    "diffusers.utils.hub_utils": frozenset({"SESSION_ID"}),
    "psutil": frozenset({"_last_cpu_times", "_last_cpu_times_2", "_last_per_cpu_times", "_last_per_cpu_times_2"}),
}
"""By module."""

NAMES: dict[str, frozenset[str]] = {
    # The hour in a comment of the C code that f2py writes.
    "numpy.f2py.rules": frozenset({"generationtime", "module_rules"}),
    # Types of ctypes for its own tests, which exist once for all modules.
    "scipy._lib._ccallback_c": frozenset(
        {"plus1_ctypes", "plus1b_ctypes", "plus1bc_ctypes", "plus1_t", "plus1b_t", "plus1bc_t"}
    ),
    # Left over from a loop over a set of functions, and in its order, which is one of addresses.
    "scipy.sparse._data": frozenset({"name", "npfunc"}),
    "pandas.core.computation.expr": frozenset(
        {"PARSERS", "BaseExprVisitor", "PandasExprVisitor", "PythonExprVisitor", "unsupported_nodes"}
    ),
    # None in a fork, which fsspec's own function for forks has set.
    "fsspec.asyn": frozenset({"lock"}),
    # The folder in which the program began, as multiprocessing has it, which torch imports; and random bytes, of which
    # those of multiprocessing are shared by forks too.
    "multiprocess.process": frozenset({"ORIGINAL_DIR", "_current_process"}),
    # The number of the first link in a terminal, drawn so that those of several programs differ.
    "rich.style": frozenset({"_id_generator"}),
    # Of a semaphore that was made to see whether there are any, and removed.
    "joblib._multiprocessing_helpers": frozenset({"name"}),
    # Where the sources are that its developers check.
    "transformers.utils.auto_docstring": frozenset({"PATH_TO_TRANSFORMERS"}),
    # A cache of the parameters of classes, which filelock's own function for forks empties.
    "filelock._api": frozenset({"_INIT_PARAMETER_MODELS"}),
}
"""By module."""

ATTRIBUTES: dict[str, frozenset[str]] = {
    # Numbered as they are made, torch's own among them.
    "torch.autograd.function": frozenset({"_autograd_function_id", "_backward_cls"}),
    # A filesystem compares its pid with that of its process, and begins with an empty cache where they differ.
    "fsspec.spec": frozenset({"_pid", "_fs_token", "_fs_token_", "_cache", "_latest"}),
}
"""Of objects and classes, by the module of one of their base classes."""

_DONE: tuple[tuple[str, str], ...] = (
    # Opens a socket of IPv6 to see whether there is one, and closes it.
    ("urllib3.util.connection", "binds a socket"),
    # The folder of sources that its developers check.
    ("transformers.utils.auto_docstring", "looks for src in the working folder"),
    # What a process has open, cached or locked itself, closed at its end: each rank does that for its own.
    ("", r"registers PIL\._imaging\.clear_cache to run at exit"),
    ("", r"registers filelock\._api\._release_live_locks to run at exit"),
    ("", r"registers huggingface_hub\.utils\._http\.close_session to run at exit"),
    ("", r"registers pyarrow\._s3fs\.ensure_s3_finalized to run at exit"),
    ("", r"registers multiprocess\.util\._exit_function to run at exit"),
    ("", r"registers matplotlib\._pylab_helpers\.Gcf\.destroy_all to run at exit"),
    # What a fork is to forget, which the import has not begun to keep.
    ("", r"registers (filelock|fsspec)\.\S+ to run at a fork"),
    ("", r"registers huggingface_hub\.utils\._http\.close_session to run at a fork"),
    ("", r"registers joblib\.externals\.loky\.\S+\.ResourceTracker\._after_fork_in_child to run at a fork"),
    ("", r"registers None\._lru_cache_wrapper\.cache_clear to run at a fork"),
    # Where it keeps what it has found out about fonts: the first of several processes makes it, and all may read it.
    ("matplotlib", r"makes the folder ~/\.(config|cache)/matplotlib"),
    # Of torch's own operators: the zygote sees to these (core/rank/atexit_cleanup.py).
    ("", r"registers torch\.\S+ to run at exit"),
    # A file that would say where more of this package lies: a program's folder has none.
    ("databricks", r"looks for databricks\.pkg in the program's folder"),
    # Leaves a context that has made no file, where packages lie in folders.
    ("", r"registers certifi\.core\.exit_cacert_ctx to run at exit"),
)
"""What is done, as a pattern, by the module that does it ("" for any)."""

SETTABLE = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"})
"""Variables of native code that an import may set: how OpenMP is loaded and forked (scikit-learn)."""

PREFIXES: dict[str, str] = {
    # Looks at the names of all variables for those that begin with its own.
    "fsspec.config": "FSSPEC_",
    "diffusers.utils.import_utils": "COLAB_",
    "networkx": "NETWORKX_",
}
"""What reads all variables, and minds only those that begin so: by module."""

_PATTERNS = tuple((module, re.compile(pattern)) for module, pattern in _DONE)


def is_allowed(action: str, stack: tuple[str, ...]) -> bool:
    """Whether an action is allowed while these modules were being executed."""
    return any(module in ("", *stack) and pattern.fullmatch(action) for module, pattern in _PATTERNS)
