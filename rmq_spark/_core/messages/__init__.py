"""The table ``messages``: draining into it, its border to ``op``, and reading messages."""
