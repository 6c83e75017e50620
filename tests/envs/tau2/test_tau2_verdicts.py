"""Verdicts, action strings and conversations, with the built-in domain and a made-up shop."""

import asyncio
import dataclasses

import pytest
from small_shop import shop_case, shop_domain, telecom_world

from areal_gym.envs.tau2.actions import parse_action, to_functional
from areal_gym.envs.tau2.benchmark_data import Action
from areal_gym.envs.tau2.judge import NoJudge
from areal_gym.envs.tau2.simulation import GREETING, Simulation
from areal_gym.envs.tau2.users.base import GIVE_UP, UserTurn
from areal_gym.envs.tau2.users.scripted_user import ScriptedUser
from areal_gym.envs.tau2.verdicts import Call, evaluate, is_solved_by_inaction


class Judge:
    """Says what it was told to say."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def judge(self, transcript, assertions):
        self.asked.append((list(transcript), list(assertions)))
        return self.answers


def judged(case, calls=(), says=(), termination="user_stop", judge=None):
    """The verdict on an episode in which the assistant made these calls and said this."""
    domain = shop_domain(case)
    world = domain.initial_world(case)
    for call in calls:
        world.call(call.requestor, call.name, call.arguments)
    return asyncio.run(
        evaluate(
            domain,
            case,
            world=world,
            calls=list(calls),
            says=[GREETING, *says],
            transcript=[],
            termination=termination,
            judge=judge or NoJudge(),
        )
    )


def gold_calls(case):
    return [Call("assistant", action.name, action.arguments) for action in case.gold_actions]


# ---- parts of a verdict -------------------------------------------------------------------------


def test_the_database_decides():
    case = shop_case()
    assert judged(case, gold_calls(case)).breakdown == {"DB": 1.0}
    verdict = judged(case, gold_calls(case)[:1])
    assert (verdict.reward, verdict.db_match, verdict.action_checks) == (0.0, False, [True, False])


def test_an_end_that_nobody_wanted_is_worth_nothing():
    case = shop_case()
    for termination in ("max_steps", "too_many_errors", "agent_error", "user_gave_up", ""):
        verdict = judged(case, gold_calls(case), termination=termination)
        assert (verdict.reward, verdict.breakdown) == (0.0, None)
    assert judged(case, gold_calls(case), termination="agent_stop").reward == 1.0


def test_without_criteria_everything_is_right():
    assert judged(shop_case(has_criteria=False)).reward == 1.0


@pytest.mark.parametrize(
    ("infos", "says", "met"),
    [
        (("1,020",), ["It costs 1,020."], [False]),  # commas go from what is said only
        (("1020",), ["It costs 1,020."], [True]),
        (("10",), ["It costs 100."], [True]),
        (("Blue Lamp", "x"), ["the BLUE lamp"], [True, False]),
        (("help",), [], [True]),  # the greeting counts
    ],
)
def test_what_was_communicated(infos, says, met):
    case = shop_case(communicate_info=infos, reward_basis=("COMMUNICATE",))
    verdict = judged(case, says=says)
    assert verdict.communicate_checks == met
    assert verdict.reward == float(all(met))


@pytest.mark.parametrize(
    ("compare_args", "arguments", "is_met"),
    [
        (None, {"a": 1, "b": 2}, True),
        (None, {"a": 1}, True),  # fewer arguments match
        (None, {}, True),
        (None, {"a": 2}, False),
        (None, {"a": 1, "c": 3}, False),
        (["a"], {"a": 1, "b": 9}, True),
        (["a"], {"b": 2}, False),
        ([], {"z": 0}, True),  # the name alone
    ],
)
def test_actions_are_compared_by_name_and_arguments(compare_args, arguments, is_met):
    gold = (Action("assistant", "calculate", {"a": 1, "b": 2}, compare_args),)
    case = shop_case(gold_actions=gold, reward_basis=("ACTION",))
    assert judged(case, [Call("user", "calculate", arguments)]).action_checks == [is_met]
    assert judged(case, [Call("user", "other", arguments)]).action_checks == [False]


def test_parts_multiply():
    case = shop_case(reward_basis=("DB", "COMMUNICATE"))
    assert judged(case, gold_calls(case), ["It is 25.5 more."]).reward == 1.0
    verdict = judged(case, gold_calls(case), ["Done."])
    assert verdict.breakdown == {"DB": 1.0, "COMMUNICATE": 0.0}
    assert verdict.reward == 0.0


def test_assertions_about_the_world():
    world = telecom_world()
    assert world.holds("user", "assert_mobile_data_status", {"expected_status": True})
    speed = {"expected_speed": 200, "expected_desc": "excellent"}
    assert world.holds("user", "assert_internet_speed", speed)
    assert not world.holds("user", "assert_internet_speed", {"expected_speed": 221})


def test_a_judge_decides_what_only_language_can_say():
    case = shop_case(
        communicate_info=(), nl_assertions=("is kind", "is brief"), reward_basis=("NL_ASSERTION",)
    )
    judge = Judge(True, False)
    verdict = judged(case, judge=judge)
    assert (verdict.reward, verdict.nl_checks, verdict.is_nl_judged) == (0.0, [True, False], True)
    assert judge.asked == [([], ["is kind", "is brief"])]
    assert judged(case, judge=Judge(True, True)).reward == 1.0


def test_without_a_judge_the_stand_in_is_flagged():
    case = shop_case(nl_assertions=("is kind",), reward_basis=("DB", "NL_ASSERTION"))
    verdict = judged(case, gold_calls(case), ["25.5"])
    assert (verdict.reward, verdict.is_nl_judged) == (1.0, False)
    verdict = judged(case, gold_calls(case), ["Done."])
    assert (verdict.reward, verdict.is_nl_judged) == (0.0, False)


def test_assertions_outside_of_the_basis_bother_no_judge():
    judge = Judge(False)
    case = shop_case(nl_assertions=("is kind",))
    verdict = judged(case, gold_calls(case), judge=judge)
    assert (verdict.reward, verdict.is_nl_judged, judge.asked) == (1.0, True, [])


def test_tasks_that_inaction_solves():
    case = shop_case()
    assert not is_solved_by_inaction(shop_domain(case), case)
    reads = dataclasses.replace(case, gold_actions=case.gold_actions[:1])
    assert is_solved_by_inaction(shop_domain(reads), reads)
    told = dataclasses.replace(reads, reward_basis=("DB", "COMMUNICATE"))
    assert not is_solved_by_inaction(shop_domain(told), told)
    failing = Action("assistant", "get_order_details", {"order_id": "none"}, None)
    fails = dataclasses.replace(case, gold_actions=(failing,))
    assert is_solved_by_inaction(shop_domain(fails), fails)


# ---- conversations ------------------------------------------------------------------------------


def conversation(turns, **limits):
    case = shop_case()
    factory = ScriptedUser.factory("Hello.", turns)
    return Simulation(shop_domain(case), case, factory, **limits)


def test_every_message_after_the_greeting_is_a_step():
    talk = conversation([UserTurn("Yes.")])
    assert talk.open() == "Hello."
    assert talk.num_steps == 1
    talk.call([Call("assistant", "list_all_product_types", {})], beside="One moment.")
    assert talk.num_steps == 3
    assert asyncio.run(talk.say("Sure?")) == "Yes."
    assert talk.num_steps == 5
    assert asyncio.run(talk.say("Done.")) == ""
    assert (talk.num_steps, talk.termination) == (7, "user_stop")
    assert talk.says == [GREETING, "One moment.", "Sure?", "Done."]


@pytest.mark.parametrize("token", ["###STOP###", "bye ###TRANSFER###", "###OUT-OF-SCOPE### x"])
def test_the_user_ends_it(token):
    talk = conversation([UserTurn(token)])
    talk.open()
    assert asyncio.run(talk.say("Hm.")) == ""
    assert talk.termination == "user_stop"


def test_a_user_that_hangs_up_is_no_success():
    talk = conversation([UserTurn(GIVE_UP)])
    talk.open()
    asyncio.run(talk.say("Hm."))
    assert talk.termination == "user_gave_up"
    assert asyncio.run(talk.verdict(NoJudge())).reward == 0.0


def test_steps_and_errors_are_limited():
    talk = conversation([UserTurn("Go on.")] * 50, max_steps=9)
    talk.open()
    while talk.termination is None:
        asyncio.run(talk.say("Hm."))
    assert (talk.num_steps, talk.termination) == (9, "max_steps")
    talk = conversation([], max_errors=3)
    talk.open()
    talk.call([Call("assistant", "x", {}), Call("assistant", "y", {})])
    assert talk.termination is None
    talk.misspell("<tool_call>{")
    assert talk.termination == "too_many_errors"


def test_users_that_call_tools_for_ever_are_stopped():
    talk = conversation([UserTurn(calls=[("toggle_data", {})])] * 500, max_steps=20, max_errors=99)
    talk.open()
    assert asyncio.run(talk.say("Hm.")) == ""
    assert talk.termination == "max_steps"


# ---- action strings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "name", "arguments"),
    [
        ("f(a='x', b=-2, c=[1, 'y'])", "f", {"a": "x", "b": -2, "c": [1, "y"]}),
        ("  f (a=JFK)  ", "f", {"a": "JFK"}),
        ("f('x', a=1)", "f", {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1}}', "f", {"a": 1}),
    ],
)
def test_calls_in_action_strings(action, name, arguments):
    assert parse_action(action) == (None, name, arguments)


@pytest.mark.parametrize(
    "action",
    [
        "Sure (no problem)",
        "f(a=g(1))",
        "f(a=1)\nand more",
        '{"name": "f"}',
        '{"name": "f", "arguments": {}, "requestor": "somebody"}',
        "[" * 100_000,
        "f(" + "(" * 10_000 + ")" * 10_000 + ")",
        "f(a=" + "-" * 50_000 + "1)",
    ],
)
def test_everything_else_is_text(action):
    assert parse_action(action).content == action


def test_blank_actions_are_refused():
    with pytest.raises(ValueError, match="cannot be empty"):
        parse_action(" \n")


def test_calls_are_written_as_they_are_read():
    call = ("f", {"a": "it's", "b": None, "c": 1.5})
    text = to_functional(*call)
    assert text == r"f(a='it\'s', b=None, c=1.5)"
    assert parse_action(text) == (None, *call)
