"""A first ring: two processes train one small net on handwritten digits, with PyTorch only.

`make demo` runs this script before it builds Horovod, which the quickstart notebook needs.
"""

from __future__ import annotations

import sys

import sparkring

EPOCHS, BATCH_SIZE, LEARNING_RATE = 8, 32, 0.002
GOOD = 0.95


def train() -> float:
    """Train on this rank's half of the digits, and return the accuracy on the held-out digits."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import distributed, nn

    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    x, x_held_out, y, y_held_out = train_test_split(
        images, torch.tensor(digits.target), test_size=360, stratify=digits.target, random_state=0
    )
    mine = slice(rank, len(x) // size * size, size)
    x, y = x[mine], y[mine]

    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    accuracy = 0.0
    for epoch in range(1, EPOCHS + 1):
        for batch in torch.randperm(len(x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((net(x_held_out).argmax(1) == y_held_out).float().mean())
        sparkring.log(epoch=epoch, epochs=EPOCHS, loss=loss, val_accuracy=accuracy)
        if rank == 0:
            print(f"epoch {epoch} of {EPOCHS}: held-out accuracy {accuracy:.3f}")
    distributed.destroy_process_group()
    return accuracy


def main() -> int:
    """Run the script, and return its exit status."""
    print("A first ring: two processes train one net with PyTorch", flush=True)
    result = sparkring.run(train, np=-2, framework="torch")
    seconds = result.record.ended - result.record.started
    print(
        f"  Trained in {seconds:.1f} s; both ranks reach {result.value:.3f} on digits that were held out.\n", flush=True
    )
    if min(result.values) < GOOD or len(set(result.values)) > 1:
        print(f"first_ring: the ranks reached {result.values}, not one value of at least {GOOD}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
