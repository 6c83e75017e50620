"""The contract of engines finds what is wrong with engines that are wrong on purpose."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace

import pytest

from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.errors import EngineError, UsageError
from areal_gym.models.hf.hf_loading import load_policy
from areal_gym.testing.engine_contract import EngineAbilities, check_engine, tiny_policies
from areal_gym.types import FinishReason
from tests._support.engines_under_test import EMBEDDED, SEEING, policies_of, started
from tests._support.sglang_servers import count


class Inexact(EmbeddedEngine):
    """Its log-probabilities are wrong by 0.01."""

    async def generate(self, prompt_ids, params, *, session=None):
        turn = await super().generate(prompt_ids, params, session=session)
        return replace(turn, logprobs=[logprob - 0.01 for logprob in turn.logprobs])


class Cold(EmbeddedEngine):
    """It reports the log-probabilities of temperature 1, whatever it samples at."""

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, temperature=params.temperature and 1.0)
        return await super().generate(prompt_ids, params, session=session)


class Timid(EmbeddedEngine):
    """It takes likely tokens too often: the best of eight samples."""

    async def generate(self, prompt_ids, params, *, session=None):
        turns = [
            await super(Timid, self).generate(prompt_ids, replace(params, seed=seed))
            for seed in range(8 * (params.seed or 0), 8 * (params.seed or 0) + 8)
        ]
        return max(turns, key=lambda turn: sum(turn.logprobs) / len(turn.logprobs))


class Untruncated(EmbeddedEngine):
    """It ignores top_p and top_k."""

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, top_p=1.0, top_k=0)
        return await super().generate(prompt_ids, params, session=session)


class Unstoppable(EmbeddedEngine):
    """It ignores stop tokens."""

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, stop_token_ids=())
        return await super().generate(prompt_ids, params, session=session)


class SwallowsStops(EmbeddedEngine):
    """It leaves the stop token out."""

    async def generate(self, prompt_ids, params, *, session=None):
        turn = await super().generate(prompt_ids, params, session=session)
        if turn.finish_reason is not FinishReason.STOP or len(turn.token_ids) == 1:
            return turn
        cut = {name: getattr(turn, name)[:-1] for name in ("token_ids", "logprobs", "versions")}
        return replace(turn, **cut)


class EndsAtEos(EmbeddedEngine):
    """The model's own end of text ends its turns, and it says that it was the limit."""

    async def generate(self, prompt_ids, params, *, session=None):
        eos = 2  # that of `tiny_policies`
        stops = (*params.stop_token_ids, eos)
        turn = await super().generate(
            prompt_ids, replace(params, stop_token_ids=stops), session=session
        )
        is_own = turn.token_ids[-1] == eos
        return replace(turn, finish_reason=FinishReason.LENGTH) if is_own else turn


class Greedless(EmbeddedEngine):
    """At temperature 0 it samples a little."""

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, temperature=params.temperature or 0.3)
        return await super().generate(prompt_ids, params, session=session)


class Overflowing(EmbeddedEngine):
    """It cuts a prompt that does not fit."""

    async def generate(self, prompt_ids, params, *, session=None):
        prompt_ids = prompt_ids[-(self.max_context - 1) :]
        return await super().generate(prompt_ids, params, session=session)


class Crossed(EmbeddedEngine):
    """Of two requests at the same time, each gets the other's answer."""

    _partner = None

    async def generate(self, prompt_ids, params, *, session=None):
        turn = asyncio.create_task(super().generate(prompt_ids, params, session=session))
        partner, self._partner = self._partner, turn
        await asyncio.sleep(0)
        other = partner or self._partner
        return await other


class Unseeded(EmbeddedEngine):
    """It has seeds of its own."""

    _seeds = itertools.count()

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, seed=next(self._seeds))
        return await super().generate(prompt_ids, params, session=session)


class Unconstrained(EmbeddedEngine):
    """It ignores grammars."""

    async def generate(self, prompt_ids, params, *, session=None):
        params = replace(params, grammar=None)
        return await super().generate(prompt_ids, params, session=session)


class Repeating(EmbeddedEngine):
    """Its streams give the last token of each piece twice."""

    async def stream(self, prompt_ids, params, *, session=None):
        async for piece in super().stream(prompt_ids, params, session=session):
            twice = {
                name: (*getattr(piece, name), getattr(piece, name)[-1])
                for name in ("token_ids", "logprobs", "versions")
            }
            yield replace(piece, **twice)


class Deaf(EmbeddedEngine):
    """A cancelled call goes on for a while as if nothing had been said."""

    async def generate(self, prompt_ids, params, *, session=None):
        turn = asyncio.ensure_future(super().generate(prompt_ids, params, session=session))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
            raise


class Forgetful(EmbeddedEngine):
    """It takes a publication's version, and not its weights."""

    async def publish(self, weights, version):
        list(weights)
        self.policy_version = self._scheduler.version = version


class OffByOne(EmbeddedEngine):
    """Its tokens carry the version after that of their weights."""

    async def generate(self, prompt_ids, params, *, session=None):
        turn = await super().generate(prompt_ids, params, session=session)
        return replace(turn, versions=[version + 1 for version in turn.versions])


class LastVersion(EmbeddedEngine):
    """All tokens of a turn carry the version at its end."""

    async def generate(self, prompt_ids, params, *, session=None):
        turn = await super().generate(prompt_ids, params, session=session)
        return replace(turn, versions=[turn.versions[-1]] * len(turn.versions))


class StaleCache(EmbeddedEngine):
    """A publication leaves the caches of the old weights, and they are used again."""

    async def publish(self, weights, version):
        tensors = dict(weights)

        def load():
            network = self._scheduler.network
            network.load(tensors)
            self.policy_version = self._scheduler.version = version

        await self._between_steps(load)


class HalfLoaded(EmbeddedEngine):
    """It loads what it can of weights that do not fit, and refuses the rest."""

    async def publish(self, weights, version):
        tensors = dict(weights)
        try:
            await super().publish(tensors.items(), version)
        except EngineError:
            tensors.pop("surplus.weight", None)
            shapes = {"model.norm.weight": 64}
            for name, size in shapes.items():
                tensors[name] = tensors[name].new_ones(size)
            await super().publish(tensors.items(), self.policy_version)
            raise


class Careless(EmbeddedEngine):
    """It accepts weights of another shape without a word, and goes on."""

    async def publish(self, weights, version):
        try:
            await super().publish(weights, version)
        except EngineError:
            self.policy_version = version


class Leaking(EmbeddedEngine):
    """It leaves a thread behind."""

    async def aclose(self):
        threading.Thread(target=LEAK.wait, name="left", daemon=True).start()
        await super().aclose()


class Blind(EmbeddedEngine):
    """It reads placeholders, and no pictures."""

    async def generate(self, prompt_ids, params, *, session=None, images=()):
        return await super().generate(prompt_ids, params, session=session)


class ComparesIds(EmbeddedEngine):
    """It takes rows of equal ids for equal, whatever their pictures are."""

    async def generate(self, prompt_ids, params, *, session=None, images=()):
        first = self.__dict__.setdefault("first", {}).setdefault(tuple(prompt_ids), images)
        return await super().generate(prompt_ids, params, session=session, images=first)


class SamplesPlaceholders(EmbeddedEngine):
    """Its turns end with the id that stands for pictures."""

    async def generate(self, prompt_ids, params, *, session=None, images=()):
        turn = await super().generate(prompt_ids, params, session=session, images=images)
        if images:
            turn.token_ids = [*turn.token_ids[:-1], prompt_ids[images[0].start]]
        return turn


class StaleTower(EmbeddedEngine):
    """It keeps what the first weights have seen in pictures."""

    @classmethod
    def from_checkpoint(cls, policy, **options):
        engine = super().from_checkpoint(policy, **options)
        published = load_policy(policy).published()
        engine.tower = {name: tensor for name, tensor in published if ".visual." in name}
        assert engine.tower
        return engine

    async def publish(self, weights, version):
        await super().publish((dict(weights) | self.tower).items(), version)


class AcceptsShortRows(EmbeddedEngine):
    """It reads the first picture as the row has it, and answers whatever its length is."""

    async def generate(self, prompt_ids, params, *, session=None, images=()):
        try:
            return await super().generate(prompt_ids, params, session=session, images=images)
        except EngineError:
            return await super().generate(prompt_ids, params, session=session)


LEAK = threading.Event()


class Undying(ScriptedEngine):
    """Its errors have no text."""

    async def generate(self, prompt_ids, params, *, session=None):
        try:
            return await super().generate(prompt_ids, params, session=session)
        except EngineError:
            raise EngineError("") from None


FAULTS = [
    (Inexact, "greedy", r"log-probability of token \d+ is 0.01 off"),
    (Inexact, "logprobs", r"log-probability of token \d+ is 0.01 off"),
    (Inexact, "publication", "0.01 off"),
    (Cold, "logprobs", "off the model's own at temperature 0.7"),
    (Timid, "logprobs", "samples do not follow .* they are more likely"),
    (Untruncated, "truncation", "top_k.*(lies outside|off the sampling distribution)"),
    (Unstoppable, "stops", "length at token|goes on after a stop token"),
    (SwallowsStops, "stops", "STOP|stop at token"),
    (EndsAtEos, "stops", "without stop tokens a turn has 3 of 24"),
    (Greedless, "greedy", "not the likeliest|answers differ"),
    (Overflowing, "limits", "a prompt of 256 tokens, max_context being 256, is not refused"),
    (Crossed, "concurrency", "among many requests"),
    (Unseeded, "seeds", "the same seed gives other tokens"),
    (Unconstrained, "grammars", "a grammar, which is not declared, is not refused"),
    (Repeating, "streams", "a stream gives|of 40|goes on after"),
    (Deaf, "cancelling", "no answer within"),
    (Forgetful, "publication", "after a publication by in-process"),
    (OffByOne, "publication", r"versions \{1\}, not 0"),
    (OffByOne, "updates-in-flight", "off the model's own"),
    (LastVersion, "updates-in-flight", "off the model's own|no turn goes on"),
    (StaleCache, "publication", "after a publication by in-process"),
    (HalfLoaded, "refused-weights", "after refusing a tensor of another shape"),
    (Careless, "refused-weights", "is not refused"),
    (Leaking, "closing", "aclose leaves threads: left"),
]
FAULTS_OF_PICTURES = [
    (Blind, "pictures", "off the model's own"),
    (ComparesIds, "pictures", "off the model's own"),
    (SamplesPlaceholders, "pictures", "it samples placeholders of pictures"),
    (AcceptsShortRows, "pictures", "a row with one placeholder fewer .* is not refused"),
    (StaleTower, "picture-updates", "seen before a publication by in-process: .* off"),
]


@pytest.fixture(scope="module")
def seeing_policies(tmp_path_factory):
    return policies_of("qwen3_vl", tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return tiny_policies(tmp_path_factory.mktemp("policies"))


@pytest.mark.parametrize(
    ("engine_class", "rule", "told"),
    FAULTS,
    ids=[f"{engine_class.__name__}-{rule}" for engine_class, rule, _ in FAULTS],
)
def test_fault_is_found(engine_class, rule, told, policies):
    LEAK.clear()
    patience_s = 2 if engine_class is Deaf else 60

    def opened(policy):
        return started(engine_class.from_checkpoint(policy, max_context=256, num_slots=24))

    try:
        with pytest.raises(AssertionError, match=f"^{rule}: .*({told})"):
            check_engine(rule, opened, policies, EMBEDDED, patience_s=patience_s)
    finally:
        LEAK.set()


@pytest.mark.parametrize(
    ("engine_class", "rule", "message"),
    FAULTS_OF_PICTURES,
    ids=[engine_class.__name__ for engine_class, *_ in FAULTS_OF_PICTURES],
)
def test_fault_with_pictures_is_detected(engine_class, rule, message, seeing_policies):
    def opened(policy):
        return started(engine_class.from_checkpoint(policy, max_context=256, num_slots=24))

    with pytest.raises(AssertionError, match=f"^{rule}: .*({message})"):
        check_engine(rule, opened, seeing_policies, SEEING)


@pytest.mark.parametrize("takes_images", [False, True])
def test_declared_pictures_are_compared_with_the_engine(takes_images, policies, seeing_policies):
    def opened(policy):
        return started(EmbeddedEngine.from_checkpoint(policy, max_context=256, num_slots=4))

    abilities = replace(EMBEDDED, takes_images=takes_images)
    with pytest.raises(
        AssertionError, match=f"takes_images .* the engine has it as {not takes_images}"
    ):
        check_engine("protocols", opened, policies if takes_images else seeing_policies, abilities)


def test_errors_need_a_text(policies):
    abilities = EngineAbilities(has_model=False, weight_syncs=("in-process",))

    def opened(policy):
        return started(Undying(count, max_context=256))

    with pytest.raises(AssertionError, match="is refused without a word"):
        check_engine("limits", opened, policies, abilities)


@pytest.mark.parametrize(
    ("ability", "told"),
    [
        ({"streams": False}, "streams is not declared, and it has .*StreamingEngine"),
        ({"sleeps": True}, "sleeps is declared, and it lacks .*SleepingEngine"),
        ({"takes_grammars": True}, "takes_grammars is declared"),
        ({"weight_syncs": ("disk",)}, "in-process is not declared"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_declarations_are_compared_with_the_engine(ability, told, policies):
    def opened(policy):
        return started(EmbeddedEngine.from_checkpoint(policy, max_context=256, num_slots=4))

    with pytest.raises(AssertionError, match=told):
        check_engine("protocols", opened, policies, replace(EMBEDDED, **ability))


def test_unknown_rule_is_named_with_the_known_ones(policies):
    with pytest.raises(UsageError, match="no rule of engines is named 'gredy'") as caught:
        check_engine("gredy", None, policies, EMBEDDED)
    assert "did you mean 'greedy'?" in caught.value.hints
