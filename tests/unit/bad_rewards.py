"""Reward functions that go wrong on the completion "bad"; any other completion scores its
length."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

ONE_MIB = 1 << 20


def _scores(completions, bad=None):
    return [bad if text == "bad" else float(len(text)) for text in completions]


def raises(prompts, completions):
    if "bad" in completions:
        raise KeyError("no such thing")
    return _scores(completions)


def exits(prompts, completions):
    if "bad" in completions:
        sys.exit("leaving")
    return _scores(completions)


def recurses(prompts, completions):
    return recurses(prompts, completions) if "bad" in completions else _scores(completions)


def hangs(prompts, completions):
    while "bad" in completions:
        pass
    return _scores(completions)


def hangs_in_c(prompts, completions):
    if "bad" in completions:
        re.fullmatch("(a+)+", "a" * 60 + "b")  # exponential time, and the interpreter lock is held
    return _scores(completions)


def floods_and_hangs(prompts, completions):
    while "bad" in completions:
        print("x" * ONE_MIB)
    return _scores(completions)


def hangs_with_children(prompts, completions):
    if "bad" in completions:
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    return _scores(completions)


def leaves(prompts, completions):
    if "bad" in completions:
        print("last words")
        os._exit(3)
    return _scores(completions)


def kills_itself(prompts, completions):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    return _scores(completions)


def crashes(prompts, completions):
    if "bad" in completions:
        ctypes.string_at(0)
    return _scores(completions)


def closes_everything(prompts, completions):
    if "bad" in completions:
        # The worker's pipes have high numbers where the run has many files open.
        os.closerange(0, 1 << 16)
    return _scores(completions)


def writes_everywhere(prompts, completions):
    if "bad" in completions:
        for descriptor in range(
            3, 1024
        ):  # the worker's pipes have high numbers where the run has many files open
            try:
                os.write(descriptor, b"\xff" * 100)
            except OSError:
                continue
    return _scores(completions)


def takes_memory(prompts, completions):
    kept = [bytearray(64 * ONE_MIB) for _ in range(64)] if "bad" in completions else []
    return _scores(completions)[: len(completions) + len(kept)]


def too_few(prompts, completions):
    return _scores(completions)[: -1 if "bad" in completions else None]


def too_many(prompts, completions):
    return _scores(completions) + [1.0] * ("bad" in completions)


def returns_nothing(prompts, completions):
    return None if "bad" in completions else _scores(completions)


def returns_a_dict(prompts, completions):
    return {"score": 1.0} if "bad" in completions else _scores(completions)


def returns_text(prompts, completions):
    return _scores(completions, bad="1.0")


def returns_a_list(prompts, completions):
    return _scores(completions, bad=[1.0])


def returns_complex(prompts, completions):
    return _scores(completions, bad=1 + 1j)


def returns_nan(prompts, completions):
    return _scores(completions, bad=float("nan"))


def returns_infinity(prompts, completions):
    return _scores(completions, bad=float("-inf"))


def returns_a_huge_number(prompts, completions):
    return _scores(completions, bad=10**400)


# What follows looks bad and is not: these give every completion its score.


def floods(prompts, completions):
    for _ in range(50):
        sys.stdout.write("x" * ONE_MIB)
        sys.stderr.write("y" * 1000)
    return _scores(completions, bad=0.5)


def leaves_children(prompts, completions):
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return _scores(completions, bad=0.5)


def forks_and_returns_twice(prompts, completions):
    os.fork()
    return _scores(completions, bad=0.5)


def leaves_an_alarm(prompts, completions):
    time.sleep(0.15)
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # would end the next call
    return _scores(completions, bad=0.5)
