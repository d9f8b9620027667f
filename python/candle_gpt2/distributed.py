"""One training over the processes of ``torch.distributed``, which sums what each has computed of every step.

    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    trainer = candle_gpt2.Trainer("book.txt", "out", init="gpt2", rank=rank, world_size=world_size)
    candle_gpt2.distributed.train(trainer)

PyTorch is needed only for the communication between the processes. Without dropout the losses are those of one process,
except for the order of the sums.
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
    raise ModuleNotFoundError("several processes need PyTorch, which is not installed: pip install torch", name="torch") from None

from ._native import Gpt2Error, Trainer

__all__ = ["share_state", "train"]


def train(trainer: Trainer, on_step: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Takes all steps that are left, together with the trainers of the other processes.

    Every process calls it. All start from the state of rank 0, so only rank 0 must see the folder to resume from. ``on_step`` is
    called with what :meth:`Trainer.apply` returns. When a process has gone, the others raise :class:`Gpt2Error`; the last state that
    was saved is whole.
    """
    share_state(trainer)
    while not trainer.done:
        loss, gradients = trainer.loss_and_gradients()
        # The sums are in the memory of the array then.
        _together(trainer, torch.distributed.all_reduce, torch.from_numpy(gradients))
        total = torch.tensor([loss], dtype=torch.float64)
        _together(trainer, torch.distributed.all_reduce, total)
        told = trainer.apply(gradients, total.item())
        if on_step is not None:
            on_step(cast("dict[str, Any]", told))


def share_state(trainer: Trainer) -> None:
    """Sends the state of rank 0's trainer to those of all other processes; every process calls it."""
    is_first = torch.distributed.get_rank() == 0
    if torch.distributed.get_world_size() == 1:
        return
    state = torch.frombuffer(bytearray(trainer.state()), dtype=torch.uint8) if is_first else torch.empty(0)
    size = torch.tensor([state.numel()])
    _together(trainer, _from_first, size)
    if not is_first:
        state = torch.empty(int(size.item()), dtype=torch.uint8)
    _together(trainer, _from_first, state)
    if not is_first:
        trainer.set_state(state.numpy().tobytes())


def _from_first(tensor: torch.Tensor) -> None:
    torch.distributed.broadcast(tensor, 0)


def _together(trainer: Trainer, work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    """Does with a tensor what all processes do together, and says so if one of them has gone."""
    try:
        work(tensor)
    except RuntimeError as error:
        raise Gpt2Error(
            f"rank {torch.distributed.get_rank()}: another process has gone, or cannot be reached, before step {trainer.step + 1} "
            f"({error}); start all of them again with resume=True to continue from the last saved state"
        ) from error
