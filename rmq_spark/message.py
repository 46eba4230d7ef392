"""Messages as programs send and receive them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.vocabulary.message import Message as Message
    from rmq_spark._core.vocabulary.message import MessageExt as MessageExt

__getattr__, __dir__, __all__ = public(__name__)
