"""Decodes API objects with msgspec, one at a time, so that any thread may. lightkube's client then does the same.

msgspec notes on a type how to decode it when the type is decoded first. The note is on the type before it is complete, and
Python code completes it (StructInfo_Convert, src/msgspec/_core.c, of 0.22.0), so another thread may run meanwhile. If that
thread decodes the same type, it reads what is not there yet, and the process ends with SIGSEGV. The lock also covers types
that several types contain, and the types of lists, which lightkube makes when it needs them. It costs nothing: msgspec
decodes under the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import msgspec
from lightkube.core import decoders
from lightkube.core.dictmixin import DictMixin

P = ParamSpec("P")
T = TypeVar("T")

_decoding = Lock()


def _one_at_a_time(decode: Callable[P, T]) -> Callable[P, T]:
    @wraps(decode)
    def locked(*words: P.args, **named: P.kwargs) -> T:
        with _decoding:
            return decode(*words, **named)

    return locked


convert = _one_at_a_time(msgspec.convert)  # noqa: TID251

# lightkube's client looks its decoders up by these names for each answer.
for _name in decoders.__all__:
    setattr(decoders, _name, _one_at_a_time(getattr(decoders, _name)))
DictMixin.from_dict = classmethod(_one_at_a_time(DictMixin.from_dict.__func__))  # type: ignore[method-assign,assignment,attr-defined]
