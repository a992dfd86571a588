"""Writes what a program can read about its process, as JSON.

    python probe.py [ARGUMENT]…

PROBE_OUT names the file; under a launcher, the rank is added to its name. PROBE_IMPORT is a module to import first.
"""

names_at_start = list(globals())
loaded = sorted(__import__("sys").modules)
taken = __import__("os").listdir("/proc/self/fd")  # before any import can have opened one

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

FAULTS = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}  # faulthandler's


def main_module():
    main = sys.modules["__main__"]
    spec = main.__spec__
    return {
        "__name__": main.__name__,
        "__file__": getattr(main, "__file__", None),
        "__cached__": getattr(main, "__cached__", None),
        "__package__": main.__package__,
        "__doc__": main.__doc__,
        "__spec__": None if spec is None else [spec.name, spec.origin],
        "__loader__": [type(main.__loader__).__name__, getattr(main.__loader__, "path", None)],
        "__annotations__": getattr(main, "__annotations__", None),
        "__builtins__": type(getattr(main, "__builtins__", None)).__name__,
        "names": names_at_start,
        "is ours": main.__dict__ is globals(),
    }


def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        facts = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "newlines", "closed")
        found[name] = {fact: getattr(stream, fact) for fact in facts}
        found[name]["buffer"] = type(stream.buffer).__name__
        found[name]["is original"] = stream is getattr(sys, f"__{name}__")
        found[name]["fileno"] = stream.fileno()
    return found


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def status(*fields):
    found = dict(line.split(":\t", 1) for line in read("/proc/self/status").splitlines())
    return {field: found[field].strip() for field in fields}


def numbers(mask):
    """The signals in a mask of /proc, without those that the C library reserves."""
    return {number for number in signal.valid_signals() if int(mask, 16) >> (number - 1) & 1}


def signals():
    found = status("SigBlk", "SigIgn", "SigCgt")
    return {
        "handlers": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "blocked": sorted(numbers(found["SigBlk"])),
        "ignored": sorted(numbers(found["SigIgn"])),
        "caught": sorted(numbers(found["SigCgt"]) - FAULTS),
        "wakeup": signal.set_wakeup_fd(-1),
        "timer": signal.getitimer(signal.ITIMER_REAL),
    }


def descriptors():
    found = {}
    for number in sorted(map(int, taken)):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
        except OSError:
            pass  # the one that listed them
    return found


def limits():
    import resource

    known = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    mask = os.umask(0)
    os.umask(mask)
    return {
        "rlimits": {name: resource.getrlimit(number) for name, number in known.items()},
        "umask": mask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "user": [os.getuid(), os.geteuid(), os.getgroups()],
        "dumpable": status("NoNewPrivs", "Seccomp"),
    }


def threads():
    import threading

    return {
        "python": [thread.name for thread in threading.enumerate()],
        "main": threading.current_thread() is threading.main_thread(),
        "frames": len(sys._current_frames()),
    }


def interpreter():
    import gc
    import warnings

    return {
        "flags": str(sys.flags),
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.exec_prefix, sys.base_prefix],
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "filesystem": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "locale": __import__("_locale").setlocale(__import__("_locale").LC_ALL),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "digits": getattr(sys, "get_int_max_str_digits", int)(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), gc.garbage],
        "warnings": [str(each) for each in warnings.filters],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            sys.breakpointhook is sys.__breakpointhook__,
            sys.gettrace(),
            sys.getprofile(),
            hasattr(sys, "last_value"),
            sys.exc_info(),
        ],
        "finders": [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path],
        "path hooks": len(sys.path_hooks),
        "hash": hash("text"),
    }


def others():
    import atexit
    import logging
    import multiprocessing

    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "start methods": multiprocessing.get_all_start_methods(),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "children": multiprocessing.active_children(),
        "atexit": atexit._ncallbacks(),
        "logging": [logging.root.level, logging.root.handlers, logging.raiseExceptions, logging.lastResort.level],
    }


def main():
    environment = dict(os.environ)
    if os.environ.get("PROBE_IMPORT"):
        __import__(os.environ["PROBE_IMPORT"])
    found = {
        "main": main_module(),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "cwd": os.getcwd(),
        "environ": environment,
        "streams": streams(),
        "signals": signals(),
        "descriptors": descriptors(),
        "tasks": len(os.listdir("/proc/self/task")),
        "limits": limits(),
        "threads": threads(),
        "interpreter": interpreter(),
        "others": others(),
        "loaded": loaded,
        "title": read("/proc/self/cmdline").strip("\0 ").split("\0"),
        "comm": read("/proc/self/comm"),
        "stdin": sys.stdin.read(),
        "session": os.getsid(0) == os.getpgrp(),
    }
    with open(os.environ["PROBE_OUT"] + os.environ.get("RANK", ""), "w", encoding="utf-8") as file:
        json.dump(found, file, default=str)


if __name__ == "__main__":
    main()
