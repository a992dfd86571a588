"""A rank without a channel to the launcher, which then cannot drop what it would print again."""

import sys

import pytest

from tests.conftest import run_command, write_program

RANK = """
    import os, sys
    from ddplaunch.core.rank.rank_runner import load_private_module

    job = {"rank": 0, "error_file": "error", "target_text": "train.py", "args": ["x"]}
    restart = load_private_module("core/rank/rank_restart").RankRestart(job, {}, None, "runner.py")
    os.write(1, sys.argv[1].encode())
    restart.start_over("numpy", "something differs")
"""


@pytest.mark.parametrize(("printed", "code", "stdout"), [("", 0, "train.py x\n"), (".", 2, ".")])
def test_it_starts_over_only_if_it_has_not_printed_a_single_character(tmp_path, printed, code, stdout):
    write_program(tmp_path, "rank.py", RANK)
    write_program(tmp_path, "runner.py", "import sys\nprint(*sys.argv[2:])")
    done = run_command([sys.executable, "rank.py", printed], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, "")
    if code:
        why = "`import numpy` does not fit the preloaded one (rank.py:7: something differs)"
        assert why in (tmp_path / "error").read_text()
