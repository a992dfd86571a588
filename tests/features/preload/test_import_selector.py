"""Tests of which imports of a program are preloaded, with small tables and packages."""

from pathlib import Path

import pytest

from ddplaunch.features.preload import known_packages, program_source
from ddplaunch.features.preload.import_selector import SelectedImports, select_imports
from ddplaunch.system.target.target import find_target
from tests.conftest import write_program
from tests.features.preload.table import Installation

NOT_LISTED = "imports stranger, which is not in the table"


class Selecting:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.installation = folder / "program", Installation(folder)
        self.folder.mkdir()
        self.add = self.installation.add
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(self.installation.site))
        self.add("free")
        self.add("stranger", known=False)

    def select(self, source: str, *, include_deferred: bool = True) -> SelectedImports:
        self._monkeypatch.setattr(known_packages, "TABLE_FILE", str(self.installation.write()))
        write_program(self.folder, "train.py", source)
        target = find_target("train.py", (), as_module=False, as_program=False, cwd=str(self.folder))
        program, table = program_source.read_program(target), known_packages.PackageTable()
        return select_imports(program, table, target.sys_path_0 or "", include_deferred=include_deferred)

    def modules(self, source: str) -> list[str]:
        return [*self.select(source).modules]

    def reasons(self, source: str) -> dict[str, str]:
        return dict(self.select(source).excluded)


@pytest.fixture
def selecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Selecting:
    return Selecting(tmp_path, monkeypatch)


def test_the_reason_is_given_for_each_module_left_out(selecting):
    selecting.add("bad", refused="makes a temporary folder at import")
    selecting.add("old", version="1.0")
    selecting.add("next", version="2.0")
    selecting.add("beta", version="1.2rc1")
    selecting.add("needs", loads=["stranger"])
    found = selecting.select("import torch, bad, old, next, beta, needs\nimport stranger, free, absent\n")
    assert found.modules == ("free",)
    assert dict(found.excluded) == {
        "bad": "makes a temporary folder at import",
        "old": "1.0 has not been audited",
        "next": "2.0 has not been audited",
        "beta": "1.2rc1 has not been audited",
        "needs": NOT_LISTED,
        "stranger": "not in the table",
    }


def test_two_versions_in_one_folder(selecting):
    (selecting.installation.site / "free-1.3.dist-info").mkdir()
    assert selecting.reasons("import free\n") == {"free": "? has not been audited"}


def test_another_folder_has_the_second_module_of_a_package(selecting, tmp_path, monkeypatch):
    """A second module that is not installed may be optional."""
    selecting.add("two", top=["two", "second"])
    assert selecting.modules("import two\n") == ["two"]
    write_program(tmp_path / "other/site-packages", "second.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "other/site-packages"))
    assert selecting.modules("import two\n") == []


def test_an_editable_install_is_not_preloaded(selecting, tmp_path, monkeypatch):
    (selecting.installation.site / "free.py").unlink()
    write_program(tmp_path / "elsewhere", "free.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert selecting.modules("import free\n") == []


LAZY = {"lazy": (), "lazy.trainer": ("Trainer",), "lazy.model": ("Model",), "lazy.inside": ()}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from lazy import Trainer\n", ["lazy", "lazy.trainer"]),
        ("from lazy.trainer import x\n", ["lazy", "lazy.trainer"]),
        ("from lazy import inside\n", ["lazy", "lazy.inside"]),
        ("import lazy\ndef f(): lazy.Trainer()\n", ["lazy", "lazy.trainer"]),
        ("import lazy\nlazy.Trainer\n", ["lazy", "lazy.trainer"]),
        ("def main():\n  from lazy import Trainer\n", ["lazy", "lazy.trainer"]),
        ("def main():\n  if x: from lazy import Trainer\n", []),
        ("if x: from lazy import Trainer\n", []),
    ],
)
def test_the_words_that_lead_to_a_module(selecting, source, modules):
    selecting.add("lazy", modules=LAZY)
    assert selecting.modules("import torch\n" + source) == modules


def test_a_module_of_another_package_is_as_known_as_that(selecting):
    selecting.add("lazy", modules={"lazy": (), "free": ("Trainer",), "gone": ("Trainer",), "next": ("Trainer",)})
    selecting.add("next", version="2.0")
    assert selecting.modules("import lazy\nlazy.Trainer\n") == ["lazy", "free"]


def test_a_module_that_this_version_does_not_have_is_left_out(selecting):
    selecting.add("lazy", modules=LAZY)
    (selecting.installation.site / "lazy" / "trainer.py").unlink()
    assert selecting.modules("from lazy import Trainer, Model\n") == ["lazy", "lazy.model"]


def test_imports_in_functions_are_not_preloaded_for_one_rank(selecting):
    selecting.add("lazy", modules=LAZY)
    found = selecting.select("import lazy\nlazy.Trainer\ndef f(): import free\n", include_deferred=False)
    assert found.modules == ("lazy",)


def test_the_modules_that_imports_may_load(selecting):
    """Those of torch are known though not in the table: triton, if torch is a build for GPUs."""
    selecting.add("torch", loads=["part-of-torch"])
    selecting.add("bad", refused="prints")
    assert selecting.select("import free\n").known == ("free", "part_of_torch", "torch")


def test_optional_imports_of_a_package_count_if_they_are_installed(selecting):
    """An optional import counts only if it is installed; otherwise the zygote would have to start again."""
    selecting.add("asks", tries=["stranger", "absent.part"])
    selecting.add("gentle", tries=["free.part", "absent"])
    assert selecting.reasons("import gentle\nimport asks\n") == {"asks": NOT_LISTED}
    selecting.add("known_now", refused="prints")
    selecting.add("gentle", tries=["known_now"])
    assert selecting.reasons("import gentle\n") == {"gentle": "imports known_now, which prints"}


def test_every_module_of_the_table_belongs_to_a_package_of_it():
    table = known_packages.PackageTable()
    assert [
        module for each in table.packages.values() for module in each.modules if table.find_package(module) is None
    ] == []
