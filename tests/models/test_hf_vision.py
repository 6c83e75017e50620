"""Vision-language models on packed rows, against transformers' own forward row by row."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from areal_gym.message_types import ImageRef
from areal_gym.models.hf.hf_loading import load_policy
from areal_gym.models.hf.hf_vision import rope_positions
from areal_gym.trainer.batch.bins import Row, split_by_patches
from areal_gym.trainer.batch.packing import pack
from tests._support.picture_rows import saved_policy, seeing_policy, two_groups
from tests._support.tiny_vision import FAMILIES

QWEN = FAMILIES[:2]


def own_logprobs(policy, rows):
    """The log-probabilities of each row's tokens after the shared ones, packed."""
    batch = pack(rows)
    hidden_NC = policy(batch)
    pairs = [
        (source, target)
        for row, index in zip(rows, batch.row_index, strict=True)
        for source, target in zip(
            index[row.num_shared - 1 : -1], index[row.num_shared :], strict=True
        )
    ]
    sources, targets = map(list, zip(*pairs, strict=True))
    logprobs = policy.logits(hidden_NC[sources]).float().log_softmax(-1)
    return logprobs.gather(1, batch.token_ids_N[targets][:, None]).squeeze(1)


def reference_logprobs(network, policy, rows):
    """The same by transformers' own forward, one row at a time, pictures found by its own code."""
    family = network.config.model_type
    scores = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        pixels = [policy.vision._pixels_of(image.sha256) for image in row.images]
        kinds = torch.zeros_like(ids)
        for image in row.images:
            kinds[0, image.start : image.start + image.length] = 1
        given = {"pixel_values": torch.cat([each.values for each in pixels])}
        given["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = kinds
        if family != "gemma3":
            given["image_grid_thw"] = torch.cat([each.grid for each in pixels])
        logits = policy.vision.without_banned(network(input_ids=ids, **given).logits[0].float())
        logprobs = logits.log_softmax(-1)[row.num_shared - 1 : -1]
        scores.append(logprobs.gather(1, ids[0, row.num_shared :, None]).squeeze(1))
    return torch.cat(scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_with_pictures_score_and_learn_as_separate_ones(family, tmp_path):
    with seeing_policy(family, tmp_path) as policy:
        rows = two_groups(policy)
        tower_calls = []
        policy.vision.tower.register_forward_hook(lambda *_: tower_calls.append(1))
        policy.recomputes_layers = True
        ours = own_logprobs(policy, rows)
        assert len(tower_calls) == 1
        network = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "policy", attn_implementation="eager"
        ).eval()
        theirs = reference_logprobs(network, policy, rows)
        is_text = theirs > -1e3  # placeholders of the answers' own pictures are banned
        assert int(is_text.sum()) == sum((7, 8, 9)) * 2
        gaps = (ours - theirs)[is_text].detach().abs()
        assert float(gaps.max()) <= 1e-5
        weights = torch.linspace(-1, 1, len(ours))[is_text]
        (ours[is_text] * weights).sum().backward()
        (theirs[is_text] * weights).sum().backward()
    expected = dict(network.named_parameters())
    num_compared = 0
    for name, parameter in policy.network.named_parameters():
        gradient = expected[name].grad
        if gradient is not None and float(gradient.abs().max()) > 1e-7:
            gap = float((parameter.grad - gradient).abs().max() / gradient.abs().max())
            assert gap <= 1e-4, name
            num_compared += 1
    assert num_compared > 80


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_prompts_of_other_pictures_would_be_seen(family, tmp_path, monkeypatch):
    """The control of the test above: rows grouped by ids alone are wrong by a lot."""
    with seeing_policy(family, tmp_path) as policy, torch.no_grad():
        rows = two_groups(policy)
        exact = own_logprobs(policy, rows)
        by_ids = property(lambda row: str(list(row.token_ids[: row.num_shared])).encode())
        monkeypatch.setattr(Row, "prompt", by_ids)
        assert float((own_logprobs(policy, rows) - exact).abs().max()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_placeholder_is_a_token_like_any_other(family, tmp_path):
    with seeing_policy(family, tmp_path) as policy, torch.no_grad():
        row = two_groups(policy)[0]
        ids = list(row.token_ids)
        ids[-3] = policy.vision.banned_ids[0]
        stray = Row(token_ids=tuple(ids), num_shared=row.num_shared, images=row.images)
        plain, changed = (own_logprobs(policy, [each]) for each in (row, stray))
        assert torch.equal(changed[:-3], plain[:-3])
        assert torch.isfinite(changed).all()
        assert float(changed[-3]) < -1e3  # it is banned
        assert float((changed[-2:] - plain[-2:]).abs().max()) > 1e-4


@pytest.mark.parametrize("family", QWEN)
def test_rope_positions_are_those_of_transformers(family, tmp_path):
    with seeing_policy(family, tmp_path) as policy:
        for row in two_groups(policy):
            ids = torch.tensor([row.token_ids])
            kinds = torch.zeros_like(ids)
            for image in row.images:
                kinds[0, image.start : image.start + image.length] = 1
            grids = torch.tensor([image.grid for image in row.images])
            theirs, _ = policy.network.model.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=grids
            )
            assert torch.equal(rope_positions(len(row.token_ids), row.images, 2), theirs[:, 0])


def test_rope_positions_of_neighbouring_pictures():
    images = [ImageRef("a", 1, 2, (1, 2, 4)), ImageRef("b", 3, 3, (1, 6, 2))]
    assert rope_positions(8, images, 2).tolist() == [
        [0, 1, 1, 3, 3, 3, 6, 7],
        [0, 1, 1, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 3, 3, 6, 7],
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", ["frozen", "projector", "full"])
def test_parts_that_see_are_trained_as_asked(family, trained, tmp_path):
    with seeing_policy(family, tmp_path) as policy:
        policy.vision.set_trained(trained)
        own_logprobs(policy, two_groups(policy)).sum().backward()
    moved = {name for name, p in policy.named_parameters() if p.grad is not None}
    tower = {name for name in moved if "visual" in name or "vision_tower" in name}
    projector = {name for name in moved if "merger" in name or "projector" in name}
    assert bool(projector) == (trained != "frozen")
    assert bool(tower - projector) == (trained == "full")
    assert any("language_model" in name for name in moved)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_tensors_are_those_of_the_checkpoint(family, tmp_path):
    with seeing_policy(family, tmp_path) as policy:
        files = load_file(tmp_path / "policy" / "model.safetensors")
        published = dict(policy.published())
    assert published.keys() == files.keys()
    assert all(torch.equal(published[name], files[name]) for name in files)


def test_another_picture_changes_what_is_seen(tmp_path):
    for family in FAMILIES:
        with seeing_policy(family, tmp_path / family) as policy, torch.no_grad():
            rows = two_groups(policy)
            first = own_logprobs(policy, rows[:1])
            other = Row(
                token_ids=rows[0].token_ids, num_shared=rows[0].num_shared, images=rows[3].images
            )
            assert float((own_logprobs(policy, [other]) - first).abs().max()) > 1e-3, family


def test_micro_batches_have_a_budget_of_patches():
    image = {name: ImageRef(name, 0, 4, (1, 4, 4)) for name in "abcd"}
    rows = [
        Row(token_ids=range(9), images=tuple(image[name] for name in names))
        for names in ("a", "a", "b", "", "cd", "a")
    ]
    assert split_by_patches(rows, range(6), 16) == [[0, 1], [2, 3], [4], [5]]
    assert split_by_patches(rows, range(6), 32) == [[0, 1, 2, 3], [4], [5]]
    assert split_by_patches(rows, range(6), 10**6) == [list(range(6))]


def test_checkpoint_without_an_image_processor_is_trained_on_texts(tmp_path):
    directory = saved_policy("qwen3_vl", tmp_path / "policy")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink(missing_ok=True)
    policy = load_policy(directory)
    assert policy.vision is None
    with torch.no_grad():
        hidden = policy(pack([Row(token_ids=range(3, 20))]))
        assert math.isfinite(float(policy.logits(hidden).sum()))
