"""Helpers that know nothing of jobs: the event loop, errors, text, files, sockets, and the types of messages.

Every package may import this one; it imports only the standard library and msgspec.
"""
