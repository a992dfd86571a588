"""A test that a run on one machine does not pay for Kubernetes."""

import sys

from tests.conftest import run_command, write_program
from tests.start_modes import LIGHT

RECORDS = """
import sys

class Recorder:
    @staticmethod
    def find_spec(name, path, target=None):
        if "kubernetes" in name:
            with open("imported", "a") as file:
                print(name.removeprefix("ddplaunch.features."), file=file)

sys.meta_path.insert(0, Recorder)
from ddplaunch.cli import main
main()
"""


def test_a_run_imports_nothing_of_it_but_its_entry(tmp_path):
    write_program(tmp_path, "one.py", "print('one')")
    words = [sys.executable, "-c", RECORDS, "run", "--nproc", "2", *LIGHT, "one.py"]
    done = run_command(words, tmp_path, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert (done.returncode, done.stdout.count("one")) == (0, 2), done.stderr
    assert (tmp_path / "imported").read_text().split() == ["kubernetes", "kubernetes.feature"]
