"""A single SGLang server: requests, refusals and malformed answers."""

import asyncio
import json

import pytest
from aiohttp import web

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.server_client import RefusedError
from areal_gym.engines.sglang import FakeSGLangServer
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.engines.sglang.sglang_replies import load_answer, read_answer
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from tests._support.sglang_servers import count, fake, until, website


def post_to(url, route="/x", body=None, **options):
    async def post():
        server = SGLangClient(url)
        try:
            return await server.post(route, body or {}, **options)
        finally:
            await server.aclose()

    return post()


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (400, {"error": {"message": "too long"}}, "HTTP 400.*too long"),
        (200, {"success": False, "message": "no such path"}, "no such path"),
        (400, {"success": False, "error_message": "already loaded"}, "already loaded"),
        (422, {"detail": "field required"}, "HTTP 422.*field required"),
        (500, None, "HTTP 500.*no reason given"),
        (400, ["odd"], "odd"),
    ],
)
def test_every_form_of_refusal_quotes_the_server(status, answer, words):
    async def handle(request):
        return web.json_response(answer, status=status)

    async def scenario():
        async with website(handle) as url:
            with pytest.raises(RefusedError, match=words) as caught:
                await post_to(url)
            assert caught.value.status == status

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ({"body": b"null", "content_type": "application/json"}, {}),
        ({"body": b""}, {"message": ""}),
        ({"text": "Cache flushed.\n"}, {"message": "Cache flushed."}),
        ({"text": '{"a": 1}', "content_type": "application/json"}, {"a": 1}),
    ],
)
def test_plain_text_answers_are_accepted(response, answer):
    async def handle(request):
        return web.Response(**response)

    async def scenario():
        async with website(handle) as url:
            assert await post_to(url) == answer

    asyncio.run(scenario())


@pytest.mark.parametrize("value", ["\ud800", 2**70, 1.5, "é"])
def test_bodies_of_requests_are_json(value):
    async def scenario():
        async def handle(request):
            return web.json_response({"got": json.loads(await request.read())})

        async with website(handle) as url:
            assert (await post_to(url, "/generate", {"a": [value]}))["got"] == {"a": [value]}

    asyncio.run(scenario())


def test_unanswered_request_times_out_as_unreachable():
    async def handle(request):
        await asyncio.sleep(60)

    async def scenario():
        async with website(handle) as url:
            with pytest.raises(EngineUnreachableError, match=r"within 0\.05 s"):
                await post_to(url, timeout_s=0.05)

    asyncio.run(scenario())


def test_closing_fails_waiting_requests():
    async def scenario():
        asked = asyncio.Event()

        async def handle(request):
            asked.set()
            await asyncio.sleep(60)

        async with website(handle) as url:
            server = SGLangClient(url)
            waiting = asyncio.create_task(server.post("/x", {}))
            await asked.wait()
            await server.aclose()
            with pytest.raises(EngineUnreachableError):
                await waiting
            await server.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["", "ftp://a:1", "http://", "http://a:port", "http://a:99999"])
def test_invalid_url_is_refused(url):
    with pytest.raises(ConfigError, match="is not the URL"):
        SGLangClient(url)


def test_short_urls_are_completed():
    assert SGLangClient("a:30000/").url == "http://a:30000"
    assert "--host a --port 443" in SGLangClient("https://a").start_command


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"finish_reason": {"type": "surprise"}},
        {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[]]},
        {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 5, None]],
            "weight_versions": [],
        },
    ],
    ids=["empty", "finish", "row", "spans"],
)
def test_incomplete_generation_is_an_error(meta):
    with pytest.raises(EngineError):
        read_answer({"meta_info": meta}, 0)


ROWS = [[-1.5, 7, None], [-0.25, 8, None], [float("-inf"), 9, None]]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"weight_versions": [{"version": "3", "start": 0, "end": 3}]},
        {"output_top_logprobs": [[[-1.5, 7, None]], [[-0.25, 8, None]]]},
        {"input_token_logprobs": [[None, 1, None], [-2.0, 2, None]]},
    ],
    ids=["last", "versions", "top", "prompt"],
)
@pytest.mark.parametrize(
    "rows",
    [ROWS[:2], ROWS, [[-1.5, 7, "],["], [-0.25, 8, "]]"]], [[-1.0, 5]], [[]]],
    ids=["rows", "infinity", "texts", "pairs", "empty"],
)
def test_rows_of_tokens_are_read_as_parsed_json_is(rows, more, separators):
    text = 'it says "output_token_logprobs":[[1,2,null]] and ]]'
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": rows, **more}
    answer = {"text": text, "output_ids": [7, 8], "meta_info": meta}
    body = json.dumps(answer, separators=separators).encode()
    read = load_answer(body)
    assert read["text"] == text
    assert {**read["meta_info"], "output_token_logprobs": rows} == meta

    def outcome(of):
        try:
            return read_answer(of, 3)
        except EngineError:
            return None

    assert outcome(read) == outcome(answer)
    assert (outcome(read) is None) == (rows == [[]])


def test_what_is_no_answer_stays_as_it_is():
    several = {"output_ids": [[7], [8]], "meta_info": {"output_token_logprobs": [[[-1.0, 5]]]}}
    for answer in ([{"meta_info": {"output_token_logprobs": ROWS[:2]}}], "[[", {"a": 1}, several):
        body = json.dumps(answer, separators=(",", ":")).encode()
        assert load_answer(body) == answer
    with pytest.raises(ValueError, match=r"JSON|Expecting"):
        load_answer(b'{"meta_info":{"output_token_logprobs":[[1,2,null]]')


def test_foreign_names_of_weights_are_no_versions():
    rows = {"finish_reason": {"type": "stop"}, "output_token_logprobs": ROWS[:2]}
    spans = [{"version": "20261127093000", "start": 0, "end": 2}]
    reply = read_answer({"meta_info": {**rows, "weight_versions": spans}}, 0)
    assert reply.versions == (-1, -1)


def test_probe_recognises_server_versions():
    async def scenario():
        facts = {}
        for version in ("0.5.18", "0.5.20", "0.5.23"):
            async with fake(emulate=version) as running:
                server = SGLangClient(running.url)
                facts[version] = (await server.probe()).can_set_aside, server.needs_update_session
                await server.aclose()
        assert facts == {
            "0.5.18": (False, False),
            "0.5.20": (False, False),
            "0.5.23": (True, True),
        }

    asyncio.run(scenario())


# ---- the fake server, beyond what the engine uses -----------------------------------------------


def test_fake_answers_and_refuses_as_sglang_does():
    async def scenario():
        async with FakeSGLangServer(ScriptedEngine(count, max_context=50)) as running:
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}
            answer = await post_to(running.url, "/generate", body)
            assert answer["output_ids"] == [3, 4, 5]
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
            assert answer["meta_info"]["weight_versions"] == [
                {"version": "default", "start": 0, "end": 3}
            ]
            assert "output_token_logprobs" not in answer["meta_info"]
            for wrong, words in (
                ({"input_ids": []}, "cannot be empty"),
                ({"text": "hello"}, "takes input_ids"),
                ({"input_ids": [1] * 44}, "maximum allowed length"),
                ({"input_ids": [1] * 43, "sampling_params": {"max_new_tokens": 9}}, "50 tokens"),
                ({"input_ids": [1], "stream": True}, "does not stream"),
            ):
                with pytest.raises(RefusedError, match=words):
                    await post_to(running.url, "/generate", wrong)
            with pytest.raises(RefusedError, match="HTTP 400"):
                await post_to(running.url, "/pause_generation", {"mode": "nope"})

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_fake_pauses_generation(mode):
    async def scenario():
        async with fake(latency_s=0.002) as running:
            sampling = {"max_new_tokens": 100}
            request = {"input_ids": [1, 2], "sampling_params": sampling, "rid": "a"}
            before = asyncio.create_task(post_to(running.url, "/generate", request))
            await until(lambda: running.num_running)
            await post_to(running.url, "/pause_generation", {"mode": mode})
            held = asyncio.create_task(post_to(running.url, "/generate", {**request, "rid": "b"}))
            await asyncio.sleep(0.03)
            assert before.done() == (mode == "abort")
            assert not held.done()
            await post_to(running.url, "/continue_generation")
            first, second = await before, await held
            assert len(second["output_ids"]) == 100
            assert first["meta_info"]["num_retractions"] == (mode == "retract")
            kind = first["meta_info"]["finish_reason"]["type"]
            assert kind == ("abort" if mode == "abort" else "length")
            assert (len(first["output_ids"]) == 100) == (mode != "abort")

    asyncio.run(scenario())


def test_fake_aborts_one_of_two_requests():
    async def scenario():
        async with fake(latency_s=0.002) as running:
            sampling = {"max_new_tokens": 100}
            calls = [
                asyncio.create_task(
                    post_to(
                        running.url,
                        "/generate",
                        {"input_ids": [1, 2], "sampling_params": sampling, "rid": rid},
                    )
                )
                for rid in "ab"
            ]
            await until(lambda: running.num_running == 2)
            await post_to(running.url, "/abort_request", {"rid": "a"})
            kinds = [(await call)["meta_info"]["finish_reason"]["type"] for call in calls]
            assert kinds == ["abort", "length"]

    asyncio.run(scenario())
