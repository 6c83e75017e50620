"""Pictures at the gateway: three APIs, what is refused and why, and histories that go on."""

import asyncio
import base64
import io

import pytest

from areal_gym.chat import Renderer
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.gateway.session import SessionOptions
from areal_gym.images import use_image_store
from areal_gym.recording import Recorder
from tests._support.scripted_gateway import RewardOnlyEpisode, post, running_gateway
from tests._support.tiny_vision import picture, save_files


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3_vl")
    save_files("qwen3_vl", root)
    return Renderer.from_checkpoint(root)


def encoded(image, kind="PNG"):
    out = io.BytesIO()
    image.save(out, kind)
    return base64.b64encode(out.getvalue()).decode()


PNG = encoded(picture(1, 96, 64))
URL = f"data:image/png;base64,{PNG}"


def chat(url=URL, num=1):
    shown = [{"type": "image_url", "image_url": {"url": url}}] * num
    content = [{"type": "text", "text": "What? "}, *shown]
    return "/chat/completions", {"messages": [{"role": "user", "content": content}]}


def responses(url=URL):
    content = [
        {"type": "input_text", "text": "What? "},
        {"type": "input_image", "image_url": url},
    ]
    return "/responses", {"input": [{"role": "user", "content": content}]}


def anthropic(data=PNG, media_type="image/png", kind="base64"):
    source = {"type": kind, "media_type": media_type, "data": data}
    content = [{"type": "text", "text": "What? "}, {"type": "image", "source": source}]
    turn = {"role": "user", "content": content}
    return "/messages", {"max_tokens": 9, "messages": [turn]}


def ask(renderer, tmp_path, *requests):
    """Send requests one after the other; return the replies and the recorder."""

    async def use():
        async with running_gateway() as (gateway, _):
            engine = ScriptedEngine(
                lambda question: "seven",
                tokenizer=renderer.tokenizer,
                end_of_turn_id=renderer.end_of_turn_id,
            )
            recorder = Recorder(engine, renderer, SamplingParams())
            session = gateway.open_session(
                recorder, SessionOptions(), episode=RewardOnlyEpisode(recorder)
            )
            return [await post(session, *request) for request in requests], recorder

    with use_image_store(tmp_path):
        return asyncio.run(use())


@pytest.mark.parametrize("request_of", [chat, responses, anthropic])
def test_pictures_of_all_apis_become_one_row(renderer, tmp_path, request_of):
    replies, recorder = ask(renderer, tmp_path, request_of())
    assert replies[0][0] == 200, replies[0][1]
    prompt = recorder.outcome()["spans"][0]
    (image,) = prompt.images
    assert (image.length, image.grid) == (24, (1, 8, 12))
    other, _ = ask(renderer, tmp_path, chat())
    assert other[0][0] == 200


def test_a_history_with_pictures_goes_on(renderer, tmp_path):
    route, body = chat()
    follow = [
        *body["messages"],
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
    ]
    other = [{**chat(f"data:image/png;base64,{encoded(picture(2, 96, 64))}")[1]["messages"][0]}]
    other += follow[1:]
    replies, recorder = ask(
        renderer,
        tmp_path,
        (route, body),
        (route, {"messages": follow}),
        (route, {"messages": other}),
    )
    assert [status for status, *_ in replies] == [200] * 3
    spans = recorder.outcome()["spans"]
    assert [(s.branch, s.origin, len(s.images)) for s in spans if s.origin != "policy"] == [
        (0, "prompt", 1),
        (0, "env", 1),
        (1, "prompt", 2),
    ], "equal ids with another picture are another dialogue"


def test_tool_results_have_pictures(renderer, tmp_path):
    call = {"id": "c1", "type": "tool_use", "name": "crop", "input": {}}
    image = anthropic()[1]["messages"][0]["content"][1]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image]}
    turns = [
        {"role": "user", "content": "Crop."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    replies, recorder = ask(renderer, tmp_path, ("/messages", {"max_tokens": 9, "messages": turns}))
    assert replies[0][0] == 200, replies[0][1]
    assert len(recorder.outcome()["spans"][0].images) == 1


GIF = encoded(picture(1), "GIF")
EMPTY = (
    "/chat/completions",
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
)
WIDE = encoded(picture(1, 2049, 2049, 3))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (chat("http://127.0.0.1:1/x.png"), "a http: URL is not fetched"),
        (chat("https://example.org/x.png"), "a https: URL is not fetched"),
        (chat("file:///etc/passwd"), "a file: URL is not fetched"),
        (responses("http://169.254.169.254/"), "a http: URL is not fetched"),
        (chat("data:image/png;base64,AAAA"), "cannot be read"),
        (chat(f"data:image/gif;base64,{GIF}"), "cannot be read"),
        (chat(f"data:image/jpeg;base64,{PNG}"), "its bytes are image/png"),
        (anthropic(media_type="image/webp"), "its bytes are image/png"),
        (anthropic(kind="url"), "is not fetched"),
        (anthropic(data="%%%"), "base64 of a picture is broken"),
        (chat(f"data:image/png;base64,{WIDE}"), "at most 4,194,304 pixels"),
        (chat(num=33), "more than 32 pictures"),
        (EMPTY, "has no picture in it"),
        (("/completions", {"prompt": "a <|image_pad|> b"}), "stands for an image"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_with_the_reason(renderer, tmp_path, request_, reason):
    replies, recorder = ask(renderer, tmp_path, request_)
    status, body, _ = replies[0]
    assert status == 400
    assert reason in body["error"]["message"]
    assert recorder.outcome()["spans"] == ()


@pytest.mark.parametrize("request_", [chat(), responses(), anthropic()])
def test_a_policy_without_eyes_refuses_pictures(request_):
    async def use():
        async with running_gateway() as (_, session):
            return await post(session, *request_)

    status, body, _ = asyncio.run(use())
    assert status == 400
    assert "this policy cannot see" in body["error"]["message"]
