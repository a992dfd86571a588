"""Small packages for tests of the audit, each with one action and the expected finding."""

TORCH = """
float32, float64 = "float32", "float64"
_default = [float32]
def set_default_dtype(kind): _default[0] = kind
def get_default_dtype(): return _default[0]
def set_default_device(device): pass
def set_grad_enabled(enabled): pass
def set_float32_matmul_precision(precision): pass
class Generator:
    __module__ = "torch._C"
"""
"""A small substitute for torch."""

NUMPY = """
class Generator:
    __module__ = "numpy.random._generator"
"""
"""The source of ``numbers_of_numpy``: a substitute for numpy's generators."""

_UNSTABLE = {
    # The pid of the process, or the time: each in another kind of container.
    "in_itself": "X = os.getpid()",
    "in_bytes": "X = os.urandom(8)",
    "in_default": "class X:\n  def f(self, a=uuid.uuid4().hex): pass",
    "in_deque": "X = collections.deque([os.getpid()])",
    "in_count": "X = itertools.count(os.getpid())",
    "in_cycle": "X = itertools.cycle([os.getpid()])",
    "in_chain": "X = itertools.chain([1], [os.getpid()])",
    "in_cache": "@functools.lru_cache\ndef X(): return os.getpid()\nX()",
    "in_local": "X = threading.local()\nX.pid = [os.getpid()]",
    "in_context": "X = contextvars.ContextVar('X')\nX.set(os.getpid())",
    "in_generator": "def f():\n  a = os.getpid()\n  yield a\n  yield a\nX = f()\nnext(X)",
    "in_iterator": "X = iter([os.getpid()])",
    "in_map": "X = map(str, [os.getpid()])",
    "in_slots": "class A:\n  __slots__ = ('a',)\nX = A()\nX.a = os.getpid()",
    "in_queue": "X = queue.SimpleQueue()\nX.put(os.getpid())",
    "in_memory": "X = memoryview(b'%d' % os.getpid())",
    "in_depths": "X = {1: {2: {3: {4: {5: {6: [{7: [os.getpid()]}]}}}}}}",
    "in_text_as_address": "X = f'<object at 0x{time.monotonic_ns() + (1 << 44):x}>'",
    "in_dead_address": "X = id(object()), id([1])",
    "in_partial": "X = functools.partial(print, os.getpid())",
    "in_method": "X = [os.getpid()].append",
    "in_closure": "def f(a):\n  return lambda: a\nX = f(os.getpid())",
    "in_code": "exec(f'def X(): return {os.getpid()}')",
    "in_other_globals": "S = {'os': os}\nexec('A = os.getpid()\\ndef X(): return A', S)\nX = S.pop('X')\ndel S",
    "in_pattern": "X = re.compile(str(os.getpid()))",
    "in_match": "X = re.match('.*', str(os.getpid()))",
    "in_error": "X = ValueError(os.getpid())",
    "in_traceback": "def f():\n  a = os.getpid()\n  1 / 0\ntry:\n  f()\nexcept Exception as e:\n  X = e",
    "in_weak_value": "class Z: pass\nZ.a = Z()\nZ.a.b = os.getpid()\nX = weakref.ref(Z.a)",
    "in_weak_dict": "class A: pass\nK = A()\nX = weakref.WeakKeyDictionary({K: os.getpid()})",
    "in_proxy": "X = types.MappingProxyType({1: os.getpid()})",
    "in_date": "X = datetime.datetime.now()",
    "in_hash": "X = hashlib.sha256(str(os.getpid()).encode())",
    "in_struct": "X = struct.Struct(f'{os.getpid()}s')",
    "in_property": "class X:\n  a = property(functools.partial(print, os.getpid()))",
    "in_subclass": "class A(list): pass\nX = A()\nX.a = os.getpid()",
    "in_circle": "X = [os.getpid()]\nX.append(X)",
    "in_chain_of_objects": "X = None\nfor n in range(6000): X = [X, os.getpid()] if n == 3000 else [X]",
    "in_lock_state": "class A:\n  def __init__(self): self.lock, self.at = threading.Lock(), time.time()\nX = A()",
    "in_ctypes": "X = ctypes.c_long(os.getpid())",
    "in_false_alias": "def X(): return None\nX.__module__, X.__qualname__ = 'os', 'getcwd'\nX.a = os.getpid()",
}

_PREAMBLE = (
    "import array, collections, contextvars, ctypes, datetime, decimal, enum, fractions, functools, hashlib, io\n"
    "import itertools, os, pathlib, queue, re, struct, sys, threading, time, types, uuid, weakref\n"
)

UNSTABLE: dict[str, str] = {name: _PREAMBLE + text for name, text in _UNSTABLE.items()}
"""Packages whose X differs in each process."""

GENERATORS: dict[str, str] = {
    "draws": "import random\nX = random.Random()",
    "draws_in_list": "import random\nX = [[{'a': (random.Random(),)}]]",
    "draws_in_default": "import random\ndef X(rng=random.Random()): pass",
    "draws_in_subclass": "import random\nclass A(random.Random): pass\nX = A()",
    "draws_in_slots": "import random\nclass A:\n  __slots__ = 'r'\nX = A()\nX.r = random.Random()",
    "draws_in_circle": "import random\nX = [random.Random()]\nX.append(X)",
    "draws_numpy": "import numbers_of_numpy\nX = numbers_of_numpy.Generator()",
    "draws_torch": "import torch\nX = torch.Generator()",
}
"""Packages whose X contains a random generator."""

_WHOLE = "reads the whole environment"
ACTIONS: dict[str, tuple[str, str]] = {
    # Reads the rank.
    "gets_rank": ("import os\nos.environ.get('RANK')", "reads RANK"),
    "getenv_rank": ("import os\nos.getenv('LOCAL_RANK')", "reads LOCAL_RANK"),
    "has_rank": ("import os\n'SLURM_PROCID' in os.environ", "reads SLURM_PROCID"),
    "dict_rank": ("import os\nint(dict(os.environ).get('RANK', -1)) == 0", _WHOLE),
    "items_rank": ("import os\n[value for name, value in os.environ.items() if name == 'RANK']", _WHOLE),
    "keys_rank": ("import os\n'RANK' in list(os.environ.keys())", _WHOLE),
    "or_rank": ("import os\n(os.environ | {}).get('RANK')", _WHOLE),
    "shown_rank": ("import os\n'RANK' in repr(os.environ)", _WHOLE),
    "data_rank": ("import os\nos.environ._data.get(b'RANK')", "reads os.environ._data"),
    "posix_rank": ("import posix\nposix.environ.get(b'RANK')", "reads posix.environ"),
    "native_rank": ("import ctypes\nctypes.CDLL(None).getenv(b'RANK')", "reads RANK in native code"),
    # Sets variables.
    "native_set": (
        "import ctypes\nctypes.CDLL(None).setenv(b'NATIVE_SET', b'1', 1)",
        "sets NATIVE_SET in native code",
    ),
    "changes_path": ("import os\nos.environ['PATH'] += ':/nowhere'", "changes the variable PATH"),
    "sets_threads": ("import os\nos.environ['OMP_STACKSIZE'] = '1m'", "sets the variable OMP_STACKSIZE"),
    # At the end of the process, and at a fork.
    "at_exit": ("import atexit\ndef f(): pass\natexit.register(f)", "registers at_exit.f to run at exit"),
    "finalizes": (
        "import weakref\nclass A: pass\nX = A()\nweakref.finalize(X, print)",
        "registers builtins.print to run at exit",
    ),
    "at_exit_of_threads": (
        "import threading\ndef f(): pass\nthreading._register_atexit(f)",
        "registers at_exit_of_threads.f to run at exit",
    ),
    "at_fork": (
        "import os\ndef f(): pass\nos.register_at_fork(after_in_child=f)",
        "registers at_fork.f to run at a fork",
    ),
    # Looks at the program.
    "asks_argv": ("import sys\nX = '--debug' in sys.argv", "reads sys.argv"),
    "joins_argv": ("import sys\nX = '--debug' in ' '.join(sys.argv)", "reads sys.argv"),
    "asks_original_argv": ("import sys\nX = sys.orig_argv[1:]", "reads sys.orig_argv"),
    "asks_main": ("import sys\nX = hasattr(sys.modules['__main__'], 'DEBUG')", "reads __main__.DEBUG"),
    "asks_frame": (
        "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nX = f.f_code.co_filename\ndel f",
        "has another asks_frame.X in a fork that is rank 0",
    ),
    "asks_for_plugins": (
        "import os, sys\nX = os.listdir(sys.path[0])",
        "lists the program's folder",
    ),
    "asks_beside": (
        "import os, sys\nX = os.path.exists(os.path.join(sys.path[0], 'plugin.cfg'))",
        "looks for plugin.cfg in the program's folder",
    ),
    "lists_here": ("import os\nX = os.listdir()", "lists the working folder"),
    "scans_here": ("import os\nX = [each.name for each in os.scandir('.')]", "lists the working folder"),
    # In the process.
    "minds_terminal": ("import sys\nX = sys.stdout.isatty()", "minds a terminal (minds_terminal.X)"),
    "sets_alarm": ("import signal\nsignal.alarm(100_000)", "sets an alarm"),
    "temporary": ("import tempfile\nD = tempfile.mkdtemp()\nimport os\nos.rmdir(D)", "makes a temporary folder"),
    "writes": ("import os\nopen(os.path.join(os.path.dirname(__file__), 'log'), 'w').close()", "writes {site}/log"),
    "thread": ("import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()", "starts a thread"),
    "connects": (
        "import socket\ns = socket.socket(2, 2)\ns.connect(('127.0.0.1', 9))\ns.close()",
        "opens a connection",
    ),
    "starts": ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])", "starts python"),
    "forks": ("import os\np = os.fork()\nif p == 0: os._exit(0)\nos.waitpid(p, 0)", "forks"),
    "handles": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "handles a signal"),
    "excepts": ("import sys\nsys.excepthook = lambda *a: None", "changes sys.excepthook"),
    "path": ("import sys\nsys.path.insert(-1, '/nowhere')", "changes sys.path"),
    "loud": ("print('hello')", "prints"),
    "mask": ("import os\nos.umask(0o77)", "changes the umask"),
    "lock": ("import multiprocessing as m\nL = m.Lock()", "makes a lock that forks share"),
    "opens": ("import os\nF = os.open('/dev/null', os.O_RDONLY)", "leaves /dev/null open"),
    "logs_root": ("import logging\nlogging.root.addHandler(logging.NullHandler())", "sets up logging"),
    "mapped": ("import mmap\nM = mmap.mmap(-1, 4096)", "makes memory that forks share"),
    "finder": (
        "import sys\nsys.meta_path.insert(0, type('F', (), {'find_spec': lambda *a: None})())",
        "changes sys.meta_path",
    ),
    "builtin": ("import builtins\nbuiltins.profile = lambda f: f", "changes builtins"),
    "precise": ("import decimal\ndecimal.DefaultContext.prec = 9", "changes decimal's context"),
    "recursive": ("import sys\nsys.setrecursionlimit(3000)", "changes the recursion limit"),
    "collects": ("import gc\ngc.set_threshold(50_000)", "changes garbage collection"),
    "traps": (
        "import decimal\ndecimal.DefaultContext.traps[decimal.Inexact] = True",
        "changes decimal's context",
    ),
    "zone": ("import os, time\nos.environ['TZ'] = 'XYZ3'\ntime.tzset()", "changes the time zone"),
    "localized": ("import locale\nlocale.setlocale(locale.LC_ALL, 'POSIX')", "changes the locale"),
    "digits": ("import sys\nsys.set_int_max_str_digits(5000)", "changes the length limit of integers"),
    "loading": ("import sys\nsys.setdlopenflags(sys.getdlopenflags() | 8)", "changes how libraries are loaded"),
    "nice": ("import os\nos.nice(1)", "changes the priority"),
    "pinned": ("import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "changes the CPUs it may use"),
    "moved": ("import os\nos.chdir('/')", "changes the working directory"),
    "opaque": (
        "import sqlite3\nX = sqlite3.connect(':memory:')",
        "keeps sqlite3.Connection in opaque.X, which cannot be read",
    ),
    "fails": ("import absent_module", "cannot be imported: ModuleNotFoundError: No module named 'absent_module'"),
    "through": ("import helper_of_rank\nhelper_of_rank.look()", "reads RANK"),
}
"""Packages that do something that is recorded, and the expected violation."""

MINDS: dict[str, tuple[str, str]] = {
    "as_decimal": ("import decimal\nX = decimal.Decimal(1) / 7", "minds Python's settings (as_decimal.X)"),
    "as_locale": ("import locale\nX = locale.setlocale(locale.LC_ALL)", "minds Python's settings (as_locale.X)"),
    "as_path": ("import sys\nX = sys.path[-1]", "minds Python's settings (as_path.X)"),
    "as_filters": ("import warnings\nX = len(warnings.filters)", "minds Python's settings (as_filters.X)"),
    "as_logging": ("import logging\nX = logging.root.level", "minds logging (as_logging.X)"),
}
"""Packages that depend on what a program does before, which a rank does not check, and what that is."""

CLEAN: dict[str, str] = {
    "as_folder": "import os\nX = os.path.basename(os.getcwd())",
    "as_seed": "import random\nX = random.random() < 2",
    "filters": "import warnings\nwarnings.simplefilter('ignore', BytesWarning)",
    "beside": "import os\nX = os.path.exists('settings.ini')",
    "as_default": "import torch\nX = torch.get_default_dtype()",
    "logs": "import logging\nlogging.getLogger(__name__).info('here')",
    "plain": "import os\nX = [1, {'a': (2.5, 'x')}]\nclass A:\n  y = 1",
    "many_numbers": "N = list(range(1 << 12)), {n: -n for n in range(1 << 12)}",
    "library": "from ctypes.util import find_library\nL = find_library('c')",
    "asks_platform": "import platform\nP = platform.processor()",
    "last_finder": "import sys\nsys.meta_path.append(type('F', (), {'find_spec': lambda *a: None})())",
    "in_order": "S = list({'a', 'b', 'c'})\nF = list({len, print, sum, dict, int, str})\nK = object()\nR = repr(K)",
    "lazy": "def __getattr__(name):\n  if name != 'f': raise AttributeError\n  import lazy_part\n  return lazy_part.f",
    "lazy_part": "def f(): pass",
    "optional": "try:\n  import absent_thing\nexcept ImportError:\n  pass",
    "seeks": "import importlib.util\nX = importlib.util.find_spec('absent_other') is None",
    "one_of_folder": "import kept_folder\nX = kept_folder.folder()",
    "other_of_folder": "import kept_folder\nX = kept_folder.folder()",
    "ends_thread": "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\ndel t",
    "keeps_none": "def f(a=None, *, b=None): pass\nexec('def g(): pass', N := {})",
    "logger": "import logging\nL = logging.getLogger(__name__)\nL.addHandler(logging.NullHandler())",
    "locks": "import threading\nL, R, C = threading.Lock(), threading.RLock(), threading.Condition()",
    "containers": (
        "import collections, functools, itertools, queue, re, threading, weakref\n"
        "A = collections.deque([1]), collections.OrderedDict(a=1), collections.defaultdict(list)\n"
        "B = itertools.count(), iter([1]), functools.partial(print), re.compile('a'), queue.Queue()\n"
        "class W: pass\nC = W()\nD = weakref.WeakSet([C]), weakref.ref(C), {id(C): 1}\n"
        "@functools.lru_cache\ndef E(n): return [n]\nE(1)"
    ),
    "classes": (
        "import abc, dataclasses, enum, typing\nT = typing.TypeVar('T')\n"
        "class A(abc.ABC, typing.Generic[T]):\n  @property\n  @abc.abstractmethod\n  def a(self): ...\n"
        "@dataclasses.dataclass\nclass B:\n  a: int = 1\nclass C(enum.Enum):\n  D = B()\n"
    ),
    "circle": "class A: pass\nX = [A() for n in range(500)]\nfor a in X: a.all = X",
    "secret": "import random\nX = random.SystemRandom()",
    "names_generator": "from random import choice, randint, random",
    "reads_home": "import os\nH = os.environ.get('FAKE_HOME')\nV = os.getenv('FAKE_MODE')",
    "sets_own": "import os\nos.environ.setdefault('MINE', '1')",
    "of_fork": "from plain import X\nimport logger",
}
"""Packages that may be preloaded: a rank checks or redoes what their imports depend on or change."""

FILES: dict[str, dict[str, str]] = {
    "kept_folder": {
        "kept_folder.py": (
            "import functools, os\n@functools.cache\ndef folder():\n"
            "  return os.environ.get('FAKE_HOME') or os.environ.get('FAKE_TMP') or '/'"
        )
    },
    "helper_of_rank": {"helper_of_rank.py": "import os\ndef look(): return os.getenv('RANK')"},
    "numbers_of_numpy": {"numbers_of_numpy.py": NUMPY},
    "importer": {"importer.py": "import pack.bad"},
    "pack": {"pack/__init__.py": "", "pack/good.py": "", "pack/bad.py": "import os\nos.getenv('RANK')"},
    "torchmetrics": {
        "torchmetrics/__init__.py": "from torchmetrics.utilities.prints import rank_zero_only",
        "torchmetrics/utilities/__init__.py": "",
        "torchmetrics/utilities/prints.py": (
            "import os\ndef rank_zero_only(): pass\nrank_zero_only.rank = int(os.environ.get('LOCAL_RANK', 0))"
        ),
    },
    "torchmetrics_kept": {
        "torchmetrics_kept.py": "from torchmetrics.utilities.prints import rank_zero_only as r\nR = r.rank"
    },
}
"""Packages of several files, and modules that others import."""
