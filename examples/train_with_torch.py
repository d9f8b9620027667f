"""Data-parallel training on several processes or machines with torch.distributed.

usage: OMP_NUM_THREADS=8 torchrun --nproc-per-node 4 examples/train_with_torch.py DATA OUT [--init MODEL | --config FILE]
           [--steps N] [--batch-size B] [--lr LR] [--device DEVICE] [--resume]

Needs PyTorch. B is the batch size of all processes together. The process with rank 0 writes OUT. After a process or machine fails,
the same command with --resume continues from the last saved state in OUT. On two machines, run on each with its --node-rank:
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 4 …
"""

import argparse
import datetime
import os
import sys

import candle_gpt2
import torch.distributed
from candle_gpt2 import distributed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--init")
    parser.add_argument("--config")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which an unresponsive process counts as dead")
    arguments = vars(parser.parse_args())
    if arguments["device"] == "cuda":
        # Each process of a machine uses its own GPU.
        arguments["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    timeout = datetime.timedelta(seconds=arguments.pop("timeout"))
    data, out = arguments.pop("data"), arguments.pop("out")
    if arguments["init"] is None and arguments["config"] is None:
        arguments["init"] = "built-in"

    # torchrun sets addresses and ranks in the environment.
    torch.distributed.init_process_group("gloo", timeout=timeout)
    if not train(data, out, arguments):
        # A regular exit would wait for the dead process.
        os._exit(1)
    torch.distributed.destroy_process_group()


def train(data, out, options):
    """Trains, and returns whether training completed."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        trainer = candle_gpt2.Trainer(data, out, rank=rank, world_size=world_size, **options)
        distributed.train(trainer, show if rank == 0 else None)
    except candle_gpt2.Gpt2Error as error:
        print(error, file=sys.stderr, flush=True)
        return False
    return True


def show(step):
    held_out = f", held out {step['held_out_loss']:.4f}" if "held_out_loss" in step else ""
    print(f"step {step['step']}: loss {step['loss']:.4f}{held_out}, {step['tokens_per_s']:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
