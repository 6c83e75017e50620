"""One hour on one GPU: what only a GPU can show, most valuable first, beside what the plan says.

    python benchmarks/gpu_hour.py [--model QWEN3_0.6B_DIR] [--out gpu-hour] [--gpu h100-80gb]
    python benchmarks/gpu_hour.py --toy          # every part at toy size on a CPU, in two minutes

Each part is a process with a time limit, so that none takes another one down. Results are written
to OUT/PART.json as they come, and to OUT/gpu_hour.json; the same command again keeps what succeeded
and tries the rest, `--parts` chooses. A part that cannot run says why. Without `--model`, weights
of Qwen3-0.6B's shape are random: seconds and bytes are the same, and nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMITS = {
    # name: minutes
    "model": 5,
    "step-4k": 4,
    "parity-sglang": 6,
    "parity-embedded": 3,
    "step-16k": 4,
    "publish-disk": 4,
    "publish-tensor": 4,
    "publish-distributed": 4,
    "parity-vllm": 5,
    "gsm8k-eta0": 7,
    "gsm8k-eta2": 7,
    "gsm8k-eta4": 7,
}
_END_S = 20.0
"""Time for a part to end by itself, once its own deadline is over."""


def run_part(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a part in a process group of its own and return its result."""
    result_file = options.out / f"{name}.json"
    result_file.unlink(missing_ok=True)
    job = {
        "part": name,
        "out": str(options.out),
        "model": str(options.model) if options.model else None,
        "gpu": options.gpu,
        "is_toy": options.toy,
        "sglang_python": options.sglang_python,
        "uses_stand_in": options.stand_in,
        "limit_s": max(1.0, limit_s - _END_S),
    }
    start_s = time.monotonic()
    with (options.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_hour_parts.py")), json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_over = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_over = True
        finally:
            _end(process)
    seconds = round(time.monotonic() - start_s, 1)
    if result_file.exists():
        result: dict[str, Any] = json.loads(result_file.read_text())
    else:
        reason = f"not ready within {limit_s:.0f} s" if is_over else f"exit {process.returncode}"
        result = {"status": "failed", "reason": f"{reason}: {_last_line(log.name)}", "rows": []}
    result |= {"part": name, "seconds": seconds}
    result_file.write_text(json.dumps(result, indent=1))
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part, its servers included."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.5)
    process.wait()


def _last_line(log: str) -> str:
    lines = Path(log).read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


def kept_result(name: str, out: Path) -> dict[str, Any] | None:
    """Return the result of a part that has succeeded before."""
    try:
        result: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return result if result.get("status") == "ok" else None


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return plan and measurement side by side."""
    lines = [f"{'part':<20} {'figure':<34} {'plan':>12} {'measured':>12}  unit"]
    for result in results:
        if result["status"] != "ok":
            lines.append(f"{result['part']:<20} {result['status']}: {result['reason']}")
        for row in result["rows"]:
            plan, measured = (_short(row[key]) for key in ("plan", "measured"))
            figure = f"{row['figure']:<34} {plan:>12} {measured:>12}  {row['unit']}"
            lines.append(f"{result['part']:<20} {figure}".rstrip())
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory with Qwen3-0.6B's weights")
    parser.add_argument("--out", type=Path, default=Path("gpu-hour"), help="where results go")
    parser.add_argument("--gpu", default="h100-80gb", help="as in areal-gym plan --gpu")
    parser.add_argument("--minutes", type=float, default=60, help="no part begins later")
    parser.add_argument("--parts", default=",".join(LIMITS), help="names, by commas")
    parser.add_argument("--sglang-python", help="the Python of an environment with SGLang")
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="publish to areal-gym's own stand-in for SGLang, on the same GPU",
    )
    parser.add_argument("--toy", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := [name for name in options.parts if name not in LIMITS]:
        parser.error(f"no part {unknown[0]!r}; there are: {', '.join(LIMITS)}")
    if options.model is not None and not (options.model / "config.json").exists():
        parser.error(f"{options.model} has no config.json: --model wants a checkpoint directory")
    if not options.toy:
        from areal_gym.models.device import accelerator

        if accelerator() is None:
            parser.error("torch sees no accelerator here; --toy runs every part on a CPU")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.out = options.out.absolute()
    options.model = options.model and options.model.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * options.minutes
    results: list[dict[str, Any]] = []
    for name in LIMITS:
        if name != "model" and name not in options.parts:
            continue
        result = kept_result(name, options.out)
        left_s = end_s - time.monotonic()
        if result is None and left_s <= _END_S:
            reason = f"the {options.minutes:g} minutes are over; the same command goes on"
            result = {"part": name, "status": "skipped", "reason": reason, "rows": []}
        elif result is None:
            print(f"{name} ...", file=sys.stderr, flush=True)
            result = run_part(name, options, min(60.0 * LIMITS[name], left_s))
        results.append(result)
        report = {"gpu": options.gpu, "is_toy": options.toy, "parts": results}
        (options.out / "gpu_hour.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report) if options.json else table(results))


if __name__ == "__main__":
    main()
