"""Diagnosis of inspected ranks: who waits for whom, stalls, slow ranks. Pure, standard library only.

``inspection`` has the types, ``waits`` the conclusions and ``wait_sentences`` their words. ``culprit`` has the
conclusions on failed jobs, ``slow_ranks`` those on slow ranks.
``tests/observe/diagnosis`` has samples of real hangs.
"""
