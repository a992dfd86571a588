"""Tests of the process state in forked ranks, where a program or a library changes or reads it."""

import sys

import pytest

from tests.conftest import run_command, write_program

REPORT = """
import os
def report(**values):
    with open(os.environ["REPORT"] + os.environ["RANK"], "a") as file:
        file.writelines(f"{name}\\t{value}\\n" for name, value in values.items())
"""

PROGRAMS = {
    "setproctitle": (
        "logging",
        """
import setproctitle, sys
report(before=setproctitle.getproctitle().partition(" ")[2])
setproctitle.setproctitle("trainer of rank " + os.environ["RANK"])
report(after=setproctitle.getproctitle(), cmdline=open("/proc/self/cmdline").read().rstrip("\\0"))
report(thread=open("/proc/self/comm").read())
report(loader=sorted(vars(sys.modules["setproctitle"].__loader__)))
if os.fork() == 0:
    setproctitle.setproctitle("its child")
    report(child=open("/proc/self/cmdline").read().rstrip("\\0"))
    os._exit(0)
os.wait()
report(parent=open("/proc/self/cmdline").read().rstrip("\\0"))
""",
    ),
    "setproctitle, preloaded": (
        "setproctitle",
        """
from setproctitle import getproctitle, setproctitle
setproctitle("trainer")
report(after=getproctitle(), cmdline=open("/proc/self/cmdline").read().rstrip("\\0"))
try:
    setproctitle(None)
except TypeError as error:
    report(error=error)
""",
    ),
    "the time of log records": (
        "logging",
        """
import logging, time
class Handler(logging.Handler):
    def emit(self, record):
        report(early=0 <= record.relativeCreated < (time.time() - began) * 1000 + 500)
began = time.time()
logging.getLogger("here").addHandler(Handler())
logging.getLogger("here").warning("now")
""",
    ),
    "folders and names": (
        "tempfile,getpass,locale,warnings,random",
        """
import getpass, locale, random, sys, tempfile, time, warnings
os.makedirs("scratch", exist_ok=True)
os.environ["TMPDIR"] = os.path.abspath("scratch")
os.environ["LOGNAME"] = "somename"
os.environ["HOME"] = os.path.abspath("scratch")
os.environ["TZ"] = "Asia/Tokyo"
time.tzset()
random.seed(3)
warnings.simplefilter("error", ResourceWarning)
report(folder=tempfile.gettempdir(), user=getpass.getuser(), home=os.path.expanduser("~"), zone=time.tzname)
report(locale=locale.setlocale(locale.LC_ALL), draw=random.random(), first=warnings.filters[0][0], argv=sys.argv)
import atexit
atexit.register(report, last=1)
atexit.register(report, last=2)
""",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_what_plain_python_shows(name, run_ddplaunch, tmp_path):
    preload, source = PROGRAMS[name]
    write_program(tmp_path, "train.py", REPORT + source)
    plain = run_command([sys.executable, "train.py"], tmp_path, {"REPORT": "plain", "RANK": "0"})
    assert plain.returncode == 0, plain.stderr
    forked = run_ddplaunch(
        "run", "--nproc", "2", "--start", "zygote", "--preload", preload, "train.py", env={"REPORT": "forked"}
    )
    assert forked.returncode == 0, forked.stderr
    assert (tmp_path / "forked0").read_text() == (tmp_path / "plain0").read_text()


def test_torch_is_imported_in_each_rank_where_it_loads_a_backend(run_in_fork, tmp_path):
    """Each rank imports torch where a backend plugin is installed, which would see no rank in the zygote."""
    write_program(tmp_path, "train.py", "import torch\n")
    write_program(tmp_path, "its-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: its\nVersion: 1.0\n")
    write_program(tmp_path, "its-1.0.dist-info/entry_points.txt", "[console_scripts]\nits = its:main\n")
    words = ("run", "--dry-run", "--nproc", "2", "train.py")
    assert "torch (imported once" in run_in_fork(*words).stdout
    write_program(tmp_path, "its-1.0.dist-info/entry_points.txt", "[torch.backends]\nits = its:autoload\n")
    assert "its 1.0 adds to torch.backends, which torch loads at its import" in run_in_fork(*words).stdout
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert "torch (imported once" in run_in_fork(*words, env=off).stdout
    asked = run_in_fork("run", "--dry-run", "--nproc", "2", "--preload", "torch", "train.py").stdout
    assert "torch (imported once" in asked
