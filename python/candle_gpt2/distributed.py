"""Data-parallel training across the processes of ``torch.distributed``.

    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    trainer = candle_gpt2.Trainer("book.txt", "out", init="gpt2", rank=rank, world_size=world_size)
    candle_gpt2.distributed.train(trainer)

Each process computes its part of every step, and ``torch.distributed`` sums the results. PyTorch is needed only for this
communication. Without dropout the losses equal those of a single process up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
    import torch.distributed  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError("candle_gpt2.distributed needs PyTorch; run `pip install torch`", name="torch") from None

from ._native import Gpt2Error, Trainer

__all__ = ["share_state", "train"]


def train(trainer: Trainer, on_step: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Runs all remaining steps, together with the trainers in the other processes.

    Every process must call this function. All start from the state of rank 0, so only rank 0 needs access to the folder to resume from.
    ``on_step`` receives the results of :meth:`Trainer.apply`. If a process dies, the others raise :class:`Gpt2Error`, and the last
    saved state remains intact.
    """
    share_state(trainer)
    while not trainer.done:
        loss, gradients = trainer.loss_and_gradients()
        # The tensor shares the array's memory, so this sums the array in place.
        _run_collective(trainer, torch.distributed.all_reduce, torch.from_numpy(gradients))
        total = torch.tensor([loss], dtype=torch.float64)
        _run_collective(trainer, torch.distributed.all_reduce, total)
        report = trainer.apply(gradients, total.item())
        if on_step is not None:
            on_step(cast("dict[str, Any]", report))


def share_state(trainer: Trainer) -> None:
    """Sends the state of rank 0's trainer to all other processes. Every process must call this function."""
    is_first = torch.distributed.get_rank() == 0
    if torch.distributed.get_world_size() == 1:
        return
    state = torch.frombuffer(bytearray(trainer.state()), dtype=torch.uint8) if is_first else torch.empty(0)
    size = torch.tensor([state.numel()])
    _run_collective(trainer, _broadcast_from_first, size)
    if not is_first:
        state = torch.empty(int(size.item()), dtype=torch.uint8)
    _run_collective(trainer, _broadcast_from_first, state)
    if not is_first:
        trainer.set_state(state.numpy().tobytes())


def _broadcast_from_first(tensor: torch.Tensor) -> None:
    torch.distributed.broadcast(tensor, 0)


def _run_collective(trainer: Trainer, work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    """Runs a collective operation on a tensor, and raises a Gpt2Error if another process has died."""
    try:
        work(tensor)
    except RuntimeError as error:
        raise Gpt2Error(
            f"rank {torch.distributed.get_rank()}: another process died or is unreachable before step {trainer.step + 1} "
            f"({error}); restart all processes with resume=True to continue from the last saved state"
        ) from error
