"""Checkpoints on S3: a server on loopback (moto's), as s3fs speaks to any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from neuronx_dist import comm
from neuronx_dist.checkpoint.background import Save
from neuronx_dist.checkpoint.errors import CheckpointError
from neuronx_dist.checkpoint.storage import RemoteStorage, Storage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.checkpoint.test_storage import check_files

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of an empty bucket."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server_module = pytest.importorskip("moto.server", reason="moto, an S3 server for tests, is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        open_storage("s3://checkpoints").make_folder()
        yield "s3://checkpoints"
    server.stop()


@pytest.fixture
def storage(bucket: str, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"{bucket}/{request.node.name}")


def test_a_file_is_what_was_written(storage: Storage) -> None:
    assert isinstance(storage, RemoteStorage)
    check_files(storage)


def test_a_file_in_several_parts(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "_BLOCK", 5 << 20)  # the least that S3 takes
    chunks = [bytes([number]) * (4 << 20) for number in range(4)]
    storage.write("file", chunks)
    assert storage.size("file") == 16 << 20 and storage.read("file") == b"".join(chunks)
    assert storage.read("file", (4 << 20) - 1, (4 << 20) + 1) == b"\0\1"


def test_save_replace_and_rotate(storage: Storage) -> None:
    def rank() -> None:
        number = comm.rank("world")

        def save(tag: str, content: bytes, fails: bool = False) -> None:
            def write(to: Any, path: str) -> None:
                to.write(f"{path}/{number}", [content] if not fails else iter(lambda: 1 // 0, 0))

            comm.barrier()  # the other rank has looked at the folder
            if number == 0:
                folder.begin(tag)
            comm.barrier()
            one = Save(folder, tag, write, {}, 2, number, 2)
            one.start()
            one.settle()

        folder = CheckpointFolder(storage)
        for tag in ("a", "b", "c", "c"):
            save(tag, tag.encode())
        assert [tag.name for tag in folder.complete()] == ["c", "b"]
        with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
            save("c", b"wrong", fails=number == 1)
        assert [tag.name for tag in folder.complete()] == ["c", "b"] and storage.read("c/1") == b"c"
        assert storage.list() == ["b", "c"] and storage.list("c") == ["0", "1", "checkpoint", "done"]

    threads.run(Mesh(2), rank)
