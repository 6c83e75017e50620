"""A taskset of verifiers 0.4: `--env verifiers:verifiers_taskset`."""

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    answer: str = ""


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            data = NumberData(prompt=f"What is twice {number}?", answer=str(2 * number))
            yield NumberTask(data, self.config.task)


__all__ = ["Numbers"]
