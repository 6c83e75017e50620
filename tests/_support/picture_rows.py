"""Tiny checkpoints that see, with weights, and rows of tokens with pictures for them."""

import contextlib
import io

import torch
from PIL import Image

from areal_gym.images import image_store, use_image_store
from areal_gym.message_types import ImageRef
from areal_gym.models.hf.hf_loading import load_policy
from areal_gym.trainer.batch.bins import Row
from areal_gym.types import FinishReason, Group, StopReason, Task, TokenSpan, Trajectory, Turn
from tests._support import tiny_vision


def saved_policy(family, directory):
    """Write a whole checkpoint of a family, and return its directory."""
    made = tiny_vision.save_files(family, directory)
    tiny_vision.model(family, made).save_pretrained(directory)
    return directory


@contextlib.contextmanager
def seeing_policy(family, directory):
    """Give a policy of a family, within an image store of its own."""
    policy_dir = saved_policy(family, directory / "policy")
    with use_image_store(directory / "images"):
        yield load_policy(policy_dir)


def placed_picture(policy, seed, start, size=(64, 64)):
    """Return a reference to a picture that begins at `start` of a row."""
    part = image_store().add(tiny_vision.picture(seed, *size))
    picture = Image.open(io.BytesIO(image_store().read(part["sha256"])))
    made = policy.vision.processor(images=[picture], return_tensors="pt")
    grid = made.get("image_grid_thw")
    if grid is None:
        return ImageRef(part["sha256"], start, policy.network.config.mm_tokens_per_image)
    return ImageRef(part["sha256"], start, int(grid.prod()) // 4, tuple(grid[0].tolist()))


def without_pictures(rows):
    """Return rows of the same lengths whose tokens are texts."""
    return [
        Row(token_ids=[3 + i % 90 for i in row.token_ids], num_shared=row.num_shared)
        for row in rows
    ]


def two_groups(policy):
    """Two groups of three: prompts of equal ids with other pictures; one answer sees another."""
    placeholder = policy.vision.banned_ids[0]
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(3, 200, (count,), generator=generator).tolist()  # noqa: E731
    before, after = draw(5), draw(6)
    rows = []
    for group in range(2):
        image = placed_picture(policy, group, len(before))
        prompt = [*before, *[placeholder] * image.length, *after]
        for member in range(3):
            own, images = draw(7 + member), [image]
            if member == 1:
                later = placed_picture(policy, 2, len(prompt) + 4, (48, 80))
                own[4:4] = [placeholder] * later.length
                images.append(later)
            rows.append(
                Row(token_ids=(*prompt, *own), num_shared=len(prompt), images=tuple(images))
            )
    return rows


def groups_of(rows):
    """Return rows as groups of three siblings with rewards 1, 0, 0, sampled by version 0.

    Pictures of answers are results of tools, between two turns of the policy.
    """
    groups = []
    for number in range(0, len(rows), 3):
        task = Task(id=f"task-{number}", data={})
        pairs = zip(rows[number : number + 3], (1.0, 0.0, 0.0), strict=True)
        members = tuple(_trajectory(task, row, reward) for row, reward in pairs)
        groups.append(Group(id=task.id, task=task, trajectories=members))
    return groups


def _trajectory(task, row, reward):
    ids, shared = tuple(row.token_ids), row.num_shared
    parts = [("prompt", 0, shared), ("policy", shared, len(ids))]
    if later := [image for image in row.images if image.start >= shared]:
        begin, end = later[0].start, later[0].start + later[0].length
        parts[1:] = [("policy", shared, begin), ("env", begin, end), ("policy", end, len(ids))]
    spans, num_turns = [], 0
    for origin, start, stop in parts:
        facts = {}
        if origin == "policy":
            facts = {"logprobs": (-5.0,) * (stop - start), "policy_version": 0}
        inside = [image.moved(-start) for image in row.images if start <= image.start < stop]
        spans.append(
            TokenSpan(
                origin=origin,
                token_ids=ids[start:stop],
                turn=num_turns,
                images=tuple(inside),
                **facts,
            )
        )
        num_turns += origin == "policy"
    rewards = [0.0] * (num_turns - 1) + [reward]
    return Trajectory(
        id=f"{task.id}-{len(ids)}",
        group_id=task.id,
        task=task,
        env_id="test",
        spans=tuple(spans),
        turns=tuple(Turn(finish_reason=FinishReason.STOP, reward=r) for r in rewards),
        stop_reason=StopReason.COMPLETED,
    )
