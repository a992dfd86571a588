"""Tests of parsing a command line: which options are ddplaunch's, which the program's, and ambiguous ones."""

from __future__ import annotations

import re
import shlex

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.cli import argv_splitter
from ddplaunch.cli.argv_splitter import (
    TRAILING_OPTIONS,
    ArgvGrammar,
    ArgvParts,
    TranslatedArgv,
    command_with_dry_run_for_program,
)

AMBIGUOUS = "could be ddplaunch's or an argument of train.py"

OPTIONS = {
    "-m": False,
    "--module": False,
    "--no-python": False,
    "--nproc": True,
    "--nnodes": True,
    "--node-rank": True,
    "--gpus": True,
    "--show": True,
    "--log-dir": True,
    "--dry-run": False,
    "--json": False,
    "-h": False,
    "--help": False,
}


def split(line: str, named: frozenset[str] = frozenset(), *, ends_at_target: bool = False, **how) -> ArgvParts:
    typed = TranslatedArgv(shlex.split(line), is_torchrun=ends_at_target)
    return argv_splitter.split_argv(typed, ArgvGrammar(OPTIONS, **how), lambda line, option: option in named)


def parts(line: ArgvParts) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    return line.options, line.target, line.program_args


def spellings(line: str, named: frozenset[str] = frozenset()) -> tuple[str, list[ArgvParts]]:
    """Return the message of a refusal, and how its suggestions are read: as ours, then as the program's."""
    with pytest.raises(UsageError) as refusal:
        split(line, named)
    suggested = [
        suggestion.partition(":")[2].split(None, 2)[2]
        for suggestion in (refusal.value.hint or "").splitlines()
        if suggestion.startswith(("ddplaunch's:", "the program's:"))
    ]
    return refusal.value.message, [split(suggestion, named) for suggestion in suggested]


@pytest.mark.parametrize(
    ("line", "ours", "target", "program"),
    [
        ("train.py", "", "train.py", ""),
        ("--nproc 4 train.py --epochs 10", "--nproc 4", "train.py", "--epochs 10"),
        ("train.py --nproc 4", "--nproc 4", "train.py", ""),
        ("train.py --dry-run --json x", "--dry-run --json", "train.py", "x"),
        ("--dry-run train.py --json", "--dry-run --json", "train.py", ""),
        ("train.py --nproc=4 data", "--nproc=4", "train.py", "data"),
        ("train.py --nproc 4 -- --nproc 8", "--nproc 4", "train.py", "--nproc 8"),
        ("--nproc 4 train.py -- --nproc 8", "--nproc 4", "train.py", "--nproc 8"),
        ("--gpus 1 train.py --nproc 4", "--gpus 1 --nproc 4", "train.py", ""),
        ("--nproc 4 train.py --nproc=4 x", "--nproc 4 --nproc=4", "train.py", "x"),
        ("train.py -- --dry-run", "", "train.py", "--dry-run"),
        ("train.py --", "", "train.py", ""),
        ("train.py -- -- x", "", "train.py", "-- x"),
        ("train.py --lr 1 -- --nproc 8", "", "train.py", "--lr 1 -- --nproc 8"),
        ("--node-rank -1 train.py", "--node-rank -1", "train.py", ""),
        ("train.py -1 -0.5", "", "train.py", "-1 -0.5"),
        ("train.py - x", "", "train.py", "- x"),
        ("-m pkg.mod --nproc 2 --lr 1", "-m --nproc 2", "pkg.mod", "--lr 1"),
        ("--module pkg.mod -m x", "--module", "pkg.mod", "-m x"),
        ("--no-python ./prog -x --module", "--no-python", "./prog", "-x --module"),
        ("--no-python ./prog --nproc 4 --dry-run", "--no-python", "./prog", "--nproc 4 --dry-run"),
        ("-- train.py --nproc 4", "", "train.py", "--nproc 4"),
        ("--nproc 2 -- -odd.py --nproc 4 -- x", "--nproc 2", "-odd.py", "--nproc 4 -- x"),
        ("devices --nproc 2", "--nproc 2", "devices", ""),
        ("--log-dir train.py data.py", "--log-dir train.py", "data.py", ""),
        ("train.py ''", "", "train.py", "''"),
        # The program's, unchanged, whatever it is called.
        ("train.py --show 0 --log-dir=x", "", "train.py", "--show 0 --log-dir=x"),
        ("train.py --nproc 4 --gpus 0", "--nproc 4", "train.py", "--gpus 0"),
        ("train.py --help", "", "train.py", "--help"),
        ("train.py --lr 1 -h", "", "train.py", "--lr 1 -h"),
        ("train.py --epochs 4 --nr-proc-x 4 --devices 4", "", "train.py", "--epochs 4 --nr-proc-x 4 --devices 4"),
        ("train.py -- --nporc 4 -n 3", "", "train.py", "--nporc 4 -n 3"),
        ("--no-python ./prog --nporc 4 -n 3", "--no-python", "./prog", "--nporc 4 -n 3"),
    ],
)
def test_how_a_command_line_is_split(line, ours, target, program):
    assert parts(split(line)) == (tuple(shlex.split(ours)), target, tuple(shlex.split(program)))


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("--nproc 4 train.py --dry-run --nproc 2", "--dry-run --nproc 2"),
        ("train.py --help", "--help"),
        ("train.py -- --help -- x", "--help -- x"),
        ("-- train.py -- --help", "-- --help"),
        ("--no-python ./p -- x", "x"),
    ],
)
def test_everything_behind_the_target_of_a_torchrun_line_is_the_programs(line, program):
    """tests/cli/test_torchrun.py compares the same lines with torchrun itself."""
    assert split(line, ends_at_target=True).program_args == tuple(shlex.split(program))


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [  # what is ours and the program's if the option is ours; then if it is the program's
        ("train.py --epochs 10 --nproc 4", ("--nproc 4", "--epochs 10"), ("", "--epochs 10 --nproc 4")),
        ("--gpus 1 train.py -x --dry-run", ("--gpus 1 --dry-run", "-x"), ("--gpus 1", "-x --dry-run")),
        ("train.py --nproc 4 --lr 1 --nnodes 2", ("--nproc 4 --nnodes 2", "--lr 1"),
         ("--nproc 4", "--lr 1 --nnodes 2")),
        ("train.py a --nproc 3 b --nnodes 1 c", ("--nproc 3 --nnodes 1", "a b c"),
         ("", "a --nproc 3 b --nnodes 1 c")),
        ("train.py a --nproc=3", ("--nproc=3", "a"), ("", "a --nproc=3")),
        ("train.py a --dry-run -- --nproc 3", ("--dry-run", "a -- --nproc 3"), ("", "a --dry-run -- --nproc 3")),
        ("train.py --log-dir x --nproc 3", ("--nproc 3", "--log-dir x"), ("", "--log-dir x --nproc 3")),
        ("--dry-run train.py x --json", ("--dry-run --json", "x"), ("--dry-run", "x --json")),
        ("-m pkg.mod x --dry-run", ("--dry-run -m", "x"), ("-m", "x --dry-run")),
    ],
)  # fmt: skip
def test_an_option_behind_arguments_is_refused_with_two_unambiguous_commands(line, ours, program):
    message, read = spellings(line)
    target = next(word for word in shlex.split(line) if word in ("train.py", "pkg.mod"))
    assert re.fullmatch(rf"--[a-z-]+ could be ddplaunch's or an argument of {target}", message)
    expected = [(tuple(shlex.split(o)), target, tuple(shlex.split(p))) for o, p in (ours, program)]
    assert [parts(each) for each in read] == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train.py --nproc 2", "--nproc"),
        ("train.py --nproc 2 --dry-run -x", "--dry-run"),
        ("train.py --nproc=2", "--nproc"),
    ],
)
def test_an_option_that_the_program_has_too_is_refused(line, named):
    message, read = spellings(line, frozenset({named}))
    assert message == f"{named} {AMBIGUOUS}"
    assert parts(read[0]) == parts(split(line))
    assert parts(read[1]) == ((), "train.py", tuple(shlex.split(line)[1:]))


def test_an_option_behind_arguments_is_the_programs_if_it_has_one():
    found = split("train.py --lr 1 --dry-run --log-dir x", frozenset({"--dry-run", "--log-dir"}))
    assert parts(found) == ((), "train.py", ("--lr", "1", "--dry-run", "--log-dir", "x"))
    assert found.lookalikes == ()


@pytest.mark.parametrize(
    ("line", "alike"),
    [
        ("train.py --log-dir x --show=0 --log-dir y", ("--log-dir", "--show")),
        ("train.py --help", ("--help",)),
        ("train.py --lr 1 -m x", ()),
        ("train.py -- --log-dir x", ()),
        ("train.py --lr 1 -- --log-dir x", ()),
        ("-- train.py --log-dir x", ()),
        ("--no-python ./p --log-dir x", ("--log-dir",)),
    ],
)
def test_program_options_with_names_of_ddplaunch_are_noted(line, alike):
    assert split(line).lookalikes == alike


@pytest.mark.parametrize(
    ("line", "word", "option", "ours", "program"),
    [
        ("train.py --nporc 4", "--nporc", "--nproc", "--nproc 4", ""),
        ("train.py --nprocs=4 --lr 1", "--nprocs", "--nproc", "--nproc=4", "--lr 1"),
        ("train.py --lr 1 -n 4", "-n", "--nproc", "--nproc 4", "--lr 1"),
        ("train.py --np 4", "--np", "--nproc", "--nproc 4", ""),
        ("train.py --nproc_per_node 4", "--nproc_per_node", "--nproc", "--nproc 4", ""),
        ("train.py --nproc 2 --node_rank 1", "--node_rank", "--node-rank", "--nproc 2 --node-rank 1", ""),
        ("--nproc 4 train.py --dryrun", "--dryrun", "--dry-run", "--nproc 4 --dry-run", ""),
        ("train.py --nprco 4 --dry-rum x", "--nprco", "--nproc", "--nproc 4 --dry-run", "x"),
        ("-m pkg.mod --nodes 2", "--nodes", "--nnodes", "--nnodes 2 -m", ""),
    ],
)
def test_a_misspelt_option_behind_the_target_is_refused_and_both_spellings_work(line, word, option, ours, program):
    message, read = spellings(line)
    target = next(each for each in shlex.split(line) if each in ("train.py", "pkg.mod"))
    assert message == f"{word} could be ddplaunch's {option} or an argument of {target}"
    before, _, behind = line.partition(target)
    theirs = (
        split(f"{before}{target} -- {behind}")
        if "--nproc 2" not in behind
        else split(f"--nproc 2 train.py -- {behind.removeprefix(' --nproc 2')}")
    )
    assert parts(read[0]) == (tuple(shlex.split(ours)), target, tuple(shlex.split(program)))
    assert parts(read[1]) == parts(theirs)


@pytest.mark.parametrize("word", ["--nprocs", "--node_rank", "-n"])
def test_a_word_near_an_option_is_the_programs_if_that_names_it(word):
    assert parts(split(f"train.py {word} 4", frozenset({word}))) == ((), "train.py", (word, "4"))


def test_a_misspelt_option_without_its_value_can_only_be_the_programs():
    message, read = spellings("train.py --nporc")
    assert message == "--nporc could be ddplaunch's --nproc or an argument of train.py"
    assert [parts(each) for each in read] == [((), "train.py", ("--nporc",))]


def test_a_value_is_no_option_that_a_program_could_know():
    assert split("train.py --nproc 4", frozenset({"4"})).options == ("--nproc", "4")


@pytest.mark.parametrize(
    ("line", "message", "program"),
    [
        ("train.py --nproc", "--nproc needs a value", "--nproc"),
        ("train.py -x --nproc", "--nproc needs a value", "-x --nproc"),
        ("train.py --nproc --dry-run", "--nproc needs a value, and --dry-run looks like an option", None),
        ("train.py --name --nproc --json", "--nproc needs a value, and --json looks like an option", None),
    ],
)
def test_an_option_without_its_value_is_refused(line, message, program):
    found, read = spellings(line)
    assert found == message
    expected = [((), "train.py", tuple(shlex.split(program or line.partition(" ")[2])))]
    assert [parts(each) for each in read] == expected


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--nprco 4 train.py", "no such option: --nprco", "did you mean --nproc?"),
        ("--frobnicate 4 train.py", "no such option: --frobnicate", "ddplaunch run --help"),
        ("--nproc-per-node 4 train.py", "no such option: --nproc-per-node", "did you mean --nproc?"),
        ("--nproc_per_node=4 train.py", "no such option: --nproc_per_node", "did you mean --nproc?"),
        ("--node_rank 1 train.py", "no such option: --node_rank", "did you mean --node-rank?"),
        ("--multi_gpu train.py", "no such option: --multi_gpu", "one rank per visible GPU"),
        ("--config_file=x train.py", "no such option: --config_file", "accelerate's file is not read"),
        ("--deepspeed ds.json train.py", "no such option: --deepspeed", "after the script's name"),
        ("--devices 4 train.py", "no such option: --devices", "did you mean --nproc?"),
        ("--mixed_precision bf16 train.py", "no such option: --mixed_precision", "ACCELERATE_MIXED_PRECISION"),
        ("-n 4 train.py", "no such option: -n", "did you mean --nproc?"),
        ("-mpkg.mod", "no such option: -mpkg.mod", "did you mean -m pkg.mod?"),
        ("-odd.py", "no such option: -odd.py", "put -- before a target"),
        ("--nproc", "--nproc needs a value", "--help"),
        ("--nproc 3 train.py --nproc 2", "--nproc is 3 before train.py and 2 after it", ""),
        ("--nproc=3 train.py --dry-run --nproc=2 x", "--nproc is 3 before train.py and 2 after it", ""),
        ("--nproc '' train.py", "--nproc has an empty value", "leave it out"),
        ("--nproc= -- train.py", "--nproc has an empty value", "leave it out"),
        (
            "--nproc --dry-run train.py",
            "--nproc needs a value, and --dry-run looks like an option",
            "--nproc=--dry-run",
        ),
        ("--nproc -m pkg.mod", "--nproc needs a value, and -m looks like an option", "--nproc=-m"),
        ("--log-dir --foo train.py", "--log-dir needs a value, and --foo looks like an option", "--log-dir=--foo"),
    ],
)
def test_usage_errors_for_any_program(line, message, hint):
    with pytest.raises(UsageError) as refusal:
        split(line)
    assert refusal.value.message == message
    assert hint in (refusal.value.hint or "")


@pytest.mark.parametrize("line", ["", "--nproc 4", "-m", "--", "--help"])
def test_a_line_without_a_target(line):
    assert split(line).target is None


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train.py --dry-run", "train.py -- --dry-run"),
        ("train.py --nproc 2 --dry-run --json x", "--nproc 2 train.py -- --dry-run --json x"),
        ("--dry-run train.py --dry-run", "--dry-run train.py -- --dry-run"),
        ("--json train.py --dry-run --lr 3", "train.py -- --dry-run --lr 3"),
        ("--dry-run --json train.py --json", None),
        ("--dry-run train.py", None),
    ],
)
def test_how_a_dry_run_is_passed_on(line, command):
    assert command_with_dry_run_for_program(split(line)) == (command and f"ddplaunch run {command}")


def test_suggested_commands_are_valid():
    """A flag takes no value; an option that has no place in a command is not suggested."""
    _, read = spellings("train.py x --dry-run=1")
    assert [each.options for each in read] == [("--dry-run",), ()]
    with pytest.raises(UsageError) as refusal:
        split("train.py x --show 0", ambiguous_options={"--show"}, replacements={"--show": "leave it out"})
    assert refusal.value.hint == "ddplaunch's:   leave it out\nthe program's: ddplaunch run train.py -- x --show 0"


SUBMIT = {**OPTIONS, "--nodes": True, "--time": True}
"""More options, as ``submit`` has them: two few that may stand behind, the others guarded."""


def split_submit(line: str, named: frozenset[str] = frozenset()) -> ArgvParts:
    few = TRAILING_OPTIONS - {"--dry-run", "--json"} | {"--nodes"}
    guarded = SUBMIT.keys() - {"--help", "-h"}
    grammar = ArgvGrammar(SUBMIT, few, guarded)
    return argv_splitter.split_argv(TranslatedArgv(shlex.split(line)), grammar, lambda line, option: option in named)


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [
        ("--time 2 train.py --nproc 4", "--time 2 --nproc 4", ""),
        ("--nodes 2 train.py --nproc 4 -- --time 3", "--nodes 2 --nproc 4", "--time 3"),
        ("--nproc 4 train.py --nodes 2 --lr 1", "--nproc 4 --nodes 2", "--lr 1"),
        ("--nodes 2 train.py --help", "--nodes 2", "--help"),
    ],
)
def test_submit_accepts_more_options_behind_the_target(line, ours, program):
    assert parts(split_submit(line)) == (tuple(shlex.split(ours)), "train.py", tuple(shlex.split(program)))


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--nodes 2 train.py --time 3", "--time"),
        ("--nproc 2 train.py --show 3", "--show"),
        ("--nproc 2 train.py --dry-run", "--dry-run"),
        ("train.py --nodes 2 --dry-run", "--dry-run"),
        ("--nodes 2 train.py --lr 1 --dry-run", "--dry-run"),
        ("--nodes 2 train.py --lr 1 --nproc 3", "--nproc"),
    ],
)
def test_submit_refuses_its_other_options_behind_the_target(line, option):
    with pytest.raises(UsageError, match=f"^{option} {AMBIGUOUS}") as refusal:
        split_submit(line)
    for suggestion in (refusal.value.hint or "").splitlines():
        split_submit(suggestion.partition(":")[2].split(None, 2)[2])
    assert split_submit(line, frozenset({option})).lookalikes == ()


@pytest.mark.slow
def test_every_word_is_in_exactly_one_part():
    """Short command lines of all kinds: one reading with the same words in it, or a refusal whose spellings work."""
    words = ("--nproc", "4", "--json", "train.py", "--lr", "--", "--nprco", "-m")
    lines = [()]
    for _ in range(4):
        lines = [(*line, word) for line in lines for word in words]
        for line in lines:
            try:
                found = argv_splitter.split_argv(TranslatedArgv(line), ArgvGrammar(OPTIONS))
            except UsageError as error:
                for suggestion in (error.hint or "").splitlines():
                    if suggestion.startswith(("ddplaunch's:", "the program's:")):
                        split(suggestion.partition(":")[2].split(None, 2)[2])
            else:
                kept = [*found.options, *([found.target] if found.target is not None else []), *found.program_args]
                dashes = [*line]
                for word in kept:
                    dashes.remove(word)
                assert dashes in ([], ["--"])
