"""Diagnosis of inspected ranks: who waits for whom, stalls, slow ranks. Pure, standard library only.

``inspection`` has the types, ``waits`` the conclusions and ``wait_sentences`` their words; those on failed jobs are in
``culprit``, on slow ranks in ``slow_ranks``.
``tests/observe/diagnosis`` has samples of real hangs.
"""
