"""Translates torchrun's --redirects, --tee, --local-ranks-filter and prefix to --show, --log-dir and --prefix.

Output that ``--redirects`` sends to files is not shown, that of ``--tee`` is shown too, and ``--local-ranks-filter``
hides ranks. ``--log-dir`` always writes the whole output of each rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.torchrun.torchrun_options import TorchrunOptions, TranslatedOption

_BOTH_STREAMS = 3
_SHOW_SUFFIX = {0: "/none", 1: "/out", 2: "/err", _BOTH_STREAMS: ""}
"""torchrun's numbers for no stream, stdout, stderr and both, in the form of ``--show``."""

_PREFIX_FIELDS = {"role_name": "{role}", "hostname": "{host}", "rank": "{rank}", "local_rank": "{local_rank}"}
"""torchrun's macros of a prefix (torch 2.14), in the form of ``--prefix``."""

_RANK = "[0-9]{1,9}"
Streams = dict[int | None, int]  # by local rank; None: all others


def translate_output(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """Translate the output options. Raises UsageError for invalid streams or ranks."""
    redirected, teed = _streams(torchrun, "--redirects"), _streams(torchrun, "--tee")
    only = _read_ranks_filter(torchrun)
    used = [name for name, streams in (("--redirects", redirected), ("--tee", teed)) if any(streams.values())]
    yield from torchrun.as_ddplaunch_option("--log-dir")
    if used and "--log-dir" not in torchrun:
        name = f"ddplaunch-logs-{os.getuid()}-{os.urandom(8).hex()}"  # unpredictable for other users
        import tempfile  # 6 ms that few starts need

        yield "--log-dir", os.path.join(tempfile.gettempdir(), name), torchrun.source(used[0])
    shown = _show(redirected, teed, only)
    if "--log-line-prefix-template" in torchrun:
        yield "--prefix", _prefix(torchrun), torchrun.source("--log-line-prefix-template")
    if shown != "all":
        yield "--show", shown, torchrun.source("--local-ranks-filter" if only else used[0])


def _prefix(torchrun: TorchrunOptions) -> str:
    """Translate --log-line-prefix-template, like "${hostname}:${rank}: ", to the value of --prefix."""

    def replace_macro(found: re.Match[str]) -> str:
        macro = found[1] or found[2]
        if macro is not None and macro not in _PREFIX_FIELDS:
            source = torchrun.source("--log-line-prefix-template")
            raise UsageError(f"{source} {text}: unknown macro ${{{macro}}}", f"known: {known}")
        return _PREFIX_FIELDS[macro] if macro else "$"

    text = torchrun.value("--log-line-prefix-template")
    known = ", ".join(f"${{{macro}}}" for macro in _PREFIX_FIELDS)
    return re.sub(r"\$(?:\$|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", replace_macro, text)


def _show(redirected: Streams, teed: Streams, only: set[int]) -> str:
    def shown_streams(rank: int | None) -> int:
        return _BOTH_STREAMS & ~(redirected.get(rank, redirected[None]) & ~teed.get(rank, teed[None]))

    if only:
        return "local:" + ",".join(f"{rank}{_SHOW_SUFFIX[shown_streams(rank)]}" for rank in sorted(only))
    common = {0: "none", _BOTH_STREAMS: "all"}.get(shown_streams(None), f"all{_SHOW_SUFFIX[shown_streams(None)]}")
    named = sorted(rank for rank in {*redirected, *teed} if rank is not None)
    different = [
        f"{rank}{_SHOW_SUFFIX[shown_streams(rank)]}" for rank in named if shown_streams(rank) != shown_streams(None)
    ]
    return f"{common},local:{','.join(different)}" if different else common


def _streams(torchrun: TorchrunOptions, name: str) -> Streams:
    """Parse the streams of --redirects or --tee: "3" for all ranks, or "0:1,1:2" by local rank."""
    text = torchrun.value(name, "0")
    if re.fullmatch(r"[0-3]", text):
        return {None: int(text)}
    if not re.fullmatch(rf"{_RANK}:[0-3](,{_RANK}:[0-3])*", text):
        hint = f"{name} 1 is stdout, 2 stderr, 3 both; 0:1,1:2 is stdout of local rank 0 and stderr of 1"
        raise UsageError(f"{torchrun.source(name)} {text}: expected numbers of streams", hint)
    pairs = (part.partition(":") for part in text.split(","))
    return {None: 0, **{int(rank): int(streams) for rank, _, streams in pairs}}


def _read_ranks_filter(torchrun: TorchrunOptions) -> set[int]:
    text = torchrun.value("--local-ranks-filter")
    if text and not re.fullmatch(rf"{_RANK}(,{_RANK})*", text):
        raise UsageError(f"{torchrun.source('--local-ranks-filter')} {text}: expected a list of ranks like 0,1")
    return {int(rank) for rank in text.split(",") if rank}
