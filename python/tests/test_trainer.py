"""Data-parallel training: the same losses as in a single process, and recovery when a process dies.

`CANDLE_GPT2_TRAINING_STEPS` (50) sets the number of steps. The tests kill only processes that they started.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES

STEPS = int(os.environ.get("CANDLE_GPT2_TRAINING_STEPS", "50"))
EXAMPLES = FIXTURES.parents[2] / "examples"
CONFIG = {"vocab_size": 270, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
OPTIONS = {"steps": 6, "batch_size": 5, "accumulate": 2, "lr": 0.01, "eval_every": 3, "save_every": 2, "dropout": 0.0}
FILES = ["model.safetensors", "config.json", "tokenizer.json", "training-state.safetensors"]
# Tolerance for float32 sums in another order, amplified over fifty steps.
TOLERANCE = 1e-5
TIMEOUT = 300


@pytest.fixture
def text(tmp_path):
    """File to train on."""
    path = tmp_path / "text.txt"
    lines = [f"FIRST CITIZEN {line % 7}:\nWhat say you, neighbour {line * 37 % 101}?\n\n" for line in range(300)]
    path.write_text("".join(lines))
    return path


def read_log(folder):
    """Reads the log as tuples: step, training loss, held-out loss."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry.get("loss"), entry.get("held_out_loss")) for entry in entries]


def assert_same_losses(found, expected):
    assert [entry[0] for entry in found] == [entry[0] for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert (a is None) == (b is None) and (a is None or abs(a - b) <= TOLERANCE), (ours, theirs)


def test_single_process_writes_the_same_files_as_train(text, tmp_path):
    candle_gpt2.train(text, tmp_path / "whole", config=CONFIG, **OPTIONS)
    trainer = candle_gpt2.Trainer(text, tmp_path / "stepwise", config=CONFIG, **OPTIONS)
    entries = []
    while not trainer.done:
        loss, gradients = trainer.loss_and_gradients()
        entries.append(trainer.apply(gradients, loss))
    for name in FILES:
        assert (tmp_path / "stepwise" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert read_log(tmp_path / "stepwise") == read_log(tmp_path / "whole")
    assert (trainer.step, trainer.steps, repr(trainer)) == (6, 6, "Trainer(step 6 of 6, rank 0 of 1)")
    assert [sorted(step) for step in entries[1:3]] == [
        sorted("step loss learning_rate gradient_norm tokens_per_s elapsed_s".split()),
        sorted("step loss learning_rate gradient_norm tokens_per_s elapsed_s held_out_loss held_out_loss_per_character".split()),
    ]


def test_second_process_continues_from_the_first_state(text, tmp_path):
    first = candle_gpt2.Trainer(text, tmp_path / "first", config=CONFIG, **OPTIONS)
    for _ in range(2):
        loss, gradients = first.loss_and_gradients()
        first.apply(gradients, loss)
    state = first.state()
    assert state == (tmp_path / "first" / "training-state.safetensors").read_bytes(), "saved at the second step"
    second = candle_gpt2.Trainer(text, tmp_path / "second", config=CONFIG, rank=1, world_size=2, **OPTIONS)
    second.set_state(state)
    assert (second.step, second.state()) == (2, state)
    one, again = second.loss_and_gradients(), second.loss_and_gradients()
    assert one[0] == again[0] and np.array_equal(one[1], again[1]), "the same step gives the same values"
    assert one[1].dtype == np.float32
    assert one[1].shape == (sum(array.size for array in second.parameters().values()),)
    assert second.parameters()["h.1.mlp.c_fc.weight"].shape == (48, 12)
    second.save()
    assert not (tmp_path / "second").exists(), "only rank 0 writes files"


def test_invalid_options_and_gradients_are_rejected(text, tmp_path):
    make = lambda out, **options: candle_gpt2.Trainer(text, tmp_path / out, config=CONFIG, **{**OPTIONS, **options})  # noqa: E731
    for options, expected in [
        ({"rank": 2, "world_size": 2}, "`rank`: expected below the world_size of 2, found 2"),
        ({"world_size": 0}, "`world_size`: expected at least 1"),
        ({"sample": "One day"}, "sample: not supported by Trainer"),
        ({"device": "tpu"}, "device: expected auto, cpu, cuda, cuda:N or metal"),
        ({"compute_dtype": "f16"}, "compute_dtype"),
    ]:
        with pytest.raises(ValueError, match=expected):
            make("refused", **options)
    with pytest.raises(TypeError, match="Did you mean world_size|unknown|world_sice"):
        make("refused", world_sice=2)
    with pytest.raises((ValueError, candle_gpt2.Gpt2Error), match="built without CUDA|no NVIDIA driver|no GPU"):
        make("refused", device="cuda:7")
    trainer = make("run", steps=1)
    loss, gradients = trainer.loss_and_gradients()
    with pytest.raises(ValueError, match=f"`gradients`: expected {len(gradients)} values"):
        trainer.apply(gradients[1:], loss)
    with pytest.raises(candle_gpt2.Gpt2Error, match="not a number|finite"):
        trainer.apply(gradients, float("nan"))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(trainer)
    # Any array-like of numbers works.
    trainer.apply(gradients.astype(np.float64).reshape(-1, 1), loss)
    assert trainer.done
    for call in (trainer.loss_and_gradients, lambda: trainer.apply(gradients, loss)):
        with pytest.raises((ValueError, candle_gpt2.Gpt2Error), match="no steps are left"):
            call()


def test_bf16_loss_is_close_to_f32(text, tmp_path):
    f32 = candle_gpt2.train(text, tmp_path / "f32", config=CONFIG, device="cpu", **OPTIONS)["loss"]
    with pytest.warns(UserWarning, match="on the CPU, bf16 is computed in f32"):
        bf16 = candle_gpt2.train(text, tmp_path / "bf16", config=CONFIG, compute_dtype="bf16", **OPTIONS)["loss"]
    assert f32 != bf16 and abs(f32 - bf16) < 0.02, (f32, bf16)


# Several processes.


def arguments(text, out):
    config = text.parent / "config.json"
    config.write_text(json.dumps(CONFIG))
    options = {"config": config, "steps": STEPS, "batch-size": 8, "lr": 0.003, "dropout": 0.0, "save-every": 4}
    return [str(part) for part in [text, out, *(part for name, value in options.items() for part in ("--" + name, value))]]


def expected_losses(text, tmp_path):
    """Returns the losses from a single process."""
    options = {"steps": STEPS, "batch_size": 8, "lr": 0.003, "dropout": 0.0, "save_every": 4}
    candle_gpt2.train(text, tmp_path / "one", config=CONFIG, **options)
    return read_log(tmp_path / "one")


class Group:
    """Processes that run the torch.distributed example."""

    def __init__(self, count, arguments):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(EXAMPLES / "train_with_torch.py"), *arguments]
        self.processes = [
            subprocess.Popen(
                command, env={**os.environ, **environment, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self):
        """Waits for all processes. Returns their exit codes and standard error output."""
        ended = [process.communicate(timeout=TIMEOUT) for process in self.processes]
        return [(process.returncode, errors) for process, (_, errors) in zip(self.processes, ended, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("count", [2, 4])
def test_torch_processes_match_a_single_process(count, text, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    expected = expected_losses(text, tmp_path)
    with Group(count, arguments(text, tmp_path / "out")) as group:
        for code, errors in group.wait():
            assert code == 0, errors
    assert_same_losses(read_log(tmp_path / "out"), expected)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_torch_process_stops_the_others_with_a_message(lost, text, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    out, flags = tmp_path / "out", arguments(text, tmp_path / "out")
    with Group(2, flags) as group:
        # The first process prints each step.
        for line in group.processes[0].stdout:
            if line.startswith("step 9:"):
                break
        group.processes[lost].send_signal(signal.SIGKILL)
        ended = group.wait()
    assert ended[lost][0] == -signal.SIGKILL
    code, errors = ended[1 - lost]
    assert code == 1 and "another process died or is unreachable" in errors and "resume=True" in errors, errors
    # The saved state is intact, and both processes resume from it.
    saved = candle_gpt2.Trainer(
        text, out, config=CONFIG, resume=True, steps=STEPS, batch_size=8, lr=0.003, dropout=0.0, save_every=4
    )
    assert saved.step in range(8, STEPS, 4)
    del saved
    with Group(2, [*flags, "--resume"]) as group:
        for code, errors in group.wait():
            assert code == 0, errors
    assert_same_losses(read_log(out), expected_losses(text, tmp_path))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_ray_workers_match_a_single_process(count, text, tmp_path):
    check_ray(count, text, tmp_path, None)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_killed_ray_worker_is_restarted_and_resumes(text, tmp_path):
    check_ray(2, text, tmp_path, 9)


def check_ray(count, text, tmp_path, killed_at):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")
    expected = expected_losses(text, tmp_path)
    out = tmp_path / "out"
    # One CPU per worker, regardless of this machine's CPU count.
    command = [sys.executable, str(EXAMPLES / "train_on_ray.py"), *arguments(text, out)]
    command += ["--workers", str(count), "--cpus", str(count)]
    with (tmp_path / "printed").open("w") as printed:
        # Ray stores its runs in the home folder, so use the test's folder.
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env={**os.environ, "HOME": str(tmp_path)})
        try:
            if killed_at is not None:
                kill_worker(process.pid, out, killed_at)
            process.wait(timeout=600)
        finally:
            # Ray stops when its driver ends.
            process.terminate()
            process.wait(timeout=60)
    assert process.returncode == 0, (tmp_path / "printed").read_text()[-3000:]
    assert_same_losses(read_log(out), expected)


def kill_worker(driver, out, step):
    """Kills the last worker of the driver after `step` steps are logged."""
    end = time.monotonic() + TIMEOUT
    while not (out / "log.jsonl").exists() or len((out / "log.jsonl").read_text().splitlines()) < step:
        assert time.monotonic() < end, "no steps are logged"
        time.sleep(0.05)
    workers = [pid for pid in descendants(driver) if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) >= 2, workers
    os.kill(workers[-1], signal.SIGKILL)


def descendants(process):
    """Returns all direct and indirect child processes."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {process})
