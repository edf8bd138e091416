# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, union-attr, type-arg"
"""DataLoaders and torch.multiprocessing under every start method; prints what came out."""

import threading

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor(index * index), get_worker_info().id


class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(get_worker_info().id * 10, get_worker_info().id * 10 + 4))


def doubled(rank, tensor, queue):
    tensor *= 2
    queue.put((rank, __name__, mp.current_process().name))


def fails(rank):
    raise ValueError(f"rank {rank}")


def loads():
    for method, workers in (("fork", 2), ("spawn", 1)):  # every spawned process imports torch: not too many
        loader = DataLoader(
            Squares(), batch_size=4, num_workers=workers, multiprocessing_context=method, persistent_workers=True
        )
        for _epoch in range(2):
            print(method, [[part.tolist() for part in batch] for batch in loader])
    print(sorted(int(x) for batch in DataLoader(Counted(), num_workers=2) for x in batch))


def main():
    loads()
    for thread in threading.enumerate():  # a queue's feeder unlinks semaphores as its last act; the interpreter's end
        if thread is not threading.main_thread():  # may cut it off between that and telling the resource tracker
            thread.join()

    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        queue, tensor = context.SimpleQueue(), torch.ones(3).share_memory_()
        process = context.Process(target=doubled, args=(0, tensor, queue), name="one")
        process.start()
        process.join()
        print(method, process.exitcode, queue.get(), tensor.tolist())
    try:
        mp.spawn(fails, nprocs=1)
    except mp.ProcessRaisedException as error:
        print(error)


if __name__ == "__main__":
    main()
