"""The demo: a grocer's year of orders, a driver that is killed three times, and the proof that everything agrees.

``python -m examples.grocer`` runs it (``make demo`` installs what it needs first). ``DEMO_ROWS`` limits the lines of
the data set. ``DEMO_DIR`` names a folder to work in, which is then kept.

=================  ====================================================================================
``baskets``        writes the data set as input files of a stream, with a row for each basket
``orders``         the order database, and the listener whose local transaction writes to it
``stream``         the query: each basket is a transaction of three messages in three topics
``kill``           kills the driver with SIGKILL at an exact point
``processes``      child processes; each has a session of its own, which ends as a whole
``proof``          compares orders, messages and data set
``show``           prints the demo
``story``          runs all of it in order
=================  ====================================================================================
"""
