"""Tests of code that changes later imports: each way keeps torch from being preloaded."""

import pytest

from ddplaunch.features.preload.import_selector import ImportSelector
from ddplaunch.features.preload.known_packages import PackageTable
from ddplaunch.features.preload.program_source import read_program
from ddplaunch.system.target.target import find_target
from tests.conftest import write_program


def barrier(folder, source: str) -> str | None:
    """What keeps torch out, of a program that imports it last."""
    write_program(folder, "train.py", f"{source}\nimport torch\n")
    target = find_target("train.py", (), as_module=False, as_program=False, cwd=str(folder))
    return ImportSelector(
        read_program(target), PackageTable(), target.sys_path_0 or "", (), include_deferred=True
    ).torch_barrier


VARIABLES = [
    "import os\nfor k, v in {'A': '1'}.items(): os.environ[k] = v",
    "import os\nfor line in open('v.env'): os.environ.update([line.split('=')])",
    "import os\nos.environ.update(**settings)",
    "import os\ndef setup(e=os.environ): e['A'] = '1'\nsetup()",
    "import os\ne, _ = os.environ, 1",
    "import os\nfor e in [os.environ]: e['A'] = '1'",
    "import os\n(e := os.environ)['A'] = '1'",
    "import os\nlist(map(os.environ.__setitem__, ['A'], ['1']))",
    "import os\nput = os.environ.__setitem__\nput('A', '1')",
    "import os\ngetattr(os, 'environ')['A'] = '1'",
    "import os\nname = 'env' + 'iron'\ngetattr(os, name)['A'] = '1'",
    "import os\nos.__dict__['environ']['A'] = '1'",
    "import os\nclass C: env = os.environ",
    "import os\nX = {'env': os.environ}",
    "import os\nf = lambda: os.environ\nf()['A'] = '1'",
    "import os\ndef f(): return os.environ\nf()['A'] = '1'",
    "import os\ndef f(): yield os.environ\nnext(f())['A'] = '1'",
    "from os import environ as E\nE[chr(65)] = '1'",
    "from os import *\nenviron[chr(65)] = '1'",
    "import posix\nposix.putenv(b'A', b'1')",
    "__import__('os').environ[chr(65)] = '1'",
    "import importlib as i\ni.import_module('os').environ[chr(65)] = '1'",
    "import sys\nsys.modules['os'].environ[chr(65)] = '1'",
    "import os, operator\noperator.setitem(os.environ, 'A', '1')",
    "import os\nos.environ = {'A': '1'}",
    "import os\nos.environ['OMP_NUM_THREADS'], x = '1', 2",
    "import os\nwith f() as os.environ['A']: pass",
    "import os\n[0 for os.environ['A'] in '12']",
    "import os\nos.environ.setdefault(*pair)",
    "from dotenv import load_dotenv as ld\nld('v.env')",
    "from yaml.utils import patch_environment as p\nwith p(OMP_NUM_THREADS='1'): pass",
    "import yaml\nyaml.load(OMP_NUM_THREADS='1')",
    "from unittest import mock\nmock.patch.dict('os.environ', {'A': '1'}).start()",
    "def f(pairs): globals()['os'].environ.update(pairs)\nimport os\nf({})",
    "m = __import__('os')\nm.environ[chr(65)] = '1'",
    "import os\ntry:\n  os.environ[chr(65)] = '1'\nfinally: pass",
    "import os\nclass A:\n  def __init__(self): os.environ[chr(65)] = '1'\nA()",
    "import ctypes\nctypes.CDLL(None).setenv(b'A', b'1', 1)",
]

PATHS = [
    "import sys as s\ns.path.insert(0, s.argv[0])",
    "from sys import path as p\np[:0] = [input()]",
    "import sys\np = sys.path\np.insert(0, 'lib')",
    "import sys\nsetup(sys.path)",
    "import sys\nadd = sys.path.append\nadd('lib')",
    "import sys\nsys.path, x = ['lib', *sys.path], 1",
    "import sys\nsys.path.append('a.whl')",
    "import os\nos.chdir('lib')",
    "import contextlib\nwith contextlib.chdir('lib'): pass",
    "import sys\nm = sys\nm.path.append('lib')",
    "import sys\nf(sys)",
    "import sys\nX = [sys]",
    "globals()['sys'].path.append(input())\nimport sys",
    "import sys\nsys.path.__iadd__(['lib'])",
    "import sys\nsys.__dict__['path'].append('lib')",
    "import argparse\nargparse._sys.path.append(input())",
    "import sys\nfor sys.path[0] in ['lib']: pass",
    "import sys\nlist.insert(sys.path, 0, 'lib')",
]

HOOKS = [
    "from sys import meta_path\nmeta_path.append(f)",
    "import sys\nsys.path_hooks.append(f)",
    "import sys\nsys.path_importer_cache.clear()",
    "import sys\nsys.modules['numpy'] = None",
    "import sys\ndel sys.modules['json']",
    "import sys\nsys.modules.setdefault('numpy', None)",
    "import builtins\nbuiltins.__import__ = f",
    "import builtins\nsetattr(builtins, '__import__', f)",
    "__builtins__.__import__ = f",
    "import sys, os\nsys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL)",
    "import ctypes\nctypes.CDLL('libx.so', mode=ctypes.RTLD_GLOBAL)",
    "import logging\nlogging.setLoggerClass(f)",
    "from logging.config import fileConfig\nfileConfig('x.ini')",
    "import logging\nlogging.getLogger('torch').setLevel(10)",
    "import logging\nfor name in ('torch', 'yaml'): logging.getLogger(name).setLevel(10)",
    "import logging\nNAME = 'torch'\nlogging.getLogger(NAME).setLevel(10)",
    "import logging\nlogging.root.manager.loggerDict.clear()",
    "import warnings\nwarnings.filters.insert(0, ('error', None, Warning, None, 0))",
    "import logging.config\ndef f(): logging.config.dictConfig({})\nf()",
    "import importlib.util as u\nu.module_from_spec(s)",
    "run = exec\nrun('x')",
    "import builtins\nbuiltins.eval('x')",
    "import sys\nsys.addaudithook(f)",
    "import sys\nsys.settrace(f)",
    "import os\nos.sched_setaffinity(0, {0})",
    "import warnings\nwarnings.simplefilter('error')",
    "import functools\nfunctools.lru_cache = f",
    "import functools\nfor m in [functools]: m.lru_cache = f",
    "import functools\nvars(functools).update(lru_cache=f)",
    "import functools\nobject.__setattr__(functools, 'lru_cache', f)",
    "import functools\npatch(functools)",
    "import importlib, json\nimportlib.reload(json)",
    "import typing\ntyping.TYPE_CHECKING = True",
    "import site\nsite.main()",
    "import types\ntypes.FunctionType(compile('x', '', 'exec'), {})()",
    "import pickle\npickle.load(open('x', 'rb'))",
    "names = globals()\nnames['__builtins__'].__import__ = f",
    "import sys\nm = getattr(sys, 'modules')\nm['numpy'] = None",
    "import importlib\nm = importlib.import_module('sys')\nm.path.append(input())",
    "class A:\n  def exec(self): pass\nexec('x')",
]


@pytest.mark.parametrize("source", [*VARIABLES, *PATHS, *HOOKS])
def test_statements_that_prevent_preloading_torch(tmp_path, source):
    assert barrier(tmp_path, source)


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"settings.py": "from os import environ as E\n"}, "from settings import E\nE['A'] = '1'"),
        ({"settings.py": "import sys as s\n"}, "import settings\nsettings.s.path.append('lib')"),
        ({"settings.py": "import sys\n"}, "from settings import *\nsys.path.append(input())"),
        ({"settings.py": "from sys import path\n"}, "from settings import path\npath.append('lib')"),
        ({"settings.py": "import os\ndef put(m, a): getattr(m, a)['A'] = '1'\ndef go(): put(os, 'environ')\n"},
         "import settings\nsettings.go()"),
        ({"settings.py": "def ("}, "import settings"),
        ({"settings.py": "\0"}, "import settings"),
        ({"typing_extensions.py": ""}, ""),
        ({"settings.py": "import sys\ndef go(): sys.meta_path.append(1)\n"}, "from settings import go as g\ng()"),
    ],
)  # fmt: skip
def test_statements_in_imported_files_that_prevent_preloading_torch(tmp_path, files, source):
    for name, text in files.items():
        write_program(tmp_path, name, text)
    assert barrier(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nprint(os.environ['A'], os.environ.get('B'), dict(os.environ), 'C' in os.environ, {**os.environ})",
        "import os\nfor name in os.environ: print(name)\nX = [k for k, v in os.environ.items()]",
        "import os\nrank = int(os.getenv('RANK', 0))",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nos.environ.setdefault('HF_HOME', '/x')",
        "import os\nos.environ['WANDB_PROJECT'] = input()",
        "import os, subprocess\nsubprocess.run(['x'], env=os.environ)",
        "import sys\nprint(sys.path[0], 'numpy' in sys.modules, sys.modules.get('json'), sys.argv[1:])",
        "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))",
        "import importlib.util, importlib.metadata\nHAS = importlib.util.find_spec('apex') is not None",
        "import logging, warnings\nlogging.basicConfig(level=10)\nlogger = logging.getLogger(__name__)\n"
        "logging.getLogger('train').setLevel(10)\nwarnings.filterwarnings('ignore')",
        "import argparse, random, numpy as np\nrandom.seed(0)\nnp.random.seed(0)\nparser = argparse.ArgumentParser()",
        "import logging\nNAME = 'train'\nlogger = logging.getLogger(NAME)\n"
        "def get(name): return logging.getLogger(name)",
        "import sys\nsys.argv.remove('x')\nrows = []\nrows.append(sys.argv)",
        "import math, sys\nprint(getattr(math, input()), hasattr(math, 'tau'), getattr(sys, 'argv'))",
        "import math as m\nnames = sorted(n for n in m.__dict__ if callable(m.__dict__[n]))",
        "def eval(model): model.eval()\neval(1)",
        "import re\nPATTERN = re.compile('x')\ndef f(model): model.compile()",
        "import importlib\nname = importlib.import_module('math').sqrt",
        "import math\nxp = math",
        "X = globals().get('x')\nconfig = {k: globals()[k] for k in 'ab'}",
    ],
)
def test_statements_that_do_not_affect_imports(tmp_path, source):
    assert barrier(tmp_path, source) is None
