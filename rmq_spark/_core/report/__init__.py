"""A report of a commit log: figures, charts, and one page with all of them."""
