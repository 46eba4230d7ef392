"""Imports the packages that draw charts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from altair import Chart as PlainChart
    from altair import LayerChart

    Chart = PlainChart | LayerChart


def altair() -> Any:
    """Return Altair, imported for the first chart.

    Raises
    ------
    OptionError
        When Altair is not installed.
    """
    return _import_from_extra("altair")


def scripts() -> str:
    """Return the scripts that draw charts in a browser, Vega, Vega-Lite and Vega-Embed, as one text.

    Raises
    ------
    OptionError
        When vl-convert is not installed.
    """
    bundle: str = _import_from_extra("vl_convert").javascript_bundle()
    return bundle


def _import_from_extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != module:
            raise
        raise OptionError(
            f"a report needs {module.replace('_', '-')}: install rmq_spark with its extra report"
        ) from None
