"""The built-in group filters and curricula."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import CurriculumSpec, FilterSpec, hookimpl


@hookimpl
def register_filters() -> Iterable[FilterSpec]:
    """Offer group filters."""
    yield FilterSpec(
        id="zero-variance",
        entry_point="areal_gym.rollout.filters:ZeroVarianceFilter",
        summary="drops groups whose trajectories all have the same reward",
    )
    yield FilterSpec(
        id="success-rate",
        entry_point="areal_gym.rollout.filters:SuccessRateFilter",
        summary="keeps groups that are neither too hard nor too easy",
    )


@hookimpl
def register_curricula() -> Iterable[CurriculumSpec]:
    """Offer curricula."""
    yield CurriculumSpec(
        id="success-rate",
        entry_point="areal_gym.rollout.curriculum:SuccessRateCurriculum",
        summary="prefers tasks that are solved about half the time",
    )
