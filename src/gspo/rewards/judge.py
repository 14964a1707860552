"""A language model as judge, behind an endpoint that speaks OpenAI's chat protocol.

In: answers. Out: the number between 0 and 1 that the judge's reply ends with. `ready.py` makes a `JudgeModel` of
`judge:URL?model=NAME`; `score.py` asks it for all answers of a step, of which several are under way at once.

Threads wait for the endpoint, and only for it: each request has a deadline, and nothing of the user's runs in them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from gspo.errors import InputError, RunError
from gspo.rewards.call import Item
from gspo.rewards.rules import last_number
from gspo.rewards.runner import Outcome
from gspo.types import Status

QUESTION = """You judge an answer. Be strict.

[Question]
{prompt}

[Answer]
{completion}
[End of the answer]

Is the answer correct and helpful? Say in a sentence why, then end with a line that holds a number between 0 (wrong) and 1 (right) alone."""
_AT_ONCE = 16
_AGAIN = (429, 500, 502, 503, 504)
_LONGEST_REPLY = 1 << 22


class EndpointError(Exception):
    """The endpoint gave no usable reply."""


@dataclass
class JudgeModel:
    """A judge, its memory and its budget."""

    url: str
    """Base of the endpoint, as in http://localhost:8000/v1."""
    model: str
    prompt: str
    """Column of the prompt."""
    timeout: float
    """Seconds for an answer, retries included."""
    question: str = QUESTION
    """With {completion}, {prompt} and any column."""
    budget: int | None = None
    """Requests in a run; None: no limit."""
    _known: dict[str, float | None] = field(default_factory=dict)
    """Verdict by question: an answer that was judged before is not paid for twice."""
    _spent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, items: Sequence[Item]) -> list[Outcome]:
        """An outcome for each item, in order. Raises RunError when the budget is used up: what is left would be chance."""
        questions = [self._question(item) for item in items]
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        if self.budget is not None and self._spent + len(new) > self.budget:
            raise RunError(
                f"judge {self.model}: {self._spent} requests are made, {len(new)} more are needed, and the budget is {self.budget}: "
                "raise budget= in the reward and go on with --resume"
            )
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = dict(zip(new, threads.map(self._verdict, new), strict=True))
        for question, outcome in found.items():
            if outcome.error is None:
                self._known[question] = outcome.values[0]
        return [found.get(question) or self._remembered(question) for question in questions]

    def _remembered(self, question: str) -> Outcome:
        value = self._known[question]
        return Outcome((value,), Status.NO_VERDICT if value is None else Status.OK, 0.0)

    def _question(self, item: Item) -> str:
        prompt = item.columns[self.prompt]
        shown = prompt if isinstance(prompt, str) else "\n\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        return self.question.format_map({**item.columns, "prompt": shown, "completion": item.completions[0]})

    def _verdict(self, question: str) -> Outcome:
        """A number outside of 0 to 1, or none, is no verdict; an endpoint that fails is a failure."""
        start = time.monotonic()
        try:
            reply = self._ask(question, start + self.timeout)
        except TimeoutError:
            words = f"judge {self.model}: no reply from {self.url} within {self.timeout:g} s (judging.timeout)"
            return Outcome((None,), Status.TIMEOUT, time.monotonic() - start, words)
        except EndpointError as error:
            return Outcome((None,), Status.CRASHED, time.monotonic() - start, str(error))
        number = last_number(reply.strip().rpartition("\n")[2])
        value = float(number) if number is not None and 0 <= number <= 1 else None
        return Outcome((value,), Status.NO_VERDICT if value is None else Status.OK, time.monotonic() - start)

    def _ask(self, question: str, deadline: float) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        pause = 0.25
        while True:
            with self._lock:
                self._spent += 1
            try:
                status, reply, after = request(f"{self.url}/chat/completions", body, deadline)
            except ConnectionError as error:
                status, reply, after = None, str(error), None
            if status == 200:
                return _content(reply, self.url)
            if status is not None and status not in _AGAIN:
                raise EndpointError(f"judge {self.model}: {self.url} replied {status}: {reply[:500]}")
            wait = pause if after is None else after
            if time.monotonic() + wait >= deadline:
                raise EndpointError(
                    f"judge {self.model}: {self.url} failed until judging.timeout: {status or ''} {reply[:500]}"
                )
            time.sleep(wait)
            pause *= 2


def request(url: str, body: Any, deadline: float) -> tuple[int, str, float | None]:
    """POST `body` (GET if it is None). Returns status, text and the seconds of Retry-After.

    Raises:
        TimeoutError: no whole reply before `deadline`, however slowly it drips.
        ConnectionError: no connection, or one that broke.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_left(deadline))
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    clock: threading.Timer | None = None
    try:
        connection.connect()
        # A limit of a socket is one for each piece: an endpoint that drips would never meet it.
        clock = threading.Timer(_left(deadline), _shut, [connection.sock])
        clock.start()
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", parts.path or "/", data, headers)
        with connection.getresponse() as reply:
            text = reply.read(_LONGEST_REPLY)
            _left(deadline)
            after = reply.getheader("Retry-After", "")
            return reply.status, text.decode(errors="replace"), float(after) if after.isdigit() else None
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        _left(deadline)
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        if clock is not None:
            clock.cancel()
        connection.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _content(reply: str, url: str) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"{url} does not speak the chat protocol: {reply[:300]!r}") from error
    return str(content)


# ------------------------------------------------------------------------------ at the start


def served_model(url: str, where: str, timeout: float) -> str:
    """The one model that an endpoint serves. Raises InputError if it is down, or serves several."""
    try:
        status, reply, _ = request(f"{url}/models", None, time.monotonic() + timeout)
        names = [str(entry["id"]) for entry in json.loads(reply)["data"]] if status == 200 else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where}: no endpoint answers at {url}: {error or 'no reply'}") from error
    if len(names) != 1:
        raise InputError(
            f"{where}: say which model judges, as in judge:{url}?model=NAME; it serves {', '.join(names) or 'no list'}"
        )
    return names[0]


def check_question(question: str, columns: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a question that is not about the answer, or names what no row has."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(question) if name is not None]
    except ValueError as error:
        raise InputError(
            f"{where}: the question is no template: {error}; braces are written twice, {{{{ and }}}}"
        ) from error
    if "completion" not in names:
        raise InputError(
            f"{where}: the question does not contain {{completion}}, so every answer would be judged alike"
        )
    if unknown := [name for name in names if name not in ("completion", "prompt", *columns)]:
        raise InputError(
            f"{where}: the question asks for {{{unknown[0]}}}; there are completion, prompt, {', '.join(columns)}"
        )
