"""Python imports this at the start of every process that was told its fate by its environment, a Spark worker too.

Python itself catches what is raised here, and goes on.
"""

from tests.torture.kill.points import arm_as_told

arm_as_told()
