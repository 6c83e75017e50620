"""The reader's directory, with the files that the docs name."""

import importlib
import json

from tests._support.paths import ROOT


def write_files(directory):
    """Write the files that the docs name as the reader's."""
    from datasets import Dataset

    questions = [
        {"question": f"What is {n}+1?", "answer": str(n + 1), "subject": "Algebra", "level": n % 5}
        for n in range(20)
    ]
    twos = [{"question": f"What is 2 of {n}?", "answer": "2"} for n in range(40)]
    for name, rows in {
        "questions.jsonl": questions,
        "algebra.jsonl": questions,
        "prompts.jsonl": [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(40)],
        "twos.jsonl": twos,
        "data/gsm8k/train.jsonl": questions,
        "data/gsm8k/test.jsonl": twos,
        "passages.jsonl": [{"id": "1", "title": "Ada", "text": "Ada lives in Ghent."}],
        "qa.jsonl": [
            {"question": f"Where does Ada live, {n}?", "answers": ["Ghent"], "support": ["1"]}
            for n in range(20)
        ],
        "mbpp.jsonl": [
            {
                "task_id": n,
                "text": f"Write a function to add {n}.",
                "code": f"def add(x):\n    return x + {n}",
                "test_list": [f"assert add(1) == {1 + n}"],
            }
            for n in range(20)
        ],
        "dialogues.jsonl": [
            {
                "messages": [
                    {"role": "user", "content": f"What is {n}+{n}?"},
                    {"role": "assistant", "content": f"\\boxed{{{2 + n % 2}}}"},
                ]
            }
            for n in range(20)
        ],
    }.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name in ("train", "test"):
        rows = [{"question": f"In {name}: {n}+1?", "answer": str(n + 1)} for n in range(8)]
        Dataset.from_list(rows).to_parquet(directory / f"{name}.parquet")
    (directory / "my_package").mkdir()
    (directory / "my_package" / "rewards.py").write_text(
        "def score(answer, gold):\n    return float(answer == gold)\n"
    )
    (directory / "rewards.py").write_text(
        "def exact(completion, answer):\n    return float(completion.strip() == answer)\n"
    )
    for name in ("examples", "benchmarks", "tests"):
        (directory / name).symlink_to(ROOT / name)


def install(facts, directory):
    """Leave what an editable install of a pyproject.toml leaves in a directory: entry points."""
    name = facts.get("project", {}).get("name", "package-of-the-page")
    info = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in facts["project"]["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
