"""The packaged model's cache: used only when intact, made anew when not."""

import json

import pytest

from evalgate import embedded
from evalgate.errors import StorageError, UsageError


@pytest.fixture
def fake_conversion(monkeypatch, tmp_path):
    """A packaged file of a few bytes and a conversion that counts its calls."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    calls = []

    def convert(gguf, target):
        calls.append(gguf)
        (target / "model.safetensors").write_bytes(gguf.read_bytes() * 2)

    monkeypatch.setattr(embedded, "find_packaged_gguf", lambda: source)
    monkeypatch.setattr(embedded, "_convert_in_subprocess", convert)
    return calls


def test_the_model_is_converted_once(fake_conversion, tmp_path):
    first = embedded.ensure_packaged_model(tmp_path / "cache")
    second = embedded.ensure_packaged_model(tmp_path / "cache")
    assert first == second
    assert len(fake_conversion) == 1
    assert (first / "model.safetensors").read_bytes() == b"weightsweights"


def test_a_damaged_cache_is_made_anew(fake_conversion, tmp_path):
    folder = embedded.ensure_packaged_model(tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"torn")
    assert not embedded.is_intact(folder)
    assert embedded.ensure_packaged_model(tmp_path / "cache") == folder
    assert embedded.is_intact(folder)
    assert len(fake_conversion) == 2


def test_a_folder_without_its_manifest_is_not_used(fake_conversion, tmp_path):
    folder = embedded.ensure_packaged_model(tmp_path / "cache")
    (folder / embedded.MANIFEST).unlink()
    assert not embedded.is_intact(folder)


def test_nothing_of_a_failed_conversion_stays(fake_conversion, monkeypatch, tmp_path):
    def fail(source, target):
        (target / "half").write_bytes(b"x")
        raise StorageError("no space left")

    monkeypatch.setattr(embedded, "_convert_in_subprocess", fail)
    with pytest.raises(StorageError, match="no space"):
        embedded.ensure_packaged_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_remedy(fake_conversion, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StorageError, match="EVALGATE_CACHE"):
        embedded.ensure_packaged_model(blocked / "cache")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(UsageError, match="no-such-package-anywhere"):
        embedded.find_packaged_gguf()


def test_the_manifest_names_the_source(fake_conversion, tmp_path):
    folder = embedded.ensure_packaged_model(tmp_path / "cache")
    manifest = json.loads((folder / embedded.MANIFEST).read_text())
    assert list(manifest["files"]) == ["model.safetensors"]
    assert manifest["version"] == embedded.CONVERSION_VERSION
