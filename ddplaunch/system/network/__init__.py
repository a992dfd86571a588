"""The network of this machine: its interfaces and addresses, name look-ups, and reserved ports."""
