"""Where ``submit`` and ``ssh`` were; kept for ``submitit.Task``, which programs import and pickled jobs name."""
