"""Random histories of batches, chunks, cache hits, preemption and rollbacks: every answer equals the one alone."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sensorium.callers.errors import InputError
from sensorium.engine.kv_cache.block_pool import NULL_BLOCK
from sensorium.engine.stats import EngineStats

COUNTED = ("preemptions", "prefix_hits", "encoder_hits", "encoder_evictions", "cut_items", "prefix_evictions", "steps_ahead")

ROOM = {"bidirectional_items": (10, 0), "bidirectional_prompt": (42, 14), "bidirectional_media": (42, 40)}
"""Tokens and encoder rows that a step needs for the spans of a sequence."""


class History(RuleBasedStateMachine):
    """A random history. Prompts share beginnings and items, so caches are hit; pools are small, so sequences are preempted."""

    toy = None
    totals = dict.fromkeys(COUNTED, 0)

    @initialize(
        seed=st.integers(0, 10**6),
        blocks=st.integers(14, 34),
        budget=st.integers(1, 40),
        seqs=st.integers(1, 5),
        encoder_rows=st.integers(6, 20),
        encoder_budget=st.sampled_from([1, 5, 12, 100]),
        prompt_attention=st.sampled_from(["causal", "causal", "causal", *ROOM]),
        reads=st.booleans(),
        max_cached=st.sampled_from([None, None, 0, 4]),
        window=st.sampled_from([None, 1, 6, 13]),
        chunk=st.sampled_from([None, None, 4, 12]),
        states=st.booleans(),
        async_scheduling=st.booleans(),
        late=st.sampled_from([0, 0, 1, 3]),
        draws_there=st.booleans(),
    )
    def start(self, seed, budget, seqs, prompt_attention, reads, window, chunk, states, draws_there, **options):
        tokens, rows = ROOM.get(prompt_attention, (-seqs, 0))
        if prompt_attention == "bidirectional_items" and seed % 2:
            prompt_attention = "bidirectional_ranges"
        self.rng, self.prompt_attention = random.Random(seed), prompt_attention
        if prompt_attention == "bidirectional_media":
            window = chunk = None
        budget += tokens + seqs
        options["encoder_rows"] += rows or 6 * reads
        self.model = lambda: self.toy.ToyModel(reads, window=window, states=states, chunk=chunk)
        self.core = self.toy.make_core(
            budget=budget, seqs=seqs, prompt_attention=prompt_attention, model=self.model(), block_size=4, max_len=48, **options
        )
        self.core.executor.runner.draws_there = draws_there
        self.reads = reads
        self.count = 0
        self.asked = {}  # name -> the sequence as a new prompt
        self.answers = {}
        self.done = set()

    def text(self, least, most):
        return [self.rng.randrange(4, 9) for _ in range(self.rng.randint(least, most))]

    def prompt(self, offset=0):
        tokens, features = [], []
        for _ in range(self.rng.randint(0, 2)):
            tokens += [7] * self.rng.randint(0, 6)
            place = offset + len(tokens)
            if self.rng.random() < 0.2:
                features += self.toy.pair(place, 2)
            else:
                features.append(self.toy.item(place, *self.rng.choice([(5, 1), (6, 2), (3, 3)]), edges=self.rng.random() < 0.5))
            tokens += [self.toy.PAD] * features[-1].range.length
        return tokens + [8] * self.rng.randint(0, 3) + self.text(1, 3), features

    @rule(hold=st.booleans(), priority=st.sampled_from([0, 0, 1]), temperature=st.sampled_from([0.0, 0.0, 1.0]))
    def add(self, hold, priority, temperature):
        name = f"r{self.count}"
        self.count += 1
        tokens, features = self.prompt()
        request = self.toy.make_request(
            name, self.rng, media=False, hold_open=hold, temperature=temperature, max_tokens=self.rng.randint(1, 8)
        )
        request = replace(
            request,
            prompt_token_ids=tuple(tokens),
            features=tuple(features),
            priority=priority,
            salt=self.rng.choice(["", "", "tenant"]),
            cross=(self.toy.item(0, self.rng.choice([3, 6]), 4),) if self.reads else (),
            seed=self.rng.randrange(9),
        )
        self.core.add(request)
        self.asked[name], self.answers[name] = request, []

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            for output in self.core.step().outputs:
                self.take(output)

    def take(self, output):
        assert output.error is None
        answer = self.answers[output.request_id]
        answer += output.token_ids
        if output.finish_reason is not None:
            self.compare(output)

    def compare(self, output):
        name = output.request_id
        request = replace(self.asked[name], hold_open=False)
        core = self.toy.make_core(
            blocks=64, budget=500, caching=False, model=self.model(), prompt_attention=self.prompt_attention
        )
        core.add(request)
        alone = self.toy.drain(core)[name]
        assert self.answers[name] == self.toy.tokens_of(alone), f"{name} has another answer in a batch"
        assert output.finish_reason == alone[-1].finish_reason
        if self.asked[name].hold_open:
            self.done.add(name)
        else:
            del self.asked[name]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.core.abort(name)
        self.done.discard(name)
        del self.asked[name]

    @precondition(lambda self: set(self.asked) - self.done)
    @rule(data=st.data())
    def refused(self, data):
        """Check that appending more than fits during an answer is refused and changes nothing."""
        name = data.draw(st.sampled_from(sorted(set(self.asked) - self.done)))
        with pytest.raises(InputError, match="max_model_len is 48"):
            self.core.append(name, [5] * 60)

    @precondition(lambda self: self.done)
    @rule(data=st.data(), close=st.booleans(), back=st.integers(0, 12))
    def go_on(self, data, close, back):
        """Roll a held sequence back, and append to it."""
        name = data.draw(st.sampled_from(sorted(self.done)))
        request = self.asked[name]
        tokens = [*request.prompt_token_ids, *self.answers[name]]
        keep = len(tokens) - back
        ends = [feature.range.end for feature in request.features]
        if keep >= max([1, *ends]) and back:
            self.core.truncate(name, keep)
            tokens = tokens[:keep]
        more, features = self.prompt(len(tokens))
        # answers of a bidirectional prompt see only what comes before them
        if len(tokens) + len(more) > 40 or self.prompt_attention == "bidirectional_prompt":
            return self.abort_named(name)
        self.core.append(name, more, features, close)
        features = (*request.features, *features)
        self.asked[name] = replace(
            request, prompt_token_ids=(*tokens, *more), features=features, hold_open=request.hold_open and not close
        )
        self.answers[name] = []
        self.done.discard(name)

    def abort_named(self, name):
        self.core.abort(name)
        self.done.discard(name)
        del self.asked[name]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "core"):
            return
        scheduler, stats = self.core.scheduler, self.core.stats
        held = [set() for _ in scheduler.block_pools.pools]
        for request in scheduler.requests.values():
            for blocks, own in zip(held, request.block_ids, strict=True):
                blocks.update(block for block in own if block != NULL_BLOCK)
        for blocks, pool in zip(held, scheduler.block_pools.pools, strict=True):
            assert len(blocks) == pool.num_blocks - pool.num_free
        assert stats.encoder_bytes <= stats.encoder_capacity
        assert set(scheduler.requests) == set(self.asked)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        for _ in range(3000):
            for output in self.core.step().outputs if scheduler.waiting or scheduler.running else ():
                self.take(output)
        assert not [*scheduler.waiting, *scheduler.running], "the engine does not become idle"
        for name in list(self.asked):
            self.core.abort(name)
        self.toy.assert_empty(self.core)
        stats = self.core.stats
        assert isinstance(stats, EngineStats)
        for name in COUNTED:
            self.totals[name] += getattr(stats, name)


def run(toy, examples):
    History.toy, History.totals = toy, dict.fromkeys(COUNTED, 0)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
            phases=[Phase.generate],
        ),
    )
    print(History.totals)
    assert all(count >= examples / 10 for count in History.totals.values()), History.totals


def test_histories(toy):
    run(toy, 100)


@pytest.mark.full
def test_thousands_of_histories(toy):
    run(toy, 3000)
