"""Python imports this at its start when the folder is on its path: so a Spark worker, too, can be told to die."""

import os

if os.environ.get("DIE_AT") in ("half file torn", "half file written"):
    import dying  # noqa: F401
