"""The customer's phone: the user's 30 tools.

Texts are those of the benchmark, a Python repr in `check_vpn_status` included; every change ends
with the status bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_gym.envs.tau2.database import Record, as_choice, as_int, as_text
from areal_gym.envs.tau2.handset import APN_DEFAULTS, Handset, describe_speed

_MODES = ("4g_5g_preferred", "4g_only", "3g_only", "2g_only")
_PERMISSIONS = ("sms", "storage", "phone", "network")
_BARS = {
    "none": "📵 No Signal",
    "poor": "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}
_SIM_TEXTS = {
    "active": "Your SIM card is active and working.",
    "missing": "No SIM card detected in the phone.",
    "locked_pin": "The SIM card is locked with a PIN code.",
    "locked_puk": "The SIM card is locked with a PUK code.",
}
_ADVICE = {
    "Very Poor": "Connection is very slow. Basic web browsing might be difficult.",
    "Poor": "Connection is slow. Web browsing may be sluggish, streaming difficult.",
    "Fair": "Connection is okay for web browsing and some standard definition streaming.",
    "Good": "Connection is good for most activities, including HD streaming.",
    "Excellent": "Connection is very fast.",
}


class Phone(Handset):
    """The user's side of the telecom domain."""

    # ---- reading --------------------------------------------------------------------------------

    def check_status_bar(self) -> str:
        device = self.device
        parts = []
        if device["airplane_mode"]:
            parts.append("✈️ Airplane Mode")
        else:
            parts.append(_BARS[device["network_signal_strength"]])
            if device["network_technology_connected"] != "none":
                parts.append(device["network_technology_connected"])
            # Also where the data does not work: abroad without roaming, or when all is used.
            if device["data_enabled"] and device["network_technology_connected"] != "none":
                parts.append("📱 Data Enabled")
                if device["data_saver_mode"]:
                    parts.append("🔽 Data Saver")
            else:
                parts.append("📵 Data Disabled")
        if device["vpn_connected"]:
            parts.append("🔒 VPN Connected")
        parts.append(f"🔋 {device['battery_level']}%")
        return "Status Bar: " + " | ".join(parts)

    def check_network_status(self) -> str:
        device = self.device
        return (
            f"Airplane Mode: {_on_off(device['airplane_mode'])}\n"
            f"SIM Card Status: {self._sim_status()}\n"
            f"Cellular Connection: {device['network_connection_status']}\n"
            f"Cellular Signal: {device['network_signal_strength']}\n"
            f"Cellular Network Type: {device['network_technology_connected']}\n"
            f"Mobile Data Enabled: {_yes_no(device['data_enabled'])}\n"
            f"Data Roaming Enabled: {_yes_no(device['roaming_enabled'])}\n"
            f"Wi-Fi Radio: {_on_off(device['wifi_enabled'])}\n"
            f"Wi-Fi Connected: {_yes_no(device['wifi_connected'])}"
        )

    def check_network_mode_preference(self) -> str:
        return f"Network Mode Preference: {self.device['network_mode_preference']}"

    def run_speed_test(self) -> str:
        speed = self._speed_mbps()
        if speed is None:
            return "Speed test failed: No Connection."
        words = describe_speed(speed)
        return f"Speed Test Result: {speed:.2f} Mbps ({words}). {_ADVICE[words]}"

    def check_sim_status(self) -> str:
        return _SIM_TEXTS[self._sim_status()]

    def check_data_restriction_status(self) -> str:
        if self.device["data_saver_mode"]:
            return "Data Saver mode is ON (limits data usage)."
        return "Data Saver mode is OFF."

    def check_apn_settings(self) -> str:
        apn = self.device["active_apn_settings"]
        return (
            f"Current APN Name: {apn['apn_name']}\n"
            f"MMSC URL (for picture messages): {apn['mmsc_url'] or 'Not Set'}\n"
            "(These are technical settings, usually best left unchanged.)"
        )

    def check_wifi_status(self) -> str:
        """Return the state of Wi-Fi, which no tool and no task ever connects."""
        if not self.device["wifi_enabled"]:
            return "Wi-Fi is turned OFF."
        return "Wi-Fi is ON but not connected to any network."

    def check_wifi_calling_status(self) -> str:
        return f"Wi-Fi Calling is currently turned {_on_off(self.device['wifi_calling_enabled'])}."

    def check_vpn_status(self) -> str:
        details = self.device["vpn_details"]
        if not self.device["vpn_connected"]:
            return "VPN is turned OFF."
        performance = details["server_performance"]
        return (
            f"VPN is ON and connected. Details: {{'server_address': {details['server_address']!r}, "
            f"'protocol': {details['protocol']!r}, 'server_performance': "
            f"<PerformanceLevel.{performance.upper()}: {performance!r}>}}"
        )

    def check_installed_apps(self) -> str:
        names = ", ".join(self.device["app_statuses"])
        return f"The following apps are installed on the phone: {names}"

    def check_app_status(self, app_name: str) -> str:
        granted = self._granted(app_name)
        if granted is None:
            return f"App '{app_name}' not found on this phone."
        lines = [f"Status for App: {app_name}", " - Permissions Granted:"]
        return "\n".join([*lines, *(f"   - {name}" for name in granted or ["None"])])

    def check_app_permissions(self, app_name: str) -> str:
        granted = self._granted(app_name)
        if granted is None:
            return f"App '{app_name}' not found on this phone."
        if not granted:
            return f"App '{app_name}' currently has no permissions granted."
        return f"App '{app_name}' has permission for: {', '.join(granted)}."

    def can_send_mms(self) -> str:
        verb = "can" if self._can_send_mms() else "cannot"
        return f"Your messaging app {verb} send MMS messages."

    def check_payment_request(self) -> str:
        request = self.surroundings["payment_request"]
        if request is None:
            return "No payment request has been made."
        bill_id, amount = request["bill_id"], request["amount_due"]
        return f"You have a payment request for bill {bill_id} of {amount} USD."

    # ---- writing --------------------------------------------------------------------------------

    def set_network_mode_preference(self, mode: str) -> str:
        if mode not in _MODES:
            return self._with_bar(
                f"Failed to set network mode: '{mode}' is not a valid option. "
                f"Please use one of: {', '.join(_MODES)}"
            )
        self._set("network_mode_preference", mode)
        return self._with_bar(f"Preferred Network Mode set to: {mode}")

    def toggle_airplane_mode(self) -> str:
        self._set_airplane_mode(not self.device["airplane_mode"])
        return self._with_bar(f"Airplane Mode is now {_on_off(self.device['airplane_mode'])}.")

    def reseat_sim_card(self) -> str:
        """Put the card back in; a locked card stays locked."""
        self._set("sim_card_missing", False)
        return self._with_bar("SIM card re-seated successfully.")

    def toggle_data(self) -> str:
        return self._toggle("data_enabled", "Mobile Data")

    def toggle_roaming(self) -> str:
        return self._toggle("roaming_enabled", "Data Roaming")

    def toggle_data_saver_mode(self) -> str:
        return self._toggle("data_saver_mode", "Data Saver Mode", is_network=False)

    def set_apn_settings(self, apn_settings: Mapping[str, Any]) -> str:
        """Replace the settings; missing ones become the defaults."""
        self._set("active_apn_settings", _apn_settings(apn_settings))
        name = self.device["active_apn_settings"]["apn_name"]
        return self._with_bar(f"APN settings set to: {name}")

    def reset_apn_settings(self) -> str:
        """Request a reset, which takes effect at the next reboot."""
        self.device["active_apn_settings"]["reset_at_reboot"] = True
        self.simulate_network_search()
        return self._with_bar("APN settings will reset at reboot.")

    def toggle_wifi(self) -> str:
        if self.device["airplane_mode"]:
            return self._with_bar("Cannot change Wi-Fi settings while Airplane Mode is ON.")
        return self._toggle("wifi_enabled", "Wi-Fi", is_network=False)

    def toggle_wifi_calling(self) -> str:
        return self._toggle("wifi_calling_enabled", "Wi-Fi Calling", is_network=False)

    def connect_vpn(self) -> str:
        if self.device["vpn_connected"]:
            return "VPN already connected."
        self._connect_vpn()
        return self._with_bar("VPN connected successfully.")

    def disconnect_vpn(self) -> str:
        if not self.device["vpn_connected"]:
            return self._with_bar("No active VPN connection to disconnect.")
        self._drop_vpn()
        return self._with_bar("VPN disconnected successfully.")

    def grant_app_permission(self, app_name: str, permission: str) -> str:
        """Grant a permission, named in any case."""
        app = self.device["app_statuses"].get(app_name)
        permission = permission.lower()
        if app is None:
            text = f"Error. App '{app_name}' not found. Cannot grant permission."
        elif permission not in _PERMISSIONS:
            text = (
                f"Error. Permission '{permission}' not tracked for app '{app_name}', "
                f"available permissions: {list(_PERMISSIONS)}"
            )
        else:
            app["permissions"][permission] = True
            text = f"Success. Permission '{permission}' granted to app '{app_name}'."
        return self._with_bar(text)

    def reboot_device(self) -> str:
        """Reset the APN settings if requested, and search for a network."""
        lines = []
        if self.device["active_apn_settings"]["reset_at_reboot"]:
            self.device["active_apn_settings"] = dict(APN_DEFAULTS)
            lines.append("Resetting APN settings...")
        self.simulate_network_search()
        return self._with_bar("\n".join([*lines, "Restarting network services..."]))

    def make_payment(self) -> str:
        """Pay the requested bill; the carrier is told at the next sync."""
        request = self.surroundings["payment_request"]
        if request is None:
            return "You do not have a payment request."
        request["paid"] = True
        bill_id, amount = request["bill_id"], request["amount_due"]
        return f"Payment of {amount} USD has been made for bill {bill_id}."

    # ---- helpers --------------------------------------------------------------------------------

    def _with_bar(self, text: str) -> str:
        return f"{text}\n{self.check_status_bar()}"

    def _toggle(self, setting: str, words: str, *, is_network: bool = True) -> str:
        """Switch a setting; without `is_network`, the network does not depend on it."""
        self.device[setting] = not self.device[setting]
        if is_network:
            self.simulate_network_search()
        return self._with_bar(f"{words} is now {_on_off(self.device[setting])}.")

    def _granted(self, app_name: str) -> list[str] | None:
        app = self.device["app_statuses"].get(app_name)
        if app is None:
            return None
        return [name for name in _PERMISSIONS if app["permissions"][name]]


def _on_off(is_on: bool) -> str:
    return "ON" if is_on else "OFF"


def _yes_no(is_so: bool) -> str:
    return "Yes" if is_so else "No"


def _apn_settings(given: Mapping[str, Any]) -> Record:
    unknown = [name for name in given if name not in APN_DEFAULTS]
    if unknown:
        raise ValueError(f"unknown APN settings: {', '.join(unknown)}")
    settings = {**APN_DEFAULTS, **given}
    as_choice(settings["apn_name"], ("internet", "broken"))
    for name in ("mms_apn", "mmsc_url", "mms_proxy"):
        if settings[name] is not None:
            as_text(settings[name])
    if settings["mms_port"] is not None:
        settings["mms_port"] = as_int(settings["mms_port"])
    if not isinstance(settings["reset_at_reboot"], bool):
        raise ValueError("reset_at_reboot is true or false")
    return settings
