"""One process or several under torchrun, gloo or nccl. No script.

Process `rank` of `world` holds rows rank::world of a split; process 0 also does what is done once: it seeds the head, scores
and writes the files. On one process, without torchrun, everything here is the plain thing it stands for.
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from make_lt_data import UserError


def start_processes(device):
    """(rank, world size, this process's device) from torchrun's environment; one process without it."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))
    # torchrun --max_restarts keeps its store: without a prefix the new processes could read addresses of the dead ones.
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    return rank, world, device


def sum_over_ranks(x):
    """x summed over processes; x itself on one."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class _Gather(torch.autograd.Function):
    """Rows of all processes, this one's first. The gradient of a row is summed over the processes that used it."""

    @staticmethod
    def forward(ctx, x):
        rank, world = dist.get_rank(), dist.get_world_size()
        sizes = torch.zeros(world, dtype=torch.int64, device=x.device)
        sizes[rank] = len(x)
        ctx.sizes = sum_over_ranks(sizes).tolist()
        padded = x.new_zeros(max(ctx.sizes), *x.shape[1:])
        padded[:len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded)
        parts = [part[:size] for part, size in zip(parts, ctx.sizes)]
        return torch.cat([parts[rank]] + parts[:rank] + parts[rank + 1:])

    @staticmethod
    def backward(ctx, grad):
        rank = dist.get_rank()
        own, before, after = grad.split([ctx.sizes[rank], sum(ctx.sizes[:rank]), sum(ctx.sizes[rank + 1:])])
        grad = sum_over_ranks(torch.cat([before, own, after]).contiguous())
        return grad.split(ctx.sizes)[rank]


def gather(x):
    return _Gather.apply(x) if dist.is_initialized() else x


def gather_rows(x, N):
    """The (N, ...) tensor of all rows, on every process, of which this one holds rows rank::world as x."""
    if not dist.is_initialized():
        return x
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(N, *x.shape[1:], dtype=x.dtype, device=x.device)
    whole[rank::world] = x
    return sum_over_ranks(whole) if N else whole


def check_same_epoch(epoch, folder, world, device):
    """UserError where the processes did not find the same checkpoint."""
    if int(sum_over_ranks(torch.tensor(epoch, device=device))) != world * epoch:
        raise UserError(f"the processes found different checkpoints: every node needs the same {folder}/ (a shared disk)")


def on_all_processes(device, work):
    """work(rank, world, device) on each of torchrun's processes, which end here; on the only one without torchrun."""
    rank, world, device = start_processes(device)
    try:
        work(rank, world, device)
        if world > 1:
            dist.barrier()  # process 0 is still writing: a process that left would look like a failure to torchrun
    except RuntimeError as err:
        if world == 1 or not any(word in str(err) for word in ("onnection", "NCCL", "peer", "imed out")):
            raise
        raise UserError("another process died: the same command goes on from the last finished epoch") from None
    if world > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that tears itself down


def joint_step(loss, optimizer, where, rows):
    """An optimizer step with the gradients of all processes' shares of the loss summed, and clipped to 1.0.

    where and rows, the training rows of the batch, are for the UserError of a gradient that is not finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    if loss.requires_grad:  # a process may have no row in a batch
        loss.backward()
    flat = sum_over_ranks(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
    if not torch.isfinite(flat).all():
        raise UserError(f"a gradient is not finite in {where}, at lr {optimizer.param_groups[0]['lr']:.1e}, training rows "
                        f"{sorted({*rows.tolist()})}: try a smaller --lr or --dtype float32; the last finished epoch is saved")
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
