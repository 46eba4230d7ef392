"""The demo: a grocer's year of orders, a driver that is killed three times, and the proof that all agrees.

``python -m rmq_spark.demo`` runs it (``make demo`` installs what it needs first). ``DEMO_ROWS`` takes fewer lines of
the data set, ``DEMO_DIR`` names a folder to work in, which is then kept.

=================  ====================================================================================
``baskets``        the data set as input files of a stream: one row a basket
``orders``         the order database, and the listener whose local transaction writes to it
``stream``         the query: each basket is a transaction of three messages in three topics
``kill``           the driver's end by SIGKILL, at an exact point
``processes``      child processes, each with a session of its own that ends as a whole
``proof``          orders, messages and data set compared
``show``           what is to be seen; ``story`` puts it all in order
=================  ====================================================================================
"""
