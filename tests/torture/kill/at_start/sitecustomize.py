"""Python imports this at the start of every process that was told its fate by its environment, a Spark worker too.

What comes to a point runs as a module: the tests' programs, and Spark's workers. Spark also asks Python for its version
with ``-c``; that must not wait for the product's import. Python itself catches what is raised here, and goes on.
"""

import sys

if "-m" in sys.orig_argv[:3]:
    from tests.torture.kill.points import arm_as_told

    arm_as_told()
