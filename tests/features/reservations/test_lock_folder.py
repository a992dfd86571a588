"""Tests of the folder for locks that DDPLAUNCH_LOCK_DIR names."""

import pytest

from ddplaunch.features.reservations.lock_folder import FOLDER_VARIABLE, LockFolderError, find_lock_folder

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:40 / {0}/home rw shared:2 - nfs4 server:/home rw
24 23 8:2 / {0}/home/scratch rw shared:3 - xfs /dev/sdb1 rw
25 22 0:41 / {0}/all\\040jobs rw - lustre mgs:/all rw
"""


@pytest.fixture
def find(tmp_path):
    """Find the folder on a machine with these mounts; the first argument is its path, below that of the test."""
    (tmp_path / "mounts").write_text(MOUNTS.format(tmp_path.resolve()))

    def find_folder(name):
        (folder := tmp_path / name).mkdir(parents=True)
        return find_lock_folder({FOLDER_VARIABLE: str(folder)}, str(tmp_path / "mounts")) == str(folder)

    return find_folder


@pytest.mark.parametrize("name", ["locks", "homes", "home/scratch", "home/scratch/locks"])
def test_a_folder_of_this_machine_is_taken(find, name):
    assert find(name)


@pytest.mark.parametrize(
    ("name", "kind"), [("home", "nfs4"), ("home/locks", "nfs4"), ("home/scratches", "nfs4"), ("all jobs", "lustre")]
)
def test_a_folder_that_other_machines_lock_too_is_refused(find, name, kind):
    with pytest.raises(LockFolderError, match=rf"/{name} is on a network file system \({kind}\)") as raised:
        find(name)
    assert raised.value.hint == "choose a folder of this machine, like /run/lock"
