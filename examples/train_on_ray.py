"""Data-parallel training on Ray Train, which starts the workers and restarts them after failures.

usage: python examples/train_on_ray.py DATA OUT [--workers N] [--threads N] [--init MODEL | --config FILE] [--steps N]
           [--batch-size B] [--lr LR] [--device DEVICE] [--restarts N] [--address HOST:PORT | --cpus N]

Needs `pip install 'ray[train]' torch`. Without an address, Ray starts on this machine. B is the batch size of all workers together.
Every worker must have access to DATA. The first worker writes OUT; put it in a shared folder if another worker may be first after a
restart.
"""

import argparse
import sys
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings):
    """Trains in a worker. Ray has created the process group."""
    import candle_gpt2
    from candle_gpt2 import distributed

    candle_gpt2.set_threads(settings["threads"])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    # A restarted worker resumes from the last saved state. A new worker finds no state.
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
    parser.add_argument("--cpus", type=int, help="number of CPUs for Ray, if it starts on this machine [default: all]")
    options = vars(parser.parse_args())
    if options["init"] is None and options["config"] is None:
        options["init"] = "built-in"
    # Workers have different working directories.
    data, out = (str(Path(options.pop(name)).resolve()) for name in ("data", "out"))
    workers, threads, restarts = (options.pop(name) for name in ("workers", "threads", "restarts"))

    ray.init(address=options.pop("address"), num_cpus=options.pop("cpus"), include_dashboard=False)
    settings = {"data": data, "out": out, "threads": threads, "options": options}
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        # With CUDA, each worker sees its own GPU.
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, use_gpu=options["device"].startswith("cuda"), resources_per_worker={"CPU": threads}
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=restarts)),
    )
    try:
        trainer.fit()
    except Exception as error:
        sys.exit(f"training stopped early; run the same command again to resume from the last saved state: {error}")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
