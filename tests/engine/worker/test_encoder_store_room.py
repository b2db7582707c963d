"""The folder of encoder rows: it stays below its capacity, survives disk errors, and is shared by processes and engines."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from hostile import MODEL, asked, make_image
from rows_on_disk import counts, files, filled, key_of, make, rows_of
from sensorium import LLM, SamplingParams
from sensorium.engine.worker import encoder_store


def test_the_least_recently_used_files_are_deleted_first(tmp_path):
    size = filled(tmp_path).stat().st_size
    store = make(tmp_path, capacity=size * 8)
    for i in range(1, 8):
        store.put(key_of(i), rows_of(i))
        store.flush()
    for age, i in enumerate((3, 1, 0, 2, 4, 5, 6, 7)):
        os.utime(store.tensors.connectors[0].file(store.tensors.key(key_of(i))), (1000 + age, 1000 + age))
    assert store.load(key_of(3), 5) is not None  # used: now the last to go
    for i in range(8, 11):
        store.put(key_of(i), rows_of(i))
        store.flush()
    left = {path.stem for path in files(tmp_path)}
    assert key_of(3) in left
    assert {key_of(1), key_of(0)} & left == set()
    assert {key_of(i) for i in (6, 7, 8, 9, 10)} <= left
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size * 8


def test_the_capacity_holds_across_models_and_after_every_write(tmp_path):
    size = filled(tmp_path).stat().st_size
    for name in ("a", "b"):
        store = make(tmp_path, capacity=size * 6, fingerprint=name)
        for i in range(40):
            store.put(key_of(i), rows_of(i))
            store.flush()
            assert sum(path.stat().st_size for path in files(tmp_path)) <= size * 6
        assert store.load(key_of(39), 5) is not None
    tiny = make(tmp_path / "tiny", capacity=size - 1)
    tiny.put(key_of(0), rows_of(0))
    tiny.close()
    assert not files(tmp_path / "tiny")


def test_only_its_own_files_are_deleted(tmp_path):
    size = filled(tmp_path).stat().st_size
    foreign = [tmp_path / "notes.safetensors", tmp_path / "models" / f"{key_of(0)}.safetensors"]
    folder = files(tmp_path)[0].parent
    stale, fresh = folder / "tmpdead.tmp", folder / "tmpalive.tmp"
    (tmp_path / "models").mkdir()
    for path in (*foreign, stale, fresh):
        path.write_bytes(b"x" * 100)
        os.utime(path, (1, 1))
    os.utime(fresh)
    store = make(tmp_path, capacity=size * 2)
    for i in range(10):
        store.put(key_of(i), rows_of(i))
    store.close()
    assert all(path.exists() for path in (*foreign, fresh))
    assert not stale.exists()


def test_the_write_queue_is_bounded_and_put_never_waits(tmp_path, monkeypatch):
    store = make(tmp_path)
    store.tensors.queue_bytes = rows_of(0).nbytes * 3
    monkeypatch.setattr(store.tensors._writer, "submit", lambda *job: None)  # a disk that never answers
    for i in range(10):
        store.put(key_of(i), rows_of(i))
    store.put(key_of(0), rows_of(0))
    assert counts(store).skipped == 7
    assert len(store.rows) == 10


def test_one_item_larger_than_the_queue_is_written(tmp_path):
    store = make(tmp_path)
    store.tensors.queue_bytes = 1
    store.put(key_of(0), rows_of(0))
    store.close()
    assert counts(store).writes == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_disk_errors_log_one_warning(tmp_path, monkeypatch, caplog, code):
    def refuse(*names, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    store = make(tmp_path)
    for i in range(3):
        store.put(key_of(i), rows_of(i))
    store.close()
    assert caplog.text.count(os.strerror(code)) == 1
    assert counts(store).failed == 3
    assert store.rows.get(key_of(0)) is not None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_is_a_file_logs_one_warning(tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    store = make(tmp_path / "cache")
    assert store.load(key_of(0), 5) is None
    store.put(key_of(0), rows_of(0))
    store.close()
    assert len(caplog.records) == 1


def test_a_folder_open_to_others_is_not_trusted(tmp_path, caplog):
    path = filled(tmp_path)
    path.parent.chmod(0o777)
    store = make(tmp_path)
    assert store.load(key_of(0), 5) is None
    store.put(key_of(1), rows_of(1))
    store.close()
    assert path.exists()
    assert len(files(tmp_path)) == 1
    assert "open to others" in caplog.text


def _write_and_read(folder: str, first: int, results) -> None:
    encoder_store._ROOT = Path(folder)  # no code: that of a checkout may change meanwhile
    store = make(Path(folder), capacity=6000)
    wrong = 0
    for i in range(first, first + 60):
        key = i % 40
        found = store.load(key_of(key), 5)
        wrong += found is not None and not torch.equal(found, rows_of(key))
        store.put(key_of(key), rows_of(key))
        store.drop([key_of(key)])
    store.close()
    results.put((wrong, counts(store).damaged, counts(store).failed, counts(store).hits))


@pytest.mark.full
def test_two_processes_share_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_store, "_ROOT", tmp_path)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_write_and_read, args=(str(tmp_path), first, results)) for first in (0, 20)]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(count[:3] == (0, 0, 0) for count in counts), counts
    assert not list(tmp_path.rglob("*.tmp"))
    store = make(tmp_path)
    assert sum(store.load(path.stem, 5) is not None for path in files(tmp_path)) == len(files(tmp_path)) > 0


def test_an_engine_loads_its_rows_after_a_restart(tmp_path):
    """The same answer needs no encoder call. Other model options use other files; damaged rows are encoded again."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [asked(make_image(i), make_image(9)) for i in range(3)]

    def serve(**options):
        llm = LLM(MODEL, max_model_len=256, encoder_cache_dir=str(tmp_path), **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm.engine.loop.core
        core.executor.runner.store.close()
        return [output.outputs[0].token_ids for output in outputs], core.stats

    first, made = serve()
    assert (made.encoder_calls, made.encoder_disk_hits) == (4, 0)
    again, found = serve()
    assert (found.encoder_calls, found.encoder_disk_hits) == (0, 4)
    assert again == first
    assert serve(dtype="bfloat16")[1].encoder_disk_hits == 0
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    damaged, anew = serve()
    assert (anew.encoder_calls, anew.encoder_disk_hits) == (4, 0)
    assert damaged == first
    assert serve()[1].encoder_disk_hits == 4
