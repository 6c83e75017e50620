"""Pictures in records: spans name them by hash; records without pictures are what they were."""

import json

import pytest

from areal_gym.types import (
    FinishReason,
    ImageRef,
    Message,
    Task,
    TokenSpan,
    Trajectory,
    Turn,
    images_of,
    readable,
    text_of,
)

SHA = "ab" * 32
PICTURE = {"type": "image", "sha256": SHA, "width": 640, "height": 480, "media_type": "image/png"}


def trajectory(content="2+2?", images=()):
    asked: Message = {"role": "user", "content": content}
    return Trajectory(
        id="t",
        group_id="g",
        task=Task(id="sum/1", data={"question": "2+2?"}),
        env_id="sums",
        spans=(
            TokenSpan(origin="prompt", token_ids=(5, 6, 7, 8), images=images),
            TokenSpan(origin="policy", token_ids=(9,), logprobs=(-0.5,), policy_version=0),
        ),
        turns=(Turn(finish_reason=FinishReason.STOP, reward=1.0),),
        messages=(asked, {"role": "assistant", "content": "4"}),
    )


def test_records_without_pictures_are_written_as_before_there_were_any():
    # Messages and spans as areal-gym wrote them at 17bbdf6, which knew no pictures.
    golden = (
        '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", '
        '"content": "4"}], "spans": [{"origin": "prompt", "token_ids": '
        '{"int32": "BQAAAAYAAAAHAAAACAAAAA=="}, '
        '"logprobs": null, "policy_version": null, "turn": 0, "branch": 0, "teacher_logprobs": '
        'null}, {"origin": "policy", "token_ids": {"int32": "CQAAAA=="}, "logprobs": {"float32": '
        '"AAAAvw=="}, "policy_version": 0, "turn": 0, "branch": 0, "teacher_logprobs": null}]}'
    )
    row = trajectory().to_dict(packs_numbers=True)
    assert json.dumps({name: row[name] for name in ("messages", "spans")}) == golden
    assert Trajectory.from_dict(json.loads(json.dumps(row))) == trajectory()


def test_pictures_survive_the_files():
    images = (ImageRef(SHA, 1, 2, (1, 4, 4)), ImageRef("cd" * 32, 3, 1))
    content = [{"type": "text", "text": "How many?"}, PICTURE]
    played = trajectory(content, images)
    row = json.loads(json.dumps(played.to_dict(packs_numbers=True)))
    assert Trajectory.from_dict(row) == played
    assert row["spans"][0]["images"] == [
        {"sha256": SHA, "start": 1, "length": 2, "grid": [1, 4, 4]},
        {"sha256": "cd" * 32, "start": 3, "length": 1},
    ]
    assert "images" not in row["spans"][1]


@pytest.mark.parametrize(
    "images",
    [
        (ImageRef(SHA, 3, 2),),
        (ImageRef(SHA, 0, 2), ImageRef(SHA, 1, 1)),
        (ImageRef(SHA, 2, 1), ImageRef(SHA, 0, 1)),
        (ImageRef(SHA, 1, 0),),
        (ImageRef(SHA, -1, 1),),
    ],
)
def test_pictures_lie_apart_inside_of_their_span(images):
    with pytest.raises(ValueError, match="picture"):
        TokenSpan(origin="prompt", token_ids=(5, 6, 7, 8), images=images)


def test_a_policy_samples_no_pictures():
    with pytest.raises(ValueError, match="samples no pictures"):
        TokenSpan(
            origin="policy",
            token_ids=(5,),
            logprobs=(0.0,),
            policy_version=0,
            images=(ImageRef(SHA, 0, 1),),
        )


def test_contents_have_a_text_for_graders_and_one_for_people():
    content = [{"type": "text", "text": "How many? "}, PICTURE]
    assert text_of(content) == "How many? "
    assert readable(content) == "How many? [image 640x480 abab]"
    assert images_of(content) == [PICTURE]
    assert (text_of("x"), readable("x"), images_of("x")) == ("x", "x", [])
