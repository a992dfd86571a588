"""Jobs over SSH: reading host lists, one SSH session for each host, the fleet of all sessions, and the host side."""
