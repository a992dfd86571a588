"""Recognises the line of another launcher, and raises an error with the line of ddplaunch to type instead."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.argv_splitter import (
    TARGET_KIND_OPTIONS,
    end_of_options,
    is_option,
    option_name,
    underscores_to_dashes,
)
from ddplaunch.cli.click_commands import PYTHON
from ddplaunch.cli.pasted.accelerate_line import translate_accelerate
from ddplaunch.cli.pasted.deepspeed_line import translate_deepspeed
from ddplaunch.cli.pasted.foreign_options import TranslatedLine
from ddplaunch.cli.pasted.mpi_line import translate_mpi

Translate = Callable[[Sequence[str], Mapping[str, bool]], TranslatedLine]

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_OPTION_OWNERS = {
    **dict.fromkeys(
        ("--num-processes", "--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port"),
        "accelerate launch",
    ),
    **dict.fromkeys(("--num-gpus", "--num-accelerators", "--enable-each-rank-log"), "deepspeed"),
    **dict.fromkeys(("-np", "-H", "--npernode", "-npernode", "--map-by"), "mpirun"),
}
"""Options that only one launcher has: a line that begins with one is read as a line of that launcher."""

_OF_THE_NODES = frozenset({"--nnodes", "--node-rank", "--master-addr", "--master-port", "--run-id"})
"""Options that the variables of a scheduler replace: ddplaunch reads them in each task of srun."""

_VARIABLE = r"[A-Za-z_]\w*=.*"
_PYTHON_VALUES = ("-X", "-W")
_PYTHON_CODE = r"-[bBdEiIOPqsSuvx]*c.*"  # -c, also behind flags and before the code: -uc


def check_not_other_launcher(words: Sequence[str], own: Mapping[str, bool]) -> None:
    """Raise UsageError if the words are a line of another launcher, with the line to type as hint.

    Args:
        words: what follows ``ddplaunch run``.
        own: the spellings of ddplaunch's options, and whether they take a value.
    """
    end = end_of_options(words, own)
    before, rest = list(words[:end]), list(words[end:])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest or "--no-python" in before:
        return
    if is_option(rest[0]):
        owner = _OPTION_OWNERS.get(underscores_to_dashes(option_name(rest[0])))
        is_hold = rest[0] == "-H" and is_option("".join(rest[1:2]))  # of sbatch, which takes no hosts
        if owner and not is_hold:
            raise _error(f"{option_name(rest[0])} is an option of {owner}", _translate_by(owner, words, own))
        return
    as_module = not {"-m", "--module"}.isdisjoint(before)
    launcher = _MODULES.get(rest[0]) if as_module else _find_launcher(rest)
    if launcher is None:
        return
    before = [word for word in before if word not in TARGET_KIND_OPTIONS]
    line = _translate_words(["python", "-m", *rest] if as_module else rest, own)
    if launcher == "python":
        raise _error(
            f"{rest[0]} is not a script: ddplaunch starts Python", replace(line, options=(*before, *line.options))
        )
    raise _error(f"this is a command line of {launcher}", replace(line, options=(*before, *line.options)))


def _find_launcher(words: Sequence[str]) -> str | None:
    """Return the name of the launcher with which a command line begins; None if it begins with a target."""
    words = _split_variables(words)[1]
    name = os.path.basename(words[0]) if words else ""
    if os.path.isfile(words[0] if words else "") and os.sep not in words[0]:  # a script of this name
        return None
    if re.fullmatch(PYTHON, name):
        _, inner = _split_python_options(words[1:])
        return _MODULES.get(inner[1], "python") if inner[:1] == ["-m"] and inner[1:] else "python" if inner else None
    if name == "accelerate":
        return "accelerate launch" if words[1:2] == ["launch"] else None
    return name if name in _TRANSLATE or name == "srun" else None


def _split_variables(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``env A=1 B=2 command`` into the variables and the command."""
    words = list(words[1:] if words[:1] == ["env"] else words)
    end = next((at for at, word in enumerate(words) if not re.fullmatch(_VARIABLE, word)), len(words))
    return words[:end], words[end:]


def _translate_words(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the line of a launcher, which may start another one; a target is returned as it is."""
    variables, words = _split_variables(words)
    name = os.path.basename(words[0]) if words else ""
    if re.fullmatch(PYTHON, name):
        left_out, inner = _split_python_options(words[1:])
        if any(re.fullmatch(_PYTHON_CODE, word) for word in left_out):
            raise UsageError(f"{words[0]} -c is not a script: ddplaunch starts Python")
        module = inner[1] if inner[:1] == ["-m"] and inner[1:] else ""
        if module in _MODULES:
            line = _translate_by(_MODULES[module], inner[2:], own)
        else:
            line = TranslatedLine(tuple(inner[:1]), tuple(inner[1:])) if module else TranslatedLine((), tuple(inner))
        line = replace(line, without_equivalent=(*left_out, *line.without_equivalent))
    elif name == "srun":
        line = _translate_srun(words, own)
    elif name in _TRANSLATE or name == "accelerate":
        line = _translate_by(
            "accelerate launch" if name == "accelerate" else name, words[1 + (name == "accelerate") :], own
        )
    elif words and os.sep in words[0] and not words[0].endswith((".py", ".pyc")):
        line = TranslatedLine(("--no-python",), tuple(words))
    else:
        line = TranslatedLine((), tuple(words))
    return replace(line, variables=(*variables, *line.variables))


def _translate_by(launcher: str, words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    outer = _TRANSLATE[launcher](words, own)
    if launcher not in ("mpirun", "mpiexec", "horovodrun") or not outer.rest:
        return outer
    inner = _translate_words(outer.rest, own)  # python train.py, or torchrun once on each host
    options = outer.options
    if "--nproc" in inner.options:
        options = _without_options(options, {"--nproc"})
    return TranslatedLine(
        (*options, *_without_options(inner.options, _OF_THE_NODES)),
        inner.rest,
        (*outer.variables, *inner.variables),
        (*outer.without_equivalent, *inner.without_equivalent),
    )


def _translate_torchrun(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the words after ``torchrun``; options that it does not have are left out."""
    from ddplaunch.cli.torchrun.translator import translate

    left, unknown = list(words), list[str]()
    while True:
        translated = translate(left, own, {})
        end = end_of_options(translated.argv, own)
        options, rest = translated.argv[:end], translated.argv[end:]
        if not rest or not is_option(rest[0]):
            break
        at = len(left) - len(rest)
        has_value = "=" not in rest[0] and rest[1:] and not is_option(rest[1]) and not rest[1].endswith(".py")
        unknown.append(" ".join(rest[: 1 + bool(has_value)]))
        del left[at : at + 1 + bool(has_value)]
    without_equivalent = (*unknown, *translated.without_effect)
    return TranslatedLine(tuple(options), tuple(rest[1:] if rest[:1] == ["--"] else rest), (), without_equivalent)


def _translate_torch_launch(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the words after ``torch.distributed.launch``, which gives scripts ``--local-rank`` by default."""
    line = _translate_torchrun(words, own)
    end = len(words) - len(line.rest)
    if any(underscores_to_dashes(word) == "--use-env" for word in words[:end]):
        return line
    return replace(line, options=(*line.options, "--pass-local-rank"))


def _translate_srun(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Keep srun, which starts ddplaunch in each task: Slurm's variables say what torchrun was told about nodes."""
    end = next((at for at, word in enumerate(words[1:], 1) if _find_launcher(words[at:]) or word.endswith(".py")), None)
    if end is None:  # srun's options are not known here, so it is unknown where its program begins
        hint = "srun and its options come before ddplaunch run: name the script after ddplaunch run"
        raise UsageError("this is a command line of srun", hint)
    line = _translate_words(words[end:], own)
    options = _without_options(line.options, _OF_THE_NODES)
    return replace(line, options=options, outer=tuple(words[:end]))


def _without_options(options: Sequence[str], names: frozenset[str] | set[str]) -> tuple[str, ...]:
    """Return the options without the named ones, all of which take a value."""
    left, rest = list[str](), list(options)
    while rest:
        word = rest.pop(0)
        if option_name(word) not in names:
            left.append(word)
        elif "=" not in word:
            rest = rest[1:]
    return tuple(left)


def _split_python_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the interpreter's options from ``-m module`` or the script; -u, which ranks have anyway, is dropped."""
    left_out, rest = list[str](), list(words)
    while rest and is_option(rest[0]) and rest[0] != "-m":
        word = rest.pop(0)
        if word in _PYTHON_VALUES and rest:
            word += f" {rest.pop(0)}"
        if word != "-u":
            left_out.append(word)
    return left_out, rest


_TRANSLATE: dict[str, Translate] = {
    "torchrun": _translate_torchrun,
    "torch.distributed.launch": _translate_torch_launch,
    "accelerate launch": translate_accelerate,
    "accelerate-launch": translate_accelerate,
    "deepspeed": translate_deepspeed,
    "mpirun": translate_mpi,
    "mpiexec": translate_mpi,
    "horovodrun": translate_mpi,
}


def _error(what: str, line: TranslatedLine) -> UsageError:
    """Build the error: the line to type, and the options without an equivalent."""
    words = shlex.join([*line.outer, "ddplaunch", "run", *line.options, *(line.rest or ("train.py",))])
    variables = "".join(
        f"{name}={shlex.quote(value)} " for name, _, value in (each.partition("=") for each in line.variables)
    )
    hint = f"type: {variables}{words}"
    if line.without_equivalent:
        hint += f"\nno equivalent, left out: {', '.join(line.without_equivalent)}"
    return UsageError(what, hint)
