"""Chat templates, programs of strangers in the language Jinja, run in a process of their own.

Jinja's sandbox limits neither time nor memory: `'a' * 10**10` is one step of it. So the process has limits of both.
"""

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil
from transformers.utils.chat_template_utils import render_jinja_template

SECONDS = 5  # for a conversation, which takes milliseconds
MEMORY = 512 << 20  # bytes that a template may take
LONGEST = 1 << 24  # bytes that it may write, as many as a line of a text has


class Rendering(NamedTuple):
    """The result of a template: the text of a conversation, or None and the reason why there is none."""

    text: str | None
    reason: str = ""


def write_conversation(template: str, messages: Sequence[Mapping], tokens: Mapping[str, str]) -> Rendering:
    """Return a conversation as a chat template writes it, without a prompt for a further answer.

    tokens: the tokenizer's special tokens by role, which templates may name.
    """
    writer = _writer()
    request = json.dumps([template, messages, tokens, SECONDS], default=_as_json)
    answer = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            writer.stdin.write(f"{request}\n")
            writer.stdin.flush()
            answer = writer.stdout.readline()
    finally:
        if not answer.endswith("\n"):  # it has ended, or is in the middle of a conversation
            _writer.cache_clear()
            writer.kill()
    if answer.endswith("\n"):
        return Rendering(*json.loads(answer))
    stopped = writer.wait() == -signal.SIGALRM
    return Rendering(None, f"it takes more than {SECONDS:g} seconds" if stopped else "it ends the process that runs it")


@functools.cache
def _writer() -> subprocess.Popen:
    """Start the process that writes conversations; it ends when this one does."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )


def _as_json(value: object) -> object:
    """Return a value that JSON cannot hold as templates see it: a mapping as an object, others by their type."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def serve() -> None:
    """Answer each request, a line of standard input, with a line of standard output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # answers alone go to the real standard output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    most = psutil.Process().memory_info().vms + MEMORY
    with contextlib.suppress(ValueError, OSError):  # a lower limit is there, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin:
        template, messages, tokens, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, wherever it is
        answer = _render(template, messages, tokens)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


def _render(template: str, messages: list[dict], tokens: dict[str, str]) -> Rendering:
    try:
        ((text,), _) = render_jinja_template(conversations=[messages], chat_template=template, **tokens)
        if len(text.encode()) > LONGEST:
            return Rendering(None, f"it writes more than {LONGEST >> 20} MB")
        return Rendering(text)
    except MemoryError:
        return Rendering(None, f"it takes more than {MEMORY >> 20} MB of memory")
    except Exception as error:  # from Jinja, transformers, or the template's own code
        return Rendering(None, str(error) or type(error).__name__)
