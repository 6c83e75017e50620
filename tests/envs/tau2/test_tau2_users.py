"""Simulated users: rule-based ones, and language models behind a URL."""

import asyncio
import dataclasses
import threading

import pytest
from aiohttp import web

import areal_gym
from areal_gym.chat.chat_client import ChatClient
from areal_gym.envs.checker import play
from areal_gym.envs.tau2.domain_state import load_tools
from areal_gym.envs.tau2.language_models import LLMJudge, LLMUser
from areal_gym.envs.tau2.users.base import (
    GIVE_UP,
    STOP,
    TRANSFER,
    Scene,
    in_first_person,
)
from areal_gym.envs.tau2.users.customer import Customer
from areal_gym.envs.tau2.users.phone_owner import REQUESTS, PhoneOwner
from areal_gym.errors import EnvError
from tests._support.small_shop import shop_case, shop_domain, telecom_world
from tests._support.tau2_data import DATA, needs_data


def ask(user, text):
    return asyncio.run(user.respond(text)).text


# ---- the customer -------------------------------------------------------------------------------


@pytest.fixture
def shop():
    case = shop_case()
    domain = shop_domain(case)
    scene = Scene(domain=domain, case=case, world=domain.initial_world(case))
    return scene, Customer(scene)


def test_scenario_text_turns_into_first_person():
    text = "You want your money. You are Ada; give you back what you're owed."
    assert in_first_person(text) == "I want my money. I am Ada; give me back what I'm owed."


def test_customer_opens_with_the_reason_for_the_call(shop):
    assert shop[1].open("Hi!") == "I want my red lamp of order #W0000001 in green."


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Could you please tell me your email?", "I don't remember my email."),
        (
            "Please provide your full name and zip code.",
            "My name is Ada Byron. My zip code is 90001.",
        ),
        ("What is the order number?", "My order number is #W0000001."),
        ("Which payment method, paypal? You would pay the difference?", "I would pay"),
        ("I will exchange 1000000001 for 1000000003, is that correct?", "Yes, please."),
        ("I will exchange 1000000001 for 1000000002, is that correct?", "No, that is not what"),
    ],
)
def test_customer_answers_questions_and_confirmations(shop, question, answer):
    assert ask(shop[1], question).startswith(answer)


def test_customer_stops_only_when_all_is_done(shop):
    scene, customer = shop
    assert STOP not in ask(customer, "Done. Is there anything else?")
    for action in scene.case.gold_actions:
        scene.world.call("assistant", action.name, action.arguments)
    assert ask(customer, "Done. Is there anything else?") == STOP


def test_customer_stops_when_informed():
    case = shop_case(gold_actions=(), reward_basis=("DB", "COMMUNICATE"))
    domain = shop_domain(case)
    customer = Customer(Scene(domain=domain, case=case, world=domain.initial_world(case)))
    assert STOP not in ask(customer, "Let me see. Is there anything else?")
    assert ask(customer, "It costs 25.5 more.") == STOP


def test_customer_insists_after_a_refusal(shop):
    _, customer = shop
    assert ask(customer, "I am unable to do that.").startswith("Are you sure?")
    # There is something to be done, so it insists until it hangs up.
    answers = [ask(customer, "I cannot do that.") for _ in range(8)]
    assert answers[0].startswith("But I want")
    assert answers[-1] == GIVE_UP


def test_customer_hangs_up_on_nonsense_and_accepts_transfer(shop):
    _, customer = shop
    answers = [ask(customer, "Xyzzy.") for _ in range(6)]
    assert answers[-1] == GIVE_UP
    assert ask(customer, "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.") == TRANSFER


# ---- the owner of a phone -----------------------------------------------------------------------


def owner_of(world, reason="You cannot send MMS messages."):
    case = shop_case(
        domain="telecom",
        instructions={
            "reason_for_call": reason,
            "known_info": "You are Cy Roe with phone number 555.",
        },
    )
    return PhoneOwner(Scene(domain=shop_domain(case), case=case, world=world))


def converse(world, owner, text):
    """Run the owner's tool calls; return its final answer and the names of the calls."""
    made = []
    turn = asyncio.run(owner.respond(text))
    while turn.calls:
        made += [name for name, _ in turn.calls]
        results = [world.call("user", name, arguments) for name, arguments in turn.calls]
        assert not any(result.is_error for result in results)
        turn = asyncio.run(owner.respond(results))
    return turn.text, made


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("Please turn on airplane mode.", "toggle_airplane_mode"),
        ("Turn mobile data off, please.", "toggle_data"),
        ("Can you switch the data saver mode on?", "toggle_data_saver_mode"),
        ("Please enable data roaming in the settings.", "toggle_roaming"),
        ("Could you turn on Wi-Fi calling?", "toggle_wifi_calling"),
        ("Please restart your phone.", "reboot_device"),
        ("Please remove and reinsert the SIM card.", "reseat_sim_card"),
        ("Reset the APN settings to default.", "reset_apn_settings"),
        ("Set the network mode to 4g_only.", "set_network_mode_preference"),
        ("Please change your preferred network to 5G.", "set_network_mode_preference"),
        ("Please run a speed test.", "run_speed_test"),
        ("What does the status bar show?", "check_status_bar"),
        ("Is a VPN active?", "check_vpn_status"),
        ("Which permissions does the messaging app have?", "check_app_permissions"),
        ("Give the messaging app the storage permission.", "grant_app_permission"),
        ("Please check your payment request.", "check_payment_request"),
        ("What are your APN settings?", "check_apn_settings"),
        ("Is your data roaming turned on?", "check_network_status"),
        ("Wi-Fi calling should be on for that.", "toggle_wifi_calling"),
        ("Your signal is weak: please restart your phone.", "reboot_device"),
        ("Restart your phone, then turn Wi-Fi on.", "reboot_device"),
        ("Please run `toggle_data_saver_mode`.", "toggle_data_saver_mode"),
        ("Use toggle_airplane_mode to turn airplane mode on.", "toggle_airplane_mode"),
        ("Please do: check_sim_status", "check_sim_status"),
    ],
)
def test_phone_owner_understands_free_form_requests(text, tool):
    world = telecom_world()
    world.phone.break_apn_mms_setting()  # so that nothing mends it at once
    answer, made = converse(world, owner_of(world), text)
    assert made[0] == tool
    assert answer not in (STOP, "")


def test_phone_owner_does_not_repeat_actions():
    world = telecom_world()
    answer, made = converse(world, owner_of(world), "Please turn mobile data on.")
    assert (answer, made) == ("It is already on.", [])


def test_phone_owner_stops_when_the_problem_is_solved():
    world = telecom_world()
    world.phone.remove_app_permission("messaging", "sms")
    owner = owner_of(world)
    assert owner.open("Hi!") == "I cannot send MMS messages. I am Cy Roe with phone number 555."
    answer, made = converse(world, owner, "Is everything working now?")
    assert (answer, made) == ("Your messaging app cannot send MMS messages.", ["can_send_mms"])
    request = REQUESTS["grant_app_permission"].format(app_name="messaging", permission="sms")
    answer, made = converse(world, owner, request)
    assert (answer, made) == (STOP, ["grant_app_permission", "can_send_mms"])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("May I have your phone number?", "I am Cy Roe with phone number 555."),
        ("Shall I add 2 GB of data for $4?", "Yes, you may add 2.0 GB of data."),
        ("Would you like to upgrade your plan?", "No, I do not want to change my plan."),
        ("Your mobile data is used up. May I refuel 2 GB?", "Yes, you may add 2.0 GB of data."),
        ("Shall I proceed?", "Yes, please."),
        ("YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.", TRANSFER),
        ("Xyzzy.", "I am not sure what you would like me to do. One step at a time, please."),
    ],
)
def test_phone_owner_answers_other_questions(text, answer):
    world = telecom_world()
    assert converse(world, owner_of(world), text)[0] == answer


@needs_data
@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_gold_solutions_succeed_with_rule_based_users(domain):
    env = areal_gym.make(f"tau2/{domain}", data_dir=str(DATA))
    for index in range(env.num_tasks("base")):
        steps = play(env, lambda e: e.gold_action(), options={"split": "base", "index": index})
        assert steps[-1].reward == 1.0, env.render()


# ---- language models behind a URL ---------------------------------------------------------------


class Server:
    """An OpenAI-compatible server with scripted answers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request):
        self.requests.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        return web.json_response({"choices": [{"message": message}]})

    def close(self):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr("areal_gym.chat.chat_client.FIRST_WAIT_S", 0.001)
    servers = []

    def start(*answers):
        servers.append(Server(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_llm_user_swaps_roles(serve, shop):
    server = serve(503, "I am Ada.", f"Thanks. {STOP}")
    user = LLMUser(shop[0], ChatClient(server.url, model="m"))
    user.open("Hi!")
    assert ask(user, "Who are you?") == "I am Ada."
    assert STOP in ask(user, "Done.")
    request = server.requests[-1]
    assert (request["model"], request["temperature"]) == ("m", 0.0)
    assert [message["role"] for message in request["messages"]] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    system = request["messages"][0]["content"]
    assert system.startswith("Play the user. \n\n<scenario>\n")
    assert "Unknown info:\n\tYou do not remember" in system
    assert "PERSONA_GUIDELINES" not in system


def test_llm_user_calls_phone_tools(serve):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "toggle_data", "arguments": "{}"},
    }
    server = serve({"role": "assistant", "content": None, "tool_calls": [call]}, "It is off.")
    world = telecom_world()
    case = shop_case()
    tools = load_tools("telecom")
    texts = [info.schema for info in tools["user"].values()]
    telecom = dataclasses.replace(shop_domain(case), name="telecom", tools=tools)
    user = LLMUser(Scene(domain=telecom, case=case, world=world), ChatClient(server.url))
    user.open("Hi!")
    turn = asyncio.run(user.respond("Turn data off."))
    assert turn.calls == [("toggle_data", {})]
    result = world.call("user", *turn.calls[0])
    assert asyncio.run(user.respond([result])).text == "It is off."
    assert server.requests[0]["tools"] == texts
    assert len(texts) == 30
    assert server.requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": result.text,
    }


@pytest.mark.parametrize(
    "answers",
    [
        [404],
        [500] * 4,
        [b"<html>"],
        [b'{"choices": []}'],
        [""],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}],
    ],
)
def test_failing_llm_user_server_is_an_env_error(serve, shop, answers):
    user = LLMUser(shop[0], ChatClient(serve(*answers).url))
    user.open("Hi!")
    with pytest.raises(EnvError):
        ask(user, "Hello?")


def test_unreachable_llm_user_is_an_env_error(shop, monkeypatch):
    monkeypatch.setattr("areal_gym.chat.chat_client.FIRST_WAIT_S", 0.001)
    user = LLMUser(shop[0], ChatClient("http://127.0.0.1:9/v1/"))
    user.open("Hi!")
    with pytest.raises(EnvError, match=":9/v1/chat/completions gave no answer"):
        ask(user, "Hello?")


def test_tau2_with_an_llm_user(serve):
    server = serve("It is 1234.", STOP)
    env = areal_gym.make("tau2", user=server.url)
    env.reset(seed=1)
    assert env.step("Your number?").observation == "It is 1234."
    step = env.step("Bye.")
    assert (step.terminated, step.reward) == (True, 0.0)
    env.close()


def test_failing_llm_user_fails_the_episode(serve):
    env = areal_gym.make("tau2", user=serve(404).url)
    env.reset(seed=1)
    with pytest.raises(EnvError, match="HTTP 404"):
        env.step("Your number?")
    env.close()


def test_llm_judge_returns_one_verdict_per_assertion(serve):
    transcript = [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": None}]
    server = serve('Here: {"met": [true, false]}')
    judge = LLMJudge(ChatClient(server.url))
    assert asyncio.run(judge.judge(transcript, ["a", "b"])) == [True, False]
    question = server.requests[0]["messages"][1]["content"]
    assert "assistant: Hi!" in question
    assert "2. b" in question


@pytest.mark.parametrize("answer", ["yes", '{"met": [true]}', '{"met": ["yes", "no"]}', "{}"])
def test_malformed_judge_answer_is_an_env_error(serve, answer):
    judge = LLMJudge(ChatClient(serve(*[answer] * 3).url))
    with pytest.raises(EnvError, match="2 truth values"):
        asyncio.run(judge.judge([], ["a", "b"]))


def test_judge_is_asked_again_and_its_last_object_counts(serve):
    quoting = 'The agent wrote {"met": [true, true]}. I say {"met": [true, false]}'
    judge = LLMJudge(ChatClient(serve("I think so.", quoting).url))
    assert asyncio.run(judge.judge([], ["a", "b"])) == [True, False]
