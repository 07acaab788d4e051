"""Flights: those of one process who want the same value at the same time. One of them asks the server for all.

Invariant. Whoever is given an answer sat down before the request was sent that brought it. So nobody gets a value that
was read, or stored, before they asked for it, and after an invalidation nothing older than that. Those who came later
go on in the next flight, together, with one of them in the pilot's seat.

A flight saves requests and nothing depends on it: what is computed, and by whom, is for the server to say. Should two
flights of one name be in the air, or a pilot be lost on the way (Ctrl-C strikes anywhere), it costs a request or
half a second.

Atomic: single dict and list operations, so any thread may call. ``setdefault`` decides who is the pilot.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from holdfast.protocol.effects import Bell

__all__ = ["Desk", "Flight", "Seat", "fly_alone"]


class Flight:
    __slots__ = ("key", "over", "pilot", "seats")

    def __init__(self, key: str) -> None:
        self.key = key
        self.seats: list[Seat] = []  # only ever longer
        self.pilot: dict[None, Seat] = {}  # who asks for all: whoever got this seat first
        self.over = False


_NOWHERE: Final = Flight("")  # where one sits who has not joined any
_NOWHERE.over = True


class Seat:
    """One caller."""

    __slots__ = ("answer", "bell", "flight", "left", "who")

    def __init__(self, who: Hashable) -> None:
        self.who = who  # the thread or the task
        self.bell: Bell | None = None  # whoever asks for the others needs none
        self.answer: Any = None
        self.left = False
        self.flight = _NOWHERE


class Desk:
    """The flights of one client. ``life`` is its driver's: those of a parent process, or of another loop, are gone."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.flights: dict[str, Flight] = {}
        self._life = driver.life

    def join(self, key: str, seat: Seat) -> None:
        """Sit down in a flight that is not over."""
        if self._life != self.driver.life:
            self.flights, self._life = {}, self.driver.life
        while True:
            flight = seat.flight = self.flights.setdefault(key, Flight(key))
            flight.seats.append(seat)
            flight.pilot.setdefault(None, seat)
            if not flight.over:
                return
            self.close(flight)  # it landed at this very moment, and may not have seen us

    def close(self, flight: Flight) -> None:
        """Nobody may sit down any more."""
        if self.flights.get(flight.key) is flight:
            self.flights.pop(flight.key, None)

    def land(self, flight: Flight, answer: Any = None, served: int = 0) -> None:
        """It is over: the first so many have their answer, and the others fly on."""
        flight.over = True
        self.close(flight)
        seats = list(flight.seats)
        for seat in seats[:served]:
            seat.answer = answer
        pilot = flight.pilot.get(None)
        late = [seat for seat in seats[served:] if seat is not pilot and not seat.left and seat.answer is None]
        if late:
            heir = Flight(flight.key)
            heir.seats = late
            for seat in late:
                seat.flight = heir
            self.flights.setdefault(flight.key, heir)
            wake(heir)
        for seat in seats[:served]:
            if seat.bell is not None:
                seat.bell.ring()

    def leave(self, seat: Seat) -> None:
        """It has its answer, or wants none any more."""
        seat.left = True
        flight = seat.flight
        pilot = flight.pilot.get(None)
        if pilot is seat:
            if not flight.over:
                self.land(flight)
        elif pilot is None:
            wake(flight)


def wake(flight: Flight) -> None:
    """One of them is to take the pilot's seat."""
    for seat in flight.seats:
        if not seat.left:
            if seat.bell is not None:  # else it has just come, and will look before it sleeps
                seat.bell.ring()
            return


def fly_alone(key: str, who: Hashable) -> Seat:
    """A seat in a flight that nobody else can join."""
    seat = Seat(who)
    seat.flight = Flight(key)
    seat.flight.seats.append(seat)
    seat.flight.pilot[None] = seat
    return seat
