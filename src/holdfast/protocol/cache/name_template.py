"""Names made of arguments: ``"user:{user_id}"`` names the calls of a decorated function.

Invariant. An accepted template names every valid call of its function. Arguments whose texts differ never share a name:
separators (a colon, and all other marks between the fields) are written as %XX within an argument, so ``("1:2", "3")``
and ``("1", "2:3")`` have different names, and an argument chosen by an attacker cannot reach another value. Arguments
with the same text share a name: 1 and "1".

What can be known before the first call is checked when the function is decorated: that each field is a readable
parameter, and that the function does its work before it returns. What depends on the argument (whether it has that
attribute, whether its text is usable) is checked by the call.

Why not a digest of all arguments? People can read a name, look it up, invalidate it from elsewhere, and lock it. And
``self``, a session or a logger are arguments too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from string import Formatter
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig

_FORMATTER: Final = Formatter()
_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")
_ORDERED: Final = (list, tuple, dict, bytes, bytearray)
_CONTAINERS: Final = (*_ORDERED, set, frozenset)


class Field(NamedTuple):
    """Literal text, and the argument that follows it, if any."""

    text: str
    path: str = ""  # user.id
    parameter: str = ""  # user
    conversion: str | None = None
    spec: str = ""

    def __str__(self) -> str:
        conversion = f"!{self.conversion}" if self.conversion else ""
        spec = f":{self.spec}" if self.spec else ""
        return f"{{{self.path}{conversion}{spec}}}"


class Template:
    """Makes the names of one function's calls."""

    def __init__(self, pattern: str, function: Callable[..., Any], use: str) -> None:
        """``use`` is the decorator's name, for errors."""
        self.pattern = pattern
        self._shown = f"{use}({pattern!r:.80})"
        _refuse_generators(self._shown, function)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # a built-in without a signature
            raise InvalidConfig(self._shown, f"{function!r:.60} has no readable signature: wrap it in a def") from None
        self._fields = self._parse()
        separators = "".join(sorted(set().union(*map(_marks, self._between()))))
        self._unsafe = re.compile(rf"[%:{{}}\s\x00-\x1f\x7f-\x9f\ud800-\udfff{re.escape(separators)}]")

    def _between(self) -> list[str]:
        """The texts between two fields. Each needs a separator that ends the first field."""
        texts: list[str] = []
        since = ""
        begun = False
        for field in self._fields:
            since += field.text
            if field.path:
                if begun:
                    texts.append(since)
                    if not _marks(since):
                        raise InvalidConfig(self._shown, "put a separator, such as a colon, between two fields")
                since, begun = "", True
        return texts

    def _parse(self) -> list[Field]:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise InvalidConfig(self._shown, "give a name, with {fields} for the arguments on which it depends")
        try:
            parsed = list(_FORMATTER.parse(self.pattern))
        except ValueError as error:
            raise InvalidConfig(self._shown, f"{error}. Double a brace that is not part of a field") from None
        fields: list[Field] = []
        for text, path, spec, conversion in parsed:
            if path is None:
                fields.append(Field(text))
                continue
            if "{" in (spec or ""):
                raise InvalidConfig(self._shown, "a field within a field is not supported")
            field = Field(text, path, self._parameter(path), conversion, spec or "")
            try:
                found, _ = _FORMATTER.get_field(path, (), {field.parameter: _Anything()})
                _FORMATTER.convert_field(found, conversion)
            except ValueError as error:
                raise InvalidConfig(self._shown, f"{field} cannot be read: {error}") from None
            fields.append(field)
        return fields

    def _parameter(self, path: str) -> str:
        root = re.split(r"[.\[]", path, maxsplit=1)[0]
        named = [name for name, found in self._signature.parameters.items() if found.kind in _NAMED]
        if root not in named:
            shown = "{" + path + "}"
            choice = ", ".join(named) if named else "none"
            raise InvalidConfig(self._shown, f"{shown} is no argument of the function, whose arguments are: {choice}")
        return root

    def shape(self) -> str:
        """The pattern without the names of its fields. Templates of the same shape make the same names."""
        return "".join(
            re.sub("[{}]", r"\g<0>\g<0>", field.text) + (str(field._replace(path="")) if field.path else "")
            for field in self._fields
        )

    def sample(self) -> str:
        """An example of a name, to check whether such names are valid."""
        return "".join(field.text + ("x" if field.path else "") for field in self._fields)

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name of a call; TypeError if the function does not take these arguments."""
        return self._format(self._signature.bind(*args, **kwargs))

    def name_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The same, but arguments that the name does not depend on (such as ``self``) may be left out."""
        return self._format(self._signature.bind_partial(*args, **kwargs))

    def _format(self, bound: inspect.BoundArguments) -> str:
        bound.apply_defaults()
        parts = []
        for field in self._fields:
            parts.append(field.text)
            if field.path:
                if field.parameter not in bound.arguments:
                    raise TypeError(f"{self._shown} needs the argument {field.parameter!r}")
                parts.append(self._unsafe.sub(_escape, self._text_of(field, bound.arguments)))
        return "".join(parts)

    def _text_of(self, field: Field, arguments: dict[str, Any]) -> str:
        try:
            value, _ = _FORMATTER.get_field(field.path, (), arguments)
            textless = not field.conversion and not field.spec and _has_no_short_text(value)
            text = "" if textless else format(_FORMATTER.convert_field(value, field.conversion), field.spec)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            kind, why = type(arguments[field.parameter]).__name__, f"{type(error).__name__}: {error}"
            raise InvalidConfig(self._shown, f"{field} cannot format an argument of type {kind} ({why})") from error
        if textless:
            raise self._refusal(field, value, f"which has no short text; {_advice(field, value)}")
        if not isinstance(value, str) and _ADDRESS.search(text):
            part = f"{{{field.path}.id}}"
            raise self._refusal(field, value, f"whose text is its address in memory; use a part of it, like {part}")
        return text

    def _refusal(self, field: Field, value: object, why: str) -> InvalidConfig:
        return InvalidConfig(self._shown, f"{field} is of type {type(value).__name__}, {why}")


class _Anything:
    """An argument with every attribute and item, to check whether a field is readable."""

    def __getattr__(self, _name: str) -> _Anything:
        return self

    def __getitem__(self, _key: object) -> _Anything:
        return self


def _has_no_short_text(value: object) -> bool:
    """Whether the value's text is its address in memory, or as long as its contents."""
    kind: Any = type(value)
    if isinstance(value, _CONTAINERS):
        return True
    return all(getattr(kind, way) is getattr(object, way) for way in ("__str__", "__repr__", "__format__"))


def _advice(field: Field, value: object) -> str:
    if isinstance(value, _ORDERED):
        return f"use a part of it, or its repr: {{{field.path}!r}}"
    if isinstance(value, _CONTAINERS):
        return "pass a sorted list: another process may have another order"
    return f"use a part of it, like {{{field.path}.id}}"


def _marks(text: str) -> set[str]:
    return {char for char in text if not char.isalnum()}


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass"))


def _refuse_generators(shown: str, function: Any) -> None:
    if isinstance(function, classmethod | staticmethod):
        raise InvalidConfig(shown, f"put the decorator below @{type(function).__name__}")
    if not callable(function) or inspect.isclass(function):
        raise InvalidConfig(shown, f"decorate a function, not an object of type {type(function).__name__!r}")
    body = _body_of(function)
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        name = getattr(function, "__name__", "it")
        raise InvalidConfig(
            shown,
            f"{name} is a generator function, which returns before its work is done. Return a list, or use client.lock",
        )


def is_coroutine_function(function: Any) -> bool:
    """Whether a call of the function only makes a coroutine."""
    ways = function, _body_of(function), vars(type(function)).get("__call__")
    return any(map(inspect.iscoroutinefunction, ways))


def _body_of(function: Any) -> Any:
    """The function that a call runs: __call__ of an object, the wrapped function of a partial."""
    return function if inspect.isroutine(function) else getattr(function, "func", function.__call__)
