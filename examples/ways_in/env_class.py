"""An environment class: `--env examples/ways_in/env_class.py:Double`."""

from areal_gym import Response, Task, TextEnv, UsageError


class Double(TextEnv):
    """Double a number."""

    def sample_task(self, rng, options):
        split, index = options.get("split", "train"), options.get("index", int(rng.integers(10**6)))
        if split not in ("train", "test") or type(index) is not int or index < 0:
            raise UsageError(f"no task {index!r} in split {split!r}")
        number = 2 * index + (split == "test")
        return Task(id=f"{split}/{number}", split=split, data={"number": number})

    def first_messages(self, task):
        return [{"role": "user", "content": f"What is twice {task.data['number']}?"}]

    async def respond(self, message):
        is_right = message["content"].strip() == str(2 * self.task.data["number"])
        return Response(reward=float(is_right), is_terminated=True)

    def gold_action(self):
        return str(2 * self.task.data["number"])
