"""A taskset of verifiers 0.4: sums."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        if self.data.answer == "13":
            raise RuntimeError("unlucky")
        return float(self.data.answer in (trace.last_reply or ""))


class SmallSums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            data = SumData(prompt=f"What is {number} + 1?", answer=str(number + 1))
            yield SumTask(data, self.config.task)


__all__ = ["SmallSums"]
