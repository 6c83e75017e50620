"""The retail shop: 16 tools over products, users and orders.

Texts, the order of the checks and the order of floating-point operations are those of the
benchmark, as observed; two of its quirks are kept because verdicts depend on them: all items of
one `modify_pending_order_items` get the last variant's price and options, and a cancellation
refunds every line of the payment history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areal_gym.envs.tau2.benchmark_calculator import calculate
from areal_gym.envs.tau2.database import Record, Tables
from areal_gym.envs.tau2.domain_state import DatabaseWorld
from areal_gym.envs.tau2.values import as_text

_LATER_FIELDS = (
    "cancel_reason",
    "exchange_items",
    "exchange_new_items",
    "exchange_payment_method_id",
    "exchange_price_difference",
    "return_items",
    "return_payment_method_id",
)
"""Fields of an order that are null in the data."""
_CANCEL_REASONS = ("no longer needed", "ordered by mistake")


def retail_tables(raw: Mapping[str, Any]) -> Tables:
    """Return the tables of `db.json`, with prices as floats and the later fields as nulls."""
    for product in raw["products"].values():
        for variant in product["variants"].values():
            variant["price"] = float(variant["price"])
    for user in raw["users"].values():
        for method in user["payment_methods"].values():
            if "balance" in method:
                method["balance"] = float(method["balance"])
    for order in raw["orders"].values():
        for item in order["items"]:
            item["price"] = float(item["price"])
        for payment in order["payment_history"]:
            payment["amount"] = float(payment["amount"])
        for name in _LATER_FIELDS:
            order.setdefault(name, None)
    return Tables({name: raw[name] for name in ("products", "users", "orders")})


class RetailWorld(DatabaseWorld):
    """The shop of one episode."""

    domain = "retail"

    # ---- reading --------------------------------------------------------------------------------

    def calculate(self, expression: str) -> str:
        return calculate(expression)

    def transfer_to_human_agents(self, summary: str) -> str:
        """Change nothing."""
        return "Transfer successful"

    def find_user_id_by_email(self, email: str) -> str:
        """Return the user's id; case does not matter."""
        for user in self.db.records("users"):
            if user["email"].lower() == email.lower():
                return str(user["user_id"])
        raise ValueError("User not found")

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Return the user's id; case does not matter in the names."""
        wanted = (first_name.lower(), last_name.lower())
        for user in self.db.records("users"):
            if user["address"]["zip"] == zip:
                name = user["name"]
                if (name["first_name"].lower(), name["last_name"].lower()) == wanted:
                    return str(user["user_id"])
        raise ValueError("User not found")

    def get_order_details(self, order_id: str) -> Record:
        return self.db.require("orders", order_id, "Order not found")

    def get_product_details(self, product_id: str) -> Record:
        return self.db.require("products", product_id, "Product not found")

    def get_item_details(self, item_id: str) -> Record:
        """Return a variant of the product that has it."""
        for product in self.db.records("products"):
            if item_id in product["variants"]:
                variant: Record = product["variants"][item_id]
                return variant
        raise ValueError("Item not found")

    def get_user_details(self, user_id: str) -> Record:
        return self.db.require("users", user_id, "User not found")

    def list_all_product_types(self) -> str:
        """Return ids by name, sorted by name."""
        names = {product["name"]: product["product_id"] for product in self.db.records("products")}
        return json.dumps(names, sort_keys=True)

    # ---- writing --------------------------------------------------------------------------------

    def cancel_pending_order(self, order_id: str, reason: str) -> Record:
        """Refund every line of the payment history."""
        if self.get_order_details(order_id)["status"] != "pending":
            raise ValueError("Non-pending order cannot be cancelled")
        if reason not in _CANCEL_REASONS:
            raise ValueError("Invalid reason")
        order = self.db.edit("orders", order_id)
        refunds = []
        for payment in order["payment_history"]:
            method_id = payment["payment_method_id"]
            refunds.append(_payment("refund", payment["amount"], method_id))
            self._credit(order["user_id"], method_id, payment["amount"])
        order["status"] = "cancelled"
        order["cancel_reason"] = reason
        order["payment_history"].extend(refunds)
        return order

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Request an exchange; nothing is paid yet."""
        order = self.get_order_details(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be exchanged")
        missing = _first_missing(order, item_ids)
        if missing is not None:
            raise ValueError(f"Number of {missing} not found.")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match.")
        difference = 0.0
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = _item(order, item_id)
            difference += self._available(item, new_item_id)["price"] - item["price"]
        difference = round(difference, 2)
        method = self._method(order["user_id"], payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the price difference")
        order = self.db.edit("orders", order_id)
        order["status"] = "exchange requested"
        order["exchange_items"] = sorted(item_ids)
        order["exchange_new_items"] = sorted(new_item_ids)
        order["exchange_payment_method_id"] = payment_method_id
        order["exchange_price_difference"] = difference
        return order

    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Request a return; nothing is refunded yet."""
        order = self.get_order_details(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be returned")
        method = self._method(order["user_id"], payment_method_id)
        is_original = order["payment_history"][0]["payment_method_id"] == payment_method_id
        if method["source"] != "gift_card" and not is_original:
            raise ValueError("Payment method should be the original payment method")
        if _first_missing(order, item_ids) is not None:
            raise ValueError("Some item not found")
        order = self.db.edit("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = sorted(item_ids)
        order["return_payment_method_id"] = payment_method_id
        return order

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Exchange items at once; allowed once per order."""
        order = self.get_order_details(order_id)
        if order["status"] != "pending":
            raise ValueError("Non-pending order cannot be modified")
        missing = _first_missing(order, item_ids)
        if missing is not None:
            raise ValueError(f"{missing} not found")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match")
        difference = 0.0
        variant: Record = {}
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            if item_id == new_item_id:
                raise ValueError("The new item id should be different from the old item id")
            item = _item(order, item_id)
            variant = self._available(item, new_item_id)
            difference += variant["price"] - item["price"]
        method = self._method(order["user_id"], payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the new item")
        order = self.db.edit("orders", order_id)
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(_payment(kind, abs(difference), payment_method_id))
        self._credit(order["user_id"], payment_method_id, -difference)
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = _item(order, item_id)
            item["item_id"] = new_item_id
            item["price"] = variant["price"]  # the last one's, for every item: see the module
            item["options"] = dict(variant["options"])
        order["status"] = "pending (item modified)"
        return order

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Record:
        """Pay with another method and refund the first."""
        order = self.get_order_details(order_id)
        self._check_is_pending(order)
        method = self._method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("There should be exactly one payment for a pending order")
        old_method_id, amount = history[0]["payment_method_id"], history[0]["amount"]
        if old_method_id == payment_method_id:
            raise ValueError("The new payment method should be different from the current one")
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ValueError("Insufficient gift card balance to pay for the order")
        order = self.db.edit("orders", order_id)
        order["payment_history"] += [
            _payment("payment", amount, payment_method_id),
            _payment("refund", amount, old_method_id),
        ]
        self._credit(order["user_id"], payment_method_id, -amount)
        self._credit(order["user_id"], old_method_id, amount)
        return order

    def modify_pending_order_address(
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Record:
        """Change the address of this order only."""
        self._check_is_pending(self.get_order_details(order_id))
        address = _address(address1, address2, city, state, country, zip)
        order = self.db.edit("orders", order_id)
        order["address"] = address
        return order

    def modify_user_address(
        self,
        user_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Record:
        """Change the default address for later orders."""
        self.get_user_details(user_id)
        address = _address(address1, address2, city, state, country, zip)
        user = self.db.edit("users", user_id)
        user["address"] = address
        return user

    # ---- helpers --------------------------------------------------------------------------------

    def _check_is_pending(self, order: Record) -> None:
        # "pending (item modified)", too: unlike for cancellations and items.
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")

    def _method(self, user_id: str, method_id: str) -> Record:
        method: Record | None = self.get_user_details(user_id)["payment_methods"].get(method_id)
        if method is None:
            raise ValueError("Payment method not found")
        return method

    def _credit(self, user_id: str, method_id: str, amount: float) -> None:
        """Move money to a gift card; other methods stay as they are."""
        if self._method(user_id, method_id)["source"] == "gift_card":
            method = self.db.edit("users", user_id)["payment_methods"][method_id]
            method["balance"] = round(method["balance"] + amount, 2)

    def _available(self, item: Record, new_item_id: str) -> Record:
        variants = self.get_product_details(item["product_id"])["variants"]
        if new_item_id not in variants:
            raise ValueError("Variant not found")
        if not variants[new_item_id]["available"]:
            raise ValueError(f"New item {new_item_id} not found or available")
        variant: Record = variants[new_item_id]
        return variant


def _first_missing(order: Record, item_ids: list[str]) -> str | None:
    """Return the first item that is requested more often than the order has it."""
    owned = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > owned.count(item_id):
            return item_id
    return None


def _item(order: Record, item_id: str) -> Record:
    for item in order["items"]:
        if item["item_id"] == item_id:
            return item  # type: ignore[no-any-return]
    raise ValueError(f"Item {item_id} not found")


def _payment(kind: str, amount: float, method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    return {
        "address1": as_text(address1),
        "address2": as_text(address2),
        "city": as_text(city),
        "country": as_text(country),
        "state": as_text(state),
        "zip": as_text(zip),
    }
