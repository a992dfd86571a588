"""Tests of the folders in which processes of one user reach each other."""

from pathlib import Path

import pytest

from ddplaunch.base.local_sockets import is_private_dir


@pytest.mark.parametrize(
    ("parent_mode", "mode", "is_private"),
    [
        (0o755, 0o700, True),
        (0o1777, 0o700, True),  # as /tmp: with the sticky bit only its owner can replace a folder
        (0o777, 0o700, False),  # others could replace it
        (0o775, 0o700, False),
        (0o755, 0o750, False),  # others could enter it
        (0o755, 0o701, False),
    ],
)
def test_a_folder_is_private_if_no_other_user_can_enter_or_replace_it(tmp_path: Path, parent_mode, mode, is_private):
    folder = tmp_path / "parent" / "sockets"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(parent_mode)
    assert is_private_dir(str(folder)) is is_private


def test_a_link_to_a_private_folder_is_not_private(tmp_path: Path):
    (tmp_path / "sockets").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("sockets")
    assert is_private_dir(str(tmp_path / "sockets"))
    assert not is_private_dir(str(tmp_path / "link"))
    assert not is_private_dir(str(tmp_path / "missing"))
