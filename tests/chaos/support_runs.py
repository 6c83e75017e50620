"""Small runs for chaos scripts: exact ones, hooks at their phases, and a disk that can be full."""

from __future__ import annotations

import functools
import hashlib
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig, load_config
from areal_gym.run_dir.run_dir import RunDir

STEPS = 3


def make_policy(directory: Path) -> Path:
    """Returns a checkpoint of a tiny policy with random weights."""
    from areal_gym.models.tiny.checkpoint_files import save_checkpoint
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig
    from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

    template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
    tokenizer = build_tokenizer(["Make 17 from 3, 4 and 5.", template], vocab_size=320)
    draft = directory / "tokenizer"
    draft.mkdir(parents=True)
    save_tokenizer(tokenizer, draft, max_context=256)
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    return save_checkpoint(build_decoder(config, seed=0), directory / "policy", tokenizer_dir=draft)


def overrides_of(policy: Path | str) -> list[str]:
    """Returns the settings of a small run, which gives the same weights each time."""
    return [
        *(f"engine.model={policy}", "env.id=countdown", f"steps={STEPS}"),
        *("engine.max_context=256", "engine.num_slots=4", "rollout.max_in_flight=4"),
        *("rollout.group_size=2", "rollout.batch_groups=2", "rollout.max_new_tokens=4"),
        *("eval.num_tasks=2", "eval.every=2", "trainer.save_every=1"),
        *("trainer.advantage=reinforce", "deterministic=true"),
    ]


def config_of(policy: Path, *overrides: str) -> RunConfig:
    """Returns the same settings with others on top."""
    return load_config(overrides=[*overrides_of(policy), *overrides])


def fingerprint(run: Path, *, step: int = STEPS) -> str:
    """Returns a hash of what a run has learned, and of what it was trained on."""
    digest = hashlib.sha256()
    directory = RunDir(run)
    digest.update((directory.checkpoint(step) / "model.safetensors").read_bytes())
    for row in directory.read_metrics():
        digest.update(repr((row["step"], row["train/loss"], row["reward/mean"])).encode())
    for number in range(1, step + 1):
        for trajectory in directory.read_trajectories(number):
            digest.update(repr((trajectory.token_ids, trajectory.reward)).encode())
    return digest.hexdigest()[:16]


@contextmanager
def before_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Inside, `act` is called once: just before the `number`-th call of `owner.name`."""
    original = getattr(owner, name)
    count = 0

    @functools.wraps(original)
    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return original(*arguments, **named)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)


class SmallDisk:
    """A disk that can be filled and emptied: a tmpfs as root, else a limit on the size of files."""

    def __init__(self, place: Path, megabytes: int = 64) -> None:
        self.place = place
        place.mkdir(parents=True)
        options = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place))
        try:
            mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
            self.is_mounted = mounted.returncode == 0
        except FileNotFoundError:
            self.is_mounted = False
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, left: int = 0) -> None:
        """Leaves so many bytes, or lets no file grow beyond them."""
        if not self.is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, self._limits[1]))
            return
        ballast = self.place / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
        with ballast.open("r+b") as stream:
            stream.truncate(max(0, ballast.stat().st_size - left))

    def empty(self) -> None:
        """Gives the space back."""
        if self.is_mounted:
            (self.place / "ballast").unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def set_read_only(self, is_read_only: bool) -> None:
        """Lets nothing be written, or everything."""
        if self.is_mounted:
            how = "ro" if is_read_only else "rw"
            command = ["mount", "-o", f"remount,{how}", str(self.place)]
            deadline_s = time.monotonic() + 120
            # As long as a checkpoint is being written, the disk is busy.
            while subprocess.run(command, capture_output=True, check=False).returncode:
                assert time.monotonic() < deadline_s, "the disk stays busy"
                time.sleep(0.01)
        else:
            for folder in (self.place, *(p for p in self.place.rglob("*") if p.is_dir())):
                folder.chmod(0o555 if is_read_only else 0o755)

    def close(self) -> None:
        """Takes the disk away."""
        self.empty()
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.place)], check=True)
