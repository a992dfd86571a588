"""Tests that process state which libraries keep is repaired in a fork, and nothing else is changed."""

import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import run_command

REPAIRS = Path(ddplaunch.__file__).parent / "features" / "preload" / "rank" / "fork_fixups.py"

FAKES = """
import os, sys, types, uuid, threading, __future__
def module(name, **values):
    sys.modules[name] = made = types.ModuleType(name)
    made.__dict__.update(values)
    return made
def keeper(rank=0):
    def rank_zero_only(): pass
    rank_zero_only.rank = rank
    return rank_zero_only
"""

PRINTS = "m = module('torchmetrics.utilities.prints',"
CASES = {
    "lightning": (
        "def _get_rank(): return int(os.environ['RANK'])\n"
        "m = module('lightning.fabric.utilities.rank_zero', rank_zero_only=keeper(), _get_rank=_get_rank)",
        "m.rank_zero_only.rank",
        "11",
    ),
    "torchmetrics": (f"{PRINTS} rank_zero_only=keeper())", "m.rank_zero_only.rank", "3"),
    "another version": (f"{PRINTS} rank_zero_only=None)", "m.rank_zero_only", "None"),
    "no rank kept": (f"{PRINTS} rank_zero_only=lambda: 0)", "hasattr(m.rank_zero_only, 'rank')", "False"),
    "transformers": ("m = module('transformers.utils.hub', SESSION_ID='0' * 32)",
                     "(len(m.SESSION_ID), m.SESSION_ID != '0' * 32)", "(32, True)"),
    "multiprocessing": ("import multiprocessing as m\nkey = m.current_process().authkey",
                        "(m.current_process().authkey != key, len(m.current_process().authkey))", "(True, 32)"),
    "nothing loaded": ("n = set(sys.modules)", "set(sys.modules) == n", "True"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_library_keeps_the_value_of_its_rank(name):
    made, shown, expected = CASES[name]
    repair = f"exec(open({str(REPAIRS)!r}).read())\napply_fixups(sys.modules)"
    program = f"import sys\n{FAKES}\n{made}\n{repair}\nprint({shown})"
    ended = run_command([sys.executable, "-c", program], env={"RANK": "11", "LOCAL_RANK": "3"})
    assert (ended.stdout.strip(), ended.stderr) == (expected, "")
