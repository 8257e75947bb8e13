"""Thousands of damaged checkpoints: an answer or a clear error of ours, and nothing half loaded."""

import hashlib
import random

import pytest
import torch

from pyro_vsd.training import load_checkpoint, save_checkpoint
from pyro_vsd.training.checkpoint import _HEADER, _MAGIC, _VERSION
from tests.training import cases

FILES = 2_500
START = len(_MAGIC) + _HEADER.size


def flip(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 8, 64])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def cut(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data[: chance.randrange(len(data))])


def hole(data: bytearray, chance: random.Random) -> bytes:
    """A block of zeros, as a file system leaves after a crash."""
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice([1, 16, 512, 4096]))
    data[start:stop] = bytes(stop - start)
    return bytes(data)


def splice(data: bytearray, chance: random.Random) -> bytes:
    start, size, target = chance.randrange(len(data)), chance.randrange(1, 512), chance.randrange(len(data))
    data[target : target + size] = data[start : start + size]
    return bytes(data)


def insert(data: bytearray, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return bytes(data[:place]) + chance.randbytes(chance.randrange(1, 64)) + bytes(data[place:])


def noise(data: bytearray, chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(2000))


DAMAGE = [flip, flip, cut, hole, splice, insert, noise]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    torch.set_default_dtype(torch.float64)
    path = tmp_path_factory.mktemp("fuzz") / "good.ckpt"
    run = cases.TorchRun(cases.regressor, torch.optim.Adam)
    run.train(1)
    save_checkpoint(path, **run.parts(), extra={"note": "a", "numbers": [1, 2.5]})
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "with-a-valid-checksum"])
def test_damaged_checkpoints(good, sealed, tmp_path):
    """Sealed: a stranger's file, whose checksum is right whatever it holds."""
    run = cases.TorchRun(cases.regressor, torch.optim.Adam)
    parts, before, state = run.parts(), run.values(), torch.get_rng_state()
    chance, path = random.Random(0), tmp_path / "bad.ckpt"
    refused = changed = 0
    messages = set()
    for number in range(FILES):
        damage = DAMAGE[number % len(DAMAGE)]
        if sealed:
            payload = damage(bytearray(good[START:]), chance)
            header = _HEADER.pack(_VERSION, len(payload), hashlib.sha256(payload).digest())
            data = _MAGIC + header + payload
        else:
            data = damage(bytearray(good), chance)
        path.write_bytes(data)
        changed += data != good
        try:
            load_checkpoint(path, **parts)
        except ValueError as error:
            messages.add(str(error))
            refused += 1
            assert cases.same(run.values(), before)
            assert torch.equal(torch.get_rng_state(), state)
        else:  # an answer: the numbers are others, the objects whole
            before, state = run.values(), torch.get_rng_state()
            run.elbo.check_finite()
    assert changed >= 2_000
    assert [m for m in messages if not (m.startswith("path") or "does not fit. " in m)] == []
    assert refused > FILES // 3 if sealed else refused == changed
