"""Kills processes that a run has started, in the middle of it."""

import os
import signal
import subprocess
import time

from areal_gym.runs.run_display import Display


def children():
    """Command lines of all that descends from this process, by process id."""
    rows = subprocess.run(
        ["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    processes = [row.split(None, 2) for row in rows.splitlines()]
    mine, num_known = {os.getpid()}, 0
    while len(mine) > num_known:
        num_known = len(mine)
        mine |= {int(pid) for pid, parent, _ in processes if int(parent) in mine}
    mine.discard(os.getpid())
    return {
        int(pid): args
        for pid, _, args in processes
        if int(pid) in mine and "resource_tracker" not in args and not args.startswith("ps ")
    }


class Killing(Display):
    """Kills processes, found by their command lines, once a step is on record."""

    def __init__(self, *commands, after_step=2, how_often=1, awaits=None):
        self.awaits = awaits  # a checkpoint that must be on the disk: it is written beside training
        self.commands = commands
        self.after_step = after_step
        self.how_often = how_often
        self.said = []
        self.killed = []

    @property
    def has_killed(self):
        return self.how_often == 0

    def say(self, text):
        self.said.append(text)

    def step(self, step, total, metrics):
        if step == self.after_step and self.how_often:
            self.how_often -= 1
            deadline_s = time.monotonic() + 120
            while self.awaits and not self.awaits.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            for command in self.commands:
                self.killed.append(process_of(command))
                os.kill(self.killed[-1], signal.SIGKILL)


def process_of(command):
    """The newest of our processes with these words in its command line: guards come first."""
    return max(pid for pid, args in children().items() if command in args)
