"""How our processes speak: frames on a socket, messages whose fields are checked, the proof of a token."""
