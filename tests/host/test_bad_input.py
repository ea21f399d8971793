"""What can't work is refused at the start, with what was found, what was expected and what to do."""

from __future__ import annotations

import socket
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import agentlightning as agl
import pytest
from agentlightning.algorithm.verl import VERL as UpstreamVERL
from agentlightning.verl.daemon import AgentModeDaemon
from agentlightning.verl.trainer import AgentLightningTrainer
from omegaconf import OmegaConf

import agl_meta
from agl_meta.verl import TrainingContextDaemon, TrainingContextTrainer, algorithm
from agl_meta.verl.daemon_mixin import TrainingContextDaemonMixin
from agl_meta.verl.passes import Run
from agl_meta.verl.positions import Position
from agl_meta.verl.settings import Settings
from agl_meta.verl.stamping import StampingStore
from tests.host.test_numbers import UpstreamTrainer
from tests.host.training import SavingAgent, compose, fit, overrides


class TestClasses:
    """A custom set-up with one of the two classes missing, or without the mixin."""

    def test_trainer_without_the_mixin(self, tmp_path: Path) -> None:
        """agl_meta.VERL refuses such a trainer_cls at once."""
        with pytest.raises(
            agl_meta.ConfigurationError, match="AgentLightningTrainer, which tells no position"
        ):
            agl_meta.VERL(overrides(tmp_path), trainer_cls=AgentLightningTrainer)

    def test_daemon_without_the_mixin(self, tmp_path: Path) -> None:
        """And such a daemon_cls."""
        with pytest.raises(agl_meta.ConfigurationError, match="AgentModeDaemon, which stamps no"):
            agl_meta.VERL(overrides(tmp_path), daemon_cls=AgentModeDaemon)

    def test_trainer_cls_forgotten(self, tmp_path: Path) -> None:
        """Our daemon below upstream's trainer says that the trainer_cls is missing."""
        with pytest.raises(agl_meta.ConfigurationError, match="the trainer_cls is missing"):
            fit(
                "v1",
                tmp_path,
                None,
                trainer_cls=UpstreamTrainer,
                daemon_cls=TrainingContextDaemon,
                config=compose(tmp_path, None),
            )

    def test_daemon_cls_forgotten(self, tmp_path: Path) -> None:
        """Our trainer above upstream's daemon says that the daemon_cls is missing."""
        with pytest.raises(
            agl_meta.ConfigurationError, match="daemon_cls=agl_meta.verl.TrainingContextDaemon"
        ):
            fit("v1", tmp_path, None, daemon_cls=AgentModeDaemon)

    def test_daemon_that_enqueues_past_the_stamp(self) -> None:
        """A copied-out daemon that enqueues in another way is found at its first batch."""

        class Copied:
            mode = "v1"
            train_rollout_n = 1
            store = None

            def set_up_data_and_server(self, *_: Any, **__: Any) -> None:
                """Enqueues in a way of its own."""

        class Mine(TrainingContextDaemonMixin, Copied):  # type: ignore[misc]
            pass

        daemon = Mine()
        assert isinstance(daemon.store, StampingStore)
        place = Position(global_step=1, epoch=0, batch_index=0, is_train=True, reason="train")
        run = Run(Settings(), None, (), lambda is_train: False)
        daemon.follow(lambda *_: run.begin_batch(place, 1, 1, daemon))
        with pytest.raises(agl_meta.ConfigurationError, match="none of its tasks was stamped"):
            daemon.set_up_data_and_server({"x": [1]}, [])


class TestOutputDir:
    """An output folder that can't be used."""

    def test_is_a_file(self, tmp_path: Path) -> None:
        """Found by agl_meta.VERL, before anything is started."""
        (tmp_path / "file").write_text("x")
        with pytest.raises(agl_meta.OutputDirError, match="is a file"):
            agl_meta.VERL(overrides(tmp_path), output_dir=tmp_path / "file")

    def test_in_the_config(self, tmp_path: Path) -> None:
        """The same for one that the config names."""
        config = {**overrides(tmp_path), "agl_meta": {"output_dir": "/no-such-mount/x"}}
        with pytest.raises(agl_meta.OutputDirError, match="Mount it"):
            agl_meta.VERL(config)

    def test_argument_wins_and_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trainer runs in another process, with another current directory."""
        monkeypatch.chdir(tmp_path)
        config = {**overrides(tmp_path), "agl_meta": {"output_dir": "other"}}
        algorithm = agl_meta.VERL(config, output_dir="runs/x")
        assert algorithm.config.agl_meta.output_dir == str(tmp_path / "runs" / "x")

    def test_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The variable names the folder where the argument does not, and moves it where it does."""
        monkeypatch.setenv("AGL_META_OUTPUT_DIR", str(tmp_path / "here"))
        algorithm = agl_meta.VERL(overrides(tmp_path))
        assert algorithm.config.agl_meta.output_dir == str(tmp_path / "here")
        fit("v1", tmp_path, Path("/no-such-mount/x"), trainer={"total_training_steps": 1, "save_freq": -1})
        found = list(agl_meta.read_predictions(tmp_path / "here"))
        assert {p.context.global_step for p in found} == {0, 1}
        assert agl_meta.read_pass(tmp_path / "here" / "global_step_1" / "train")["expected"]

    def test_unknown_setting(self, tmp_path: Path) -> None:
        """A misspelt setting is refused, not ignored."""
        config = {**overrides(tmp_path), "agl_meta": {"outputdir": "x"}}
        with pytest.raises(agl_meta.ConfigurationError, match="has outputdir; expected only output_dir"):
            agl_meta.VERL(config)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("agentlightning", "0.2.2"),
        ("agentlightning", "1.0.2"),
        ("verl", "0.4.1"),
        ("verl", "0.8.0"),
        ("verl", None),
    ],
)
def test_unsupported_versions(
    package: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that does not work is refused by name and version, with the range that does."""
    real = metadata.version

    def pretend(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", pretend)
    with pytest.raises(
        agl_meta.ConfigurationError, match=f"Found {package} .*works with {package} .*pip install"
    ) as caught:
        agl_meta.VERL(overrides(tmp_path))
    assert (version or "not installed") in str(caught.value)


class TestPort:
    """A port that another program uses."""

    def test_v0(self, tmp_path: Path) -> None:
        """The v0 server's port is checked before the training starts, and named."""
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            port = taken.getsockname()[1]
            config = {**overrides(tmp_path), "agentlightning": {"port": port}}
            algorithm = agl_meta.VERL(config)
            with pytest.raises(agl_meta.ConfigurationError, match=f"Port {port} can't be used"):
                algorithm.run([], [])

    def test_v1(self, tmp_path: Path) -> None:
        """The store's port is checked by ``Trainer.fit`` before anything is started, and named."""
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            port = taken.getsockname()[1]
            trainer = agl.Trainer(algorithm=agl_meta.VERL(overrides(tmp_path)), n_runners=1, port=port)
            with pytest.raises(agl_meta.ConfigurationError, match=f"Port {port} can't be used.*agl.Trainer"):
                trainer.fit(SavingAgent(), [])

    def test_daemon(self) -> None:
        """The daemon checks it, too, where it runs: that may be another machine."""
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            port = taken.getsockname()[1]
            daemon = TrainingContextDaemon(
                port,
                1,
                train_information={"model": "m"},
                tokenizer=None,
                mini_batch_size=1,
                pad_token_id=0,
                mode="v0",
            )
            with pytest.raises(agl_meta.ConfigurationError, match="agentlightning.port"):
                daemon.start()


class Unpicklable(agl_meta.Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_callback_that_can_not_be_sent(tmp_path: Path) -> None:
    """A callback is pickled on its way to the trainer: one that can't be is refused by name."""
    with pytest.raises(agl_meta.ConfigurationError, match="The callback Unpicklable can't be pickled"):
        agl_meta.VERL(overrides(tmp_path), callbacks=[Unpicklable()])


def test_no_callback(tmp_path: Path) -> None:
    """A class instead of an instance is a usual slip."""
    with pytest.raises(agl_meta.ConfigurationError, match="instances of agl_meta.Callback"):
        agl_meta.VERL(overrides(tmp_path), callbacks=[agl_meta.Callback])  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_sample_key_that_is_no_field(mode: str, tmp_path: Path) -> None:
    """A sample_key that the samples lack is refused at the first batch, with the fields they have."""
    config = compose(tmp_path, None)
    OmegaConf.update(config, "agl_meta.sample_key", "id", force_add=True)
    with pytest.raises(agl_meta.ConfigurationError, match="sample_key is 'id'.*qid"):
        fit(mode, tmp_path, None, config=config)


def test_drop_in_for_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """agl_meta.VERL is upstream's class, takes its arguments, and merges the config alike."""
    monkeypatch.setattr(algorithm, "stderr_is_terminal", lambda: False)  # as under pytest -s
    ours = agl_meta.VERL(overrides(tmp_path), TrainingContextTrainer, TrainingContextDaemon)
    config = overrides(tmp_path)
    config["agentlightning"] = {"port": ours.config.agentlightning.port}
    theirs = UpstreamVERL(config)
    assert isinstance(ours, UpstreamVERL)
    assert OmegaConf.to_container(ours.config) == OmegaConf.to_container(theirs.config)
