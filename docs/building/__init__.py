"""Builds the documentation site: ``make docs``. The pages are in ``docs/``; the reference is made from the code."""
