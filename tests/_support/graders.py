"""Reward functions as a user would write them, some of them broken."""

import json
import os
import time


def add(a, b):
    return {"sum": a + b, "secret": os.environ.get("API_KEY")}


def spin():
    while True:
        pass


def sleep(seconds):
    time.sleep(seconds)
    return "awake"


def fail():
    raise KeyError("no such answer")


def talk():
    print("hello")
    return "x" * 10_000


def no_json():
    return json


def read(path):
    with open(path) as file:
        return file.read()
