"""The airline: 14 tools over flights, users and reservations. "Now" is 2024-05-15 15:00.

Kept because verdicts depend on it: cancelling twice refunds twice, seats are taken by a booking
but neither released by a cancellation nor moved by an update, a certificate is gone even when
money is left on it, and the day after "2024-05-09" is "2024-05-10" but after "2024-05-08" it is
"2024-05-9", on which nothing flies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from areal_gym.envs.tau2.database import (
    Record,
    Tables,
    as_choice,
    as_float,
    as_int,
    as_text,
    make_floats,
)
from areal_gym.envs.tau2.domain_state import DatabaseWorld

_NOW = "2024-05-15T15:00:00"
_NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
_NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
_CABINS = ("business", "economy", "basic_economy")
_INSURANCE_PRICE = 30
_BAG_PRICE = 50
_AIRPORTS = {
    **{"SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago"},
    **{"DFW": "Dallas", "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami"},
    **{"BOS": "Boston", "PHX": "Phoenix", "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando"},
    **{"EWR": "Newark", "CLT": "Charlotte", "MSP": "Minneapolis", "DTW": "Detroit"},
    **{"PHL": "Philadelphia", "LGA": "LaGuardia"},
}
_ROUTE = ("flight_number", "origin", "destination")
_TIMES = ("scheduled_departure_time_est", "scheduled_arrival_time_est")


def airline_tables(raw: Mapping[str, Any]) -> Tables:
    """Return the tables of `db.json`, with fields in the order in which tools show them."""
    flights = {
        number: _only(flight, *_ROUTE, *_TIMES, "dates")
        for number, flight in raw["flights"].items()
    }
    for user in raw["users"].values():
        make_floats(user["payment_methods"].values(), "amount")
    for reservation in raw["reservations"].values():
        reservation["flights"] = [_segment(row, row["price"]) for row in reservation["flights"]]
        reservation.setdefault("status", None)
    return Tables({"flights": flights, "users": raw["users"], "reservations": raw["reservations"]})


class AirlineWorld(DatabaseWorld):
    """The airline of one episode."""

    domain = "airline"

    # ---- reading --------------------------------------------------------------------------------

    def get_user_details(self, user_id: str) -> Record:
        return self.db.require("users", user_id, f"User {user_id} not found")

    def get_reservation_details(self, reservation_id: str) -> Record:
        return self.db.require(
            "reservations", reservation_id, f"Reservation {reservation_id} not found"
        )

    def get_flight_status(self, flight_number: str, date: str) -> str:
        return str(self._day(flight_number, date)["status"])

    def list_all_airports(self) -> list[Record]:
        return [{"iata": code, "city": city} for code, city in _AIRPORTS.items()]

    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[Record]:
        return list(self._offers(date, origin, destination))

    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[Record]]:
        """Return pairs of flights; times are compared as texts."""
        pairs = []
        for first in self._offers(date, origin):
            first["date"] = date
            arrival = first["scheduled_arrival_time_est"]
            next_date = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
            for second in self._offers(next_date, first["destination"], destination, arrival):
                second["date"] = next_date
                pairs.append([first, second])
        return pairs

    # ---- writing --------------------------------------------------------------------------------

    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: str,
        cabin: str,
        flights: list[Mapping[str, Any]],
        passengers: list[Mapping[str, Any]],
        payment_methods: list[Mapping[str, Any]],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: str,
    ) -> Record:
        legs = [_leg(row) for row in flights]
        people = [_passenger(row) for row in passengers]
        payments = [_payment(row["payment_id"], row["amount"]) for row in payment_methods]
        methods = self.get_user_details(user_id)["payment_methods"]
        reservation: Record = {
            "reservation_id": self._new_reservation_id(),
            "user_id": user_id,
            "origin": as_text(origin),
            "destination": as_text(destination),
            "flight_type": as_choice(flight_type, ("round_trip", "one_way")),
            "cabin": as_choice(cabin, _CABINS),
            "flights": [],
            "passengers": people,
            "payment_history": payments,
            "created_at": _NOW,
            "total_baggages": as_int(total_baggages),
            "nonfree_baggages": as_int(nonfree_baggages),
            "insurance": as_choice(insurance, ("yes", "no")),
            "status": None,
        }
        price = 0
        for number, date in legs:
            segment = self._new_segment(number, date, cabin, len(people))
            reservation["flights"].append(segment)
            price += segment["price"] * len(people)
        if insurance == "yes":
            price += _INSURANCE_PRICE * len(people)
        price += _BAG_PRICE * nonfree_baggages
        _require_payments(payments, methods, price)
        user = self.db.edit("users", user_id)
        for payment in payments:
            method = user["payment_methods"][payment["payment_id"]]
            if method["source"] == "gift_card":
                method["amount"] -= payment["amount"]
            elif method["source"] == "certificate":
                del user["payment_methods"][payment["payment_id"]]
        for number, date in legs:
            seats = self.db.edit("flights", number)["dates"][date]["available_seats"]
            seats[cabin] -= len(people)
        self.db.add("reservations", reservation["reservation_id"], reservation)
        user["reservations"].append(reservation["reservation_id"])
        return reservation

    def cancel_reservation(self, reservation_id: str) -> Record:
        """Refund every line of the payment history; the seats stay taken."""
        self.get_reservation_details(reservation_id)
        reservation = self.db.edit("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [_payment(line["payment_id"], -line["amount"]) for line in history]
        reservation["status"] = "cancelled"
        return reservation

    def send_certificate(self, user_id: str, amount: int) -> str:
        """Give the user a certificate, at most three."""
        methods = self.get_user_details(user_id)["payment_methods"]
        for certificate_id in _NEW_CERTIFICATES:
            if certificate_id not in methods:
                number = as_float(amount)
                certificate = {"source": "certificate", "id": certificate_id, "amount": number}
                self.db.edit("users", user_id)["payment_methods"][certificate_id] = certificate
                return f"Certificate {certificate_id} added to user {user_id} with amount {amount}."
        raise ValueError("Too many certificates")

    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> Record:
        """Charge for more paid bags; fewer bags refund nothing."""
        reservation = self.get_reservation_details(reservation_id)
        more = max(0, nonfree_baggages - reservation["nonfree_baggages"])
        reservation = self._pay_for_update(reservation, payment_id, _BAG_PRICE * more)
        reservation["total_baggages"] = total_baggages
        reservation["nonfree_baggages"] = nonfree_baggages
        return reservation

    def update_reservation_flights(
        self, reservation_id: str, cabin: str, flights: list[Mapping[str, Any]], payment_id: str
    ) -> Record:
        """Replace the flights; unchanged segments keep their price in the same cabin."""
        reservation = self.get_reservation_details(reservation_id)
        num_passengers = len(reservation["passengers"])
        price = 0
        segments = []
        for row in flights:
            number, date = _leg(row)
            for old in reservation["flights"]:
                is_kept = (old["flight_number"], old["date"]) == (number, date)
                if is_kept and cabin == reservation["cabin"]:
                    segment = copy.deepcopy(old)
                    break
            else:
                segment = self._new_segment(number, date, cabin, num_passengers)
            price += segment["price"] * num_passengers
            segments.append(segment)
        price -= sum(old["price"] for old in reservation["flights"]) * num_passengers
        reservation = self._pay_for_update(reservation, payment_id, price)
        reservation["flights"] = segments
        reservation["cabin"] = cabin
        return reservation

    def update_reservation_passengers(
        self, reservation_id: str, passengers: list[Mapping[str, Any]]
    ) -> Record:
        """Replace the passengers by as many others."""
        people = [_passenger(row) for row in passengers]
        reservation = self.get_reservation_details(reservation_id)
        if len(people) != len(reservation["passengers"]):
            raise ValueError("Number of passengers does not match")
        reservation = self.db.edit("reservations", reservation_id)
        reservation["passengers"] = people
        return reservation

    # ---- helpers --------------------------------------------------------------------------------

    def _flight(self, number: str) -> Record:
        return self.db.require("flights", number, f"Flight {number} not found")

    def _day(self, number: str, date: str) -> Record:
        days: Mapping[str, Record] = self._flight(number)["dates"]
        if date not in days:
            raise ValueError(f"Flight {number} not found on date {date}")
        return days[date]

    def _new_segment(self, number: str, date: str, cabin: str, num_passengers: int) -> Record:
        day = self._day(number, date)
        if day["status"] != "available":
            raise ValueError(f"Flight {number} not available on date {date}")
        if day["available_seats"][cabin] < num_passengers:
            raise ValueError(f"Not enough seats on flight {number}")
        return _segment({**self._flight(number), "date": date}, day["prices"][cabin])

    def _offers(
        self, date: str, origin: str, destination: str | None = None, leave_after: str = ""
    ) -> Iterator[Record]:
        for flight in self.db.records("flights"):
            if (
                flight["origin"] != origin
                or destination not in (None, flight["destination"])
                or flight["scheduled_departure_time_est"] < leave_after
            ):
                continue
            day = flight["dates"].get(date)
            if day is not None and day["status"] == "available":
                yield {
                    **_only(flight, *_ROUTE),
                    "status": "available",
                    **_only(flight, *_TIMES),
                    "date": None,
                    **_only(day, "available_seats", "prices"),
                }

    def _new_reservation_id(self) -> str:
        for reservation_id in _NEW_RESERVATIONS:
            if self.db.find("reservations", reservation_id) is None:
                return reservation_id
        raise ValueError("Too many reservations")

    def _pay_for_update(self, reservation: Record, payment_id: str, price: int) -> Record:
        """Take the payment, if one is due, and return the reservation for writing."""
        user_id = reservation["user_id"]
        method = self.get_user_details(user_id)["payment_methods"].get(payment_id)
        if method is None:
            raise ValueError("Payment method not found")
        if method["source"] == "certificate":
            raise ValueError("Certificate cannot be used to update reservation")
        if method["source"] == "gift_card":
            if method["amount"] < price:
                raise ValueError("Gift card balance is not enough")
            own_methods = self.db.edit("users", user_id)["payment_methods"]
            own_methods[payment_id]["amount"] -= price
        payments = [_payment(payment_id, price)] if price != 0 else []
        reservation = self.db.edit("reservations", reservation["reservation_id"])
        reservation["payment_history"] += payments
        return reservation


def _require_payments(payments: list[Record], methods: Record, price: int) -> None:
    for payment in payments:
        method = methods.get(payment["payment_id"])
        if method is None:
            raise ValueError(f"Payment method {payment['payment_id']} not found")
        has_balance = method["source"] in ("gift_card", "certificate")
        if has_balance and method["amount"] < payment["amount"]:
            raise ValueError(f"Not enough balance in payment method {payment['payment_id']}")
    paid = sum(payment["amount"] for payment in payments)
    if paid != price:
        raise ValueError(f"Payment amount does not add up, total price is {price}, but paid {paid}")


def _leg(row: Mapping[str, Any]) -> tuple[str, str]:
    return as_text(row["flight_number"]), as_text(row["date"])


def _passenger(row: Mapping[str, Any]) -> Record:
    return {name: as_text(row[name]) for name in ("first_name", "last_name", "dob")}


def _payment(payment_id: Any, amount: Any) -> Record:
    return {"payment_id": as_text(payment_id), "amount": as_int(amount)}


def _segment(row: Mapping[str, Any], price: int) -> Record:
    return {**_only(row, *_ROUTE, "date"), "price": price}


def _only(row: Mapping[str, Any], *names: str) -> Record:
    return {name: row[name] for name in names}
