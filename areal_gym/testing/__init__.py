"""The contracts of plugins, for the tests of their authors.

    from areal_gym.testing import check_advantage_estimator, check_policy_loss

    def test_my_loss():
        check_policy_loss(my_loss, clip_high=0.3)

Each check raises an AssertionError that names the rule, and returns nothing. The contract of
engines is `areal_gym.testing.engine_contract`.
"""

from __future__ import annotations

from areal_gym.testing.component_contracts import (
    check_advantage_estimator,
    check_policy_loss,
    check_reward,
)

__all__ = ["check_advantage_estimator", "check_policy_loss", "check_reward"]
