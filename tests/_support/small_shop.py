"""A shop, an airline and a phone carrier with a few made-up records each."""

import dataclasses

from areal_gym.envs.tau2.airline import AirlineWorld, airline_tables
from areal_gym.envs.tau2.benchmark_data import Action, Case, Domain
from areal_gym.envs.tau2.domain_state import load_tools
from areal_gym.envs.tau2.retail import RetailWorld, retail_tables
from areal_gym.envs.tau2.telecom import TelecomWorld, telecom_tables

ADDRESS = {
    "address1": "1 Elm Row",
    "address2": "",
    "city": "Ghent",
    "country": "BE",
    "state": "OV",
    "zip": "90001",
}


def variant(item_id, price, is_available=True, **options):
    return {"item_id": item_id, "options": options, "available": is_available, "price": price}


def item(item_id, price, **options):
    return {
        "name": "Lamp",
        "product_id": "7000000001",
        "item_id": item_id,
        "price": price,
        "options": options,
    }


def order(order_id, status, items, method="gift_card_1", amount=30):
    return {
        "order_id": order_id,
        "user_id": "ada_byron_1815",
        "address": dict(ADDRESS),
        "items": items,
        "status": status,
        "fulfillments": [],
        "payment_history": [
            {"transaction_type": "payment", "amount": amount, "payment_method_id": method}
        ],
    }


def shop_tables():
    return retail_tables(
        {
            "products": {
                "7000000001": {
                    "name": "Lamp",
                    "product_id": "7000000001",
                    "variants": {
                        "1000000001": variant("1000000001", 10, color="red"),
                        "1000000002": variant("1000000002", 20, color="blue"),
                        "1000000003": variant("1000000003", 35.5, color="green"),
                        "1000000004": variant("1000000004", 5, is_available=False, color="pink"),
                    },
                },
                "7000000002": {
                    "name": "Chair",
                    "product_id": "7000000002",
                    "variants": {"1000000009": variant("1000000009", 1, color="oak")},
                },
            },
            "users": {
                "ada_byron_1815": {
                    "user_id": "ada_byron_1815",
                    "name": {"first_name": "Ada", "last_name": "Byron"},
                    "address": dict(ADDRESS),
                    "email": "ada@example.com",
                    "payment_methods": {
                        "gift_card_1": {"source": "gift_card", "id": "gift_card_1", "balance": 40},
                        "gift_card_2": {"source": "gift_card", "id": "gift_card_2", "balance": 1},
                        "paypal_1": {"source": "paypal", "id": "paypal_1"},
                    },
                    "orders": ["#W0000001", "#W0000002", "#W0000003"],
                }
            },
            "orders": {
                "#W0000001": order(
                    "#W0000001",
                    "pending",
                    [item("1000000001", 10, color="red"), item("1000000002", 20, color="blue")],
                ),
                "#W0000002": order(
                    "#W0000002",
                    "delivered",
                    [item("1000000001", 10, color="red"), item("1000000001", 10, color="red")],
                    "paypal_1",
                    20,
                ),
                "#W0000003": order("#W0000003", "processed", [item("1000000001", 10)]),
            },
        }
    )


def flight(number, origin, destination, departure, arrival, days):
    return {
        "flight_number": number,
        "origin": origin,
        "destination": destination,
        "scheduled_departure_time_est": departure,
        "scheduled_arrival_time_est": arrival,
        "dates": {
            day: {
                "status": "available",
                "available_seats": {"basic_economy": 1, "economy": 2, "business": 0},
                "prices": {"basic_economy": 50, "economy": 100, "business": 300},
            }
            for day in days
        },
    }


def airline_world():
    days = ("2024-05-08", "2024-05-20", "2024-05-21")
    return AirlineWorld(
        airline_tables(
            {
                "flights": {
                    "HAT001": flight("HAT001", "JFK", "ORD", "08:00:00", "10:00:00", days),
                    "HAT002": flight("HAT002", "ORD", "SFO", "11:00:00", "13:00:00", days),
                    "HAT003": flight("HAT003", "JFK", "BOS", "22:00:00", "00:30:00+1", days),
                    "HAT004": flight("HAT004", "BOS", "SFO", "06:00:00", "09:00:00", days),
                },
                "users": {
                    "bo_li_1": {
                        "user_id": "bo_li_1",
                        "payment_methods": {
                            "gift_card_1": {
                                "source": "gift_card",
                                "id": "gift_card_1",
                                "amount": 150,
                            },
                            "certificate_1": {
                                "source": "certificate",
                                "id": "certificate_1",
                                "amount": 500,
                            },
                            "credit_card_1": {"source": "credit_card", "id": "credit_card_1"},
                        },
                        "reservations": [],
                    }
                },
                "reservations": {},
            }
        )
    )


def telecom_world():
    line = {
        "line_id": "L1",
        "phone_number": "555",
        "status": "Active",
        "plan_id": "P1",
        "device_id": "D1",
        "data_used_gb": 1.0,
        "data_refueling_gb": 0.0,
        "roaming_enabled": False,
    }
    customer = {
        "customer_id": "C1",
        "full_name": "Cy Roe",
        "date_of_birth": "1990-01-01",
        "phone_number": "555",
        "line_ids": ["L1"],
        "bill_ids": ["B1"],
    }
    bill = {
        "bill_id": "B1",
        "customer_id": "C1",
        "issue_date": "2025-01-01",
        "total_due": 20.0,
        "line_items": [],
        "status": "Overdue",
    }
    plan = {"plan_id": "P1", "data_limit_gb": 5.0, "price_per_month": 40.0}
    device = {
        "sim_card_status": "active",
        "sim_card_missing": False,
        "airplane_mode": False,
        "network_signal_strength": "good",
        "network_technology_connected": "5G",
        "network_connection_status": "connected",
        "battery_level": 80,
        "data_enabled": True,
        "roaming_enabled": False,
        "network_mode_preference": "4g_5g_preferred",
        "wifi_enabled": False,
        "wifi_connected": False,
        "wifi_calling_enabled": False,
        "wifi_calling_mms_over_wifi": False,
        "data_saver_mode": False,
        "vpn_connected": False,
        "active_apn_settings": {},
        "app_statuses": {
            "messaging": {
                "app_name": "messaging",
                "permissions": {"sms": True, "storage": True, "phone": False, "network": False},
            }
        },
    }
    tables = telecom_tables(
        {
            "plans": [plan | {"data_refueling_price_per_gb": 2.0}],
            "customers": [customer],
            "lines": [line],
            "bills": [bill],
            "devices": [],
        },
        {"device": device},
    )
    world = TelecomWorld(*tables)
    world.initialize(
        [
            {
                "env_type": "user",
                "func_name": "set_user_info",
                "arguments": {"name": "Cy", "phone_number": "555"},
            }
        ]
    )
    return world


def shop_case(**changes):
    """Return a case in which Ada wants the red lamp of her pending order in green."""
    gold = (
        Action("assistant", "get_order_details", {"order_id": "#W0000001"}, None),
        Action(
            "assistant",
            "modify_pending_order_items",
            {
                "order_id": "#W0000001",
                "item_ids": ["1000000001"],
                "new_item_ids": ["1000000003"],
                "payment_method_id": "paypal_1",
            },
            None,
        ),
    )
    case = Case(
        id="1",
        domain="retail",
        instructions={
            "reason_for_call": "You want your red lamp of order #W0000001 in green.",
            "known_info": "You are Ada Byron in zipcode 90001.",
            "unknown_info": "You do not remember your email address.",
            "task_instructions": "You would pay the difference with paypal.",
        },
        persona=None,
        ticket=None,
        initialization_actions=(),
        has_criteria=True,
        gold_actions=gold,
        env_assertions=(),
        communicate_info=("25.5",),
        nl_assertions=(),
        reward_basis=("DB",),
    )
    return dataclasses.replace(case, **changes)


def shop_domain(case):
    tables = shop_tables()
    return Domain(
        name="retail",
        version="test",
        make_world=lambda: RetailWorld(tables),
        tools=load_tools("retail"),
        cases={case.id: case},
        splits={"train": (case.id,), "test": ()},
        policies={"manual": "Be kind."},
        guidelines="Play the user. <PERSONA_GUIDELINES>",
        gold_states={},
    )
