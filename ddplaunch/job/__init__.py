"""A job seen from outside: its status, and the door through which a client asks for it."""
