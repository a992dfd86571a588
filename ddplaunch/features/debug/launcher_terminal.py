"""Attaches the launcher's own terminal to the debugger when a rank stops and no other user is attached."""

from __future__ import annotations

from ddplaunch.core.output.isolation import IsolatedLoop
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.features.debug.debug_server import DebugServer
from ddplaunch.features.debug.debugger_prompt import DebuggerPrompt, TerminalFrontend


class LauncherTerminal:
    """The terminal, until the job ends."""

    def __init__(self, loop: IsolatedLoop, screen: TerminalScreen) -> None:
        self._loop, self._screen = loop, screen
        self._frontend: TerminalFrontend | None = None

    def attach(self, server: DebugServer) -> None:
        """Give control to the user at the terminal."""
        self._frontend = TerminalFrontend(self._loop, self._screen)
        prompt = DebuggerPrompt(self._frontend, server.on_user_message)
        self._frontend.on_key = prompt.on_key
        server.attach_user(self._loop.guard(prompt.on_message))

    def close(self) -> None:
        """Release the terminal."""
        if self._frontend is not None:
            self._frontend.close()
