"""One training on the workers of Ray Train, which starts them, and starts them again where one is lost.

usage: python examples/train_on_ray.py DATA OUT [--workers N] [--threads N] [--init MODEL | --config FILE] [--steps N]
           [--batch-size B] [--lr LR] [--device DEVICE] [--restarts N] [--address HOST:PORT | --cpus N]

Needs `pip install 'ray[train]' torch`. Without an address Ray is started on this machine. B windows are one batch of all workers
together. DATA must be where every worker sees it; OUT is written by the first one, and where it is on a shared folder, any
of them can be the first one after a restart.
"""

import argparse
import sys
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings):
    """What each worker does: Ray has made the process group."""
    import candle_gpt2
    from candle_gpt2 import distributed

    candle_gpt2.set_threads(settings["threads"])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    # A restarted worker resumes from the last saved state; a new one finds none.
    trainer = candle_gpt2.Trainer(
        settings["data"], settings["out"], rank=rank, world_size=world_size, resume=True, **settings["options"]
    )
    distributed.train(trainer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--init")
    parser.add_argument("--config")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--address")
    parser.add_argument("--cpus", type=int, help="that Ray is to count, where it is started here [default: the machine's]")
    options = vars(parser.parse_args())
    if options["init"] is None and options["config"] is None:
        options["init"] = "built-in"
    # Workers have folders of their own.
    data, out = (str(Path(options.pop(name)).resolve()) for name in ("data", "out"))
    workers, threads, restarts = (options.pop(name) for name in ("workers", "threads", "restarts"))

    ray.init(address=options.pop("address"), num_cpus=options.pop("cpus"), include_dashboard=False)
    settings = {"data": data, "out": out, "threads": threads, "options": options}
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        # Each worker sees a GPU of its own, where it is to have one.
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, use_gpu=options["device"].startswith("cuda"), resources_per_worker={"CPU": threads}
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=restarts)),
    )
    try:
        trainer.fit()
    except Exception as error:
        sys.exit(f"the training has ended early; start it again to resume from its last saved state: {error}")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
