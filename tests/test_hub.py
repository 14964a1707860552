"""A machine without a network: names that only the hub could know are refused at once, in one message."""

from __future__ import annotations

import os
import subprocess
import sys

ASKED = """
from gspo.config import Data, Model
from gspo.errors import InputError
from gspo.models.load import load_tokenizer
from gspo.rewards.classifier import load_classifier
from gspo.tasks.data import read_rows
import time

start = time.monotonic()
for ask in (
    lambda: load_tokenizer(Model(name="nobody/nosuch")),
    lambda: read_rows(Data(source="nobody/nosuch")),
    lambda: load_classifier("nobody/nosuch", "cpu", "reward"),
):
    try:
        ask()
    except InputError as error:
        print(error)
print(time.monotonic() - start < 20)
"""


def test_a_hub_that_does_not_answer_is_asked_once() -> None:
    there = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and "OFFLINE" not in key}
    nowhere = {**there, "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, env=nowhere, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    *said, quick = done.stdout.splitlines()
    assert quick == "True", done.stdout + done.stderr
    assert [text.partition(":")[0] for text in said] == ["model=nobody/nosuch", "data.source=nobody/nosuch", "reward"]
    assert all("the hub (http://127.0.0.1:9) does not answer" in text for text in said)
    assert "Retry" not in done.stderr
