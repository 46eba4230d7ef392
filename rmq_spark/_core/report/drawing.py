"""The packages that draw: whether they are there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from altair import Chart as PlainChart
    from altair import LayerChart

    Chart = PlainChart | LayerChart


def altair() -> Any:
    """Altair, which is imported when the first chart is drawn.

    Raises
    ------
    OptionError
        When it is not installed.
    """
    return _of_extra("altair")


def scripts() -> str:
    """The scripts that draw charts in a browser: Vega, Vega-Lite and Vega-Embed as one text.

    Raises
    ------
    OptionError
        When vl-convert is not installed.
    """
    bundle: str = _of_extra("vl_convert").javascript_bundle()
    return bundle


def _of_extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != module:
            raise
        raise OptionError(
            f"a report needs {module.replace('_', '-')}: install rmq_spark with its extra report"
        ) from None
