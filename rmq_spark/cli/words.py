"""An error's sentence in the words of the command: options for arguments, and commands for Python calls."""

from __future__ import annotations

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import TxmqError


def sentence_for_command(problem: BaseException, path: str | None = None) -> str:
    """Return an error's sentence without secrets.

    Parameters
    ----------
    path : str, optional
        The commit log's path to type in commands; None when the configuration names it.
    """
    if not isinstance(problem, TxmqError):
        return redacted(problem)
    sentence = problem.problem
    if problem.argument is not None:
        typed = problem.argument if problem.argument.startswith("--") else f"--{problem.argument.replace('_', '-')}"
        sentence = f"{typed} {sentence}"
    return redacted(sentence if problem.remedy is None else f"{sentence}: {problem.remedy.typed(path)}")
