"""The benchmark measures CPU time and memory of training, sampling and reading with pictures.

    python benchmarks/pictures.py [--only step,turns,memory,host] [--json]

step     4 prompts x 8 answers of 32 tokens, a picture of 64 placeholders a prompt, a Qwen3-VL of
         1.1 million parameters, tower trained: CPU seconds of forward and backward pass, siblings
         sharing their prompt and its picture (4 pictures), and each row by itself (32)
turns    answers of 2 tokens by the embedded engine, 192 that arrive at once, a picture of 64
         placeholders each: CPU milliseconds of one, 16 siblings to a picture, and each by itself
memory   32 episodes x 10 turns x 10 pictures of 640 x 480, all in flight at once: private memory
         of the process, beyond that of one episode; the pictures' own bytes lie in the store
host     CPU milliseconds of a picture that an environment draws, or that comes as JPEG: read,
         encoded, hashed and written (once); made pixels for the tower (once); and for a sibling,
         which names the same picture
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFilter

from areal_gym.agents.chat import ChatAgent
from areal_gym.chat import Renderer
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.shapes import ShapesEnv
from areal_gym.images import image_store, use_image_store
from areal_gym.images.reading import ImageLimits, set_image_limits
from areal_gym.message_types import ImageRef
from areal_gym.models.hf.hf_loading import load_policy
from areal_gym.rollout.episode import play_episode
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.types import Content, Message, Task
from areal_gym.warm_start.starter_policy import prepare_starter
from areal_gym.warm_start.vision_starter import VisionRecipe

NUM_PROMPTS, NUM_SIBLINGS, NUM_TOKENS = 4, 8, 32
NUM_EPISODES, NUM_TURNS, NUM_PICTURES = 32, 10, 10
SIZE = (640, 480)
COLORS = ("red", "green", "blue")


def checkpoint() -> Path:
    """The starter that sees, before it has seen anything."""
    recipe = VisionRecipe(max_steps=0, num_probes=1, max_context=16_384)
    made = prepare_starter(ShapesEnv(), env_key="benchmark of pictures", seed=0, recipe=recipe)
    return made.directory


def drawn(seed: int, size: tuple[int, int] = SIZE) -> Image.Image:
    rng = random.Random(seed)
    canvas = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(canvas)
    for _ in range(20):
        x, y = rng.randrange(size[0] - 60), rng.randrange(size[1] - 60)
        pen.rectangle(
            (x, y, x + rng.randint(8, 60), y + rng.randint(8, 60)), fill=rng.choice(COLORS)
        )
    return canvas


def photograph(seed: int) -> bytes:
    """A JPEG file whose pixels are as hard to compress as a photograph's."""
    noise = Image.frombytes("RGB", SIZE, random.Random(seed).randbytes(3 * SIZE[0] * SIZE[1]))
    out = io.BytesIO()
    noise.filter(ImageFilter.GaussianBlur(1)).save(out, "JPEG", quality=90)
    return out.getvalue()


# ---- step ----------------------------------------------------------------------------------------


def step(num_repeats: int = 5) -> dict[str, float]:
    policy = load_policy(checkpoint())
    assert policy.vision is not None
    policy.vision.set_trained("full")
    generator = random.Random(0)
    shared: list[Row] = []
    alone: list[Row] = []
    for number in range(NUM_PROMPTS * NUM_SIBLINGS):
        prompt = number // NUM_SIBLINGS
        answer = [generator.randrange(3, 200) for _ in range(NUM_TOKENS)]
        for rows, seed in ((shared, prompt), (alone, 100 + number)):
            part = image_store().add(drawn(seed, (128, 128)))
            image = ImageRef(part["sha256"], 5, 64, (1, 16, 16))
            ids = [10 + prompt, *[1] * (4 + image.length), *range(20, 35), *answer]
            rows.append(Row(token_ids=ids, num_shared=len(ids) - NUM_TOKENS, images=(image,)))
    alone = [Row(token_ids=row.token_ids, images=row.images) for row in alone]
    spent = {
        name: statistics.median(_pass_seconds(policy, rows) for _ in range(num_repeats))
        for name, rows in (("shared_cpu_s", shared), ("alone_cpu_s", alone))
    }
    return spent | {"ratio": spent["shared_cpu_s"] / spent["alone_cpu_s"]}


def _pass_seconds(policy: Any, rows: list[Row]) -> float:
    begin_s = time.process_time()
    masks = [[False] * (len(row.token_ids) - NUM_TOKENS) + [True] * NUM_TOKENS for row in rows]
    score_tokens(policy, pack(rows), masks).logprobs.sum().backward()
    policy.zero_grad()
    return time.process_time() - begin_s


# ---- turns ---------------------------------------------------------------------------------------


def turns(num_repeats: int = 3) -> dict[str, float]:
    spent = {}
    for name, num_siblings in (("sibling_ms", 16), ("alone_ms", 1)):
        times = [asyncio.run(_turn_ms(num_siblings)) for _ in range(num_repeats)]
        spent[name] = statistics.median(times)
    return spent | {"ratio": spent["sibling_ms"] / spent["alone_ms"]}


async def _turn_ms(num_siblings: int, num_turns: int = 192) -> float:
    engine = EmbeddedEngine.from_checkpoint(checkpoint(), max_context=128)
    prompts = []
    for seed in range(num_turns // num_siblings):
        part = image_store().add(drawn(seed, (128, 128)))
        image = ImageRef(part["sha256"], 5, 64, (1, 16, 16))
        prompts += [([10, *[1] * (4 + image.length), *range(20, 35)], image)] * num_siblings
    await engine.start()
    begin_s = time.process_time()
    await asyncio.gather(
        *(
            engine.generate(ids, SamplingParams(max_new_tokens=2, seed=seed), images=(image,))
            for seed, (ids, image) in enumerate(prompts)
        )
    )
    spent_s = time.process_time() - begin_s
    await engine.aclose()
    return 1000 * spent_s / num_turns


# ---- memory --------------------------------------------------------------------------------------


class Album(TextEnv):
    """Shows ten pictures a turn, and keeps episodes in their last turn until `is_seen`."""

    max_turns = NUM_TURNS

    def __init__(self, number: int, is_full: Callable[[], None], is_seen: asyncio.Event) -> None:
        super().__init__()
        self._number, self._is_full, self._is_seen = number, is_full, is_seen
        self._turn = 0

    def sample_task(self, rng: Any, options: Any) -> Task:
        return Task(id=f"train/{self._number}", data={})

    def first_messages(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self._shown()}]

    async def respond(self, message: Message) -> Response:
        self._turn += 1
        if self._turn == NUM_TURNS:
            self._is_full()
            await self._is_seen.wait()
            return Response(reward=1.0, is_terminated=True)
        return Response(messages=[{"role": "user", "content": self._shown()}])

    def _shown(self) -> Content:
        first = (self._number * NUM_TURNS + self._turn) * NUM_PICTURES
        pictures = [image_store().add(drawn(first + i)) for i in range(NUM_PICTURES)]
        return [*pictures, {"type": "text", "text": "What is it?"}]


def private_mb() -> float:
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3


def memory() -> dict[str, float]:
    set_image_limits(ImageLimits(max_images=NUM_TURNS * NUM_PICTURES))
    renderer = Renderer.from_checkpoint(checkpoint())
    engine = ScriptedEngine(
        ["ok"] * NUM_TURNS, tokenizer=renderer.tokenizer, end_of_turn_id=renderer.end_of_turn_id
    )

    async def play(numbers: range) -> float:
        measured, left, is_seen = 0.0, len(numbers), asyncio.Event()

        def is_full() -> None:
            nonlocal measured, left
            left -= 1
            if not left:
                measured = private_mb()
                is_seen.set()

        envs = [Album(number, is_full, is_seen) for number in numbers]
        played = await asyncio.gather(
            *(play_episode(env, ChatAgent(), engine, renderer) for env in envs)
        )
        assert all(len(each.turns) == NUM_TURNS for each in played)
        return measured

    before = asyncio.run(play(range(1000, 1001)))
    grown = asyncio.run(play(range(NUM_EPISODES))) - before
    stored = sum(path.stat().st_size for path in image_store().directory.rglob("*.png"))
    return {"grown_mb": grown, "store_mb": stored / 1e6}


# ---- host ----------------------------------------------------------------------------------------


def host(num_pictures: int = 40) -> dict[str, float]:
    policy = load_policy(checkpoint())
    assert policy.vision is not None
    pixels_of = policy.vision._pixels_of
    seeds = range(10_000, 10_000 + num_pictures)
    pictures: dict[str, list[Any]] = {
        "96x96": [drawn(seed, (96, 96)) for seed in seeds],
        "320x240": [drawn(seed, (320, 240)) for seed in seeds],
        "640x480": [drawn(seed) for seed in seeds],
        "640x480_jpeg": [photograph(seed) for seed in seeds],
    }
    costs = {}
    for kind, made in pictures.items():
        hashes: list[str] = []
        costs[f"{kind}_read_ms"] = _ms(lambda each: hashes.append(_add(each)), made)  # noqa: B023
        costs[f"{kind}_pixels_ms"] = _ms(pixels_of, hashes)
        costs[f"{kind}_sibling_ms"] = _ms(pixels_of, hashes)
    return costs


def _add(picture: Any) -> str:
    sha256: str = image_store().add(picture)["sha256"]
    return sha256


def _ms(call: Callable[[Any], Any], values: list[Any]) -> float:
    spent = []
    for value in values:
        begin_s = time.process_time()
        call(value)
        spent.append(time.process_time() - begin_s)
    return 1000 * statistics.median(spent)


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "step": step,
    "turns": turns,
    "memory": memory,
    "host": host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name in options.only.split(","):
        with TemporaryDirectory() as home, use_image_store(Path(home)):
            figures[name] = {key: round(value, 4) for key, value in PARTS[name]().items()}
        if not options.json:
            print(name, *(f"{key} {value:g}" for key, value in figures[name].items()), sep="   ")
    if options.json:
        print(json.dumps({"benchmark": "pictures"} | figures))


if __name__ == "__main__":
    main()
