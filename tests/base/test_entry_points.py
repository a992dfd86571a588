"""Tests of finding entry points: as importlib.metadata does, and quicker."""

import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ddplaunch.base.entry_points import find_entry_points, parse_entry_points
from tests.conftest import write_program
from tests.scaled_timeouts import machine_slowness

MAX_LOOK_S = 0.003
"""CPU time that every command may spend on looking for plug-ins."""


@pytest.mark.parametrize("group", ["console_scripts", "pytest11", "no.such.group"])
def test_it_finds_what_importlib_metadata_finds(group):
    found = {(name, f"{module}:{attribute}".rstrip(":")) for name, module, attribute, _ in find_entry_points(group)}
    assert found == {(point.name, point.value.partition(" [")[0]) for point in entry_points(group=group)}


def test_the_first_of_two_versions_counts_and_what_cannot_be_read_is_left_out(tmp_path: Path):
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        write_program(tmp_path, f"{folder}/some_name-{version}.dist-info/entry_points.txt", "[g]\nx = m:o\n")
    (tmp_path / "b" / "other-1.dist-info").mkdir()
    (tmp_path / "a" / "odd-1.dist-info" / "entry_points.txt").mkdir(parents=True)
    folders = [str(tmp_path / "missing"), *(str(tmp_path / name) for name in "ab")]
    assert find_entry_points("g", folders) == [("x", "m", "o", "some-name 2.0")]


def test_other_groups_comments_and_extras_do_not_count():
    text = "[other]\na = b\n[g]\n# c = d\n; e = f\n\nname=package.module:Thing.FEATURE [extra]\nall = m\n[g.h]\ni = j\n"
    assert [*parse_entry_points(text, "g")] == [
        ("name", "package.module", "Thing.FEATURE"),
        ("all", "m", ""),
    ]


def test_looking_is_quick():
    taken = []
    for _ in range(20):
        began = time.thread_time()
        find_entry_points("ddplaunch.features")
        taken.append(time.thread_time() - began)
    assert min(taken) < MAX_LOOK_S * machine_slowness(), f"{min(taken) * 1000:.1f} ms"
