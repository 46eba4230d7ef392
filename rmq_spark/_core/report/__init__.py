"""A report of a commit log: its figures, the charts of them, and one page that holds all."""
