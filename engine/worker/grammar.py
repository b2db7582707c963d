"""Structured outputs: compiles grammars, follows answers, and finds the tokens that may come next.

It uses llguidance, which is imported when the first request needs it. A grammar can overflow llguidance's stack, which ends the
process. So each grammar is first compiled in a worker process with a small stack.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ...callers.errors import InputError, clip
from ...mm.media.isolate import call_worker, keep_workers
from ...processors.text.tokenizer import Tokenizer
from ..structured_outputs import StructuredOutputsParams
from .grammar_compiler import STACK, compile_alone, compile_grammar

_WHITESPACE: dict[str, dict[str, object]] = {
    "compact": {"whitespace_flexible": False},
    "flexible": {"whitespace_pattern": r"[ \n\r\t]{1,40}"},  # bounded, or a model could fill its answer with whitespace
}
_MAX_COMPILED = 64  # unused grammars that stay compiled
_COMPILERS = 2  # threads
_WORKER_MEMORY = 1 << 30
_WORD = 32  # tokens in one word of a mask
_REGEX_ERROR = re.compile(r"regex parse error:.*?\berror: ([^\n]*)", re.S)
_UNKNOWN_TOKEN = re.compile(
    r'unknown special token: "([^"]*)"; following special tokens are available: \u27e6(.*?)\u27e7', re.S
)
_SHOWN_TOKENS = 16
_MAX_PROBLEM = 400  # characters of llguidance's message
_STACK_SIZE = Lock()  # held while the stack size of new threads is changed


class Grammar:
    """The state of one answer's grammar. The caller keeps the answer's tokens."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size, self._num_words = matcher, vocab_size, -(-vocab_size // _WORD)
        self._num_accepted = 0

    def accept_tokens(self, token_ids: Sequence[int], turn_start: int) -> None:
        """Advance by the answer's new tokens since the last call. Raise InputError if the grammar does not allow them."""
        new = list(token_ids[turn_start + self._num_accepted :])
        self._num_accepted += len(new)
        if new and not self._matcher.consume_tokens(new):
            raise self._error()

    def rollback(self, num_tokens: int) -> None:
        """Return to the state after the first `num_tokens` of the answer, or to the beginning if llguidance cannot."""
        if num_tokens < self._num_accepted:
            done = self._matcher.rollback(self._num_accepted - num_tokens)
            self._num_accepted = num_tokens if done else 0
            if not done:
                self._matcher.reset()

    @property
    def complete(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    def allowed_tokens(self, end_ids: Sequence[int], may_end: bool, vocab: int) -> tuple[np.ndarray, bool]:
        """Return the tokens that may come next, bool `[vocab]`, and whether the answer must end here, regardless of `may_end`.

        Args:
            end_ids: tokens that end the answer. They are allowed if the grammar is complete, or if they complete it, and
                `may_end` is True, or if the grammar allows nothing else.
            vocab: number of logits in a row. It may exceed the tokenizer's vocabulary; tokens beyond that are never allowed.

        Raises:
            InputError: the grammar cannot continue, or only with an end token that does not complete it.
        """
        words = np.zeros(self._num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._error()
        allowed = np.zeros(vocab, dtype=bool)
        num_tokens = min(vocab, self._vocab_size)
        allowed[:num_tokens] = np.unpackbits(words.view(np.uint8), count=num_tokens, bitorder="little").view(bool)
        ends, named = list(end_ids), list[int]()
        if not self.complete:  # the grammar itself may have an end token
            named = [token for token in end_ids if token < num_tokens and allowed[token]]
            ends = list(filter(self._completes, named))
        allowed[list(end_ids)] = False
        must_end = not allowed.any() and bool(ends)
        if named and not ends and not allowed.any():
            where = "in the middle of its answers, which would end there; leave it out, or put it last"
            raise InputError(f"the grammar has the end token {named[0]} {where}", param="structured_outputs.grammar")
        allowed[ends] = must_end or may_end
        return allowed, must_end

    def _completes(self, token: int) -> bool:
        copy = self._matcher.deep_copy()
        return bool(copy.consume_token(token) and copy.is_accepting())

    def _error(self) -> InputError:
        return InputError(f"the grammar cannot continue: {_line(self._matcher.get_error())}; make it simpler")


class GrammarFactory:
    """Compiles grammars for one tokenizer. Caches the latest, and those whose future is still referenced.

    Thread-safe; compiling holds no lock. The first grammar takes seconds longer: it starts the worker and reads the vocabulary.

    Args:
        seconds: time limit of the worker.
        refuse_seconds: how long a grammar is refused after it crashed the worker or exceeded a limit there.
        require_sandbox: compile nothing in a worker whose system calls cannot be filtered.
    """

    def __init__(
        self, tokenizer: Tokenizer, seconds: float = 10.0, refuse_seconds: float = 300.0, require_sandbox: bool = False
    ) -> None:
        self._tokenizer, self._seconds, self._refuse_seconds = tokenizer, seconds, refuse_seconds
        self._require_sandbox = require_sandbox
        self._refused: OrderedDict[StructuredOutputsParams, float] = OrderedDict()  # until when, on the monotonic clock
        self._release: Callable[[], object] | None = None
        self._latest: OrderedDict[StructuredOutputsParams, Future[Any]] = OrderedDict()
        self._alive: WeakValueDictionary[StructuredOutputsParams, Future[Any]] = WeakValueDictionary()
        self._lock, self._vocabulary_lock = Lock(), Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[tuple[str, StructuredOutputsParams, Future[Any]]] = []  # (tenant, grammar, result) of each `begin`
        self._busy = set[str]()  # tenants whose grammar is being compiled

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile in the calling thread. Raise InputError if that fails; it names the format and what is wrong with it."""
        self._compiled(params)

    def begin(self, params: StructuredOutputsParams, tenant: str = "") -> Future[Any]:
        """Compile in another thread. While the caller keeps the returned future, `make` does not compile again.

        Grammars of one `tenant` are compiled one at a time, except those of "".
        """
        future, new = self._future(params)
        if new:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_COMPILERS, "sensorium-grammar")
            with self._lock:
                self._waiting.append((tenant, params, future))
            with _STACK_SIZE:
                before = threading.stack_size(4 * STACK)  # applies to all threads that start before it is restored
                self._pool.submit(self._compile_waiting)
                threading.stack_size(before)
        return future

    def make(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar's state at the beginning of an answer. InputError as in `check`."""
        matcher, size = self._compiled(params)
        return Grammar(matcher.deep_copy(), size)

    def close(self) -> None:
        """End the threads and idle workers."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._release is not None:
            self._release()

    def _compiled(self, params: StructuredOutputsParams) -> tuple[Any, int]:
        future, new = self._future(params)
        if new:
            self._compile_for(params, future)
        compiled: tuple[Any, int] = future.result()
        return compiled

    def _future(self, params: StructuredOutputsParams) -> tuple[Future[Any], bool]:
        """Return the future of a grammar, and True if it is new, so that the caller has to compile it."""
        with self._lock:
            future = self._alive.get(params)
            new = future is None
            if future is None:
                future = self._alive[params] = Future()
            self._latest[params] = future
            self._latest.move_to_end(params)
            if len(self._latest) > _MAX_COMPILED:
                self._latest.popitem(last=False)
        return future, new

    def _compile_waiting(self) -> None:
        """Compile grammars of tenants that occupy no thread, oldest first."""
        while True:
            with self._lock:
                entry = next((entry for entry in self._waiting if entry[0] not in self._busy), None)
                if entry is None:  # the rest belongs to tenants with a running thread, which compiles it
                    return
                self._waiting.remove(entry)
                tenant, params, future = entry
                self._busy |= {tenant} - {""}
            self._compile_for(params, future)
            with self._lock:
                self._busy.discard(tenant)

    def _compile_for(self, params: StructuredOutputsParams, future: Future[Any]) -> None:
        """Compile into the future. Errors are not cached: the next request compiles again."""
        try:
            future.set_result(self._compile(params))
        except BaseException as error:
            with self._lock:
                self._latest.pop(params, None)
                self._alive.pop(params, None)
            future.set_exception(error)

    def _compile(self, params: StructuredOutputsParams) -> tuple[Any, int]:
        """Return llguidance's matcher, and the size of its vocabulary."""
        try:
            source = _source(params)
        except ValueError as error:
            raise _error(params, str(error)) from None
        self._check_in_worker(params, source)
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        matcher, problem = compile_grammar(vocabulary, source)
        if problem:
            raise _error(params, _line(problem))
        return matcher, vocabulary.vocab_size

    def _check_in_worker(self, params: StructuredOutputsParams, source: str) -> None:
        """Raise InputError if a worker crashes or exceeds a limit when it compiles the grammar, or did so recently."""
        with self._lock:
            if self._release is None:
                self._release = keep_workers(self)
            left = self._refused.get(params, -math.inf) - time.monotonic()
        if left > 0:
            raise _error(params, f"compiling it failed before; it is refused for another {math.ceil(left)} s")
        try:
            reply = call_worker(
                compile_alone, source.encode(), self._seconds, _WORKER_MEMORY, require_sandbox=self._require_sandbox
            )
        except InputError:
            reply = None
        if reply is not None and reply.kind == "value":
            return
        with self._lock:
            self._refused[params] = time.monotonic() + self._refuse_seconds
            self._refused.move_to_end(params)
            if len(self._refused) > _MAX_COMPILED:
                self._refused.popitem(last=False)
        reason = f"compiling it crashed, needed more than {_WORKER_MEMORY:,} bytes, or took more than {self._seconds:g} s"
        raise _error(params, f"{reason}; nest it less, make it smaller, or raise <<grammar_seconds>>")

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(*self._tokenizer.grammar_vocabulary())
        except ValueError as error:
            raise InputError(
                f"structured_outputs cannot be used with this checkpoint's tokenizer: {error}", code="unsupported"
            ) from None


def _error(params: StructuredOutputsParams, reason: str) -> InputError:
    param = f"structured_outputs.{params.form}"
    return InputError(f"<<param>> cannot be used: {reason}", param=param)


def _source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's own form."""
    from llguidance import LLMatcher

    make: Any = LLMatcher
    if params.form in ("json", "json_object"):
        text = make.grammar_from_json_schema(params.json or '{"type": "object"}', overrides=_WHITESPACE[params.whitespace])
    elif params.form == "regex":
        text = make.grammar_from_regex(params.regex)
    elif params.choice:  # as one regex: with a rule for each choice the parser would run out of states
        text = make.grammar_from_regex("|".join(map(re.escape, params.choice)))
    else:
        text = make.grammar_from_lark(params.grammar)
    return str(text)


def _line(text: str) -> str:
    """Return the first sentence of llguidance's message on one line."""
    text = text.partition("<state>")[0]
    parsed = _REGEX_ERROR.search(text)
    if parsed is not None:  # without the lines of llguidance's own grammar around the expression
        return f"{' '.join(parsed[1].split())}; this engine's expressions have no look-around and no back-references"
    if (unknown := _UNKNOWN_TOKEN.search(text)) is not None:
        names = [name for name in unknown[2].split("\u2027") if name.startswith("<")]
        more = f" and {len(names) - _SHOWN_TOKENS} others" if len(names) > _SHOWN_TOKENS else ""
        return f"the tokenizer has no special token {clip(unknown[1], 80)}; it has {', '.join(names[:_SHOWN_TOKENS])}{more}"
    words = clip(" ".join(text.split()), _MAX_PROBLEM)
    if words.startswith("lexer error"):
        return f"{words}; make it smaller, for example with smaller repetition counts"
    return "no answer has this form" if words == "NoExtensionBias" else words
