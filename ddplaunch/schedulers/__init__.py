"""The former place of ``submitit.Task``, which programs import and pickled jobs name."""
