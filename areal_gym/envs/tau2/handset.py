"""The phone's physics: what its settings and surroundings make work, how it breaks, what must hold.

Changes that the carrier makes to the line reach the phone only when it next searches for a
network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import inf
from typing import Any

from areal_gym.envs.tau2.database import Record, sorted_text

_SIGNALS = {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"}
_SPEEDS = {"2G": (0.1, 0.4), "3G": (1.0, 5.0), "4G": (10.0, 100.0), "5G": (50.0, 500.0)}
"""Slowest and fastest speed in Mbps."""
_SIGNAL_FACTORS = {"poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
_SLOW_VPN_FACTOR = 0.1
_DATA_SAVER_FACTOR = 0.2
_DESCRIPTIONS = {1.0: "Very Poor", 5.0: "Poor", 25.0: "Fair", 100.0: "Good", inf: "Excellent"}
"""Descriptions of the speeds below a limit in Mbps."""
APN_DEFAULTS = {
    **{"apn_name": "internet", "reset_at_reboot": False, "mms_apn": "mms"},
    **{"mmsc_url": "http://mms.carrier.com/mms/wapenc", "mms_proxy": None, "mms_port": None},
}
_VPN = {"server_address": "192.168.1.1", "protocol": "OpenVPN", "server_performance": "excellent"}


def describe_speed(mbps: float) -> str:
    """Return a description from "Very Poor" to "Excellent"."""
    return next(words for limit, words in _DESCRIPTIONS.items() if mbps < limit)


class Handset:
    """A phone and what surrounds it: `device` and `surroundings`, as the benchmark names them."""

    def __init__(self, state: Record) -> None:
        self.device: Record = state["device"]
        self.surroundings: Record = state["surroundings"]
        # The benchmark keeps this for the whole process: a VPN once broken stays slow in all later
        # episodes. Here it is the episode's own, as if each had a process to itself.
        self._vpn_on_connect = dict(_VPN)

    @staticmethod
    def initial(device: Mapping[str, Any]) -> Record:
        """Return the state in `user_db.toml`, with the missing fields filled in."""
        return {
            "device": {
                "wifi_ssid": None,
                "vpn_details": None,
                **copy.deepcopy(dict(device)),
                "active_apn_settings": {**APN_DEFAULTS, **device["active_apn_settings"]},
            },
            "surroundings": {
                **{"name": None, "phone_number": None, "payment_request": None},
                **{"is_abroad": False, "roaming_allowed": False, "line_active": True},
                **{"mobile_data_usage_exceeded": False, "signal_strength": dict(_SIGNALS)},
            },
        }

    def text(self) -> str:
        """Return the sorted text of the state, whose hash the benchmark compares."""
        return sorted_text({"device": self.device, "surroundings": self.surroundings})

    # ---- how an episode begins --------------------------------------------------------

    def set_user_info(self, name: str, phone_number: str) -> None:
        self.surroundings.update(name=name, phone_number=phone_number)

    def set_user_location(self, abroad: bool) -> None:
        self.surroundings["is_abroad"] = abroad

    def simulate_network_search(self) -> None:
        """Find the best network that the settings allow."""
        device = self.device
        technology = "none"
        if (
            self._sim_status() == "active"
            and not device["airplane_mode"]
            and device["active_apn_settings"]["apn_name"] != "broken"
            and self.surroundings["line_active"]
        ):
            technology = self._best_technology()
        signal = self.surroundings["signal_strength"].get(technology, "none")
        device["network_technology_connected"] = technology
        device["network_signal_strength"] = signal
        device["network_connection_status"] = "no_service" if technology == "none" else "connected"

    def turn_airplane_mode_on(self) -> None:
        self._set_airplane_mode(True)

    def turn_data_off(self) -> None:
        self._set("data_enabled", False)

    def turn_roaming_on(self) -> None:
        self._set("roaming_enabled", True)

    def turn_roaming_off(self) -> None:
        self._set("roaming_enabled", False)

    def turn_data_saver_mode_on(self) -> None:
        self.device["data_saver_mode"] = True

    def unseat_sim_card(self) -> None:
        self._set("sim_card_missing", True)

    def lock_sim_card(self, mode: str) -> None:
        """Lock the card by `pin` or `puk`."""
        self._set("sim_card_status", f"locked_{mode}")

    def break_apn_settings(self) -> None:
        """Break all data connections."""
        self.device["active_apn_settings"]["apn_name"] = "broken"
        self.simulate_network_search()

    def break_apn_mms_setting(self) -> None:
        """Break picture messages."""
        self.device["active_apn_settings"]["mmsc_url"] = None

    def break_vpn(self) -> None:
        """Connect to a slow server, now and at every later connection."""
        self._vpn_on_connect["server_performance"] = "poor"
        self._connect_vpn()

    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        self.device["wifi_calling_enabled"] = enabled
        if mms_over_wifi is not None:
            self.device["wifi_calling_mms_over_wifi"] = mms_over_wifi

    def remove_app_permission(self, app_name: str, permission: str) -> None:
        self.device["app_statuses"][app_name]["permissions"][permission] = False

    # ---- what must hold at the end ----------------------------------------------------

    def assert_service_status(self, expected_status: str) -> bool:
        return bool(self.device["network_connection_status"] == expected_status)

    def assert_mobile_data_status(self, expected_status: bool) -> bool:
        return self._has_mobile_data() == expected_status

    def assert_internet_speed(
        self, expected_speed: float, expected_desc: str | None = None
    ) -> bool:
        """Return whether the speed is at least the expected one and has that description."""
        speed = self._speed_mbps()
        if speed is None or speed < expected_speed:
            return False
        return expected_desc is None or describe_speed(speed).lower() == expected_desc.lower()

    def assert_can_send_mms(self, expected_status: bool) -> bool:
        return self._can_send_mms() == expected_status

    # ---- how it works ----------------------------------------------------------------------------

    def _set(self, setting: str, value: Any) -> None:
        """Change a setting on which the network depends."""
        self.device[setting] = value
        self.simulate_network_search()

    def _sim_status(self) -> str:
        return "missing" if self.device["sim_card_missing"] else str(self.device["sim_card_status"])

    def _set_airplane_mode(self, is_on: bool) -> None:
        if is_on:
            self.device["wifi_connected"] = False
            self._drop_vpn()
        self._set("airplane_mode", is_on)

    def _best_technology(self) -> str:
        mode = self.device["network_mode_preference"]
        if mode != "4g_5g_preferred":
            return str(mode[:2].upper())
        return "5G" if self.surroundings["signal_strength"]["5G"] != "none" else "4G"

    def _has_mobile_data(self) -> bool:
        device, around = self.device, self.surroundings
        can_roam = device["roaming_enabled"] and around["roaming_allowed"]
        return bool(
            not device["airplane_mode"]
            and device["network_signal_strength"] != "none"
            and device["network_connection_status"] != "no_service"
            and (can_roam or not around["is_abroad"])
            and device["data_enabled"]
            and not around["mobile_data_usage_exceeded"]
        )

    def _speed_mbps(self) -> float | None:
        device = self.device
        if not self._has_mobile_data():
            return None
        slowest, fastest = _SPEEDS[device["network_technology_connected"]]
        factor = 1.0
        if device["vpn_connected"] and device["vpn_details"]["server_performance"] == "poor":
            factor *= _SLOW_VPN_FACTOR
        if device["data_saver_mode"]:
            factor *= _DATA_SAVER_FACTOR
        factor *= _SIGNAL_FACTORS[device["network_signal_strength"]]
        return round((slowest + fastest) / 2 * factor, 2)

    def _can_send_mms(self) -> bool:
        device = self.device
        permissions = device["app_statuses"]["messaging"]["permissions"]
        is_over_wifi = device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"]
        return bool(
            self._has_mobile_data()
            and device["network_technology_connected"] != "2G"
            and not is_over_wifi
            and device["active_apn_settings"]["mmsc_url"] is not None
            and permissions["storage"]
            and permissions["sms"]
        )

    def _connect_vpn(self) -> None:
        self.device.update(vpn_connected=True, vpn_details=dict(self._vpn_on_connect))

    def _drop_vpn(self) -> None:
        self.device.update(vpn_connected=False, vpn_details=None)
