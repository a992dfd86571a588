"""``deepspeed``: options of the launcher of DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.cli.pasted.foreign_options import ForeignSyntax, TranslatedLine, split_foreign_options

# fmt: off
SYNTAX = ForeignSyntax(
    flags=frozenset({
        "--module", "--no-python", "--no-local-rank", "--no-ssh", "--no-ssh-check", "--force-multi", "--save-pid",
        "--elastic-training", "--bind-cores-to-rank",
    }),
    values=frozenset({
        "--hostfile", "--include", "--exclude", "--num-nodes", "--num-gpus", "--num-accelerators", "--master-port",
        "--master-addr", "--node-rank", "--launcher", "--launcher-args", "--enable-each-rank-log", "--autotuning",
        "--bind-core-list", "--ssh-port", "--venv-script", "--min-elastic-nodes", "--max-elastic-nodes",
    }),
    aliases={"-H": "--hostfile", "-i": "--include", "-e": "--exclude"},
)
# fmt: on

_SAME = ("--master-addr --master-addr", "--master-port --master-port", "--enable-each-rank-log --log-dir")
_LOCAL = ("localhost", "127.0.0.1")


def translate_deepspeed(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the words after ``deepspeed``."""
    given = split_foreign_options(words, SYNTAX, own)
    options = list(given.own)
    hostfile, include = given.take("--hostfile"), given.take("--include")
    by_hand = given.take_flag("--no-ssh")  # the same command runs on each node
    node_rank = given.take("--node-rank")
    if gpus := given.take("--num-gpus", "--num-accelerators"):
        options += ["--nproc", gpus]
    if include and (local := gpus_of_this_machine(include)) is not None:
        options += ["--gpus", local] if local else []
        include = hostfile = None
    if by_hand:
        if nodes := given.take("--num-nodes"):
            options += ["--nnodes", nodes]
        if node_rank:
            options += ["--node-rank", node_rank]
        if hostfile:
            given.unknown.append(f"--hostfile {hostfile}")
    elif hostfile or include:
        options += ["--hostfile", hostfile or "/job/hostfile"]
        options += ["--include", include] if include else []
        if exclude := given.take("--exclude"):
            options += ["--exclude", exclude]
    elif given.given.get("--num-nodes") == ["1"]:
        given.take("--num-nodes")
    for foreign, name in map(str.split, _SAME):
        if value := given.take(foreign):
            options += [name, value]
    if given.take_flag("--bind-cores-to-rank"):
        options += ["--bind", "numa"]
    if not given.take_flag("--no-local-rank") and _reads_local_rank(given.rest):
        options.append("--pass-local-rank")
    given.take("--no-ssh-check", "--force-multi")
    for flag in ("--module", "--no-python"):
        if given.take_flag(flag):
            options.append("-m" if flag == "--module" else flag)
    return TranslatedLine(tuple(options), tuple(given.rest), (), given.left_over())


def gpus_of_this_machine(include: str) -> str | None:
    """Return the GPUs in DeepSpeed's ``localhost:0,1``, "" for all; None if it names another host."""
    host, _, gpus = include.partition(":")
    return gpus if host in _LOCAL and "@" not in gpus else None


def _reads_local_rank(rest: Sequence[str]) -> bool:
    """Whether the script's source contains the local-rank option that deepspeed passes to each script."""
    try:
        with open(rest[0], encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 20)
    except (OSError, IndexError):
        return False
    return any(f"{quote}--local{dash}rank{quote}" in text for quote in "'\"" for dash in "_-")
