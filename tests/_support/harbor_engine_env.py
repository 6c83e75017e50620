"""An environment of Harbor on a Docker engine, without compose: `harbor_engine_env:EngineEnv`."""

import io
import posixpath
import tarfile
from pathlib import Path

import docker
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities


class EngineEnv(BaseEnvironment):
    """A container that sleeps; commands are execs of the engine, as with compose."""

    def __init__(self, *args, build_args=None, **kwargs):
        super().__init__(*args, **kwargs)
        self._build_args = build_args or {}
        self._client = docker.from_env()
        self._container = None

    @staticmethod
    def type():
        return "engine"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self):
        if self.task_env_config.docker_image is None:
            assert (self.environment_dir / "Dockerfile").is_file()

    async def start(self, force_build):
        image = self.task_env_config.docker_image
        if image is None:
            try:
                built, _ = self._client.images.build(
                    path=str(self.environment_dir),
                    tag=self.environment_name,
                    buildargs=self._build_args,
                    network_mode="none",
                    rm=True,
                    forcerm=True,
                )
            except docker.errors.BuildError as error:
                list(error.build_log)  # read to its end, which closes the connection
                raise
            image = built.id
        self._container = self._client.containers.run(
            image,
            ["/bin/sh", "-c", "while :; do sleep 86400; done"],
            detach=True,
            init=True,
            labels={"harbor-tests": self.session_id},
            network_mode="none" if self._network_disabled else None,
            working_dir=self.task_env_config.workdir,
        )

    async def stop(self, delete):
        if self._container is not None:
            self._container.remove(force=True, v=True)
            self._container = None
        self._client.close()

    async def upload_file(self, source_path, target_path):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(source_path, posixpath.basename(target_path))
        self._container.put_archive(posixpath.dirname(target_path), buffer.getvalue())

    async def upload_dir(self, source_dir, target_dir):
        raise NotImplementedError

    async def download_file(self, source_path, target_path):
        stream, _ = self._container.get_archive(source_path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            Path(target_path).write_bytes(archive.extractfile(archive.next()).read())

    async def download_dir(self, source_dir, target_dir):
        raise NotImplementedError

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        code, (stdout, stderr) = self._container.exec_run(
            ["/bin/sh", "-c", command],
            workdir=cwd,
            environment=self._merge_env(env) or {},
            user=str(self._resolve_user(user) or ""),
            demux=True,
        )
        stdout, stderr = ((text or b"").decode(errors="replace") for text in (stdout, stderr))
        return ExecResult(stdout=stdout, stderr=stderr, return_code=code)
