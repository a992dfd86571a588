"""Writes what ddplaunch itself says before and after a job; while it runs, the screen does."""

from __future__ import annotations

import click

from ddplaunch.console import colour_wanted
from ddplaunch.output.voice import VOICE, Kind, Said


def say(said: Said) -> None:
    """Write it to stderr; colours only where it is a terminal that may have them."""
    click.echo(VOICE.form(said), err=True, nl=False, color=None if colour_wanted() else False)


def say_note(text: str, **fields: object) -> None:
    """Say something that people should know."""
    say(Said(Kind.NOTE, text, fields))
