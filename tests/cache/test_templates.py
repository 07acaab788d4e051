"""Names made of arguments, and what is refused before the first call."""

from __future__ import annotations

import datetime
import enum
import functools
import gc
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

import holdfast
import holdfast.aio
from holdfast.names import keys_of
from holdfast.protocol.cache.name_template import Template
from tests.support import asyncio_test


def name(pattern: str, function: Any, *args: Any, **kwargs: Any) -> str:
    return Template(pattern, function, "cached").name(args, kwargs)


def both(x: Any, y: Any = "Y") -> None: ...


class User:
    def __init__(self, number: int) -> None:
        self.id = number


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("pattern", "args", "kwargs", "made"),
    [
        ("user:{x}", (42,), {}, "user:42"),
        ("user:{x}:{y}", (42,), {}, "user:42:Y"),
        ("{x}", (), {"x": "a"}, "a"),
        ("user:{x.id}", (User(7),), {}, "user:7"),
        ("user:{x[0]}", ([5, 6],), {}, "user:5"),
        ("user:{x[name]}", ({"name": "ann"},), {}, "user:ann"),
        ("day:{x:%Y-%m-%d}", (datetime.date(2024, 2, 3),), {}, "day:2024-02-03"),
        ("n:{x:04d}", (7,), {}, "n:0007"),
        ("c:{x}", (Colour.RED,), {}, "c:red"),
        ("u:{x}", (uuid.UUID(int=1),), {}, "u:00000000-0000-0000-0000-000000000001"),
        ("{{shop}}:{x}", (1,), {}, "{shop}:1"),
        ("all", (1,), {}, "all"),
        ("n:{x}", (None,), {}, "n:None"),
        ("n:{x}", ("über 漢",), {}, "n:über%20漢"),
        ("n:{x}", ("a:b%{c}\n",), {}, "n:a%3Ab%25%7Bc%7D%0A"),
        ("n:{x}", ("\x81\x9f",), {}, "n:%C2%81%C2%9F"),
        ("n:{x}", ("a\ud800",), {}, "n:a%ED%A0%80"),
        ("n:{x}", (" at 0x1f",), {}, "n:%20at%200x1f"),
        ("n:{x!r}", ([1, 2],), {}, "n:[1,%202]"),
        ("n:{x}", (True,), {}, "n:True"),
        ("n:{x}", (1.0,), {}, "n:1.0"),
        ("a/{x}", ("b/c-d",), {}, "a/b/c-d"),
        ("a/{x}/{y}", ("b/c-d",), {}, "a/b%2Fc-d/Y"),
        ("a_{x}_{y}", ("b_c",), {}, "a_b%5Fc_Y"),
    ],
)
def test_names(pattern: str, args: Any, kwargs: Any, made: str) -> None:
    assert name(pattern, both, *args, **kwargs) == made


@given(st.tuples(st.text(max_size=6), st.text(max_size=6)), st.tuples(st.text(max_size=6), st.text(max_size=6)))
@pytest.mark.parametrize("pattern", ["a:{x}:{y}", "{x}-{y}", "a{x}/b/{y}c", "{x} {y}", "{x}_{y}", "{x}a-a{y}"])
def test_different_arguments_have_different_names(pattern: str, one: Any, other: Any) -> None:
    assert (name(pattern, both, *one) == name(pattern, both, *other)) == (one == other)


@given(st.text(alphabet=":|-{}% ab", max_size=8), st.text(alphabet=":|-{}% ab", max_size=8), st.data())
def test_what_separates_cannot_be_smuggled_in(x: str, y: str, data: Any) -> None:
    other = data.draw(st.tuples(st.text(alphabet=":|-ab", max_size=8), st.text(alphabet=":|-ab", max_size=8)))
    assert (name("{x}|-{y}", both, x, y) == name("{x}|-{y}", both, *other)) == ((x, y) == other)


@pytest.mark.parametrize("value", [[1], (1,), {"a": 1}, {1}, b"x", object(), User(1)])
def test_what_has_no_short_name_is_refused(value: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=rf"user:{{x}}.*: {{x}} is of type {type(value).__name__},"):
        name("user:{x}", both, value)


@pytest.mark.parametrize("value", [[1], (1,), {"a": 1}, b"x"], ids=["list", "tuple", "dict", "bytes"])
def test_who_gives_a_list_is_told_how_it_can_be_named(value: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match=r"use a part of it, or its repr: {x!r}"):
        name("user:{x}", both, value)
    name("user:{x!r}", both, value)


def test_nobody_is_told_to_name_a_set_by_its_order() -> None:
    with pytest.raises(holdfast.InvalidConfig) as caught:
        name("user:{x}", both, {"a", "b"})
    assert "!r" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "value", "said"),
    [
        ("user:{x:d}", "x", "{x:d} cannot format an argument of type str (ValueError: Unknown format code"),
        ("user:{x.name}", 5, "{x.name} cannot format an argument of type int (AttributeError: "),
        ("user:{x[0]}", [], "{x[0]} cannot format an argument of type list (IndexError: "),
        ("user:{x[a]}", {}, "{x[a]} cannot format an argument of type dict (KeyError: 'a'"),
        ("user:{x[0]}", 5, "{x[0]} cannot format an argument of type int (TypeError: "),
        ("user:{x:>9}", [1], "{x:>9} cannot format an argument of type list (TypeError: "),
        ("user:{x!r:d}", 5, "{x!r:d} cannot format an argument of type int (ValueError: "),
    ],
    ids=["spec", "attribute", "index", "key", "no index", "no spec", "spec of a text"],
)
def test_an_argument_that_does_not_fit_its_field_is_named(pattern: str, value: Any, said: str) -> None:
    with pytest.raises(holdfast.InvalidConfig) as caught:
        name(pattern, both, value)
    assert str(caught.value).startswith(f"cached({pattern!r}): {said}")
    assert caught.value.__cause__ is not None


def test_what_else_fails_in_an_argument_passes_as_it_is() -> None:
    class Row:
        @property
        def id(self) -> int:
            raise ConnectionError("the database is gone")

    with pytest.raises(ConnectionError, match="database"):
        name("user:{x.id}", both, Row())


@pytest.mark.parametrize("pattern", ["user:{x}", "user:{x!r}", "user:{x!s}"])
@pytest.mark.parametrize("value", [object(), User(1), both, User(1).__init__, iter([])], ids=["object", *"abcd"])  # type: ignore[misc]
def test_an_address_in_memory_is_no_name(pattern: str, value: Any) -> None:
    """It would be another one in the next process, and perhaps another's in this one."""
    with pytest.raises(holdfast.InvalidConfig, match=f"is of type {type(value).__name__},"):
        name(pattern, both, value)


@given(st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x10FFFF), max_size=8))
def test_every_text_has_a_name(text: str) -> None:
    keys_of(name("user:{x}", both, text))


def generator(x: int) -> Iterator[int]:
    yield x


async def async_generator(x: int) -> AsyncIterator[int]:
    yield x


async def coroutine_function(x: int) -> int:
    return x


class Callable:
    def __call__(self, x: int) -> int:
        return x


class AsyncCallable:
    async def __call__(self, x: int) -> int:
        return x


BAD = [
    ("user:{z}", both, "{z} is no argument.*x, y"),
    ("user:{z.id}", both, "is no argument"),
    ("user:{}", both, "is no argument"),
    ("user:{0}", both, "is no argument"),
    ("user:{args[0]}", lambda *args: 1, "is no argument.*none"),
    ("user:{kwargs[a]}", lambda **kwargs: 1, "is no argument"),
    ("user:{x}{y}", both, "between"),
    ("user:{x}and{y}", both, "between"),
    ("user:{x:{y}}", both, "within"),
    ("user:{x!z}", both, "{x!z} cannot be read: Unknown conversion"),
    ("user:{x.}", both, "{x.} cannot be read: Empty attribute"),
    ("user:{x[0]y}", both, "cannot be read"),
    ("user:{x", both, "brace"),
    ("user:}", both, "brace"),
    ("", both, "give a name"),
    (None, both, "give a name"),
    ("user:{x}", generator, "is a generator"),
    ("user:{x}", functools.partial(generator, 1), "is a generator"),
    ("user:{x}", async_generator, "is a generator"),
    ("user:{x}", classmethod(both), "below @classmethod"),
    ("user:{x}", staticmethod(both), "below @staticmethod"),
    ("user:{x}", User, "decorate a function"),
    ("user:{x}", 42, "decorate a function"),
    ("all", min, "no readable signature"),
    ("{x}:hf1:", lambda x: x, "hf<digit>"),
    ("{{}}{x}", lambda x: x, "hash tag"),
    ("a\n{x}", lambda x: x, "control character"),
]


@pytest.mark.parametrize("decorator", ["cached", "exclusive"])
@pytest.mark.parametrize("module", [holdfast, holdfast.aio])
@pytest.mark.parametrize(("pattern", "function", "problem"), BAD)
def test_mistakes_are_found_at_decoration(
    module: Any, decorator: str, pattern: Any, function: Any, problem: str
) -> None:
    client = module.connect("redis://127.0.0.1:1/0")  # nobody is asked
    with pytest.raises((holdfast.InvalidConfig, holdfast.InvalidName), match=problem):
        getattr(client, decorator)(pattern)(function)


@pytest.mark.parametrize("decorator", ["cached", "exclusive"])
def test_the_blocking_face_refuses_coroutine_functions(decorator: str) -> None:
    client = holdfast.connect("redis://127.0.0.1:1/0")
    for function in (coroutine_function, functools.partial(coroutine_function, 1), AsyncCallable()):
        with pytest.raises(holdfast.InvalidConfig, match="holdfast.aio"):
            getattr(client, decorator)("a")(function)


def test_what_another_client_has_cached_is_seen_through() -> None:
    """A function that was decorated under asyncio is a coroutine function, though it looks like an object."""
    waits = holdfast.aio.connect("redis://127.0.0.1:1/0").cached("a:{x}")(coroutine_function)
    for decorator in ("cached", "exclusive"):
        with pytest.raises(holdfast.InvalidConfig, match="holdfast.aio"):
            getattr(holdfast.connect("redis://127.0.0.1:1/0"), decorator)("b:{x}")(waits)


def test_a_generator_that_was_not_foreseen_is_refused_all_the_same(client: holdfast.Client) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="generator"):
        client.get_or_compute("k", lambda: (x for x in "ab"))
    with pytest.raises(holdfast.InvalidConfig, match="generator"):
        client.exclusive("e")(lambda: generator(1))()


def test_a_default_is_for_calls_that_are_left_out() -> None:
    client = holdfast.connect("redis://127.0.0.1:1/0")
    for busy in ("raise", "wait"):
        with pytest.raises(holdfast.InvalidConfig, match="default=1.*skip"):
            client.exclusive("a", busy=busy, default=1)  # type: ignore[call-overload]


def test_to_wait_for_ever_may_be_said_as_of_a_lock(client: holdfast.Client) -> None:
    assert client.get_or_compute("k", lambda: 1, wait=float("inf")) == 1


def test_a_coroutine_that_was_not_foreseen_is_refused_all_the_same(client: holdfast.Client) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="holdfast.aio"):
        client.get_or_compute("k", lambda: coroutine_function(1))  # type: ignore[unused-coroutine]
    with pytest.raises(holdfast.InvalidConfig, match="holdfast.aio"):
        client.exclusive("e")(lambda: coroutine_function(1))()  # type: ignore[unused-coroutine]


def test_the_result_of_a_function_is_not_taken_for_the_function() -> None:
    """No other caller gets a failure for it: the server is not even asked."""
    client = holdfast.connect("redis://127.0.0.1:1/0")
    for wrong in (42, None, coroutine_function(1)):
        with pytest.raises(holdfast.InvalidConfig, match=f"of type {type(wrong).__name__}: give the function"):
            client.get_or_compute("k", wrong)  # type: ignore[arg-type]


@asyncio_test
async def test_nor_is_a_coroutine_under_asyncio() -> None:
    client = holdfast.aio.connect("redis://127.0.0.1:1/0")
    with pytest.raises(holdfast.InvalidConfig, match="of type coroutine: give the function"):
        await client.get_or_compute("k", coroutine_function(1))  # type: ignore[call-overload]


def test_a_value_that_is_too_large_is_refused_and_not_stored(
    client: holdfast.Client, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.protocol.cache.entry.LARGEST", 1 << 20)
    assert len(client.get_or_compute("k", lambda: b"x" * ((1 << 20) - 1))) == (1 << 20) - 1
    with pytest.raises(holdfast.InvalidConfig, match="larger than 1 MiB"):
        client.get_or_compute("k2", lambda: b"x" * (1 << 20))
    assert not admin.exists("k2:hf1:cache:value:{k2}")


def test_objects_that_can_be_called_can_be_decorated(client: holdfast.Client) -> None:
    assert client.cached("c:{x}")(Callable())(3) == 3
    assert client.cached("p:{x}")(functools.partial(both, y=1))(3) is None


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": "60"},
        {"ttl": True},
        {"ttl": float("nan")},
        {"ttl": float("inf")},
        {"ttl": [1]},
        {"ttl": None},
        {"stale": -1},
        {"stale": None},
        {"errors": "all"},
        {"early": -0.1},
        {"early": 1000},
        {"early": True},
        {"early": "1"},
        {"compute_ttl": 0},
        {"compute_ttl": None},
        {"max_compute": 0},
        {"wait": -1},
        {"wait": "now"},
        {"serializer": "json"},
        {"serializer": object},
    ],
    ids=str,
)
@pytest.mark.parametrize("module", [holdfast, holdfast.aio])
def test_bad_options_are_refused_when_they_are_given(module: Any, options: dict[str, Any]) -> None:
    client = module.connect("redis://127.0.0.1:1/0")
    with pytest.raises(holdfast.InvalidConfig, match=next(iter(options))):
        client.cached("k", **options)
    if module is holdfast:
        with pytest.raises(holdfast.InvalidConfig, match=next(iter(options))):
            client.get_or_compute("k", lambda: 1, **options)


@pytest.mark.parametrize("key", ["", "a\nb", "a:hf1:b", "x" * 600, 42, None, ["k"]])
def test_bad_keys_are_refused(key: Any) -> None:
    client = holdfast.connect("redis://127.0.0.1:1/0")
    with pytest.raises(holdfast.InvalidName):
        client.get_or_compute(key, lambda: 1)
    with pytest.raises(holdfast.InvalidName):
        client.invalidate(key)


@pytest.mark.parametrize("options", [{"busy": "later"}, {"wait": -1}, {"ttl": 0}, {"on_lost": "panic"}, {"label": 1}])
@pytest.mark.parametrize("module", [holdfast, holdfast.aio])
def test_bad_options_of_exclusive_are_refused_when_they_are_given(module: Any, options: dict[str, Any]) -> None:
    client = module.connect("redis://127.0.0.1:1/0")
    with pytest.raises(holdfast.InvalidConfig, match=next(iter(options))):
        client.exclusive("a", **options)


def test_a_serializer_must_make_text_or_bytes(client: holdfast.Client) -> None:
    class Odd:
        dumps = staticmethod(lambda value: 42)
        loads = staticmethod(lambda data: data)

    with pytest.raises(holdfast.InvalidConfig, match="returned int"):
        client.get_or_compute("k", lambda: 1, serializer=Odd())  # type: ignore[arg-type]


def test_an_unhashable_serializer_will_do(client: holdfast.Client) -> None:
    class Words(list[str]):
        def dumps(self, value: Any) -> str:
            return str(value)

        def loads(self, data: bytes) -> Any:
            return [*self, data.decode()]

    for _ in range(2):
        loaded: Any = client.get_or_compute("k", lambda: 1, serializer=Words(["it is"]))
        assert loaded == ["it is", "1"]


def test_early_refresh_is_drawn_as_xfetch_has_it() -> None:
    from holdfast.protocol.cache.lookup import earliness

    drawn = sorted(earliness(1.0, f"token-{number}") for number in range(20_000))
    assert drawn[0] >= 0
    mean = sum(drawn) / len(drawn)
    assert 0.95 < mean < 1.05, "an exponential distribution has the mean 1"
    assert 0.66 < drawn[10_000] < 0.73, "and the median ln 2"
    assert earliness(2.0, "token-1") == 2 * earliness(1.0, "token-1")


FACES = pytest.mark.parametrize("connect", [holdfast.connect, holdfast.aio.connect], ids=["blocking", "asyncio"])


def price(item: str) -> int:
    return 1


def stock(item: str) -> int:
    return 2


def rename(name: str) -> str:
    return name


OWN = "redis://127.0.0.1:1/9"  # a database that no other test names: templates are compared within a process


@FACES
def test_two_functions_with_one_template_are_refused(connect: Any) -> None:
    client = connect(OWN)
    kept = client.cached("item:{item}")(price)
    with pytest.raises(holdfast.InvalidConfig) as refused:
        client.cached("item:{item}")(stock)
    for part in ("item:{item}", "test_templates.price", "test_templates.stock", "its own"):
        assert part in str(refused.value)
    client.cached("stock:{item}")(stock)
    connect("redis://127.0.0.1:1/8").cached("item:{item}")(stock)
    connect(OWN, namespace="shop:").cached("item:{item}")(stock)
    assert kept.key("tea") == "item:tea"


@pytest.mark.parametrize("other", [holdfast.connect, holdfast.aio.connect], ids=["blocking", "asyncio"])
@FACES
def test_two_functions_with_one_template_are_refused_by_two_clients_of_one_process(connect: Any, other: Any) -> None:
    first, second = connect(OWN), other(OWN)
    first.cached("item:{item}")(price)
    with pytest.raises(holdfast.InvalidConfig, match="price has this template"):
        second.cached("item:{item}")(stock)
    second.cached("item:{item}")(price)


def test_a_closed_client_keeps_no_template() -> None:
    with holdfast.connect(OWN) as first:
        first.cached("item:{item}")(price)
    with holdfast.connect(OWN) as second:
        second.cached("item:{item}")(stock)


@FACES
def test_a_function_may_be_decorated_again(connect: Any) -> None:
    client = connect(OWN)

    def make() -> Any:
        @client.cached("item:{item}")  # type: ignore[untyped-decorator]
        def load(item: str) -> int:
            return 1

        return load

    kept = [make(), make()]  # as when its module is reloaded
    client.cached("price:{item}")(price)
    client.cached("price:{item}", ttl=5)(price)
    assert len(kept) == 2


@FACES
def test_two_lambdas_with_one_template_are_refused(connect: Any) -> None:
    client = connect(OWN)
    kept = client.cached("item:{item}")(lambda item: "price")
    with pytest.raises(holdfast.InvalidConfig, match="<lambda> has this template"):
        client.cached("item:{item}")(lambda item: "stock")
    with pytest.raises(holdfast.InvalidConfig, match="<lambda> has this template"):
        client.cached("item:{item}")(functools.update_wrapper(lambda item: "price", lambda item: "stock"))
    assert kept.key("tea") == "item:tea"


@FACES
def test_a_lambda_may_be_decorated_again(connect: Any) -> None:
    client = connect(OWN)
    kept = [client.cached("item:{item}")(lambda item: 1) for _ in range(2)]  # as a factory makes them
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("item:{item}", "item:{name}"),
        ("item:{item}", "item:{name.id}"),
        ("item:{item[0]}", "item:{name}"),
        ("item:{item!r:>4}:x", "item:{name!r:>4}:x"),
    ],
)
def test_templates_that_differ_in_names_of_fields_are_one_template(first: str, second: str) -> None:
    client = holdfast.connect(OWN)
    kept = client.cached(first)(price)
    with pytest.raises(holdfast.InvalidConfig, match=r"price has this template \(names of fields do not count\)"):
        client.cached(second)(rename)
    assert kept.key("tea")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("item:{item}", "item:{name!r}"),
        ("item:{item}", "item:{name:>4}"),
        ("item:{item!r}", "item:{{!r}}"),
        ("item:{item}", "items:{name}"),
        ("item:{item}", "item:{name}:"),
    ],
)
def test_templates_with_different_keys_may_be_used_side_by_side(first: str, second: str) -> None:
    client = holdfast.connect(OWN)
    kept = client.cached(first)(price), client.cached(second)(rename)
    assert kept[0].key("tea") != kept[1].key("tea")


@FACES
def test_a_template_is_free_when_its_function_is_gone(connect: Any) -> None:
    client = connect(OWN)

    def load(item: str) -> int:
        return 1

    client.cached("item:{item}")(load)
    del load
    gc.collect()
    client.cached("item:{item}")(stock)
