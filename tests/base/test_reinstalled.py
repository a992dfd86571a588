"""Tests of commands whose package is installed again, or removed, while they run."""

import subprocess
import sys
import time

from ddplaunch.base.reinstalled import was_reinstalled
from tests.conftest import clean_environment
from tests.package_copy import copy_package

REMOVES_ITSELF = """
import shutil, sys
import ddplaunch.cli

sys.argv = ["ddplaunch", "ps"]
shutil.rmtree("ddplaunch")
ddplaunch.cli.main()
"""


def test_the_files_of_the_package_are_newer_or_gone(tmp_path):
    (tmp_path / "base").mkdir()
    assert was_reinstalled(str(tmp_path))
    for each in (tmp_path, tmp_path / "base"):
        (each / "__init__.py").touch()
    assert was_reinstalled(str(tmp_path), time.time() - 60)
    assert not was_reinstalled(str(tmp_path), time.time() + 60)
    assert not was_reinstalled()


def test_a_command_whose_package_was_removed_says_so(tmp_path):
    copy_package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REMOVES_ITSELF], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    first, *rest = done.stderr.splitlines()
    assert (done.returncode, rest) == (69, ["  type it again"])
    assert first.startswith("Error: ddplaunch was installed anew or removed while this command ran: ")
