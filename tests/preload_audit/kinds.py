"""Kinds of native objects: those without state of a process, and those that a fork must not share.

Standard library only; loaded inside the interpreters of an audit. Each was looked at; whatever is in neither of these
nor in readers.py is opaque, and guilty.
"""

HARMLESS: frozenset[str] = frozenset(
    {
        # Python's own: tables of functions, made once and never written to.
        "_abc._abc_data",
        "_thread._localdummy",
        "unicodedata.UCD",
        "random.SystemRandom",
        # Names of temporary files: begins anew where it finds itself in another process.
        "tempfile._RandomNameSequence",
        # Random bytes with which processes of one program know each other: forks of one process share them.
        "multiprocessing.process.AuthenticationString",
        "multiprocess.process.AuthenticationString",
        # A library and its functions, at addresses.
        "_ctypes.CType_Type",
        "_ctypes.CField",
        "_cffi_backend.FFI",
        "_cffi_backend.Lib",
        "_cffi_backend.CType",
        "_cffi_backend.__FFIGlobSupport",
        # Functions of Fortran and of scipy's dispatch, which tables of native code name.
        "builtins.fortran",
        "uarray._Function",
        # Takes pyarrow's types out of its registry at the end.
        "pyarrow.lib._ExtensionRegistryNanny",
        # Types of messages by name: modules add their own, and none is ever removed.
        "google._upb._message.DescriptorPool",
        # What a library adds to torch's operators: functions by their names, which no other can take away.
        "torch._C._DispatchModule",
        "torch._C._DispatchOperatorHandle",
        "torch._C._PyObjectDispatchFunc",
        "torch._C._PyObjectRedispatchFunc",
        # Numpy's functions, and its wrappers of them.
        "numpy._ArrayFunctionDispatcher",
        "numpy._core._multiarray_umath._ArrayFunctionDispatcher",
    }
)
"""By full name."""

PATTERNS = (
    # Functions that Cython, pybind11 and nanobind have made, and their kinds of properties.
    r"_cython_[\w.]+\.\w*cython_function_or_method",
    r"[\w.]*\bcython_function_or_method|[\w.]*\bfused_cython_function",
    r"pybind11_builtins\.\w+|builtins\.pybind11_detail_function_record_\w+|nanobind\.nb_\w+",
    # Types of messages, made of texts in the source, never written to.
    r"google\._upb\._message\.\w*Descriptor",
    # Markers of kinds: enumerations of native code are values.
    r"torch\._C\._?\w*(Type|Kind|Mode|Op|Key|Tag)s?",
)
"""By patterns of full names."""
