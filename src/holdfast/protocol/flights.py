"""Flights: those of one process who want the same value at the same time. One of them asks the server for all.

Invariant. Whoever is given an answer sat down before the request was sent that brought it. So nobody gets a value that
was read, or stored, before they asked for it, and after an invalidation nothing older than that. Those who came later
go on in the next flight, together, with one of them in the pilot's seat. Of a failure only those are told who had come
when it happened. And if the server does not answer, it is tried for all of them, not by one after the other.

Who leaves gives the seat back, however long the flight goes on for the others: it is as large as those who wait.

A flight saves requests and nothing depends on it: what is computed, and by whom, is for the server to say. Should two
flights of one name be in the air, or a pilot be lost on the way (Ctrl-C strikes anywhere), it costs a request or
half a second.

Atomic: single dict operations and counters, so any thread may call. ``setdefault`` decides who is the pilot.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any, Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.protocol.effects import Bell

__all__ = ["Alarm", "Desk", "Flight", "Outage", "Seat", "fly_alone"]

_EVER: Final = float("inf")
_MOST_COMPLAINTS: Final = 1000  # that a client remembers, so that they do not fill its memory


class Outage(NamedTuple):
    """As an answer: the server could not be asked."""

    error: HoldfastError


class Flight:
    __slots__ = ("_numbers", "key", "over", "pilot", "seats")

    def __init__(self, key: str) -> None:
        self.key = key
        self.seats: dict[Seat, None] = {}
        self.pilot: dict[None, Seat] = {}  # who asks for all: whoever got this seat first
        self.over = False
        self._numbers = count()

    def take(self, seat: Seat) -> None:
        seat.flight = self
        seat.number = self.number()
        self.seats[seat] = None

    def number(self) -> int:
        """Whoever has sat down by now has a lower one, and whoever does so later a higher."""
        return next(self._numbers)


_NOWHERE: Final = Flight("")  # where one sits who has not joined any
_NOWHERE.over = True


class Seat:
    """One caller."""

    __slots__ = ("answer", "bell", "came", "flight", "left", "number", "unreadable", "who")

    def __init__(self, who: Hashable, came: float, unreadable: str = "") -> None:
        self.who = who  # the thread or the task
        self.came = came
        self.unreadable = unreadable  # the digest of a value that it could not load, and which counts as missing
        self.number = 0
        self.bell: Bell | None = None  # whoever asks for the others needs none
        self.answer: Any = None
        self.left = False
        self.flight = _NOWHERE


class Desk:
    """The flights of one client. ``life`` is its driver's: those of a parent process, or of another loop, are gone."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.flights: dict[str, Flight] = {}
        self._complaints: dict[str, None] = {}  # names of values that could not be loaded
        self._life = driver.life

    def first_complaint(self, name: str) -> bool:
        """Whether nobody has been warned of that value yet."""
        if name in self._complaints:
            return False
        if len(self._complaints) >= _MOST_COMPLAINTS:
            self._complaints.clear()
        self._complaints[name] = None
        return True

    def join(self, key: str, seat: Seat) -> None:
        """Sit down in a flight that is not over."""
        if self._life != self.driver.life:
            self.flights, self._life = {}, self.driver.life
        while True:
            flight = self.flights.setdefault(key, Flight(key))
            flight.take(seat)
            flight.pilot.setdefault(None, seat)
            if not flight.over:
                return
            self.close(flight)  # it landed at this very moment, and may not have seen us

    def close(self, flight: Flight) -> None:
        """Nobody may sit down any more."""
        if self.flights.get(flight.key) is flight:
            self.flights.pop(flight.key, None)

    def land(self, flight: Flight, answer: Any = None, served: int = 0, before: float = _EVER) -> None:
        """It is over: those with a lower number who had come before that have their answer, and the others fly on."""
        flight.over = True
        self.close(flight)
        given: list[Seat] = []
        late: list[Seat] = []
        pilot = flight.pilot.get(None)
        for seat in list(flight.seats):
            if seat.number < served and seat.came < before:
                seat.answer = answer
                given.append(seat)
            elif seat is not pilot and not seat.left and seat.answer is None:
                late.append(seat)
        if late:
            heir = Flight(flight.key)
            for seat in late:
                heir.take(seat)
            self.flights.setdefault(flight.key, heir)
            wake(heir)
        for seat in given:
            if seat.bell is not None:
                seat.bell.ring()

    def leave(self, seat: Seat) -> None:
        """It has its answer, or wants none any more."""
        seat.left = True
        flight = seat.flight
        flight.seats.pop(seat, None)
        pilot = flight.pilot.get(None)
        if pilot is seat:
            if not flight.over:
                self.land(flight)
        elif pilot is None:
            wake(flight)
        seat.flight = _NOWHERE  # else each of the two would keep the other alive


class Alarm:
    """Rung when whoever computes for a flight has lost its turn: the others need not wait for what counts no more."""

    def __init__(self, desk: Desk, flight: Flight) -> None:
        self._desk = desk
        self._flight = flight

    def ring(self) -> None:
        if not self._flight.over:
            self._desk.land(self._flight)

    def stir(self) -> None:
        """Nothing: only the loss itself counts."""

    def clear(self) -> None:
        """Nothing: it is lost once."""


def wake(flight: Flight) -> None:
    """One of them is to take the pilot's seat."""
    for seat in list(flight.seats):
        if not seat.left:
            if seat.bell is not None:  # else it has just come, and will look before it sleeps
                seat.bell.ring()
            return


def fly_alone(key: str, caller: Seat) -> Seat:
    """A seat for this caller in a flight that nobody else can join."""
    seat = Seat(caller.who, caller.came, caller.unreadable)
    Flight(key).take(seat)
    seat.flight.pilot[None] = seat
    return seat
