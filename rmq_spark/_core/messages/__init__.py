"""The table ``messages``: what is drained into it, the border to ``op``, and reading messages."""
