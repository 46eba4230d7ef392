"""Immutable dataclasses that are quick to make.

A send makes about twenty of them, at thousands of sends a second. With ``frozen=True`` Python itself would refuse
changes, which makes each instance several times as slow to create. So the type checker alone refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: type[T]) -> type[T]:
    """Like ``dataclass(frozen=True, slots=True)``, for a class with thousands of new instances a second."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
