"""``python -m tests.tools.release``: builds wheel and sdist, and tries them; .ci/run does, with build and twine.

The sdist holds what git does. The wheel is made of the sdist, has all files of the package and declares what it needs:
it is installed in a new environment that has these distributions alone, linked from ours so that no second torch is
needed, and there, without the checkout, the first command of the README prints what is shown there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import clean_environment
from tests.test_readme import ROOT, blocks, not_printed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder, "dist"))
        shutil.unpack_archive(sdist, folder)
        source = Path(folder, sdist.name.removesuffix(".tar.gz"))
        same("the sdist and git", files(source) - {"PKG-INFO"}, in_git())
        with zipfile.ZipFile(wheel) as zipped:
            package = {name for name in zipped.namelist() if ".dist-info/" not in name}
        ours = {name for name in in_git() if name.startswith("ddplaunch/")}
        pages = {f"ddplaunch/{name}" for name in in_git() if name.startswith("docs/")}  # which `ddplaunch help` shows
        same("the wheel and git", package, ours | pages)
        shutil.copytree(source / "docs" / "examples", Path(folder, "work", "docs", "examples"))
        first_job(install(wheel, Path(folder, "environment")), Path(folder, "work"))


def build(folder: Path) -> tuple[Path, Path]:
    """Build both, the wheel from the sdist, and have what an index would show of them checked."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder], cwd=ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", sdist, wheel])
    return sdist, wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel and link what it declares to need, with the examples' extra; return the environment."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel])
    (site,) = folder.glob("lib/python*/site-packages")
    (ours,) = site.glob("ddplaunch-*.dist-info")
    for needed in needs(Distribution.at(ours), {"examples"}).values():
        for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(needed.locate_file(name)))
    output = run([python, "-c", "import ddplaunch; print(ddplaunch.__file__)"], cwd=folder)
    assert Path(output.strip()).is_relative_to(folder), output
    return folder


def needs(of: Distribution, extras: set[str], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """The distributions that one needs with these extras, and what they need, by their names."""
    found = {} if found is None else found
    for text in of.requires or ():
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = distribution(requirement.name)
            needs(found[requirement.name], requirement.extras, found)
    return found


def first_job(environment: Path, folder: Path) -> None:
    """Run the first command of the README."""
    job = next(block for block in blocks(ROOT / "README.md") if block.language == "console").commands[0]
    path = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", os.defpath)])
    variables = {
        **clean_environment(),
        "PATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    output = run(job.typed.split(), cwd=folder, env=variables)
    if missing := not_printed(job.shown, output):
        sys.exit(f"the README shows what the wheel does not print: {missing[0]}\n{output}")


def files(folder: Path) -> set[str]:
    """Return all files below a folder, by their relative paths."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def in_git() -> set[str]:
    """The files of this checkout, those too that are not committed yet."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    return {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}


def same(what: str, one: set[str], other: set[str]) -> None:
    """Exit with an error that names the files which only one of two has."""
    if different := sorted(one ^ other):
        sys.exit(f"{what} have different files: {', '.join(different[:10])}")
    print(f"{what}: {len(one)} files, the same")


def run(command: Sequence[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command; exit with its output if it fails."""
    if env is not None and (found := shutil.which(command[0], path=env["PATH"])):
        command = [found, *command[1:]]
    print("$", *command, flush=True)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
