"""Whose option is it? Every command line has one reading or is refused, and what a refusal suggests is accepted."""

from __future__ import annotations

import shlex

import pytest

from ddplaunch.cli.placement import Placed, place
from ddplaunch.errors import UsageError

OPTIONS = {
    "-m": False,
    "--module": False,
    "--no-python": False,
    "--nproc": True,
    "--node-rank": True,
    "--gpus": True,
    "--show": True,
    "--log-dir": True,
    "--dry-run": False,
    "--json": False,
    "-h": False,
    "--help": False,
}


def split(line: str, knows: frozenset[str] = frozenset()) -> Placed:
    return place(shlex.split(line), OPTIONS, lambda placed, option: option in knows)


def spellings(line: str, knows: frozenset[str] = frozenset()) -> tuple[str, list[Placed]]:
    """Return the message of a refusal, and how its suggestions are read: as ours, then as the program's."""
    with pytest.raises(UsageError) as refusal:
        split(line, knows)
    suggested = [
        suggestion.partition(":")[2].split(None, 2)[2]
        for suggestion in (refusal.value.hint or "").splitlines()
        if suggestion.startswith(("ddplaunch's:", "the program's:"))
    ]
    return refusal.value.message, [split(suggestion, knows) for suggestion in suggested]


@pytest.mark.parametrize(
    ("line", "ours", "target", "program"),
    [
        ("train.py", "", "train.py", ""),
        ("--nproc 4 train.py --epochs 10", "--nproc 4", "train.py", "--epochs 10"),
        ("train.py --nproc 4", "--nproc 4", "train.py", ""),
        ("train.py --nproc 4 --dry-run --epochs 10", "--nproc 4 --dry-run", "train.py", "--epochs 10"),
        ("train.py --nproc=4 data", "--nproc=4", "train.py", "data"),
        ("train.py data --epochs 10", "", "train.py", "data --epochs 10"),
        ("train.py --nproc 4 -- --nproc 8", "--nproc 4", "train.py", "--nproc 8"),
        ("--nproc 4 train.py -- --nproc 8", "--nproc 4", "train.py", "--nproc 8"),
        ("train.py -- --dry-run", "", "train.py", "--dry-run"),
        ("train.py --", "", "train.py", ""),
        ("train.py -- -- x", "", "train.py", "-- x"),
        ("train.py --lr 1 -- --nproc 8", "", "train.py", "--lr 1 -- --nproc 8"),
        ("--node-rank -1 train.py", "--node-rank -1", "train.py", ""),
        ("train.py -1 -0.5", "", "train.py", "-1 -0.5"),
        ("train.py - x", "", "train.py", "- x"),
        ("-m pkg.mod --nproc 2 --lr 1", "-m --nproc 2", "pkg.mod", "--lr 1"),
        ("--nproc 2 -m pkg.mod --lr 1", "--nproc 2 -m", "pkg.mod", "--lr 1"),
        ("--module pkg.mod -m x", "--module", "pkg.mod", "-m x"),
        ("--no-python ./prog -x --module", "--no-python", "./prog", "-x --module"),
        ("-- train.py --nproc 4", "", "train.py", "--nproc 4"),
        ("--nproc 2 -- -odd.py --nproc 4 -- x", "--nproc 2", "-odd.py", "--nproc 4 -- x"),
        ("run run", "", "run", "run"),
        ("devices --nproc 2", "--nproc 2", "devices", ""),
        ("train.py --batch-size 4 --shows 1", "", "train.py", "--batch-size 4 --shows 1"),
        ("--log-dir train.py data.py", "--log-dir train.py", "data.py", ""),
        ("train.py ''", "", "train.py", "''"),
    ],
)
def test_one_reading(line, ours, target, program):
    assert split(line) == (tuple(shlex.split(ours)), target, tuple(shlex.split(program)))


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [  # what is ours and the program's if the option is ours; then if it is the program's
        ("train.py --epochs 10 --nproc 4", ("--nproc 4", "--epochs 10"), ("", "--epochs 10 --nproc 4")),
        ("--nproc 4 train.py --dry-run", ("--nproc 4 --dry-run", ""), ("--nproc 4", "--dry-run")),
        ("--nproc=4 train.py --dry-run -x", ("--nproc=4 --dry-run", "-x"), ("--nproc=4", "--dry-run -x")),
        ("train.py --nproc 4 --lr 1 --show 0", ("--nproc 4 --show 0", "--lr 1"), ("--nproc 4", "--lr 1 --show 0")),
        ("train.py a --show 0 b --gpus 1 c", ("--show 0 --gpus 1", "a b c"), ("", "a --show 0 b --gpus 1 c")),
        ("train.py a --show=0", ("--show=0", "a"), ("", "a --show=0")),
        ("train.py a --json -- --show 0", ("--json", "a -- --show 0"), ("", "a --json -- --show 0")),
        ("--nproc 2 train.py --show 0 -- -x", ("--nproc 2 --show 0", "-x"), ("--nproc 2", "--show 0 -- -x")),
        (
            "--nproc 2 train.py --show 0 -- --json",
            ("--nproc 2 --show 0", "--json"),
            ("--nproc 2", "--show 0 -- --json"),
        ),
        ("train.py --help", ("--help", ""), ("", "--help")),
        ("train.py -h", ("-h", ""), ("", "-h")),
        ("train.py --lr 1 -h", ("-h", "--lr 1"), ("", "--lr 1 -h")),
        ("train.py --nprco 4 -x", ("--nproc 4", "-x"), ("", "--nprco 4 -x")),
        ("train.py --dry-rum", ("--dry-run", ""), ("", "--dry-rum")),
        ("train.py --gpu 0", ("--gpus 0", ""), ("", "--gpu 0")),
        ("train.py --log_dir=x", ("--log-dir=x", ""), ("", "--log_dir=x")),
        ("train.py --nproc_per_node 4", ("--nproc 4", ""), ("", "--nproc_per_node 4")),
        ("--nproc 4 train.py --dryrun", ("--nproc 4 --dry-run", ""), ("--nproc 4", "--dryrun")),
        ("--nproc 4 train.py --jsno --gpus 1", ("--nproc 4 --gpus 1", "--jsno"), ("--nproc 4", "--jsno --gpus 1")),
        ("-m pkg.mod x --json", ("--json -m", "x"), ("-m", "x --json")),
        ("--no-python --nproc 2 ./p --json", ("--nproc 2 --json --no-python", ""), ("--nproc 2 --no-python", "--json")),
    ],
)
def test_what_could_be_meant_either_way_is_refused_and_both_spellings_work(line, ours, program):
    _, read = spellings(line)
    target = next(word for word in shlex.split(line) if word in ("train.py", "pkg.mod", "./p"))
    assert read == [(tuple(shlex.split(o)), target, tuple(shlex.split(p))) for o, p in (ours, program)]


def test_the_option_in_question_is_named():
    message, _ = spellings("train.py --epochs 10 --nproc 4")
    assert message == "--nproc could be ddplaunch's or an argument of train.py"


@pytest.mark.parametrize(
    ("line", "knows"),
    [
        ("train.py --log-dir runs", "--log-dir"),
        ("train.py --nproc 2 --log-dir=runs", "--log-dir"),
        ("train.py --show 4", "--show"),
    ],
)
def test_an_option_that_the_program_knows_itself_is_never_swallowed(line, knows):
    assert split(line).program == ()
    message, read = spellings(line, frozenset({knows}))
    assert message == f"{knows} could be ddplaunch's or an argument of train.py"
    assert read[0] == split(line)
    assert read[1] == ((), "train.py", tuple(shlex.split(line)[1:]))


def test_a_value_is_no_option_that_a_program_could_know():
    assert split("train.py --show 4", frozenset({"4"})).ours == ("--show", "4")


def test_what_looks_like_a_slip_is_the_programs_if_it_knows_it():
    assert split("train.py --gpu 0", frozenset({"--gpu"})).program == ("--gpu", "0")


@pytest.mark.parametrize(
    ("line", "message", "program"),
    [
        ("train.py --nproc", "--nproc needs a value", "--nproc"),
        ("train.py -x --nproc", "--nproc needs a value", "-x --nproc"),
        ("train.py --log-dir --dry-run", "--log-dir needs a value, and --dry-run looks like an option", None),
        ("train.py --name --nproc --json", "--nproc needs a value, and --json looks like an option", None),
    ],
)
def test_without_its_value_it_can_only_be_the_programs(line, message, program):
    said, read = spellings(line)
    assert said == message
    assert read == [((), "train.py", tuple(shlex.split(program or line.partition(" ")[2])))]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--nprco 4 train.py", "no such option: --nprco", "did you mean --nproc?"),
        ("--frobnicate 4 train.py", "no such option: --frobnicate", "ddplaunch run --help"),
        ("--nproc-per-node 4 train.py", "no such option: --nproc-per-node", "did you mean --nproc?"),
        ("--nproc_per_node=4 train.py", "no such option: --nproc_per_node", "did you mean --nproc?"),
        ("--node_rank 1 train.py", "no such option: --node_rank", "did you mean --node-rank?"),
        ("-n 4 train.py", "no such option: -n", "did you mean --nproc?"),
        ("-mpkg.mod", "no such option: -mpkg.mod", "did you mean -m pkg.mod?"),
        ("-odd.py", "no such option: -odd.py", "stands behind --"),
        ("--nproc", "--nproc needs a value", "--help"),
        (
            "--nproc --dry-run train.py",
            "--nproc needs a value, and --dry-run looks like an option",
            "--nproc=--dry-run",
        ),
        ("--nproc -m pkg.mod", "--nproc needs a value, and -m looks like an option", "--nproc=-m"),
        ("--log-dir --foo train.py", "--log-dir needs a value, and --foo looks like an option", "--log-dir=--foo"),
    ],
)
def test_errors_before_the_target(line, message, hint):
    with pytest.raises(UsageError) as refusal:
        split(line)
    assert refusal.value.message == message
    assert hint in (refusal.value.hint or "")


@pytest.mark.parametrize("line", ["", "--nproc 4", "-m", "--", "--help"])
def test_no_target(line):
    assert split(line).target is None


KINDS = {"--nodes": True, "--time": True}
"""A second kind of options, as ``submit`` has them."""


def split_kinds(line: str) -> Placed:
    return place(shlex.split(line), {**OPTIONS, **KINDS}, apart=KINDS, neutral={"--dry-run"})


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [
        ("--nodes 2 train.py --nproc 4", "--nodes 2 --nproc 4", ""),
        ("--nodes 2 train.py --nproc 4 -- --time 3", "--nodes 2 --nproc 4", "--time 3"),
        ("--nproc 4 train.py --nodes 2 --lr 1", "--nproc 4 --nodes 2", "--lr 1"),
        ("train.py --nodes 2 --nproc 4 x", "--nodes 2 --nproc 4", "x"),
        ("--dry-run --nodes 2 train.py --nproc 4", "--dry-run --nodes 2 --nproc 4", ""),
        ("--nodes 2 train.py --dry-run", "--nodes 2 --dry-run", ""),
    ],
)
def test_two_kinds_may_stand_on_either_side(line, ours, program):
    assert split_kinds(line) == (tuple(shlex.split(ours)), "train.py", tuple(shlex.split(program)))


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--nodes 2 train.py --time 3", "--time"),
        ("--nproc 2 train.py --show 3", "--show"),
        ("--nproc 2 train.py --dry-run", "--dry-run"),
        ("--nodes 2 --nproc 2 train.py --time 3", "--time"),
        ("--nodes 2 train.py --lr 1 --nproc 3", "--nproc"),
    ],
)
def test_one_kind_may_not(line, option):
    with pytest.raises(UsageError, match=f"^{option} could be ddplaunch's or an argument of train.py"):
        split_kinds(line)


def test_no_words_are_lost_or_invented():
    """Short command lines of all kinds: one reading with the same words in it, or a refusal whose spellings work."""
    words = ("--nproc", "4", "--json", "train.py", "--lr", "--", "--nprco", "-m")
    lines = [()]
    for _ in range(5):
        lines = [(*line, word) for line in lines for word in words]
        for line in lines:
            try:
                placed = place(line, OPTIONS)
            except UsageError as error:
                for suggestion in (error.hint or "").splitlines():
                    if suggestion.startswith(("ddplaunch's:", "the program's:")):
                        split(suggestion.partition(":")[2].split(None, 2)[2])
            else:
                kept = [*placed.ours, *([placed.target] if placed.target is not None else []), *placed.program]
                dashes = [*line]
                for word in kept:
                    dashes.remove(word)
                assert dashes in ([], ["--"])
