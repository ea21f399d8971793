"""Stands for the inference server: speaks OpenAI's protocol as vLLM does, and is no model.

An answer is one of the words of the last message, picked by a hash of the conversation and of how often
it was asked before, so that repeated rollouts differ and the same training gives the same answers.
Token ids stand where vLLM ≥ 0.10.2 (``return_token_ids``) and agentlightning's patched server put them.
"""

from __future__ import annotations

import collections
import hashlib
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_MAX_COUNTED = 100_000


class StandInInferenceServer:
    """An HTTP server on a free port of this machine, in a thread of this process."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._asked: collections.Counter[str] = collections.Counter()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        """``host:port``, as verl names its servers."""

    def start(self) -> None:
        """Serve until the process ends or :meth:`stop` is called."""
        threading.Thread(
            target=self._http.serve_forever, daemon=True, name="stand-in-inference-server"
        ).start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a completion request, as vLLM gives it."""
        is_chat = path.endswith("/chat/completions")
        if is_chat:
            messages = [_plain(message) for message in request.get("messages") or []]
            prompt_ids = self._chat_ids(messages)
            last = messages[-1]["content"] if messages else ""
            name = json.dumps(messages)
        else:
            prompt = request.get("prompt") or ""
            last = name = prompt if isinstance(prompt, str) else json.dumps(prompt)
            prompt_ids = self._tokenizer.encode(last, add_special_tokens=False)
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        choices = []
        for index in range(request.get("n") or 1):
            token_ids = self._reply_ids(name, last, limit)
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            content = (
                {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            )
            finish = "stop" if token_ids[-1:] == [self._tokenizer.eos_token_id] else "length"
            choices.append(
                {
                    "index": index,
                    **content,
                    "finish_reason": finish,
                    "logprobs": None,
                    "token_ids": token_ids,
                }
            )
        given = sum(len(choice["token_ids"]) for choice in choices)
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.get("model") or "stand-in",
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": given,
                "total_tokens": len(prompt_ids) + given,
            },
            "prompt_token_ids": prompt_ids,
            "response_token_ids": [choice["token_ids"] for choice in choices],
        }

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        except Exception:  # a model's own template may refuse a conversation; a stand-in does not
            text = "\n".join(message["content"] for message in messages)
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _reply_ids(self, name: str, last: str, limit: int | None) -> list[int]:
        with self._lock:
            if len(self._asked) >= _MAX_COUNTED:
                self._asked.clear()
            self._asked[name] += 1
            count = self._asked[name]
        words = last.split() or ["nothing"]
        digest = hashlib.blake2b(f"{count} {name}".encode("utf-8", "surrogatepass"), digest_size=8)
        word = words[int.from_bytes(digest.digest(), "big") % len(words)].strip(".,;:!?")[:200]
        ids = list(self._tokenizer.encode(word or "nothing", add_special_tokens=False))
        return [*ids, self._tokenizer.eos_token_id][: limit or None]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """One line for each request would bury the training's log."""

            def do_GET(self) -> None:
                model = {"id": "stand-in", "object": "model"}
                self._send({"object": "list", "data": [model], "status": "ok"})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                try:
                    request = json.loads(self.rfile.read(length) or b"{}")
                    response = server.answer(self.path, request)
                except Exception as error:
                    self._send({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
                    return
                if request.get("stream"):
                    self._stream(response)
                else:
                    self._send(response)

            def _send(self, document: dict[str, Any], status: int = 200) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self, response: dict[str, Any]) -> None:
                """The whole answer as one chunk of server-sent events, then its end."""
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                chunk = dict(response)
                if response["object"] == "chat.completion":
                    chunk["object"] = "chat.completion.chunk"
                    chunk["choices"] = [
                        {**{k: v for k, v in choice.items() if k != "message"}, "delta": delta}
                        for choice in response["choices"]
                        for delta in [choice["message"]]
                    ]
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
                self.close_connection = True

        return Handler


def _plain(message: Any) -> dict[str, str]:
    """A message with its content as text: parts are joined, images and tool calls are left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return {"role": str(message.get("role") or "user"), "content": str(content or "")}
