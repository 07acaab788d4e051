"""Names made of arguments: ``"user:{user_id}"`` and the function whose calls are to have such names.

Invariant. A template that was accepted names every call of its function, or the call itself was wrong. Arguments that
read differently never share a name: what separates the parts of a name (a colon, and whatever else stands between the
fields) is written as %XX where it occurs within an argument, so ``("1:2", "3")`` and ``("1", "2:3")`` are not mistaken
for each other, and nobody can reach another's value by a clever name. What reads alike is alike: 1 and "1".

Everything that can be known before the first call is checked when the function is decorated: that each field is one of
its parameters and can be read, and that it is a function which does its work before it returns. What depends on the
argument (whether it has that attribute, whether it can be written like that) is said when it is used.

Why not a digest of all arguments, as others do it? A name that people can read is one that they can look up, invalidate
from elsewhere, and lock. And ``self``, a session or a logger are arguments too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from string import Formatter
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig

__all__ = ["Template", "is_coroutine_function"]

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
    """Text that stands as it is, and the argument that follows it, if one does."""

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
    """How the calls of one function are named."""

    def __init__(self, pattern: str, function: Callable[..., Any], use: str) -> None:
        """``use`` is the decorator, for whoever has to be told what is wrong with it."""
        self.pattern = pattern
        self._said = f"{use}({pattern!r:.80})"
        _refuse_generators(self._said, function)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # built-in, and silent about its arguments
            raise InvalidConfig(self._said, f"{function!r:.60} does not tell its arguments: wrap it in a def") from None
        self._fields = self._parse()
        separators = "".join(sorted(set().union(*map(_marks, self._between()))))
        self._unsafe = re.compile(rf"[%:{{}}\s\x00-\x1f\x7f-\x9f\ud800-\udfff{re.escape(separators)}]")

    def _between(self) -> list[str]:
        """What stands between two fields. Each must have a mark by which the end of the first can be told."""
        texts: list[str] = []
        since = ""
        begun = False
        for field in self._fields:
            since += field.text
            if field.path:
                if begun:
                    texts.append(since)
                    if not _marks(since):
                        raise InvalidConfig(self._said, "put a colon or the like between two fields, so that they end")
                since, begun = "", True
        return texts

    def _parse(self) -> list[Field]:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise InvalidConfig(self._said, "give a name, with {fields} for the arguments that it depends on")
        try:
            parsed = list(_FORMATTER.parse(self.pattern))
        except ValueError as error:
            raise InvalidConfig(self._said, f"{error}. A brace that is no field is written twice") from None
        fields: list[Field] = []
        for text, path, spec, conversion in parsed:
            if path is None:
                fields.append(Field(text))
                continue
            if "{" in (spec or ""):
                raise InvalidConfig(self._said, "a field within a field is too much for a name")
            field = Field(text, path, self._parameter(path), conversion, spec or "")
            try:
                found, _ = _FORMATTER.get_field(path, (), {field.parameter: _Anything()})
                _FORMATTER.convert_field(found, conversion)
            except ValueError as error:
                raise InvalidConfig(self._said, f"{field} cannot be read: {error}") from None
            fields.append(field)
        return fields

    def _parameter(self, path: str) -> str:
        root = re.split(r"[.\[]", path, maxsplit=1)[0]
        named = [name for name, found in self._signature.parameters.items() if found.kind in _NAMED]
        if root not in named:
            shown = "{" + path + "}"
            choice = ", ".join(named) if named else "none"
            raise InvalidConfig(self._said, f"{shown} is no argument of the function; it has: {choice}")
        return root

    def sample(self) -> str:
        """A name such as it makes, to see whether names like that can be had at all."""
        return "".join(field.text + ("x" if field.path else "") for field in self._fields)

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name of a call. A TypeError if it could not be called like that."""
        return self._format(self._signature.bind(*args, **kwargs))

    def name_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The same for somebody who only wants the name: what it does not depend on (``self``, say) may be left out."""
        return self._format(self._signature.bind_partial(*args, **kwargs))

    def _format(self, bound: inspect.BoundArguments) -> str:
        bound.apply_defaults()
        parts = []
        for field in self._fields:
            parts.append(field.text)
            if field.path:
                if field.parameter not in bound.arguments:
                    raise TypeError(f"{self._said} needs the argument {field.parameter!r}")
                parts.append(self._unsafe.sub(_escape, self._text_of(field, bound.arguments)))
        return "".join(parts)

    def _text_of(self, field: Field, arguments: dict[str, Any]) -> str:
        try:
            value, _ = _FORMATTER.get_field(field.path, (), arguments)
            nameless = not field.conversion and not field.spec and _says_nothing(value)
            text = "" if nameless else format(_FORMATTER.convert_field(value, field.conversion), field.spec)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            kind, why = type(arguments[field.parameter]).__name__, f"{type(error).__name__}: {error}"
            raise InvalidConfig(self._said, f"{field} cannot be made of an argument of type {kind} ({why})") from error
        if nameless:
            raise self._refusal(field, value, f"which has no short name; {_advice(field, value)}")
        if not isinstance(value, str) and _ADDRESS.search(text):
            part = f"{{{field.path}.id}}"
            raise self._refusal(field, value, f"whose text is its address in memory; use a part of it, like {part}")
        return text

    def _refusal(self, field: Field, value: object, why: str) -> InvalidConfig:
        return InvalidConfig(self._said, f"{field} is of type {type(value).__name__}, {why}")


class _Anything:
    """An argument that has whatever a field asks of it, to see whether the field can be read."""

    def __getattr__(self, _name: str) -> _Anything:
        return self

    def __getitem__(self, _key: object) -> _Anything:
        return self


def _says_nothing(value: object) -> bool:
    """Whether its text is its address in memory, or as long as what it contains."""
    kind: Any = type(value)
    if isinstance(value, _CONTAINERS):
        return True
    return all(getattr(kind, way) is getattr(object, way) for way in ("__str__", "__repr__", "__format__"))


def _advice(field: Field, value: object) -> str:
    if isinstance(value, _ORDERED):
        return f"use a part of it, or say how to write it: {{{field.path}!r}}"
    if isinstance(value, _CONTAINERS):
        return "give a sorted list of it: in the next process it may come in another order"
    return f"use a part of it, like {{{field.path}.id}}"


def _marks(text: str) -> set[str]:
    return {char for char in text if not char.isalnum()}


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass"))


def _refuse_generators(said: str, function: Any) -> None:
    if isinstance(function, classmethod | staticmethod):
        raise InvalidConfig(said, f"put it under @{type(function).__name__}, not over it")
    if not callable(function) or inspect.isclass(function):
        raise InvalidConfig(said, f"it decorates functions, not {type(function).__name__!r}")
    body = _body_of(function)
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        name = getattr(function, "__name__", "it")
        raise InvalidConfig(
            said,
            f"{name} is a generator: it returns before it has done anything. Let it return a list, or use client.lock",
        )


def is_coroutine_function(function: Any) -> bool:
    """Whether calling it only makes a coroutine."""
    ways = function, _body_of(function), vars(type(function)).get("__call__")
    return any(map(inspect.iscoroutinefunction, ways))


def _body_of(function: Any) -> Any:
    """What is run by a call: of an object, its __call__; of a partial, what it stands for."""
    return function if inspect.isroutine(function) else getattr(function, "func", function.__call__)
