"""Stands for the inference server: speaks OpenAI's protocol as vLLM does, and is no model.

An answer is one of the words of the last user message, picked by a hash of the conversation and of
how often it was asked before: repeated rollouts differ, so that GRPO has rewards to compare, and
the same training gives the same answers. No tool is ever called, and no format is obeyed. Token ids
stand where vLLM ≥ 0.10.2 (``return_token_ids``) and agentlightning's patched server put them.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from agl_meta.forks import PerProcess

logger = logging.getLogger(__name__)

_MAX_COUNTED = 100_000
_MAX_CHOICES = 128
_MAX_WORD = 200
_PUNCTUATION = ".,;:!?\"'()"


class StandInInferenceServer:
    """An HTTP server on a free port of this machine, in a thread of this process.

    Args:
        tokenizer: the trainer's, so that token ids mean the same on both sides.
        model: the name under which it says it serves.
    """

    def __init__(self, tokenizer: Any, model: str = "stand-in") -> None:
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.answers = ScriptedAnswers(tokenizer)
        self._http.model = model
        self._thread: threading.Thread | None = None
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        """``host:port``, as verl names its servers."""

    def start(self) -> None:
        """Serve until the process ends or :meth:`stop` is called."""
        self._thread = threading.Thread(
            target=self._http.serve_forever,
            kwargs={"poll_interval": 0.05},  # how soon stop() is noticed
            daemon=True,
            name="stand-in-inference-server",
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()


class ScriptedAnswers:
    """Makes the answers; see the module for how."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._asked: collections.Counter[bytes] = collections.Counter()
        self._warned = False
        # For the counter, and because a fast tokenizer refuses to be used by two threads at once.
        self._lock = PerProcess(threading.Lock)

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a chat completion request, as vLLM gives it."""
        messages = [{**message, "content": _text(message)} for message in request["messages"]]
        if not messages:
            raise ValueError("messages is empty; expected at least one")
        users = [message for message in messages if message.get("role") == "user"]
        last = (users or messages)[-1]["content"]
        with self._lock.value:
            prompt_ids = self._chat_ids(messages, request.get("tools"))
            replies = self._replies(json.dumps(messages), last, request)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": finish,
                "token_ids": ids,
            }
            for index, (ids, text, finish) in enumerate(replies)
        ]
        return {
            **_envelope("chatcmpl", "chat.completion", choices, len(prompt_ids)),
            "prompt_token_ids": prompt_ids,
            "response_token_ids": [choice["token_ids"] for choice in choices],
        }

    def text(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a completion request of one or several prompts, as vLLM gives it."""
        prompts = request["prompt"]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        choices: list[dict[str, Any]] = []
        prompt_tokens = 0
        for prompt in prompts:
            with self._lock.value:
                is_text = isinstance(prompt, str)
                prompt_ids = self._encode(prompt) if is_text else list(prompt)
                text = prompt if is_text else self._tokenizer.decode(prompt)
                replies = self._replies(text, text, request)
            prompt_tokens += len(prompt_ids)
            choices += [
                {
                    "index": len(choices) + n,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": finish,
                    "token_ids": ids,
                    "prompt_token_ids": prompt_ids,
                }
                for n, (ids, text, finish) in enumerate(replies)
            ]
        return _envelope("cmpl", "text_completion", choices, prompt_tokens)

    def _chat_ids(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, return_dict=False
                )
            )
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "DRY RUN: the model's chat template refuses a conversation, and so may a real "
                    "server (%s: %s)",
                    type(error).__name__,
                    error,
                )
            return self._encode("\n".join(message["content"] for message in messages))

    def _replies(
        self, conversation: str, last: str, request: dict[str, Any]
    ) -> list[tuple[list[int], str, str]]:
        """Token ids, text and finish reason of each choice that is asked for."""
        count = request.get("n") or 1
        if not 1 <= count <= _MAX_CHOICES:
            raise ValueError(f"n is {count}; expected 1 to {_MAX_CHOICES}")
        limit = request.get("max_completion_tokens")
        if limit is None:
            limit = request.get("max_tokens")
        if limit is not None and limit < 1:
            raise ValueError(f"max_tokens is {limit}; expected at least 1")
        replies = []
        for _ in range(count):
            all_ids = [*self._encode(self._pick(conversation, last)), self._tokenizer.eos_token_id]
            ids = all_ids[:limit]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            replies.append((ids, text, "stop" if len(ids) == len(all_ids) else "length"))
        return replies

    def _pick(self, conversation: str, last: str) -> str:
        asked = conversation.encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(asked, digest_size=16).digest()
        if len(self._asked) >= _MAX_COUNTED:
            self._asked.clear()
        self._asked[name] += 1
        seed = hashlib.blake2b(name + str(self._asked[name]).encode(), digest_size=8).digest()
        words = last.split() or ["nothing"]
        word = words[int.from_bytes(seed, "big") % len(words)][:_MAX_WORD]
        return word.strip(_PUNCTUATION) or word

    def _encode(self, text: str) -> list[int]:
        # JSON may hold half of a surrogate pair, which no tokenizer takes.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _text(message: dict[str, Any]) -> str:
    """A message's content as text; parts are joined, images are left out."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(str(text) for text in texts if text)
    return "" if content is None else str(content)


def _envelope(prefix: str, kind: str, choices: list[dict[str, Any]], prompt_tokens: int) -> dict[str, Any]:
    given = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": given,
            "total_tokens": prompt_tokens + given,
        },
    }


def _chunks(response: dict[str, Any], include_usage: bool) -> Iterator[dict[str, Any]]:
    """A response as a stream gives it: the whole text, why it ended, and the usage if asked for."""
    is_chat = response["object"] == "chat.completion"
    head = {key: response[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else response["object"]
    first, end = [], []
    for choice in response["choices"]:
        common = {"index": choice["index"], "logprobs": None}
        whole = {key: choice[key] for key in ("token_ids", "prompt_token_ids") if key in choice}
        name, said, rest = ("delta", choice["message"], {}) if is_chat else ("text", choice["text"], "")
        first.append({**common, name: said, **whole, "finish_reason": None})
        end.append({**common, name: rest, "finish_reason": choice["finish_reason"]})
    prompt = {"prompt_token_ids": response["prompt_token_ids"]} if is_chat else {}
    yield {**head, "choices": first, **prompt}
    yield {**head, "choices": end}
    if include_usage:
        yield {**head, "choices": [], "usage": response["usage"]}


class _Server(ThreadingHTTPServer):
    answers: ScriptedAnswers
    model: str
    daemon_threads = True
    # A batch of rollouts connects at once; the default of 5 lets the rest wait for seconds.
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    # Head and body are two writes; the second must not wait for the first's acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """One line for each request would bury the training's log."""

    def do_GET(self) -> None:
        path = self._path()
        if path.endswith("/models"):
            model = {"id": self.server.model, "object": "model", "owned_by": "agl_meta dry run"}
            self._send({"object": "list", "data": [model]})
        elif path.endswith("/health"):
            self._send({"status": "ok"})
        else:
            self._refuse(404, f"the stand-in has no {path}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self._path()
        answers = self.server.answers
        if path.endswith("/chat/completions"):
            answer = answers.chat
        elif path.endswith("/completions"):
            answer = answers.text
        else:
            self._refuse(404, f"the stand-in has no {path}")
            return
        try:
            request = json.loads(body)
            response = answer(request)
            response["model"] = request.get("model") or self.server.model
            include_usage = (request.get("stream_options") or {}).get("include_usage", False)
            streams = bool(request.get("stream"))
        except Exception as error:
            self._refuse(400, f"{type(error).__name__}: {error}")
            return
        if streams:
            self._stream(_chunks(response, include_usage))
        else:
            self._send(response)

    def _path(self) -> str:
        return urlsplit(self.path).path.rstrip("/")

    def _refuse(self, status: int, reason: str) -> None:
        logger.warning("DRY RUN: the inference server's stand-in refused a request: %s", reason)
        error = {"message": reason, "type": "BadRequestError", "code": status}
        self._send({"error": error}, status)

    def _send(self, document: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._write(body)

    def _stream(self, chunks: Iterator[dict[str, Any]]) -> None:
        self.close_connection = True  # which is what ends a body without a length
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for chunk in chunks:
            self._write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self._write(b"data: [DONE]\n\n")

    def _write(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
        except ConnectionError:  # a rollout that was given up hangs up
            self.close_connection = True
