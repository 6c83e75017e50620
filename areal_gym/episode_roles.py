"""The roles of an episode: who wrote a turn, what each role earned, and what is trained on.

An episode that several roles play is one trajectory. Each of its turns names its role, and each
role has branches of its own, because it has a dialogue of its own. To train on it, the episode is
taken apart: a part is the trajectory of one role, and the parts of siblings with the same role are
a group, which advantages are computed in. Turns of a fixed role belong to no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from areal_gym.types import Group, Trajectory


def roles_of(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the roles that the policy played, in the order of their branches."""
    return tuple(dict.fromkeys(t.role for t in trajectory.turns if t.role and not t.is_fixed))


def rewards_by_role(trajectory: Trajectory) -> dict[str, float]:
    """Return the sum of rewards of each role that has spoken, fixed ones included."""
    rewards: dict[str, float] = {}
    for turn in trajectory.turns:
        if turn.role:
            rewards[turn.role] = rewards.get(turn.role, 0.0) + turn.reward
    return rewards


def part_of(trajectory: Trajectory, role: str) -> Trajectory:
    """Return the trajectory of one role: its turns and its branches, numbered from 0."""
    turns = [i for i, t in enumerate(trajectory.turns) if t.role == role and not t.is_fixed]
    place = {turn: index for index, turn in enumerate(turns)}
    spans = [span for span in trajectory.spans if span.turn in place]
    branch_of = {b: i for i, b in enumerate(dict.fromkeys(span.branch for span in spans))}
    return replace(
        trajectory,
        id=f"{trajectory.id}/{role}",
        spans=tuple(
            replace(span, turn=place[span.turn], branch=branch_of[span.branch]) for span in spans
        ),
        turns=tuple(trajectory.turns[i] for i in turns),
    )


def role_groups(group: Group) -> list[list[tuple[int, Trajectory]]]:
    """Return the members of a group by role: (place in the group, part) of each.

    A member whose turns have no role stays whole, so that a group without roles is one list. A
    member in which a role never spoke has no part in that role's list, one that fixed roles ended
    before the policy's turn is in no list, and a part without siblings is left out: it can be
    compared with nothing.
    """
    parts: dict[str | None, list[tuple[int, Trajectory]]] = {}
    for place, trajectory in enumerate(group.trajectories):
        roles = roles_of(trajectory)
        for role in roles:
            parts.setdefault(role, []).append((place, part_of(trajectory, role)))
        if not roles and not _is_played_by_fixed_roles(trajectory):
            parts.setdefault(None, []).append((place, trajectory))
    return [members for members in parts.values() if len(members) > 1 or len(group) == 1]


def has_policy_tokens(group: Group) -> bool:
    """Return whether the policy sampled a token in any part that could be trained on."""
    return any(part.num_policy_tokens for members in role_groups(group) for _, part in members)


def _is_played_by_fixed_roles(trajectory: Trajectory) -> bool:
    """Return whether every turn is a fixed role's, so that the policy never spoke."""
    return bool(trajectory.turns) and all(turn.is_fixed for turn in trajectory.turns)


def trained_parts(groups: Iterable[Group]) -> Iterator[tuple[int, int, Trajectory]]:
    """Yield (group, episode, trajectory) of all that is trained on.

    Groups count the roles' groups; episodes count the trajectories of `groups` in their order.
    """
    num_groups = num_episodes = 0
    for group in groups:
        for members in role_groups(group):
            for place, part in members:
                yield num_groups, num_episodes + place, part
            num_groups += 1
        num_episodes += len(group)


def groups_by_role(group: Group) -> Sequence[Group]:
    """Return one group per role; the group itself if its turns have no roles."""
    if not any(turn.role for member in group for turn in member.turns):
        return [group]
    return [
        replace(group, trajectories=tuple(part for _, part in members))
        for members in role_groups(group)
    ]
