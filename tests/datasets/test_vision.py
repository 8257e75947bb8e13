"""Loaders of image sets, on small files of the true formats; torchvision's checksums are set to those of the files."""

import hashlib
import os
import pickle
import re
import struct

import numpy as np
import pytest
import torch
import torchvision.datasets as tv
from scipy.io import savemat

from pyro_vsd import datasets

NUM_TRAIN, NUM_TEST = 10, 4


def images_and_labels(number, shape, num_classes, seed):
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (number, *shape), dtype=np.uint8)
    images[0] = 255
    return images, generator.integers(0, num_classes, number)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_idx(path, array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(root, monkeypatch, name):
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    halves = []
    for prefix, number in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        images, labels = images_and_labels(number, (1, 28, 28), 10, number)
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images[:, 0])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels)
        halves.append((images, labels))
    return halves


def write_cifar(root, monkeypatch, name, folder_name, train_files, key, num_classes):
    folder = root / folder_name
    folder.mkdir()
    lists, halves = [], []
    for files, number in ((train_files, NUM_TRAIN), (["test_batch" if name == "CIFAR10" else "test"], NUM_TEST)):
        images, labels = images_and_labels(number, (3, 32, 32), num_classes, number)
        parts = zip(np.array_split(images, len(files)), np.array_split(labels, len(files)), files, strict=True)
        entries = []
        for part, part_labels, file in parts:
            # Protocol 2 with byte strings is what the authors' Python 2 wrote, as far as Python 3 can say it.
            content = {"data": part.reshape(len(part), -1), key: part_labels.tolist(), "batch_label": file}
            (folder / file).write_bytes(pickle.dumps(content, protocol=2))
            entries.append([file, md5(folder / file)])
        lists.append(entries)
        halves.append((images, labels))
    dataset = getattr(tv, name)
    meta = folder / dataset.meta["filename"]
    meta.write_bytes(pickle.dumps({dataset.meta["key"]: [str(i) for i in range(num_classes)]}, protocol=2))
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5(meta)})
    monkeypatch.setattr(dataset, "train_list", lists[0])
    monkeypatch.setattr(dataset, "test_list", lists[1])
    return halves


def write_cifar10(root, monkeypatch):
    files = [f"data_batch_{i}" for i in range(1, 6)]
    return write_cifar(root, monkeypatch, "CIFAR10", "cifar-10-batches-py", files, "labels", 10)


def write_cifar100(root, monkeypatch):
    return write_cifar(root, monkeypatch, "CIFAR100", "cifar-100-python", ["train"], "fine_labels", 100)


def write_svhn(root, monkeypatch):
    halves, split_list = [], dict(tv.SVHN.split_list)
    for split, number in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        images, labels = images_and_labels(number, (3, 32, 32), 10, number)
        url, file, _ = split_list[split]
        # Digit 0 is stored as class 10; images as (H, W, C, N).
        stored = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        savemat(root / file, {"X": images.transpose(2, 3, 1, 0), "y": stored})
        split_list[split] = [url, file, md5(root / file)]
        halves.append((images, labels))
    monkeypatch.setattr(tv.SVHN, "split_list", split_list)
    return halves


def write_stl10(root, monkeypatch):
    folder = root / "stl10_binary"
    folder.mkdir()
    halves, lists = [], {}
    (folder / "class_names.txt").write_text("\n".join(str(i) for i in range(10)))
    for split, number in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        images, labels = images_and_labels(number, (3, 96, 96), 10, number)
        images.transpose(0, 1, 3, 2).tofile(folder / f"{split}_X.bin")  # columns first
        (labels + 1).astype(np.uint8).tofile(folder / f"{split}_y.bin")  # classes are counted from 1
        lists[split] = [[file, md5(folder / file)] for file in (f"{split}_X.bin", f"{split}_y.bin")]
        halves.append((images, labels))
    monkeypatch.setattr(tv.STL10, "train_list", lists["train"])
    monkeypatch.setattr(tv.STL10, "test_list", lists["test"])
    return halves


LOADERS = {
    "mnist": lambda root, patch: write_mnist(root, patch, "MNIST"),
    "fashion_mnist": lambda root, patch: write_mnist(root, patch, "FashionMNIST"),
    "kmnist": lambda root, patch: write_mnist(root, patch, "KMNIST"),
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "svhn": write_svhn,
    "stl10": write_stl10,
}


@pytest.mark.parametrize("name", LOADERS)
def test_images_and_labels_come_back(name, tmp_path, monkeypatch):
    halves = LOADERS[name](tmp_path, monkeypatch)
    for data, (images, labels) in zip(getattr(datasets, name)(tmp_path), halves, strict=True):
        assert data.x.dtype == torch.float64
        torch.testing.assert_close(data.x * 255, torch.from_numpy(images).double())
        assert torch.equal(data.y, torch.from_numpy(labels).long())


@pytest.mark.parametrize("name", LOADERS)
def test_options(name, tmp_path, monkeypatch):
    halves = LOADERS[name](tmp_path, monkeypatch)
    train, test = getattr(datasets, name)(str(tmp_path), flatten=True, dtype=torch.float32)
    assert train.x.shape == (NUM_TRAIN, halves[0][0][0].size)
    assert test.x.dtype == torch.float32
    assert test.x.max() == 1
    assert next(train.batches(3))[0].shape[0] == 3


@pytest.mark.parametrize("name", LOADERS)
def test_missing_files_say_what_to_do(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\bdownload\b"):
        getattr(datasets, name)(tmp_path)


def test_cifar100_test_half_alone(tmp_path, monkeypatch):
    _, (images, labels) = write_cifar100(tmp_path, monkeypatch)
    (tmp_path / "cifar-100-python" / "train").unlink()
    with pytest.raises(FileNotFoundError, match=r"\btest_only\b"):
        datasets.cifar100(tmp_path)
    train, test = datasets.cifar100(tmp_path, test_only=True)
    assert train.x.shape == (0, 3, 32, 32)
    torch.testing.assert_close(test.x * 255, torch.from_numpy(images).double())
    assert test.y.tolist() == labels.tolist()


def test_cifar100_test_half_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="cifar-100-python"):
        datasets.cifar100(tmp_path, test_only=True)


def test_cifar100_test_half_is_not_downloaded_alone(tmp_path):
    with pytest.raises(ValueError, match=r"\btest_only\b"):
        datasets.cifar100(tmp_path, test_only=True, download=True)


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


def test_cifar100_raises_for_a_hostile_pickle(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "test").write_bytes(pickle.dumps({"data": Hostile()}))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        datasets.cifar100(tmp_path, test_only=True)


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_cifar100_written_with_either_numpy_is_read(core, tmp_path, monkeypatch):
    _, (images, _) = write_cifar100(tmp_path, monkeypatch)
    file = tmp_path / "cifar-100-python" / "test"
    file.write_bytes(re.sub(rb"numpy\._?core", core, file.read_bytes()))
    _, test = datasets.cifar100(tmp_path, test_only=True)
    torch.testing.assert_close(test.x * 255, torch.from_numpy(images).double())
