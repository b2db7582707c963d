"""Items that another engine encodes: the answers of one engine with everything, and faults that are seen."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from family import ask, load_rows, save
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.config import make_config
from sensorium.engine.connectors import backoff
from sensorium.engine.connectors.item_inputs import ItemInputs, pack_inputs, unpack_inputs
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.packing import pack
from sensorium.engine.connectors.peer import PeerConnector
from sensorium.engine.connectors.peer_server import PeerServer
from sensorium.engine.connectors.wire import ItemFailedError, PeerError
from sensorium.engine.engine_args import EngineArgs
from sensorium.engine.frontend import remote_encoder
from sensorium.engine.frontend.remote_encoder import RemoteEncoder
from sensorium.engine.transfer_config import TOKEN_VARIABLE
from sensorium.mm.embeddings import ROWS
from sensorium.mm.fields import BatchedField, FieldElem, FlatField, SharedField
from sensorium.mm.hashing import digest
from waiting import LONG, wait_until

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
TEXT = "<|vision_start|><|image_pad|><|vision_end|>Read."
FAMILIES = {
    "qwen2_vl": "iv",
    "qwen3_vl": "iv",  # deepstack levels, timestamps as text
    "idefics3": "i",  # tiles with text between them
    "phi4mm": "ia",
    "qwen2_audio": "a",
}


def make(folder=TINY_VL, row=None, **options):
    return LLM(folder, **{"device": "cpu", "max_model_len": 2048, "warm_up": False, **(row.options if row else {}), **options})


def encoder_of(folder=TINY_VL, row=None, **options):
    return make(folder, row, **{"parts": "encoder", "encoder_listen": "127.0.0.1:0", **options})


def address(encoder):
    return f"127.0.0.1:{encoder.engine._encoder_server.port}"


def answer(llm, prompt, params=GREEDY):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def image_prompt(seed, size=(64, 48), **options):
    image = ask(load_rows()["qwen2_vl"], "i", seed, sizes=[size]).data["image"][0]
    return {"prompt": TEXT, "multi_modal_data": {"image": image}, **options}


def counts(llm):
    (stats,) = [stats for stats in llm.stats.transfers if stats.connector == "peer"]
    assert stats.kind == "encoder rows"
    return stats


@pytest.fixture(scope="module")
def whole():
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def encoder():
    with encoder_of() as llm:
        yield llm


@contextmanager
def fake_encoder(encode):
    server = PeerServer([], "127.0.0.1:0", encode=encode)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


def free_address():
    with fake_encoder(None) as place:
        return place


@pytest.mark.in_process
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_one_engine_with_everything(name, tmp_path):
    row = load_rows()[name]
    folder, prompt = save(row, tmp_path / "model"), ask(row, FAMILIES[name]).ours
    with make(folder, row) as one:
        wanted = [answer(one, prompt, params) for params in (GREEDY, SAMPLED)]
    with encoder_of(folder, row) as encoder:
        place = address(encoder)
        with make(folder, row, parts="decoder", encoder=place) as language:
            for want, params in zip(wanted, (GREEDY, SAMPLED), strict=True):
                got = answer(language, prompt, params)
                assert got.error is None, got.error
                assert (got.outputs, got.prompt_token_ids, got.items) == (want.outputs, want.prompt_token_ids, want.items)
            assert counts(language).misses == encoder.stats.encoder_calls > 0  # the second request has the rows of the first
        encoded = encoder.stats.encoder_calls
        with make(folder, row, encoder=[place]) as other:  # it has an encoder, too
            assert answer(other, prompt).outputs == wanted[0].outputs
            assert (counts(other).hits, counts(other).fallbacks, counts(other).failed) == (encoded, 0, 0)
        assert encoder.stats.encoder_calls == encoded


def test_many_requests_at_a_time(whole, encoder):
    prompts = [image_prompt(seed, (40 + 8 * (seed % 3), 48)) for seed in range(8)]
    wanted = [output.outputs for output in whole.generate(prompts, GREEDY, use_tqdm=False)]
    with make(parts="decoder", encoder=address(encoder), media_workers=4, engine_process=True) as language:
        assert [output.outputs for output in language.generate(prompts, GREEDY, use_tqdm=False)] == wanted


def test_an_encoder_that_is_gone_is_a_typed_error_or_a_counted_fallback(whole, monkeypatch):
    from prometheus_client import CollectorRegistry

    monkeypatch.setattr(backoff, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_encoder, "_PATIENCE_SECONDS", LONG)  # a busy machine is no stopped encoder
    registry = CollectorRegistry()
    prompts = [image_prompt(seed) for seed in (20, 21, 22)]
    wanted = [answer(whole, prompt).outputs for prompt in prompts]
    encoder = encoder_of()
    place = address(encoder)
    with make(parts="decoder", encoder=place) as language, make(encoder=place, metrics=registry) as both:
        assert [answer(llm, prompts[0]).outputs for llm in (language, both)] == [wanted[0]] * 2
        encoder.close()
        failed = answer(language, prompts[1])
        assert (failed.error.code, failed.error.modality, failed.error.index) == ("unreachable", "image", 0)
        assert answer(both, prompts[1]).outputs == wanted[1]
        assert (counts(language).fallbacks, counts(both).fallbacks) == (0, 1)
        assert min(counts(language).failed, counts(both).failed) > 0
        labels = {"kind": "encoder rows", "connector": "peer"}
        assert registry.get_sample_value("sensorium_connector_fallbacks_total", labels) == 1
        assert answer(language, prompts[0]).outputs == wanted[0]  # its rows are kept here
        with encoder_of(encoder_listen=place):  # a new one takes its place
            assert [answer(llm, prompts[2]).outputs for llm in (language, both)] == [wanted[2]] * 2
        assert counts(both).fallbacks == 1


DAMAGES = ["flipped", "empty", "short", "of another item", "fewer", "another dtype", "another name", "long"]


def damaged(kind, key, item, width, dtype):
    """Return a response that is no packed rows of the item."""
    rows = torch.zeros(item.num_rows, width, dtype=dtype)
    if kind == "flipped":
        data = bytearray(pack(key, {ROWS: rows}))
        data[-1] ^= 1
        return bytes(data)
    return {
        "empty": b"",
        "short": pack(key, {ROWS: rows})[:-8],
        "of another item": pack(f"{key[:-1]}{'0' if key[-1] != '0' else '1'}", {ROWS: rows}),
        "fewer": pack(key, {ROWS: rows[1:]}),
        "another dtype": pack(key, {ROWS: rows.double()}),
        "another name": pack(key, {"rows": rows}),
        "long": bytes(1 << 20),
    }[kind]


@pytest.mark.parametrize("kind", DAMAGES)
def test_wrong_rows_are_never_used(kind, whole):
    prompt, info = image_prompt(30), whole.engine.info
    width, dtype = info.hidden_size, getattr(torch, info.dtype)

    def encode(key, data):
        return damaged(kind, key, unpack_inputs(data), width, dtype)

    want = answer(whole, prompt).outputs
    with (
        fake_encoder(encode) as place,
        make(encoder=place) as both,
        make(parts="decoder", encoder=place) as language,
    ):
        assert answer(both, prompt).outputs == want
        assert (counts(both).damaged, counts(both).fallbacks) == (1, 1)
        assert answer(language, prompt).error.code == "unreachable"
        assert counts(language).damaged == 1


def test_an_encoder_of_another_model_is_refused(encoder, tmp_path):
    with make(parts="decoder", encoder=address(encoder), dtype="bfloat16") as language:
        assert answer(language, image_prompt(31)).error.code == "unreachable"
        assert counts(language).failed == 1


def test_a_slow_encoder_costs_its_time_limit(whole):
    release, prompt = threading.Event(), image_prompt(32)

    def encode(key, data):
        release.wait(LONG)
        raise ValueError("late")

    with fake_encoder(encode) as place, make(encoder=place, encoder_seconds=0.1) as both:
        assert answer(both, prompt).outputs == answer(whole, prompt).outputs
        assert (counts(both).failed, counts(both).fallbacks) == (1, 1)
        release.set()


SERVER = """
import sys
from sensorium import LLM

options = {"device": "cpu", "max_model_len": 2048, "warm_up": False, "engine_process": False}
with LLM(sys.argv[1], parts="encoder", encoder_listen="127.0.0.1:0", **options) as llm:
    print(llm.engine._encoder_server.port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.in_process
def test_an_encoder_whose_process_is_stopped_is_seen_long_before_the_time_limit(whole, monkeypatch):
    monkeypatch.setattr(backoff, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_encoder, "_PATIENCE_SECONDS", LONG)  # a busy machine is no stopped encoder
    prompts = [image_prompt(seed) for seed in (80, 81, 82)]
    wanted = [answer(whole, prompt).outputs for prompt in prompts]
    command = [sys.executable, "-P", "-c", SERVER, str(TINY_VL)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            listens_at = f"127.0.0.1:{int(process.stdout.readline())}"
            options = {"encoder": listens_at, "encoder_seconds": 10 * LONG}
            with make(**options) as both, make(parts="decoder", **options) as language:
                assert [answer(llm, prompts[0]).outputs for llm in (both, language)] == [wanted[0]] * 2
                process.send_signal(signal.SIGSTOP)
                assert answer(both, prompts[1]).outputs == wanted[1]
                assert (counts(both).failed, counts(both).fallbacks) == (1, 1)
                assert answer(language, prompts[1]).error.code == "unreachable"
                process.send_signal(signal.SIGCONT)
                assert [answer(llm, prompts[2]).outputs for llm in (both, language)] == [wanted[2]] * 2
                assert counts(both).fallbacks == 1
        finally:
            process.kill()


@pytest.mark.in_process
def test_an_engine_of_an_encoder_that_is_stopped_is_ended_and_nobody_waits_for_the_next_one(whole, monkeypatch):
    monkeypatch.setattr(backoff, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_encoder, "_PATIENCE_SECONDS", LONG)  # a busy machine is no stopped encoder
    prompts = [image_prompt(seed) for seed in (83, 84, 85)]
    wanted, may_restart = [answer(whole, prompt).outputs for prompt in prompts], threading.Event()
    with encoder_of(engine_process=True, engine_restarts=1, engine_standby=False) as encoder:
        core, loop = encoder.engine.loop.core, encoder.engine.loop
        restart = core._restart
        monkeypatch.setattr(core, "_restart", lambda: may_restart.wait(LONG) and restart())
        with make(encoder=address(encoder), encoder_seconds=10 * LONG) as both:
            os.kill(core.pid, signal.SIGSTOP)
            assert answer(both, prompts[0]).outputs == wanted[0]
            assert answer(both, prompts[1]).outputs == wanted[1]
            assert (counts(both).failed, counts(both).fallbacks) == (2, 2)
            may_restart.set()
            wait_until(lambda: not loop.is_restarting)
            assert answer(both, prompts[2]).outputs == wanted[2]
            assert (counts(both).failed, counts(both).fallbacks) == (2, 2)


def test_the_next_encoder_is_asked_if_one_is_gone(encoder, whole):
    dead = free_address()
    with make(parts="decoder", encoder=[dead, address(encoder)]) as language:
        for seed in range(40, 48):  # some of them are routed to the dead one
            prompt = image_prompt(seed)
            assert answer(language, prompt).outputs == answer(whole, prompt).outputs
        assert counts(language).failed > 0


class StoppedPeer:
    """A peer that is stopped until `is_well`. `probed`: somebody has asked whether it answers."""

    def __init__(self, number, before_failing):
        self.address, self._before_failing = f"127.0.0.1:{number}", before_failing
        self.probed, self.may_answer, self.is_well, self.num_asked = threading.Event(), threading.Event(), False, 0

    def get(self, key, limit):
        self.num_asked += 1
        if self.is_well:
            return pack(key, {ROWS: torch.ones(2, 3)})
        self._before_failing()
        raise PeerError("it did not answer in time")

    def contains(self, keys):
        self.probed.set()
        self.may_answer.wait(LONG)
        if not self.is_well:
            raise PeerError("it did not answer in time")
        return set()

    def close(self):
        self.may_answer.set()


ITEM = ItemInputs("image", {"x": FieldElem(torch.ones(2), BatchedField())}, 2, "")


def remote(peers):
    return closing(RemoteEncoder(peers, digest("rows"), LONG, 3, torch.float32, True))


def test_stopped_encoders_are_given_up_at_the_same_time(monkeypatch):
    """While the first one is waited for, the others are probed; nobody waits for them again."""
    monkeypatch.setattr(remote_encoder, "_PATIENCE_SECONDS", 0.001)

    def others_fail():
        for peer in peers:
            peer.may_answer.set()
        assert sum(peer.probed.wait(LONG if peer.num_asked == 0 else 0) for peer in peers) == 2

    peers = [StoppedPeer(number, others_fail) for number in (1, 2, 3)]
    with remote(peers) as encoder:
        assert encoder.encode(ITEM) is None
        assert sum(peer.num_asked for peer in peers) == 1
        assert encoder.stats.failed >= 3
        assert encoder.stats.fallbacks == 1


def test_a_stopped_encoder_is_asked_again_once_it_has_answered(monkeypatch):
    monkeypatch.setattr(remote_encoder, "_PATIENCE_SECONDS", 0.001)
    peer = StoppedPeer(1, lambda: None)
    with remote([peer]) as encoder:
        for _ in range(3):
            assert encoder.encode(ITEM) is None
        assert peer.num_asked == 1
        peer.is_well = True
        peer.may_answer.set()
        wait_until(lambda: encoder.encode(ITEM) is not None)
        assert encoder.stats.hits == 1


def test_an_item_on_which_the_encoder_fails(encoder):
    def encode(key, data):
        raise ItemFailedError("not finite")

    with fake_encoder(encode) as place, make(parts="decoder", encoder=[place, address(encoder)]) as language:
        errors = [answer(language, image_prompt(seed)).error for seed in range(50, 58)]
        assert {error.code for error in errors if error is not None} == {"encoder_failed"}
    with encoder_of(max_model_len=64) as small, make(parts="decoder", encoder=address(small)) as language:
        assert answer(language, image_prompt(58, (400, 400))).error.code == "encoder_failed"
        assert answer(language, image_prompt(58)).error is None


def test_tenants_do_not_share_rows(encoder):
    with make(parts="decoder", encoder=address(encoder)) as language:
        for salt, misses in (("a", 1), ("b", 2)):
            assert answer(language, image_prompt(60, cache_salt=salt)).error is None
            assert counts(language).misses == misses


def test_a_server_of_rows_takes_only_items_under_their_own_hash(encoder):
    server = encoder.engine._encoder_server
    key = f"{server._namespace}/"
    item = ItemInputs("image", {"x": FieldElem(torch.zeros(2), FlatField())}, 2, digest("tenant"))
    with closing(PeerConnector(address(encoder))) as client:
        with pytest.raises(PeerError):  # rows of others are not kept
            client.put(key + item.hash, b"rows")
        others = pack(key, {"x": torch.zeros(2)})
        for name, data in ((digest("other"), pack_inputs(item)), (item.hash, b"x"), (item.hash, others)):
            with pytest.raises(PeerError):
                client.encode(key + name, data, 1 << 20, LONG)
        with pytest.raises(PeerError):
            client.encode(f"{digest('another model')}/{item.hash}", pack_inputs(item), 1 << 20, LONG)
        with pytest.raises(ItemFailedError):  # the encoder's error
            client.encode(key + item.hash, pack_inputs(item), 1 << 20, LONG)
        unknown = ItemInputs("smell", item.kwargs, 2, item.tenant)
        with pytest.raises(ItemFailedError):
            client.encode(key + unknown.hash, pack_inputs(unknown), 1 << 20, LONG)
    plain = PeerServer([MemoryConnector(1 << 20)], "127.0.0.1:0")
    with closing(PeerConnector(f"127.0.0.1:{plain.port}")) as client, pytest.raises(PeerError):
        client.encode(key + item.hash, pack_inputs(item), 1 << 20, LONG)
    plain.close()


def test_a_token_is_needed(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with encoder_of() as encoder, make(parts="decoder", encoder=address(encoder)) as language:
        assert answer(language, image_prompt(70)).error is None
        monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
        with make(parts="decoder", encoder=address(encoder)) as other:
            assert answer(other, image_prompt(70)).error.code == "unreachable"


def test_inputs_survive_packing():
    kwargs = {
        "pixels": FieldElem(torch.rand(2, 3).to(torch.bfloat16), FlatField(dim=1)),
        "grid": FieldElem(torch.tensor([1, 2, 3]), BatchedField(keep_on_cpu=True)),
        "rate": FieldElem(2.5, SharedField()),
        "kind": FieldElem("a", SharedField()),
    }
    item = ItemInputs("video", kwargs, 6, digest("tenant"))
    got = unpack_inputs(pack_inputs(item))
    assert (got.modality, got.num_rows, got.tenant, got.hash) == (item.modality, item.num_rows, item.tenant, item.hash)
    assert {name: elem.field for name, elem in got.kwargs.items()} == {name: elem.field for name, elem in kwargs.items()}
    assert torch.equal(got.kwargs["pixels"].data, kwargs["pixels"].data)
    changed = [
        ItemInputs("image", kwargs, 6, item.tenant),
        ItemInputs("video", kwargs, 7, item.tenant),
        ItemInputs("video", kwargs, 6, digest("another tenant")),
        ItemInputs("video", kwargs | {"rate": FieldElem(2.0, SharedField())}, 6, item.tenant),
        ItemInputs("video", kwargs | {"grid": FieldElem(kwargs["grid"].data, BatchedField())}, 6, item.tenant),
    ]
    assert len({item.hash, *(other.hash for other in changed)}) == 6


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"encoder": "x"}, "encoder"),
        ({"encoder": ["127.0.0.1:1", 5]}, "encoder"),
        ({"encoder": []}, "encoder"),
        ({"encoder": "127.0.0.1:70000"}, "encoder"),
        ({"encoder": "127.0.0.1:1", "parts": "encoder"}, "encoder"),
        ({"encoder": "127.0.0.1:1", "enable_lora": True}, "encoder"),
        ({"encoder_listen": "127.0.0.1:1"}, "encoder_listen"),
        ({"encoder_listen": "127.0.0.1", "parts": "encoder"}, "encoder_listen"),
        ({"encoder_listen": "0.0.0.0:1", "parts": "encoder"}, "encoder_listen"),  # without a token
        ({"encoder_seconds": 0}, "encoder_seconds"),
    ],
)
def test_options_that_cannot_be_honoured(options, param, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as caught:
        make_config("m", options)
    assert caught.value.info.param == param


def test_an_address_of_ip_version_6_is_an_option_of_the_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--encoder", "[::1]:9002"]))
    assert make_config("m", {"encoder": args.encoder}).encoder == ("[::1]:9002",)
    both = parser.parse_args(["--model", "m", "--encoder", '["[::1]:9002", "h:9003"]'])
    assert make_config("m", {"encoder": both.encoder}).encoder == ("[::1]:9002", "h:9003")
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "m", "--encoder", "[::1]"])


@pytest.mark.parametrize("options", [{"encoder": "127.0.0.1:1"}, {"encoder_listen": "127.0.0.1:1", "parts": "encoder"}])
def test_a_token_that_is_no_text_is_refused(options, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "\udcff")
    with pytest.raises(ConfigError) as caught:
        make_config("m", options)
    assert caught.value.info.param == next(iter(options))


def test_a_port_in_use_and_updates_of_weights_are_refused(encoder):
    with pytest.raises(ConfigError) as caught:
        encoder_of(encoder_listen=address(encoder))
    assert caught.value.info.param == "encoder_listen"
    with make(encoder=address(encoder)) as both, pytest.raises(InputError) as refused:
        both.update_weights(TINY_VL)
    assert refused.value.info.code == "unsupported"


def test_kept_rows_are_planned(encoder):
    assert encoder.explain().kept_rows == 512 << 20
    with encoder_of(encoder_cache_bytes=1 << 20) as small:
        assert small.explain().kept_rows == 1 << 20
