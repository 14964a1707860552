"""A small endpoint that speaks OpenAI's chat protocol, as a process of its own: `python endpoint.py LOG`.

It prints its port. It does what the question says between `<` and `>`, and logs each request.
"""

from __future__ import annotations

import json
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

failed: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        key = self.headers.get("Authorization", "")
        with open(sys.argv[1], "a") as log:
            log.write(json.dumps({"model": body["model"], "question": question, "key": key}) + "\n")
        found = re.search(r"<(\w+)>", question)
        word = found[1] if found else ""
        if word == "hang":
            time.sleep(3600)
        if word == "drip":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
        if word == "busy" and question not in failed:
            failed.add(question)
            self.reply(503, {"error": "try again"})
        elif word == "wrong":
            self.reply(401, {"error": "no such key"})
        elif word == "html":
            self.reply(200, "<html>")
        else:
            said = {"good": "It is right.\n0.75", "busy": "1", "word": "It is fine.", "out": "7"}.get(
                word, "I see nothing.\n0"
            )
            self.reply(200, {"choices": [{"message": {"role": "assistant", "content": said}}]})

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
