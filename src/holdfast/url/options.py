"""Options in a URL: those of ``connect``, which a URL of every engine takes, and those of the engine.

``redis://h/0?namespace=shop%3A&timeout=2&socket_read_size=1024``: the first two are options of ``connect``; redis-py
takes the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final
from urllib.parse import unquote

from holdfast.errors import InvalidConfig, InvalidName, UnknownOption
from holdfast.options import client_options
from holdfast.translations import IN_URLS, advice_for

_CREDENTIALS: Final = re.compile(r"[?&][^=&]*(password|username)")


def _number(text: str) -> object:
    """The number that a text is; otherwise the text, which is refused as no number."""
    if re.fullmatch("-?[0-9]{1,20}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]{1,20}\.[0-9]{1,20}", text) else text


def _number_or_none(text: str) -> object:
    return None if text.lower() == "none" else _number(text)


# The options of ``connect`` that a text can express, and how each is read.
_READ: Final[Mapping[str, Callable[[str], Any]]] = {
    "namespace": str,
    "timeout": _number,
    "outage_wait": _number_or_none,
    "fence_retention": _number,
    "cohort": _number,
    "replicas": _number_or_none,
    "fence_floor": _number_or_none,
}


def take_options(query: str, shown: str) -> tuple[dict[str, Any], list[str]]:
    """The options of ``connect`` in the query of a URL, checked; and the other options, as they are written there."""
    ours: dict[str, Any] = {}
    others: list[str] = []
    for option in filter(None, query.split("&")):
        name, _, text = option.partition("=")
        if name not in _READ:
            others.append(option)
        elif name in ours:
            raise InvalidConfig(f"URL {shown!r}", f"it has {name} twice; keep one of them")
        else:
            ours[name] = _READ[name](unquote(text))
            try:
                client_options(**{name: ours[name]})
            except (InvalidConfig, InvalidName) as error:
                none = ", or none" if _READ[name] is _number_or_none else ""
                problem = error.problem.removesuffix(", or a timedelta")  # no text can express one
                raise InvalidConfig(f"URL {shown!r}", f"the value of {name} cannot be used; {problem}{none}") from None
    return ours, others


def unknown_option(url: str, shown: str, name: str, of_engine: Collection[str] = ()) -> UnknownOption:
    """The error for an option of a URL that neither ``connect`` nor the engine has.

    If there are credentials among the options, an unknown one may be a part of them that is not percent-encoded. So it
    is not named then.
    """
    named = "an option" if _CREDENTIALS.search(url) or not name else f"an option {name[:40]!r}"
    advice = advice_for(name, None, [*_READ, *of_engine], IN_URLS).replace("{0}", f"{name}=")
    return UnknownOption(f"URL {shown!r}", f"it has {named} that does not exist there; {advice}")
