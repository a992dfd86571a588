"""Attaches the launcher's own terminal to the debugger when a rank stops and no other user is attached."""

from __future__ import annotations

from ddplaunch.core.events import AttemptPlanned, Event
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.features.debug.debug_server import DebugServer
from ddplaunch.features.debug.debugger_prompt import DebuggerPrompt, TerminalFrontend


class LauncherTerminal(NodeSide):
    """The terminal, until the job ends."""

    def __init__(self, context: FeatureContext, screen: TerminalScreen) -> None:
        self._context, self._screen = context, screen
        self._frontend: TerminalFrontend | None = None

    def observe(self, event: Event) -> None:
        if isinstance(event, AttemptPlanned):
            self._context.loop.call_soon(self._connect)  # the debug server is started after this event

    def _connect(self) -> None:
        if server := self._context.job.debug_server():
            server.on_stop_unattended = self._context.loop.guard(self._attach)

    def _attach(self, server: DebugServer) -> None:
        self._frontend = TerminalFrontend(self._context.loop, self._screen)
        prompt = DebuggerPrompt(self._frontend, server.on_user_message)
        self._frontend.on_key = prompt.on_key
        server.attach_user(self._context.loop.guard(prompt.on_message))

    def close(self) -> None:
        """Release the terminal."""
        if self._frontend is not None:
            self._frontend.close()
