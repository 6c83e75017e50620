"""The tables of the telecom domain, as tools show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_gym.envs.tau2.database import Record, Tables
from areal_gym.envs.tau2.phone import Phone

_IDS = {"plans": "plan_id", "customers": "customer_id", "lines": "line_id", "bills": "bill_id"} | {
    "devices": "device_id"
}
_FIELDS = {
    "customers": (
        "customer_id",
        "full_name",
        "date_of_birth",
        "email",
        "phone_number",
        "address",
        "account_status",
        "payment_methods",
        "line_ids",
        "bill_ids",
        "created_at",
        "last_extension_date",
        "goodwill_credit_used_this_year",
    ),
    "lines": (
        "line_id",
        "phone_number",
        "status",
        "plan_id",
        "device_id",
        "data_used_gb",
        "data_refueling_gb",
        "roaming_enabled",
        "contract_end_date",
        "last_plan_change_date",
        "last_sim_replacement_date",
        "suspension_start_date",
    ),
    "bills": (
        "bill_id",
        "customer_id",
        "period_start",
        "period_end",
        "issue_date",
        "total_due",
        "due_date",
        "line_items",
        "status",
    ),
    "devices": (
        "device_id",
        "device_type",
        "model",
        "imei",
        "is_esim_capable",
        "activated",
        "activation_date",
        "last_esim_transfer_date",
    ),
    "plans": (
        "plan_id",
        "name",
        "data_limit_gb",
        "price_per_month",
        "data_refueling_price_per_gb",
    ),
}
"""Fields in the order in which tools show them; fields that the data leaves out are null."""
_TIMES = ("created_at", "activation_date", "last_esim_transfer_date")
"""Dates with a time of day, which are written with a space."""


@dataclass(frozen=True, slots=True)
class TelecomTables:
    """Data that all episodes share: the carrier's tables, and the phone's initial state."""

    carrier: Tables
    phone: Record


def telecom_tables(raw: Mapping[str, Any], raw_user: Mapping[str, Any]) -> TelecomTables:
    """Return the tables of `db.toml` and `user_db.toml`."""
    tables = {
        name: {row[_IDS[name]]: _record(row, fields) for row in raw[name]}
        for name, fields in _FIELDS.items()
    }
    return TelecomTables(Tables(tables, lists=frozenset(tables)), Phone.initial(raw_user["device"]))


def _record(row: Mapping[str, Any], fields: Sequence[str]) -> Record:
    record = {name: row.get(name) for name in fields}
    for name in _TIMES:
        if record.get(name) is not None:
            record[name] = str(record[name]).replace("T", " ")
    return record
