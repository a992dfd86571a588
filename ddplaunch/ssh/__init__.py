"""Reaching many machines over SSH: which hosts, a session for each, all of them, and what runs on a host."""
