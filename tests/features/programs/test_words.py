"""Tests of which words of a command line are options of a program, and which are the program."""

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.features.programs.spec import Programs, ProgramSpec, decode_programs
from ddplaunch.features.programs.words import COMMAND, COMMAND_OPTIONS, TARGET_OPTIONS, rewrite_words

WEB = (COMMAND, "--name", "web", "python3", "-m", "http.server", ":")
TARGET = (":", "--nproc", "2", "train.py")

VALUES = {
    "--name": ("env", {"name": "env"}),
    "--kind": ("sidecar", {"kind": "sidecar"}),
    "--ready": ("line:up", {"ready": "line:up"}),
    "--ready-timeout": ("10m", {"ready_timeout_s": 600.0}),
    "--after": ("web", {"after": ("web",)}),
    "--gpus": ("0-3", {"gpus": "0-3"}),
    "--gpus-per-node": ("4", {"gpus": 4}),
    "--nodes": ("2", {"nodes": 2}),
    "--with": ("web", {"beside": "web"}),
    "--count": ("3", {"count": 3}),
    "--restarts": ("5", {"restarts": 5}),
    "--env": ("LEVEL=3", {"env": {"LEVEL": "3"}}),
    "--grace": ("2.5", {"grace_s": 2.5}),
    "--nice": ("-7", {"nice": -7}),
    "--cwd": ("data", {"cwd": "data"}),
}
FLAGS = {"--each-node": {"each_node": True}, "--no-hold": {"hold": False}}


def read(*words: str) -> tuple[Programs, list[str]]:
    """Return the programs of a command line, and its other words."""
    rewritten = rewrite_words(words, {"--nproc": True})
    texts = [word.partition("=")[2] for word in rewritten if word.startswith("--program=")]
    found = decode_programs(texts, "train.py")
    assert found
    return found, rewritten[len(texts) :]


def read_command(*options: str) -> ProgramSpec:
    """Return what is read of a program with these options."""
    found, left = read(*WEB, COMMAND, *options, "sleep", "9", *TARGET)
    assert left == ["--nproc", "2", "train.py"]
    return found.beside[1]


def test_all_options_are_tested_here():
    assert {*VALUES, *FLAGS, COMMAND} == {*COMMAND_OPTIONS}


@pytest.mark.parametrize("option", VALUES)
def test_an_option_with_a_value_has_two_spellings(option: str):
    value, fields = VALUES[option]
    expected = replace(ProgramSpec("sleep", ("sleep", "9")), **fields)
    assert read_command(option, value) == expected
    assert read_command(f"{option}={value}") == expected
    with pytest.raises(UsageError, match=f"^{option} needs a value"):
        read(COMMAND, option, *TARGET)
    with pytest.raises(UsageError, match=f"^{option} needs a value, and --no-hold looks like an option"):
        read(COMMAND, option, "--no-hold", "sleep", "9", *TARGET)


@pytest.mark.parametrize("option", FLAGS)
def test_the_word_after_an_option_without_a_value_is_the_program(option: str):
    assert read_command(option) == replace(ProgramSpec("sleep", ("sleep", "9")), **FLAGS[option])


def test_the_options_of_a_program_end_at_its_name():
    found, _ = read(COMMAND, "serve", "--name", "other", "--no-hold", *TARGET)
    assert found.beside == (ProgramSpec("serve", ("serve", "--name", "other", "--no-hold")),)


@pytest.mark.parametrize("option", TARGET_OPTIONS)
def test_the_part_with_the_target_has_these_options_too(option: str):
    value, fields = VALUES[option]
    expected = replace(ProgramSpec("train.py", (), "main", is_target=True), **fields)
    for words in ((option, value), (f"{option}={value}",)):
        found, left = read(*WEB, *words, *TARGET[1:])
        assert (found.target, left) == (expected, ["--nproc", "2", "train.py"])


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ((COMMAND, "--gpus-per-node", "x", "sleep", "9", *TARGET), "--gpus-per-node x: expected a number of GPUs", "4"),
        ((COMMAND, "--gpus-per-node=1.5", "sleep", "9", *TARGET), "--gpus-per-node 1.5: expected a number", "4"),
        ((COMMAND, "--no-hold=false", "sleep", "9", *TARGET), "--no-hold takes no value", "--no-hold alone"),
        ((COMMAND, "--each-node=no", "sleep", "9", *TARGET), "--each-node takes no value", "--each-node alone"),
        ((*WEB, "--name"), "--name needs a value", "--help-all"),
        ((*WEB, "--after"), "--after needs a value", "--help-all"),
    ],
)
def test_a_wrong_value_is_named_as_it_was_typed(words: tuple[str, ...], what: str, hint: str):
    with pytest.raises(UsageError) as raised:
        read(*words)
    assert raised.value.message.startswith(what)
    assert hint in (raised.value.hint or "")
