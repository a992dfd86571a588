"""Tests of the decision which files of a folder are its code."""

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.code.code_files import CodeFile, check_size, choose_files, is_private_key, is_secret, leads_out


def test_secrets_and_repositories_are_left_out():
    names = ["train.py", "a/.env", ".env.local", ".env.example", "k/id_ed25519", "k/id_ed25519.pub", "tls.key", "b.py"]
    listed = [
        CodeFile(name)
        for name in (
            *names,
            ".git",
            "sub/.git/config",
            ".ddplaunch/code/1/train.py",
            "slurm-77.out",
            "a/__pycache__/b.pyc",
        )
    ]
    chosen = choose_files(listed)
    assert [file.path for file in chosen.files] == [".env.example", "b.py", "k/id_ed25519.pub", "train.py"]
    assert chosen.secrets == (".env.local", "a/.env", "k/id_ed25519", "tls.key")


def test_a_private_key_is_known_by_its_content():
    assert is_private_key(b"\n-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb")
    assert not is_private_key(b"-----BEGIN CERTIFICATE-----\nMII")
    assert not is_private_key(b'KEY = """-----BEGIN PRIVATE KEY-----"""')  # of a test, perhaps
    assert not is_secret("environment.py")


@pytest.mark.parametrize(
    ("path", "link", "out"),
    [
        ("a", "b", False),
        ("deep/a", "../b", False),
        ("deep/a", "../../b", True),
        ("a", "/data", True),
        ("a", "..", True),
        ("a", "..b", False),
    ],
)
def test_links_out_of_the_folder(path: str, link: str, out: bool):
    assert leads_out(path, link) is out
    assert bool(choose_files([CodeFile(path, link=link)]).outside) is out


def test_too_large_code_is_refused_with_the_largest_files():
    files = [CodeFile("train.py", 1000), CodeFile("data/a.bin", 40 << 20), CodeFile("data/b.bin", 20 << 20)]
    check_size(files[:2], ".", "")
    with pytest.raises(UsageError) as refused:
        check_size(files, ".", "leave them out")
    assert refused.value.message == (
        "--code .: 3 files have 60 MiB, at most 50 MiB are copied;"
        " the largest: data/a.bin 40 MiB, data/b.bin 20 MiB, train.py 1000 B"
    )
