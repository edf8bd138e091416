"""Time and CPU time of a step of one whole batch: the plain module, DataParallel over two CPU replicas, DDP with two ranks; one thread each."""
import multiprocessing, os, statistics, tempfile, time
import torch
import torch.distributed as dist
from torch import nn
from dlaunch.parallel import DataParallel, DistributedDataParallel

MODELS = {
    "MLP 8 x 1024": (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]), lambda n: torch.randn(n, 1024), 64),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 28 * 28, 10)), lambda n: torch.randn(n, 3, 32, 32), 32),
    "transformer": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), 4), lambda n: torch.randn(n, 64, 256), 16),
}
STEPS, ROUNDS = 4, 11

def steps(model, optimizer, batch):
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / STEPS, (time.process_time() - cpu) / STEPS

def make(name, wrap, share):
    torch.manual_seed(0)
    build, data, size = MODELS[name]
    model = wrap(build())
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), data(size // share)

def rank_main(rank, store, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parts = {name: make(name, DistributedDataParallel, 2) for name in MODELS}
    while (name := pipe.recv()) is not None:
        pipe.send(steps(*parts[name]))

if __name__ == "__main__":
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, theirs) in enumerate(pipes):
            context.Process(target=rank_main, args=(rank, folder + "/store", theirs), daemon=True).start()
        for name in MODELS:
            plain, parallel = make(name, lambda m: m, 1), make(name, lambda m: DataParallel(m, ["cpu", "cpu"]), 1)
            rows = []
            for _ in range(ROUNDS + 1):
                a, b = steps(*plain), steps(*parallel)
                for ours, _ in pipes: ours.send(name)
                ranks = [ours.recv() for ours, _ in pipes]
                c = max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)
                rows.append((a, b, c))
            rows = rows[1:]
            for what, index in (("time", 0), ("CPU time", 1)):
                alone, dp, ddp = ([row[way][index] for row in rows] for way in range(3))
                ratios = {f"{kind} x": sorted(a / b for a, b in zip(top, bottom)) for kind, top, bottom in (("DataParallel", dp, alone), ("DDP", ddp, alone), ("DataParallel / DDP", dp, ddp))}
                print(name, what, f"plain {statistics.median(alone) * 1e3:.1f} ms", {kind: f"{statistics.median(v):.2f} ({v[len(v)//4]:.2f}-{v[-len(v)//4-1]:.2f})" for kind, v in ratios.items()}, flush=True)
        for ours, _ in pipes: ours.send(None)
