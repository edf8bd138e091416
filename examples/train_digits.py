"""Train a small convolutional network on scikit-learn's digits, on any number of processes.

    python examples/train_digits.py
    dlaunch run --nproc-per-node 2 --preload sklearn.datasets examples/train_digits.py --checkpoint /tmp/digits.pt
    torchrun --nproc-per-node 2 examples/train_digits.py --checkpoint /tmp/digits.pt

Started again with the same --checkpoint, it goes on after the last finished epoch.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dlaunch.parallel import NaiveDistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, over all processes")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch, resumed from when it exists")
    parser.add_argument("--target-accuracy", type=float, default=0.0, help="exit with 1 if it is not reached")
    return parser.parse_args()


def join_the_others() -> torch.device:
    """Set up the process group that the launcher describes, or one of a single process; return our device."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    return torch.device("cpu")


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train with and 360 to test with, each 1 x 8 x 8 with values from 0 to 1."""
    from sklearn import datasets  # noqa: PLC0415  # slow to import: a launcher may have preloaded it

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """Return the mean loss over the images of all processes."""
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # sum of losses, number of images
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(images), torch.tensor(len(images), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def measure_accuracy(network: nn.Module, test: TensorDataset) -> float:
    """Each process tests its share of the images, none twice; all return the same accuracy."""
    device = next(network.parameters()).device
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in test.tensors)
    correct = (network(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


def save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write a checkpoint that is either whole or not there: a new file, flushed to disk, takes the old one's name."""
    state = {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "random": torch.get_rng_state(),
    }
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def resume(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up what `save` wrote; return the number of epochs that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["epoch"])


def train(arguments: argparse.Namespace, device: torch.device) -> float:
    """Train from the checkpoint, or from the start, to the last epoch; return the accuracy."""
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    train_set, test_set = load_digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=max(1, arguments.batch_size // dist.get_world_size()), sampler=sampler)

    network = make_network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    done = 0
    if arguments.checkpoint and arguments.checkpoint.exists():
        done = resume(arguments.checkpoint, network, optimizer)
    model = NaiveDistributedDataParallel(network)  # averages the gradients of all processes

    for epoch in range(done, arguments.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same on all processes
        loss = train_one_epoch(model, optimizer, loader)
        accuracy = measure_accuracy(network, test_set)
        if is_first:
            print(f"epoch {epoch + 1} loss {loss:.3f} accuracy {accuracy:.3f}", flush=True)
            if arguments.checkpoint:
                save(arguments.checkpoint, network, optimizer, epoch + 1)
    return measure_accuracy(network, test_set)


def main() -> None:
    arguments = parse_arguments()
    device = join_the_others()
    accuracy = train(arguments, device)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()  # after the model has gone: it uses the group
    sys.exit(accuracy < arguments.target_accuracy)


if __name__ == "__main__":
    main()
