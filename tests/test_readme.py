"""README*.md, CONTRIBUTING.md and docs/*.md are true: their commands are run, and they print what the page shows.

Read from each page's fenced blocks:

``console``
    lines that begin with ``$ `` are run by one bash, in order, in a folder that has the page's programs and
    docs/examples. Every other line must be a line of that command's output, in any order (ranks race), where ``…``
    stands for anything and one number is as good as another; what ``echo $?`` prints must be exact. Blocks are run as
    on a machine without GPUs; with ``console gpus=4`` as the info string, with four that the tests' stand-in for
    NVIDIA's library plays. The making of an environment in front of a command is left out, and so is a pytest command:
    we are in such an environment already, run by pytest. ``console needs=lightning`` is skipped where that is missing.
``hosts``
    the same on several machines: ``n0$ …`` and ``n1$ …`` are run at the same time, each on a virtual host of that name;
    the lines behind each are of that host's output.
``sh``
    commands for the reader's own machines. Each ``ddplaunch run`` in them must be one that can be planned, here, with
    eight GPUs: it is given ``--dry-run``. Other commands are not looked at.
``python``
    where the first line is a comment with a file's name, that file is there for the commands of the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.fake_nvml import FakeNvml, fake_nvml  # noqa: F401, a fixture
from tests.hosts.network import Network

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)[^)]*\)")
FILE_NAME = re.compile(r"# (?P<name>\w+\.py)\n")
OURS = re.compile(r"([A-Z_]+=\S+ )*ddplaunch run ")
SET_UP = re.compile(r"^python3 -m venv \.venv && (\.venv/bin/pip install [^&]+ && )+")
MARK = "@@@ command"
PATIENCE = 240  # a block may start several programs, each of which imports torch, on a loaded machine


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the rest of its info string, and where it stands."""

    page: Path
    line: int
    language: str
    info: str
    body: str

    @property
    def gpus(self) -> int:
        return int(self.info.removeprefix("gpus=")) if self.info.startswith("gpus=") else 0

    @property
    def needs(self) -> str | None:
        """The package without which it cannot be run."""
        return self.info.removeprefix("needs=") if self.info.startswith("needs=") else None

    @property
    def hosts(self) -> list[tuple[int, str, list[str]]]:
        """Of a block of this kind: the host's number, the command there, and what is shown of its output."""
        found: list[tuple[int, str, list[str]]] = []
        for line in self.body.splitlines():
            if prompt := re.match(r"n(\d)\$ ", line):
                found.append((int(prompt[1]), line[prompt.end() :], []))
            elif line.strip():
                found[-1][2].append(line)
        return found


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        language, _, info = fence["info"].partition(" ")
        yield Block(page, text.count("\n", 0, fence.start()) + 1, language, info.strip(), fence["body"])


def of_language(language: str) -> list[object]:
    """The blocks of this language on all pages, as parameters of a test."""
    return [
        pytest.param(block, id=f"{block.page.name}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if block.language == language
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has what a page's commands name, but for the page's own programs."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    return tmp_path


def write_programs(page: Path, folder: Path) -> None:
    for block in blocks(page):
        name = FILE_NAME.match(block.body) if block.language == "python" else None
        if name:
            (folder / name["name"]).write_text(block.body, encoding="utf-8")


def environment(gpus: int, request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables that put this environment's ddplaunch first and have it find this many GPUs."""
    variables = clean_environment()
    if gpus:
        library: FakeNvml = request.getfixturevalue("fake_nvml")
        variables = {**clean_environment(library.environ(gpus))}
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    return {**variables, "PATH": path, "COLUMNS": "100", "USER": variables.get("USER", "root")}


def bash(script: str, folder: Path, variables: dict[str, str]) -> str:
    """Run a script, in a file so that its text is in nobody's command line; return what it printed on both streams."""
    file = folder / ".commands.sh"
    file.write_text(script, encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # what is killed leaves files
        done = subprocess.run(
            ["bash", str(file)],
            cwd=folder,
            env={**variables, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    return done.stdout


def sessions(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in block.body.splitlines():
        if line.startswith("$ "):
            command = SET_UP.sub("", line[2:]).replace(".venv/bin/", "")
            found.append((command, []))
        elif line.strip():
            assert found, f"{block.page.name}:{block.line} shows output before a command"
            found[-1][1].append(line)
    return [(command, lines) for command, lines in found if not command.startswith("pytest")]


def pattern(line: str) -> re.Pattern[str]:
    """What a shown line means: numbers are any numbers, ``…`` is anything."""
    parts = (re.sub(r"\d+", r"\\d+", re.escape(part)) for part in line.rstrip().split("…"))
    return re.compile(".*".join(parts))


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 20)
@pytest.mark.parametrize("block", of_language("console"))
def test_commands_print_what_the_page_shows(block: Block, folder: Path, request: pytest.FixtureRequest) -> None:
    if block.needs and find_spec(block.needs) is None:
        pytest.skip(f"no {block.needs}: pip install -e '.[frameworks]'")
    write_programs(block.page, folder)
    commands = sessions(block)
    script = ["status=0"]
    for command, _ in commands:  # the status is carried over our own echo, so that `echo $?` means the command's
        script += [f"echo; echo '{MARK}'; (exit $status); {command}", "status=$?"]
    output = bash("\n".join(script) + "\n", folder, environment(block.gpus, request))
    printed = output.split(f"\n{MARK}\n")[1:]
    assert len(printed) == len(commands), output
    for (command, shown), said in zip(commands, printed, strict=True):
        lines = [line.rstrip() for line in said.splitlines()]
        for line in shown:
            if command == "echo $?":
                assert lines == [line], f"$ {command}"
            else:
                assert any(pattern(line).fullmatch(each) for each in lines), f"not printed: {line}\n$ {command}\n{said}"


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 20)
@pytest.mark.parametrize("block", of_language("hosts"))
def test_commands_on_several_hosts(
    block: Block, folder: Path, network: Callable[[int], Network], request: pytest.FixtureRequest
) -> None:
    write_programs(block.page, folder)
    hosts = network(1 + max(number for number, _, _ in block.hosts)).hosts
    started = [
        hosts[number].start(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(0, request),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, command, _ in block.hosts
    ]
    for process, (number, command, shown) in zip(started, block.hosts, strict=True):
        said, _ = process.communicate(timeout=PATIENCE)
        lines = [line.rstrip() for line in said.splitlines()]
        for line in shown:
            assert any(pattern(line).fullmatch(each) for each in lines), f"n{number}$ {command}\n{line}\nnot in\n{said}"


@pytest.mark.parametrize("block", of_language("sh"))
def test_commands_for_other_machines_can_be_planned(block: Block, folder: Path, request: pytest.FixtureRequest) -> None:
    write_programs(block.page, folder)
    variables = environment(8, request)
    for line in block.body.splitlines():
        command = line.partition("#")[0].strip()
        if OURS.match(command):
            # Our options stand together, before the target or right behind it.
            command = re.sub(r"\bddplaunch run( (?!-)\S+)?", r"\g<0> --dry-run", command, count=1)
            said = bash(f"{command}\necho status $?\n", folder, variables)
            assert said.endswith("status 0\n"), f"$ {command}\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    paths = [link["path"] for link in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [path for path in paths if not (page.parent / path).exists()] == []
