# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What the loss over the vocabulary costs, chunked as `dlite_hf.losses` has it and written plainly: memory and time.

    python training/measure_loss.py --vocab_size 49152 --num_anchors 256

Each arm runs forward and backward in a process of its own, three times after one to warm up: the peak of its memory
above what it held before, and the median of the seconds. bfloat16 products, one teacher, K = 7.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

from dlite_hf.losses import LossWeights, drafting_loss, target_distribution


K, RANK = 7, 128
WEIGHTS = LossWeights(ce=0.05, tv=0.5, kl=0.5)


def naive(states: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits, teacher_logits = states @ weight.T, teacher @ weight.detach().T
    log_q, log_t = logits.float().log_softmax(dim=-1), teacher_logits.float().log_softmax(dim=-1)
    p = target.float().softmax(dim=-1).view(log_q.shape)
    cross_entropy = -log_q.gather(-1, p.argmax(dim=-1, keepdim=True))[..., 0]
    total_variation = (log_q.exp() - p).abs().sum(dim=-1)
    divergence = (log_t.exp() * (log_t - log_q)).sum(dim=-1)
    return (WEIGHTS.ce * cross_entropy + WEIGHTS.tv * total_variation + WEIGHTS.kl * divergence).sum()


def chunked(states: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(target)).view(states.shape[:2])
    with torch.autocast("cpu", torch.bfloat16):
        return drafting_loss(
            states,
            weight,
            target_distribution(target, None),
            rows,
            torch.ones(states.shape[:2]),
            None,
            WEIGHTS,
            teacher,
            weight.detach(),
        ).loss


def measure(arm: str, num_anchors: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    states = torch.randn(num_anchors, K, RANK, requires_grad=True)
    weight = (torch.randn(vocab_size, RANK) * 0.1).requires_grad_()
    target = torch.randn(num_anchors * K, vocab_size, dtype=torch.bfloat16)
    teacher = torch.randn(num_anchors, K, RANK)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        started = time.perf_counter()
        loss = {"naive": naive, "chunked": chunked}[arm](states, weight, target, teacher)
        loss.backward()
        seconds.append(time.perf_counter() - started)
        states.grad = weight.grad = None
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"  {arm:8s} {peak:8.0f} MiB {statistics.median(seconds[1:]):8.2f} s   loss {loss.item():.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=49152)
    parser.add_argument("--num_anchors", type=int, default=256)
    parser.add_argument("--arm", choices=("naive", "chunked"), help="what a process of its own runs")
    args = parser.parse_args()
    if args.arm is not None:
        measure(args.arm, args.num_anchors, args.vocab_size)
        return
    gib = args.num_anchors * K * args.vocab_size * 4 / 2**30
    print(f"{args.num_anchors} anchors, V = {args.vocab_size}: fp32 logits are {gib:.2f} GiB a copy")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for arm in ("naive", "chunked"):
        sizes = ["--num_anchors", str(args.num_anchors), "--vocab_size", str(args.vocab_size)]
        subprocess.run([sys.executable, __file__, "--arm", arm, *sizes], check=True)


if __name__ == "__main__":
    main()
